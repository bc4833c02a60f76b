"""Wrong answers to lesson 21's exercises: slips of PEFT's readers and of serving engines, and the hint
for whoever made them.
"""

from functools import partial

import torch

from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 21.1 what an adapter costs


def slipped_plan(
    shapes,
    num_layers,
    rank,
    num_adapters,
    base_bytes,
    memory_bytes,
    *,
    numbers="both",
    bytes_each=2,
    room="beside",
    merged="whole",
    step="adapters",
):
    """adapter_plan with one slip, spelled by a switch."""
    own = {
        "both": lambda n, k: rank * (n + k),
        "product": lambda n, k: n * k,
        "rank each way": lambda n, k: rank * n * k,
        "a alone": lambda n, k: rank * k,
        "square": lambda n, k: 2 * rank * n,
        "with the core": lambda n, k: rank * (n + k) + rank * rank,
    }[numbers]
    blocks = 1 if numbers == "one block" else num_layers
    size = bytes_each * blocks * sum(own(n, k) for n, k in shapes)
    left = {
        "beside": memory_bytes - base_bytes,
        "all": memory_bytes,
        "without the batch": memory_bytes - base_bytes - num_adapters * size,
    }[room]
    models = {
        "whole": memory_bytes // base_bytes,
        "a base and an adapter": memory_bytes // (base_bytes + size),
        "beside": (memory_bytes - base_bytes) // base_bytes,
    }[merged]
    read = {
        "adapters": num_adapters * size,
        "one": size,
        "bases": (num_adapters - 1) * base_bytes,
        "all": left // size * size,
        "alone": -base_bytes + num_adapters * size,
    }[step]
    return size, left // size, models, (base_bytes + read) / base_bytes


def one_block(shapes, num_layers, *rest, **named):
    return slipped_plan(shapes, 1, *rest, **named)


answers.wrong("21.1", "You counted one block; the model has num_layers of them.")(one_block)
for name, slip, hint in [
    (
        "a_full_matrix",
        dict(numbers="product"),
        "N · K is what full fine-tuning stores. A has r · K numbers and B has N · r.",
    ),
    (
        "rank_times_a_full_matrix",
        dict(numbers="rank each way"),
        "A: [r, K] and B: [N, r] stand beside each other: r · (N + K), not r · N · K.",
    ),
    ("b_forgotten", dict(numbers="a alone"), "There is a B, too: N · r numbers for each matrix."),
    (
        "square_matrices",
        dict(numbers="square"),
        "Only q_proj and o_proj may be square: A is as wide as the input, B as the output.",
    ),
    (
        "a_core_of_r_by_r",
        dict(numbers="with the core"),
        "Between A and B there is no matrix of r · r, only one number, the scaling.",
    ),
    ("float32", dict(bytes_each=4), "16 bits are two bytes a number."),
    (
        "no_room_for_the_base",
        dict(room="all"),
        "The base lies in the same memory: only the rest is for adapters.",
    ),
    (
        "those_of_the_batch_twice",
        dict(room="without the batch"),
        "The adapters of the batch are among those that fit; do not take them off first.",
    ),
    (
        "a_merged_model_keeps_its_adapter",
        dict(merged="a base and an adapter"),
        "Merging adds B A to the matrix. What is stored is one matrix of the old size.",
    ),
    (
        "merged_beside_the_base",
        dict(merged="beside"),
        "The merged models need no plain base beside them.",
    ),
    ("one_adapter_is_read", dict(step="one"), "Every adapter of the batch is read once."),
    (
        "a_base_for_each_adapter",
        dict(step="bases"),
        "The base is read once for all rows, whatever their adapters. That is the point.",
    ),
    (
        "all_that_fit_are_read",
        dict(step="all"),
        "A step reads the adapters of its batch, not all that lie in memory.",
    ),
    (
        "what_is_added",
        dict(step="alone"),
        "How many times as many bytes: base and adapters, over the base.",
    ),
]:
    answers.wrong("21.1", hint, name)(partial(slipped_plan, **slip))


@answers.alternative("21.1")
def by_numbers(shapes, num_layers, rank, num_adapters, base_bytes, memory_bytes):
    total = 0
    for _ in range(num_layers):
        for outputs, inputs in shapes:
            total += rank * inputs * 2
            total += outputs * rank * 2
    fit = 0
    while base_bytes + (fit + 1) * total <= memory_bytes:
        fit += 1
    return total, fit, memory_bytes // base_bytes, 1 + num_adapters * total / base_bytes


@answers.alternative("21.1")
def by_tensors(shapes, num_layers, rank, num_adapters, base_bytes, memory_bytes):
    pairs = [
        torch.empty(size, dtype=torch.float16, device="meta")
        for outputs, inputs in shapes
        for size in ((rank, inputs), (outputs, rank))
    ]
    size = num_layers * sum(pair.numel() * pair.element_size() for pair in pairs)
    models, _ = divmod(memory_bytes, base_bytes)
    fit, _ = divmod(memory_bytes - base_bytes, size)
    return size, fit, models, (base_bytes + num_adapters * size) / base_bytes


# ---------------------------------------------------------------- 21.2 one matrix


def slipped_switch(
    weight,
    old,
    new,
    *,
    scaling="right",
    order="b a",
    unmerge="own",
    wide=True,
    refuses="named",
    into="sum",
):
    """switch_adapter with one slip, spelled by a switch."""
    given = [adapter for adapter in (old, new) if adapter is not None]
    if refuses == "named" and any(adapter.use_dora for adapter in given):
        raise ValueError("use_dora: got True; accepted: False")
    if refuses == "new alone" and new is not None and new.use_dora:
        raise ValueError("use_dora: got True; accepted: False")

    def scale_of(adapter):
        rank, alpha = len(adapter.lora_a), adapter.lora_alpha
        root = rank**0.5
        return {
            "right": alpha / (root if adapter.use_rslora else rank),
            "forgotten": 1.0,
            "alpha": alpha,
            "r over alpha": rank / alpha,
            "never rslora": alpha / rank,
            "always rslora": alpha / root,
            "rslora r^2": alpha / (rank**2 if adapter.use_rslora else rank),
            "by N": alpha / len(adapter.lora_b),
        }[scaling]

    def delta(adapter, by=None):
        a, b = adapter.lora_a, adapter.lora_b
        if order == "a b" and a.shape[1] == b.shape[0]:
            product = (a.T @ b.T) if a.shape[0] != a.shape[1] else a @ b
        elif order == "transposed" and a.shape[1] == b.shape[0]:
            product = (b @ a).T
        else:
            product = b @ a
        return (scale_of(adapter) if by is None else by) * product

    total = weight.float() if wide else weight.clone()
    if old is not None and unmerge != "never":
        by = scale_of(new) if unmerge == "new scaling" and new is not None else None
        sign = 1.0 if unmerge == "plus" else -1.0
        total = total + sign * delta(old, by).to(total.dtype)
    if new is not None:
        correction = delta(new)
        added = 2 * correction if into == "twice" else correction
        total = added if into == "alone" else total + added.to(total.dtype)
    return total if into == "float32" else total.to(weight.dtype)


for name, slip, hint in [
    (
        "scaling_forgotten",
        dict(scaling="forgotten"),
        "B A counts alpha / r times (with rsLoRA alpha / √r). You added it as it is.",
    ),
    ("alpha_alone", dict(scaling="alpha"), "Divide alpha by the rank (or by its root)."),
    ("r_over_alpha", dict(scaling="r over alpha"), "It is alpha / r, not r / alpha."),
    (
        "rslora_as_lora",
        dict(scaling="never rslora"),
        "With use_rslora the scaling is alpha / √r.",
    ),
    (
        "always_rslora",
        dict(scaling="always rslora"),
        "alpha / √r belongs to use_rslora only. Otherwise it is alpha / r.",
    ),
    (
        "rslora_squared",
        dict(scaling="rslora r^2"),
        "rsLoRA divides by the root of r, not by its square.",
    ),
    (
        "divided_by_the_outputs",
        dict(scaling="by N"),
        "r is the number of rows of A. B has N rows, and r columns.",
    ),
    (
        "a_times_b",
        dict(order="a b"),
        "W is [N, K], B is [N, r], A is [r, K]: the product is B A.",
    ),
    (
        "transposed",
        dict(order="transposed"),
        "x Aᵀ Bᵀ is x (B A)ᵀ, and W stands as Wᵀ, too: add B A as it is.",
    ),
    (
        "merged_on_top",
        dict(unmerge="never"),
        "The old adapter is still in the matrix: subtract it first.",
    ),
    (
        "merged_twice",
        dict(into="twice"),
        "The new adapter is in the matrix twice.",
    ),
    ("old_added_again", dict(unmerge="plus"), "The old adapter has to be subtracted."),
    (
        "old_by_the_new_scaling",
        dict(unmerge="new scaling"),
        "The old adapter was added with its own alpha and r: subtract it with these.",
    ),
    (
        "base_forgotten",
        dict(into="alone"),
        "B A is a correction: what is returned is W plus it.",
    ),
    (
        "rounded_before_the_sum",
        dict(wide=False),
        "Add in float32, and round to weight's dtype once, at the end.",
    ),
    ("float32_result", dict(into="float32"), "The result has the dtype of weight."),
    (
        "dora_ignored",
        dict(refuses="never"),
        "An adapter with use_dora does more than A and B: raise ValueError.",
    ),
    (
        "old_dora_ignored",
        dict(refuses="new alone"),
        "An old adapter with use_dora cannot be subtracted by A and B: raise ValueError.",
    ),
]:
    answers.wrong("21.2", hint, name)(partial(slipped_switch, **slip))


@answers.wrong("21.2", "You changed weight in place. Another request may still use the old matrix.")
def in_place(weight, old, new):
    weight.copy_(slipped_switch(weight, old, new))
    return weight


@answers.wrong("21.2", "You scaled the adapter's own B. The next merge would scale it again.")
def scales_the_adapter(weight, old, new):
    result = slipped_switch(weight, old, new)
    for adapter in (old, new):
        if adapter is not None:
            adapter.lora_b *= adapter.lora_alpha / len(adapter.lora_a)
    return result


@answers.alternative("21.2")
def by_outer_products(weight, old, new):
    """Rank by rank."""
    total = weight.double()
    for adapter, sign in ((new, 1), (old, -1)):
        if adapter is None:
            continue
        if adapter.use_dora:
            raise ValueError(f"use_dora is {adapter.use_dora}; DoRA is not read")
        rank = adapter.lora_b.shape[1]
        divisor = rank**0.5 if adapter.use_rslora else rank
        for r in range(rank):
            step = torch.outer(adapter.lora_b[:, r], adapter.lora_a[r])
            total = total + sign * adapter.lora_alpha / divisor * step.double()
    return total.to(weight.dtype)


@answers.alternative("21.2")
def by_one_product(weight, old, new):
    """Both corrections as a single product of stacked ranks."""
    left, right = [], []
    for adapter, sign in ((old, -1.0), (new, 1.0)):
        if adapter is not None:
            if adapter.use_dora is True:
                raise ValueError("use_dora")
            power = 0.5 if adapter.use_rslora else 1.0
            by = sign * adapter.lora_alpha * len(adapter.lora_a) ** -power
            left.append(by * adapter.lora_b)
            right.append(adapter.lora_a)
    if not left:
        return weight.clone()
    return (weight.float() + torch.cat(left, 1) @ torch.cat(right)).to(weight.dtype)


# ---------------------------------------------------------------- 21.3 the kernel


def slipped_rows(
    base,
    x,
    a,
    b,
    row_slots,
    ranks,
    scaling,
    *,
    slot_of=lambda row, slots: slots[row],
    empty="stays",
    scale=lambda scaling, slot, rank: scaling[slot],
    ranks_read="own",
    ranks_of_b="own",
    columns=None,
    outputs=None,
    into="add",
    row_of=lambda row, count: row,
):
    """Row by row in PyTorch, with one slip, spelled by a switch."""
    out = base.clone()
    slots, most = row_slots.tolist(), a.shape[1]
    for row in range(len(x)):
        slot = slot_of(row, slots)
        if slot < 0:
            if empty == "zero":
                out[row] = 0.0
            if empty in ("zero", "stays"):
                continue
            slot = {"first": 0, "last": len(a) - 1}[empty]
        rank = int(ranks[slot])
        counts = dict(own=rank, all=most, first=int(ranks[0]), largest=int(ranks.max()))
        own_a, own_b = counts[ranks_read], counts[ranks_of_b]
        count = max(own_a, own_b)
        size, num_outputs = columns or x.shape[1], outputs or base.shape[1]
        h = torch.zeros(count)
        h[:own_a] = a[slot, :own_a, :size] @ x[row_of(row, len(x)), :size]
        h = h * scale(scaling, slot, max(rank, 1))
        delta = h[:own_b] @ b[slot, :own_b, :num_outputs]
        if into == "add":
            out[row, :num_outputs] += delta
        elif into == "store":
            out[row, :num_outputs] = delta
        elif into == "twice":
            out[row, :num_outputs] += 2 * delta
    return out


ROWS = [
    (
        "adapter_of_the_neighbour",
        dict(slot_of=lambda row, slots: slots[(row + 1) % len(slots)]),
        "A row gets the adapter of the row behind it: load row_slots + row.",
    ),
    (
        "adapter_by_row_number",
        dict(slot_of=lambda row, slots: row % (max(slots) + 1) if max(slots) >= 0 else -1),
        "You take the row's number for its slot: load row_slots + row.",
    ),
    (
        "first_row_s_adapter_for_all",
        dict(slot_of=lambda row, slots: slots[0]),
        "All rows get the adapter of row 0: a batch is mixed.",
    ),
    (
        "without_means_adapter_0",
        dict(empty="first"),
        "-1 is no slot: such a row must stay as it is. You gave it adapter 0.",
    ),
    (
        "without_means_the_last",
        dict(empty="last"),
        "-1 is no index from the end: a row without an adapter must stay as it is.",
    ),
    (
        "without_becomes_zero",
        dict(empty="zero"),
        "A row without an adapter keeps what the base gave.",
    ),
    (
        "no_scaling",
        dict(scale=lambda scaling, slot, rank: 1.0),
        "The correction counts scaling[slot] times.",
    ),
    (
        "scaling_of_the_first",
        dict(scale=lambda scaling, slot, rank: scaling[0]),
        "Each slot has its own scaling: load scaling + slot.",
    ),
    (
        "scaling_over_rank_again",
        dict(scale=lambda scaling, slot, rank: scaling[slot] / rank),
        "scaling is alpha / r already: do not divide by the rank once more.",
    ),
    (
        "scaled_twice",
        dict(scale=lambda scaling, slot, rank: scaling[slot] ** 2),
        "You scaled h and the result: once is enough.",
    ),
    (
        "ranks_not_masked",
        dict(ranks_read="all", ranks_of_b="all"),
        "Behind a slot's rank stands what an earlier adapter left: mask r < ranks[slot].",
    ),
    (
        "b_not_masked",
        dict(ranks_of_b="all"),
        "h is 0 behind the rank, and 0 · NaN is NaN: mask the load of B, too.",
    ),
    (
        "rank_of_the_first",
        dict(ranks_read="first", ranks_of_b="first"),
        "Each slot has its own rank: load ranks + slot.",
    ),
    (
        "one_block_of_columns",
        dict(columns=16),
        "You multiply the first block of columns only: x has `size` of them.",
    ),
    (
        "one_block_of_outputs",
        dict(outputs=16),
        "You write the first block of outputs only: out has `num_outputs` of them.",
    ),
    (
        "base_overwritten",
        dict(into="store"),
        "out holds what the base gave: add to it, do not replace it.",
    ),
    ("added_twice", dict(into="twice"), "The correction was added twice."),
    (
        "first_row_of_x",
        dict(row_of=lambda row, count: 0),
        "Every program reads row 0 of x: go on by row · size.",
    ),
]
for name, slip, hint in ROWS:
    answers.wrong("21.3", hint, name)(partial(slipped_rows, **slip))


@answers.wrong(
    "21.3", "Each slot's A and B begin at slot · max_rank rows, not at slot · its own rank."
)
def slots_packed_by_rank(base, x, a, b, row_slots, ranks, scaling):
    num_slots, most, _ = a.shape
    flat_a, flat_b = a.flatten(0, 1), b.flatten(0, 1)
    place = [slot * int(ranks[slot]) for slot in range(num_slots)]
    moved = [torch.stack([flat[at : at + most] for at in place]) for flat in (flat_a, flat_b)]
    return slipped_rows(base, x, *moved, row_slots, ranks, scaling)


@answers.wrong(
    "21.3", "B has its ranks in front here, [max_rank, N]; you read it as [N, max_rank]."
)
def b_as_peft_stores_it(base, x, a, b, row_slots, ranks, scaling):
    turned = b.flatten(1).unflatten(1, (b.shape[2], b.shape[1])).transpose(1, 2)
    return slipped_rows(base, x, a, turned.contiguous(), row_slots, ranks, scaling)


@answers.wrong("21.3", "You gathered A and B for each row, which reads and writes them once more.")
def gathered(base, x, a, b, row_slots, ranks, scaling):
    slots = row_slots.clamp(min=0).long()
    in_use = torch.arange(a.shape[1]) < ranks[slots, None]
    in_use = in_use & (row_slots >= 0)[:, None]
    h = torch.einsum("trk,tk->tr", a[slots].nan_to_num(), x)
    h = torch.where(in_use, h, 0.0) * scaling[slots, None]
    return base + torch.einsum("tr,trn->tn", h, b[slots].nan_to_num())


@answers.alternative("21.3")
def adapter_by_adapter(base, x, a, b, row_slots, ranks, scaling):
    out = base.clone()
    for slot, rank in enumerate(ranks.tolist()):
        rows = (row_slots == slot).nonzero().flatten()
        h = x[rows] @ a[slot, :rank].T
        out[rows] += scaling[slot] * (h @ b[slot, :rank])
    return out


@answers.alternative("21.3")
def by_merging(base, x, a, b, row_slots, ranks, scaling):
    """One dense correction an adapter, as if it were merged."""
    out = base.double()
    for slot in range(len(ranks)):
        rank = int(ranks[slot])
        matrix = scaling[slot].double() * (a[slot, :rank].double().T @ b[slot, :rank].double())
        own = (row_slots == slot).double()[:, None]
        out = out + own * (x.double() @ matrix)
    return out.float()


# ---------------------------------------------------------------- 21.4 slots and prefixes


def slipped_slots(
    events,
    num_slots,
    block_size,
    *,
    end="one less",
    victim="least recent",
    evicts="idle",
    leaves=True,
    key="adapter",
    whole=True,
    forgets=False,
    waiting="nothing",
    counts="loads",
    free_order="lowest",
):
    """run_slots with one slip, spelled by a switch."""
    slots, users, computed = {}, {}, set()  # slots: least recently started first
    results, loads, arrived = [], 0, []

    def keys(adapter, slot, prompt):
        step = block_size if whole else 1
        mark = {"adapter": adapter, "slot": slot, "nobody": "", "prompt": ""}[key]
        ends = range(step, len(prompt) + 1, step)
        return [(mark, tuple(prompt[:end])) for end in ends]

    for kind, adapter, prompt in events:
        if kind == "end":
            if end == "one less":
                users[adapter] -= 1
            elif end == "all":
                users[adapter] = 0
            elif end == "leaves the slot":
                users[adapter] -= 1
                if not users[adapter]:
                    slots.pop(adapter, None)
            continue
        was_here = adapter in slots
        if not was_here:
            free = [slot for slot in range(num_slots) if slot not in slots.values()]
            if free:
                slot = free[0 if free_order == "lowest" else -1]
            else:
                idle = [other for other in slots if evicts == "any" or not users.get(other)]
                if victim == "first loaded":
                    idle.sort(key=arrived.index)
                if not idle:
                    if waiting == "computes":
                        computed.update(keys(adapter, 0, prompt))
                    elif waiting == "counts":
                        users[adapter] = users.get(adapter, 0) + 1
                    elif waiting == "loads":
                        loads += 1
                    results.append(None)
                    continue
                chosen = idle[-1 if victim == "most recent" else 0]
                slot = slots[chosen]
                if leaves:
                    del slots[chosen]
                if forgets:
                    computed = {pair for pair in computed if pair[0] != chosen}
                loads += counts == "evictions"
            loads += counts == "loads"
        else:
            slot = slots[adapter]
            if victim != "never moved":
                del slots[adapter]
        loads += counts == "starts"
        slots[adapter] = slot
        if not was_here:
            arrived = [*(name for name in arrived if name != adapter), adapter]
        users[adapter] = users.get(adapter, 0) + 1
        prefixes = keys(adapter, slot, prompt)
        found = [prefix for prefix in prefixes if prefix in computed]
        computed.update(prefixes)
        results.append((slot, max((len(text) for _, text in found), default=0)))
    return results, loads


for name, slip, hint in [
    (
        "evicts_what_is_in_use",
        dict(evicts="any"),
        "A running request still reads that adapter: its slot must not be taken.",
    ),
    (
        "the_first_end_frees_all",
        dict(end="all"),
        "Several requests may run with one adapter: count them, and take off one.",
    ),
    (
        "ends_are_not_counted",
        dict(end="never"),
        "A request that ended uses its adapter no longer.",
    ),
    (
        "the_last_end_empties_the_slot",
        dict(end="leaves the slot"),
        "An adapter that nobody uses stays until its slot is needed: the next request finds it.",
    ),
    (
        "first_in_first_out",
        dict(victim="never moved"),
        "A start of an adapter that lies in a slot makes it the most recently started one.",
    ),
    (
        "most_recent_goes",
        dict(victim="most recent"),
        "The least recently started one goes, not the most recent.",
    ),
    (
        "evicted_but_still_listed",
        dict(leaves=False),
        "Who lost its slot is still listed in it: two adapters believe to be in one slot.",
    ),
    (
        "highest_free_slot",
        dict(free_order="highest"),
        "Of the free slots the one with the lowest number is taken.",
    ),
    (
        "prefix_shared_between_adapters",
        dict(key="nobody"),
        "K and V of a prompt depend on the adapter that computed them: it belongs into the key.",
    ),
    (
        "prefix_keyed_by_slot",
        dict(key="slot"),
        "A slot gets another adapter later, and an adapter another slot: the key is the adapter.",
    ),
    (
        "prefixes_leave_with_the_adapter",
        dict(forgets=True),
        "The matrices leave the slot, but K and V that they computed are still true.",
    ),
    (
        "parts_of_blocks_are_found",
        dict(whole=False),
        "Only whole blocks are in the cache: tokens is a multiple of block_size.",
    ),
    (
        "who_waits_has_computed",
        dict(waiting="computes"),
        "A request that cannot start has computed no K and V.",
    ),
    (
        "who_waits_is_a_user",
        dict(waiting="counts"),
        "A request that cannot start uses nothing, and no end will follow.",
    ),
    (
        "a_refusal_is_a_load",
        dict(waiting="loads"),
        "Nothing is loaded for a request that cannot start.",
    ),
    (
        "every_start_is_a_load",
        dict(counts="starts"),
        "An adapter that lies in a slot is not loaded again.",
    ),
    (
        "evictions_are_counted",
        dict(counts="evictions"),
        "Loads into free slots count as well.",
    ),
]:
    answers.wrong("21.4", hint, name)(partial(slipped_slots, **slip))


@answers.wrong("21.4", "This is the code with its four bugs, as it was given.")
def as_given(events, num_slots, block_size):
    slots, users, computed = {}, {}, set()
    results, loads = [], 0
    for kind, adapter, prompt in events:
        if kind == "end":
            users[adapter] = 0
            continue
        if adapter not in slots:
            free = [slot for slot in range(num_slots) if slot not in slots.values()]
            idle = [other for other in slots if not users.get(other)]
            if not free and not idle:
                results.append(None)
                continue
            slots[adapter] = free[0] if free else slots[idle[0]]
            loads += 1
        slot = slots[adapter]
        users[adapter] = users.get(adapter, 0) + 1
        ends = range(block_size, len(prompt) + 1, block_size)
        prefixes = [(slot, tuple(prompt[:end])) for end in ends]
        found = sum(prefix in computed for prefix in prefixes)
        computed.update(prefixes)
        results.append((slot, found * block_size))
    return results, loads


@answers.alternative("21.4")
def by_times_of_starts(events, num_slots, block_size):
    """A list of slots, a time for each adapter, a list of who runs."""
    slots, latest, running, cache = [None] * num_slots, {}, [], {}
    results, loads = [], 0
    for now, (kind, adapter, prompt) in enumerate(events):
        if kind == "end":
            running.remove(adapter)
            continue
        if adapter not in slots:
            choices = [i for i, held in enumerate(slots) if held not in running]
            if not choices:
                results.append(None)
                continue
            slot = min(choices, key=lambda i: (slots[i] is not None, latest.get(slots[i], i)))
            slots[slot] = adapter
            loads += 1
        latest[adapter] = now
        running.append(adapter)
        blocks = [tuple(prompt[: end + block_size]) for end in range(0, len(prompt), block_size)]
        if blocks and len(blocks[-1]) % block_size:
            blocks.pop()
        known = cache.setdefault(adapter, set())
        tokens = block_size * len(known.intersection(blocks))
        known.update(blocks)
        results.append((slots.index(adapter), tokens))
    return results, loads


@answers.alternative("21.4")
def by_an_ordered_list(events, num_slots, block_size):
    """The order of use as a list, the longest common beginning from texts."""
    order, slot_of, in_use, texts = [], {}, [], []
    results, loads = [], 0
    for kind, adapter, prompt in events:
        if kind == "end":
            del in_use[in_use.index(adapter)]
            continue
        if adapter in order:
            order.remove(adapter)
        else:
            taken = set(slot_of.values())
            if len(taken) < num_slots:
                slot_of[adapter] = min(set(range(num_slots)) - taken)
            else:
                goes = next((name for name in order if name not in in_use), None)
                if goes is None:
                    results.append(None)
                    continue
                order.remove(goes)
                slot_of[adapter] = slot_of.pop(goes)
            loads += 1
        order.append(adapter)
        in_use.append(adapter)
        most = 0
        for text in (text for name, text in texts if name == adapter):
            shared = 0
            while shared < min(len(text), len(prompt)) and text[shared] == prompt[shared]:
                shared += 1
            most = max(most, shared // block_size * block_size)
        texts.append((adapter, prompt))
        results.append((slot_of[adapter], most))
    return results, loads
