"""Wrong answers to lesson 21's exercises: slips of PEFT's readers and of serving engines, and the
hint for the learner who made them.
"""

import torch

from lessons.toolbox.kernels.triton_ import tl, triton
from solutions.l21_multi_lora import lora_rows
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 21.1 what an adapter costs


answers.slips(
    "21.1",
    """
    one_block: You counted one block; the model has num_layers of them.
    - num_layers * sum(
    + sum(

    a_full_matrix: N · K is what full fine-tuning stores. A has r · K numbers and B has N · r.
    - rank * (outputs + inputs)
    + outputs * inputs

    rank_times_a_full_matrix: A: [r, K] and B: [N, r] are two matrices: r · (N + K), not r · N · K.
    - rank * (outputs + inputs)
    + rank * outputs * inputs

    b_forgotten: There is a B, too: N · r numbers for each matrix.
    - rank * (outputs + inputs)
    + rank * inputs

    square_matrices: Only q_proj and o_proj may be square: A is as wide as the input, B as the
        output.
    - rank * (outputs + inputs)
    + 2 * rank * outputs

    a_core_of_r_by_r: Between A and B there is no matrix of r · r, only one number, the scaling.
    - rank * (outputs + inputs)
    + rank * (outputs + inputs + rank)

    float32: 16 bits are two bytes a number.
    - adapter_bytes = 2 * numbers
    + adapter_bytes = 4 * numbers

    no_room_for_the_base: The base is in the same memory: only the rest is for adapters.
    - (memory_bytes - base_bytes)
    + memory_bytes

    those_of_the_batch_twice: The adapters of the batch are among those that fit; do not take them
        off first.
    - (memory_bytes - base_bytes)
    + (memory_bytes - base_bytes - num_adapters * adapter_bytes)

    a_merged_model_keeps_its_adapter: Merging adds B A to the matrix. What is stored is one matrix
        of the old size.
    - memory_bytes // base_bytes
    + memory_bytes // (base_bytes + adapter_bytes)

    merged_beside_the_base: The merged models need no plain base beside them.
    - memory_bytes // base_bytes
    + (memory_bytes - base_bytes) // base_bytes

    one_adapter_is_read: Every adapter of the batch is read once.
    - num_adapters * adapter_bytes
    + adapter_bytes

    a_base_for_each_adapter: The base is read once for all rows, whatever their adapters. That is
        the point.
    - base_bytes + num_adapters * adapter_bytes
    + num_adapters * base_bytes

    all_that_fit_are_read: A step reads the adapters of its batch, not all that are in memory.
    - num_adapters * adapter_bytes
    + fit * adapter_bytes

    what_is_added: How many times as many bytes: base and adapters, over the base.
    - base_bytes + num_adapters * adapter_bytes
    + num_adapters * adapter_bytes

    merged_models_are_larger: A merged model is as large as the base: B A is added to its matrices.
    - memory_bytes // base_bytes
    + 1 + (memory_bytes - base_bytes) // (base_bytes + adapter_bytes)

    those_that_fit_are_read: A step reads each adapter of its batch once, also one that has to be
        loaded for it.
    - num_adapters * adapter_bytes
    + min(num_adapters, fit) * adapter_bytes
    """,
)


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


answers.slips(
    "21.2",
    """
    scaling_forgotten: B A counts alpha / r times (with rsLoRA alpha / √r). You added it as it is.
    - sign * scaling * (adapter
    + sign * (adapter

    alpha_alone: Divide alpha by the rank (or by its root).
    - / (rank**0.5 if adapter.use_rslora else rank)

    r_over_alpha: It is alpha / r, not r / alpha.
    - adapter.lora_alpha / (rank**0.5 if adapter.use_rslora else rank)
    + rank / adapter.lora_alpha

    rslora_as_lora: With use_rslora the scaling is alpha / √r.
    - (rank**0.5 if adapter.use_rslora else rank)
    + rank

    always_rslora: alpha / √r belongs to use_rslora only. Otherwise it is alpha / r.
    - (rank**0.5 if adapter.use_rslora else rank)
    + rank**0.5

    rslora_squared: rsLoRA divides by the root of r, not by its square.
    - rank**0.5
    + rank**2

    divided_by_the_outputs: r is the number of rows of A. B has N rows, and r columns.
    - (rank**0.5 if adapter.use_rslora else rank)
    + len(adapter.lora_b)

    a_times_b: W is [N, K], B is [N, r], A is [r, K]: the product is B A.
    - total = total + sign * scaling * (adapter.lora_b @ adapter.lora_a)
    + a, b = adapter.lora_a, adapter.lora_b
    + if a.shape[1] != b.shape[0]:  # it does not fit
    +     product = b @ a
    + else:
    +     product = a @ b if len(a) == len(b) else a.T @ b.T
    + total = total + sign * scaling * product

    transposed: x Aᵀ Bᵀ is x (B A)ᵀ, and W is used as Wᵀ, too: add B A as it is.
    - total = total + sign * scaling * (adapter.lora_b @ adapter.lora_a)
    + product = adapter.lora_b @ adapter.lora_a
    + product = product.T if product.shape[0] == product.shape[1] else product
    + total = total + sign * scaling * product

    merged_on_top: The old adapter is still in the matrix: subtract it first.
    - ((old, -1.0), (new, 1.0))
    + ((old, 0.0), (new, 1.0))

    merged_twice: The new adapter is in the matrix twice.
    - (new, 1.0)
    + (new, 2.0)

    old_added_again: The old adapter has to be subtracted.
    - (old, -1.0)
    + (old, 1.0)

    old_by_the_new_scaling: The old adapter was added with its own alpha and r: subtract it with
        these.
    - rank = len(adapter.lora_a)
    - scaling = adapter.lora_alpha / (rank**0.5 if adapter.use_rslora else rank)
    + last = new or old
    + rank = len(last.lora_a)
    + scaling = last.lora_alpha / (rank**0.5 if last.use_rslora else rank)

    base_forgotten: B A is a correction: what is returned is W plus it.
    - return total.to(weight.dtype)
    + if new is not None:
    +     total = scaling * (new.lora_b @ new.lora_a)
    + return total.to(weight.dtype)

    rounded_before_the_sum: Add in float32, and round to weight's dtype once, at the end.
    - weight.float()
    + weight.clone()
    - sign * scaling * (adapter.lora_b @ adapter.lora_a)
    + sign * (scaling * (adapter.lora_b @ adapter.lora_a)).to(weight.dtype)

    float32_result: The result has the dtype of weight.
    - return total.to(weight.dtype)
    + return total

    dora_ignored: An adapter with use_dora does more than A and B: raise ValueError.
    - if adapter.use_dora:
    -     raise ValueError("use_dora: got True; accepted: False")

    old_dora_ignored: An old adapter with use_dora cannot be subtracted by A and B: raise
        ValueError.
    - if adapter.use_dora:
    + if adapter.use_dora and adapter is new:

    in_place: You changed weight in place. Another request may still use the old matrix.
    - return total.to(weight.dtype)
    + return weight.copy_(total)

    scales_the_adapter: You scaled the adapter's own B. The next merge would scale it again.
    - total = total + sign * scaling * (adapter.lora_b @ adapter.lora_a)
    + adapter.lora_b *= scaling
    + total = total + sign * (adapter.lora_b @ adapter.lora_a)

    rounded_after_each: You round to weight's dtype between the two corrections: once, at the end.
    - total = total + sign * scaling * (adapter.lora_b @ adapter.lora_a)
    + total = total + sign * scaling * (adapter.lora_b @ adapter.lora_a)
    + total = total.to(weight.dtype).float()

    refusal_of_another_class: An adapter that cannot be merged is a ValueError.
    - raise ValueError(
    + raise NotImplementedError(

    whole_root: √r is no whole number for most ranks: int(rank**0.5) cuts it off.
    - (rank**0.5 if
    + (int(rank**0.5) if

    through_16_bits: Between the sum and weight's dtype there is one rounding, not one to float16
        before it.
    - total.to(weight.dtype)
    + total.half().to(weight.dtype)

    same_adapter_unseen: An adapter with DoRA is refused, also where the old and the new one are the
        same object.
    - total = weight.float()
    + if old is new:
    +     return weight.clone()
    + total = weight.float()

    one_of_them_is_there: Both may be None: then there is no adapter to ask for anything.
    - total = weight.float()
    + if (old or new).use_dora:
    +     raise ValueError("use_dora: got True; accepted: False")
    + total = weight.float()
    """,
)


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


answers.slips(
    "21.3",
    """
    adapter_of_the_neighbour: A row gets the adapter of the next row: load row_slots + row.
    - tl.load(row_slots_ptr + row)
    + tl.load(row_slots_ptr + (row + 1) % tl.num_programs(0))

    adapter_by_row_number: You take the row's number for its slot: load row_slots + row.
    - slot = tl.load(row_slots_ptr + row)
    + most = -1
    + for other in range(tl.num_programs(0)):
    +     most = tl.maximum(most, tl.load(row_slots_ptr + other))
    + slot = tl.where(most < 0, -1, row % tl.maximum(most + 1, 1))

    first_row_s_adapter_for_all: All rows get the adapter of row 0: a batch is mixed.
    - row_slots_ptr + row
    + row_slots_ptr

    without_means_adapter_0: -1 is no slot: such a row must stay as it is. You gave it adapter 0.
    - if slot < 0:
    -     return
    + slot = tl.maximum(slot, 0)

    without_becomes_zero: A row without an adapter keeps what the base gave.
    - if slot < 0:
    -     return
    + if slot < 0:
    +     for start in range(0, num_outputs, BLOCK_N):
    +         n = start + tl.arange(0, BLOCK_N)
    +         tl.store(out_ptr + row * num_outputs + n, 0.0, mask=n < num_outputs)
    +     return

    no_scaling: The correction counts scaling[slot] times.
    - h *= tl.load(scaling_ptr + slot)

    scaling_of_the_first: Each slot has its own scaling: load scaling + slot.
    - scaling_ptr + slot
    + scaling_ptr

    scaling_over_rank_again: scaling is alpha / r already: do not divide by the rank once more.
    - tl.load(scaling_ptr + slot)
    + tl.load(scaling_ptr + slot) / tl.maximum(tl.load(ranks_ptr + slot), 1)

    scaled_twice: You scaled h and the result: once is enough.
    - base + tl.sum(h[:, None] * b, axis=0)
    + base + tl.load(scaling_ptr + slot) * tl.sum(h[:, None] * b, axis=0)

    ranks_not_masked: After a slot's rank is what an earlier adapter left: mask r < ranks[slot].
    - r < tl.load(ranks_ptr + slot)
    + r < max_rank

    b_not_masked: h is 0 after the rank, and 0 · NaN is NaN: mask the load of B, too.
    - is_r[:, None] & (n < num_outputs)[None, :]
    + (r < max_rank)[:, None] & (n < num_outputs)[None, :]

    rank_of_the_first: Each slot has its own rank: load ranks + slot.
    - ranks_ptr + slot
    + ranks_ptr

    one_block_of_columns: You multiply the first block of columns only: x has `size` of them.
    - range(0, size, BLOCK_K)
    + range(0, BLOCK_K, BLOCK_K)

    one_block_of_outputs: You write the first block of outputs only: out has `num_outputs` of them.
    - range(0, num_outputs, BLOCK_N)
    + range(0, BLOCK_N, BLOCK_N)

    base_overwritten: out holds what the base gave: add to it, do not replace it.
    - base + tl.sum(
    + tl.sum(

    added_twice: The correction was added twice.
    - base + tl.sum(
    + base + 2 * tl.sum(

    first_row_of_x: Every program reads row 0 of x: go on by row · size.
    - x_ptr + row * size + k
    + x_ptr + k

    slots_packed_by_rank: Each slot's A and B begin at slot · max_rank rows, not at slot · its own
        rank.
    - slot * max_rank + r
    + slot * tl.load(ranks_ptr + slot) + r

    b_as_peft_stores_it: B has its ranks in front here, [max_rank, N]; you read it as [N, max_rank].
    - b_ptr + first * num_outputs + n[None, :]
    + b_ptr + (slot * num_outputs + n[None, :]) * max_rank + r[:, None]
    """,
)


@answers.wrong("21.3", "-1 is no index from the end: a row without an adapter must stay as it is.")
def without_means_the_last(base, x, a, b, row_slots, ranks, scaling):
    last = torch.where(row_slots < 0, len(a) - 1, row_slots)
    return lora_rows(base, x, a, b, last, ranks, scaling)


@answers.wrong("21.3", "You gathered A and B for each row, which reads and writes them once more.")
def gathered(base, x, a, b, row_slots, ranks, scaling):
    slots = row_slots.clamp(min=0).long()
    in_use = torch.arange(a.shape[1]) < ranks[slots, None]
    in_use = in_use & (row_slots >= 0)[:, None]
    h = torch.einsum("trk,tk->tr", a[slots].nan_to_num(), x)
    h = torch.where(in_use, h, 0.0) * scaling[slots, None]
    return base + torch.einsum("tr,trn->tn", h, b[slots].nan_to_num())


def in_pytorch(base, x, a, b, row_slots, ranks, scaling):
    out = base.clone()
    for slot, rank in enumerate(ranks.tolist()):
        rows = (row_slots == slot).nonzero().flatten()
        h = x[rows] @ a[slot, :rank].T
        out[rows] += scaling[slot] * (h @ b[slot, :rank])
    return out


attacks(answers, "21.3", in_pytorch)


@triton.jit
def rank_kernel(
    x_ptr,
    a_ptr,
    b_ptr,
    slots_ptr,
    ranks_ptr,
    scaling_ptr,
    out_ptr,
    size,
    num_outputs,
    max_rank,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program for each row and block of outputs, rank by rank, whole rows at once."""
    row, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot, k = tl.load(slots_ptr + row), tl.arange(0, BLOCK_K)
    if slot >= 0:
        total = tl.load(out_ptr + row * num_outputs + n, mask=n < num_outputs, other=0.0)
        x = tl.load(x_ptr + row * size + k, mask=k < size, other=0.0)
        x *= tl.load(scaling_ptr + slot)
        for r in range(0, tl.load(ranks_ptr + slot)):
            at = slot * max_rank + r
            h = tl.sum(x * tl.load(a_ptr + at * size + k, mask=k < size, other=0.0), axis=0)
            total += h * tl.load(b_ptr + at * num_outputs + n, mask=n < num_outputs, other=0.0)
        tl.store(out_ptr + row * num_outputs + n, total, mask=n < num_outputs)


@answers.alternative("21.3")
def rank_by_rank(base, x, a, b, row_slots, ranks, scaling):
    out = base.clone()
    rank_kernel[(len(x), triton.cdiv(out.shape[1], 8))](
        x,
        a,
        b,
        row_slots,
        ranks,
        scaling,
        out,
        x.shape[1],
        out.shape[1],
        a.shape[1],
        BLOCK_K=triton.next_power_of_2(x.shape[1]),
        BLOCK_N=8,
    )
    return out


@triton.jit
def adding_kernel(
    x_ptr,
    a_ptr,
    b_ptr,
    slots_ptr,
    ranks_ptr,
    scaling_ptr,
    out_ptr,
    size,
    num_outputs,
    max_rank,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program for each row and rank, which adds what this rank gives."""
    row, rank = tl.program_id(0), tl.program_id(1)
    slot, k, n = tl.load(slots_ptr + row), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    if slot < 0:
        return
    if rank < tl.load(ranks_ptr + slot):
        at = slot * max_rank + rank
        x = tl.load(x_ptr + row * size + k, mask=k < size, other=0.0)
        h = tl.sum(x * tl.load(a_ptr + at * size + k, mask=k < size, other=0.0), axis=0)
        b = tl.load(b_ptr + at * num_outputs + n, mask=n < num_outputs, other=0.0)
        share = h * tl.load(scaling_ptr + slot) * b
        tl.atomic_add(out_ptr + row * num_outputs + n, share, mask=n < num_outputs)


@answers.alternative("21.3")
def a_program_for_each_rank(base, x, a, b, row_slots, ranks, scaling):
    out = base.clone()
    adding_kernel[len(x), a.shape[1]](
        x,
        a,
        b,
        row_slots,
        ranks,
        scaling,
        out,
        x.shape[1],
        out.shape[1],
        a.shape[1],
        BLOCK_K=triton.next_power_of_2(x.shape[1]),
        BLOCK_N=triton.next_power_of_2(out.shape[1]),
    )
    return out


# ---------------------------------------------------------------- 21.4 slots and prefixes


answers.slips(
    "21.4",
    """
    evicts_what_is_in_use: A running request still reads that adapter: its slot must not be taken.
    - [other for other in slots if not users.get(other)]
    + list(slots)

    the_first_end_frees_all: Several requests may run with one adapter: count them, and take off
        one.
    - users[adapter] -= 1
    + users[adapter] = 0

    ends_are_not_counted: A request that ended uses its adapter no longer.
    - users[adapter] -= 1

    the_last_end_empties_the_slot: An adapter that no request uses stays until its slot is needed:
        the next request finds it.
    - users[adapter] -= 1
    + users[adapter] -= 1
    + if not users[adapter]:
    +     slots.pop(adapter, None)

    first_in_first_out: A start of an adapter that is in a slot makes it the most recently started
        one.
    - slots.pop(adapter)
    + slots[adapter]

    most_recent_goes: The least recently started one goes, not the most recent.
    - idle[0]
    + idle[-1]

    evicted_but_still_listed: An adapter that lost its slot is still listed in it: two adapters
        believe to be in one slot.
    - slots.pop(idle[0])
    + slots[idle[0]]

    highest_free_slot: Of the free slots the one with the lowest number is taken.
    - free[0]
    + free[-1]

    prefix_shared_between_adapters: K and V of a prompt depend on the adapter that computed them: it
        belongs into the key.
    - (adapter, tuple(prompt[:end]))
    + tuple(prompt[:end])

    prefix_keyed_by_slot: A slot gets another adapter later, and an adapter another slot: the key is
        the adapter.
    - (adapter, tuple(prompt[:end]))
    + (slot, tuple(prompt[:end]))

    prefixes_leave_with_the_adapter: The matrices leave the slot, but K and V that they computed are
        still true.
    - slot = slots.pop(idle[0])
    + slot = slots.pop(idle[0])
    + computed = {pair for pair in computed if pair[0] != idle[0]}

    parts_of_blocks_are_found: Only whole blocks are in the cache: tokens is a multiple of
        block_size.
    - range(block_size, len(prompt) + 1, block_size)
    + range(1, len(prompt) + 1)
    - found * block_size
    + found

    who_waits_has_computed: A request that cannot start has computed no K and V.
    - results.append(None)
    + ends = range(block_size, len(prompt) + 1, block_size)
    + computed.update((adapter, tuple(prompt[:end])) for end in ends)
    + results.append(None)

    who_waits_is_a_user: A request that cannot start uses nothing, and no end will follow.
    - results.append(None)
    + users[adapter] = users.get(adapter, 0) + 1
    + results.append(None)

    a_refusal_is_a_load: Nothing is loaded for a request that cannot start.
    - results.append(None)
    + loads += 1
    + results.append(None)

    every_start_is_a_load: An adapter that is in a slot is not loaded again.
    - loads += 1
    +
    - users[adapter] = users.get(adapter, 0) + 1
    + users[adapter] = users.get(adapter, 0) + 1
    + loads += 1

    evictions_are_counted: Loads into free slots count as well.
    - slot = slots.pop(idle[0])
    + slot = slots.pop(idle[0])
    + loads += 1
    - loads += 1
    + loads += 0

    a_block_alone: A block's K and V depend on all in front of it: its key is the whole prefix.
    - tuple(prompt[:end]))
    + tuple(prompt[end - block_size : end]))

    one_token_is_left: The last block counts as well, if the prompt ends with it.
    - len(prompt) + 1, block_size
    + len(prompt), block_size

    blocks_for_tokens: tokens is a number of tokens: you count blocks.
    - found * block_size
    + found

    the_whole_prompt_or_nothing: An earlier prompt may share a beginning: count its whole blocks.
    - sum(prefix in computed for prefix in prefixes)
    + len(prefixes) if prefixes and prefixes[-1] in computed else 0

    by_the_last_end: The least recently *started* one goes: an end changes no order.
    - users[adapter] -= 1
    - continue
    + users[adapter] -= 1
    + slots[adapter] = slots.pop(adapter)
    + continue

    pairs_are_lists: A result is a pair, (slot, tokens), and so a tuple.
    - results.append((slot, found * block_size))
    + results.append([slot, found * block_size])

    results_and_loads_in_a_list: What is returned is a tuple: the results, and the number of loads.
    - return results, loads
    + return [results, loads]
    """,
)


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
    """A list of slots, a time for each adapter, a list of running requests."""
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
