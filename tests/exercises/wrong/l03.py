"""Wrong answers to lesson 03's exercises: real slips, and the hint for whoever made them."""

from functools import partial

import torch

from lessons.l02_naive_attention import naive
from lessons.l03_kv_cache import cache as lesson
from solutions.l03_kv_cache import KVCache
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 3.1 a chunk over caches of different lengths


def slipped_chunk(
    q,
    k_cache,
    v_cache,
    context_lens,
    softmax_scale=None,
    window=None,
    *,
    align="context",
    causal=True,
    strict=False,
    hide_v=True,
    hide_scores=True,
    lens="own",
    heads="interleave",
    scale_by="D",
    own_scale=True,
    use_window=True,
    extra_key=0,
    fixed_window=False,
    out_dtype=None,
    in_place=False,
):
    """Chunk attention with one slip. The keyword switches exist only here, to spell the wrong
    answers briefly.
    """
    (_, tq, hq, dim), (_, capacity, hkv, _) = q.shape, k_cache.shape
    n = {
        "own": context_lens,
        "first": context_lens[:1].expand(len(q)),
        "longest": context_lens.max().expand(len(q)),
        "without_new": context_lens + tq,
    }[lens]
    scale = (
        {"D": dim**-0.5, "none": 1.0}[scale_by]
        if softmax_scale is None or not own_scale
        else softmax_scale
    )
    row, step = torch.arange(capacity), torch.arange(tq)
    start = {"context": n - tq, "top_left": 0 * n, "capacity": 0 * n + capacity - tq}[align]
    own = start[:, None] + step
    if not causal:
        own = (n - 1)[:, None].expand(-1, tq)
    sees = row < own[:, :, None] if strict else row <= own[:, :, None]
    if window is not None and use_window:
        edge = (n - 1)[:, None].expand(-1, tq) if fixed_window else own
        sees = sees & (row > edge[:, :, None] - window - extra_key)
    unused = ~(row < n[:, None])[:, :, None, None]
    k, v = k_cache, v_cache
    if in_place:
        v.masked_fill_(unused, 0)
    if hide_v:
        v = v.masked_fill(unused, 0)
    spread = {
        "interleave": lambda x: x.repeat_interleave(hq // hkv, 2),
        "tile": lambda x: x.repeat(1, 1, hq // hkv, 1),
    }[heads]
    scores = torch.einsum("bthd,bnhd->bhtn", q, spread(k)) * scale
    hidden = ~sees[:, None]
    scores = (
        scores.masked_fill(hidden, -torch.inf)
        if hide_scores
        else scores - hidden.to(scores.dtype) * 1e9
    )
    out = torch.einsum("bhtn,bnhd->bthd", torch.softmax(scores, -1), spread(v))
    return out.to(out_dtype or q.dtype)


for name, slip, hint in [
    (
        "top_left_mask",
        dict(align="top_left"),
        "Your first query sees row 0 alone. It stands at row context_lens[b] - T.",
    ),
    (
        "aligned_to_capacity",
        dict(align="capacity"),
        "You align the queries with the buffer's end, not with the rows in use.",
    ),
    (
        "no_causal_mask",
        dict(causal=False),
        "Your queries see each other's future: the chunk is causal inside.",
    ),
    ("strict_mask", dict(strict=True), "Your queries do not see their own row."),
    (
        "nan_values",
        dict(hide_v=False),
        "A weight of 0 times NaN is NaN: the unused rows of v_cache have to go.",
    ),
    (
        "additive_mask",
        dict(hide_scores=False),
        "You subtract a large number from a score; NaN minus anything is NaN.",
    ),
    ("first_length", dict(lens="first"), "Every sequence is cut at sequence 0's length."),
    (
        "longest_length",
        dict(lens="longest"),
        "Every sequence is cut at the longest length: shorter ones read rows not in use.",
    ),
    (
        "new_rows_not_counted",
        dict(lens="without_new"),
        "context_lens counts the new rows already; you add T once more.",
    ),
    (
        "tiled_heads",
        dict(heads="tile"),
        "`repeat` gives KV heads 0, 1, 0, 1; query heads 0 and 1 share KV head 0: 0, 0, 1, 1.",
    ),
    ("no_scale", dict(scale_by="none"), "The scores are not scaled by 1 / √D."),
    (
        "ignores_scale",
        dict(own_scale=False),
        "softmax_scale is given, and you use 1 / √D all the same.",
    ),
    ("no_window", dict(use_window=False), "You ignore `window`."),
    (
        "window_off_by_one",
        dict(extra_key=1),
        "Your window holds one row too many: it counts the query's own.",
    ),
    (
        "one_window_for_all",
        dict(fixed_window=True),
        "All queries share the last one's window. Each counts from its own row.",
    ),
    (
        "returns_float32",
        dict(out_dtype=torch.float32),
        "You compute in float32, which is fine, and forget to return q's dtype.",
    ),
    (
        "cleans_the_cache",
        dict(in_place=True),
        "You write zeros into the caller's cache. Work on a copy of what you change.",
    ),
]:
    answers.wrong("3.1", hint, name)(partial(slipped_chunk, **slip))


@answers.alternative("3.1")
def sequence_by_sequence(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None):
    return torch.stack(
        [
            naive.attention_per_head(
                q[b], k_cache[b, :n], v_cache[b, :n], softmax_scale, window=window
            )
            for b, n in enumerate(context_lens.tolist())
        ]
    )


# ---------------------------------------------------------------- 3.2 a preallocated cache


class SlippedCache(KVCache):
    """The cache with one slip: the attributes named in `slip` differ from what the class says here."""

    overwrite = False  # new rows start on the last old one
    eager = False  # length moves with the first layer of a pass
    step_by_one = False  # length counts passes, not tokens
    whole_buffer = False  # attends to the whole capacity
    drop_new_row = False  # attends to the old rows alone
    mask = "bottom_right"
    use_window = True
    swap = False  # V is stored where K belongs
    k_only = False  # only K is written
    lose_rows = False  # growth starts with empty buffers
    late = early = False  # growth one row too late, one too early
    exact = False  # grows to what is needed, no more
    counts = "used"  # what a move adds to growth_copy_bytes
    both = True  # written_bytes counts K and V
    concat = False  # a step builds the buffer anew
    zero_on_rewind = shrink = clamp = keep_bytes = False
    off = 0

    def __init__(self, config, capacity=64, dtype=torch.float32, device="cpu", **slip):
        super().__init__(config, capacity, dtype, device)
        vars(self).update(slip)

    def reserve(self, tokens):
        if tokens + self.early <= self.capacity + self.late:
            return
        copied = {
            "used": self.used_bytes,
            "capacity": self.capacity * self.config.kv_bytes_per_token(4),
            "none": 0,
            "k_only": self.used_bytes // 2,
            "new": tokens * self.config.kv_bytes_per_token(4),
        }[self.counts]
        self.growth_copy_bytes += copied
        capacity = tokens if self.exact else lesson.bucket(tokens)
        move = lesson._enlarged(self.keys, 0 if self.lose_rows else self.length, capacity)
        self.keys, self.values = (
            move,
            lesson._enlarged(self.values, 0 if self.lose_rows else self.length, capacity),
        )

    def append(self, layer, k, v):
        start = max(self.length - 1, 0) if self.overwrite else self.length
        end = start + len(k)
        self.reserve(end)
        if self.swap:
            k, v = v, k
        if self.concat:
            self.keys = torch.cat([self.keys[:, :start], self.keys[:, start:]], 1)
        self.keys[layer, start:end] = k
        if not self.k_only:
            self.values[layer, start:end] = v
        self.written_bytes += k.nbytes + (v.nbytes if self.both else 0)
        if layer == (0 if self.eager else self.config.num_hidden_layers - 1):
            self.length = self.length + 1 if self.step_by_one else end
        return end

    def attend(self, layer, q, k, v):
        end = self.append(layer, k, v) - (len(k) if self.drop_new_row else 0)
        end = self.capacity if self.whole_buffer else end
        keys, values = self.keys[layer, :end], self.values[layer, :end]
        window = self.config.sliding_window(layer) if self.use_window else None
        if self.mask == "none":
            keys, values = (keys, values) if window is None else (keys[-window:], values[-window:])
            return naive.attention(q, keys, values, causal=False)
        if self.mask == "top_left":
            padded = torch.cat([q, q.new_zeros(end - len(q), *q.shape[1:])])
            return naive.attention(padded, keys, values, window=window)[: len(q)]
        return naive.attention(q, keys, values, self.config.softmax_scale, window=window)

    def rewind(self, tokens):
        if self.clamp:
            tokens = min(max(tokens, 0), self.length)
        if not 0 <= tokens <= self.length:
            raise ValueError(f"tokens: got {tokens}")
        self.length = max(self.length - tokens - self.off, 0)
        if self.shrink:
            self.keys, self.values = (
                self.keys[:, : max(self.length, 1)].clone(),
                self.values[:, : max(self.length, 1)].clone(),
            )
        if self.keep_bytes:
            self.written_bytes -= tokens * self.config.kv_bytes_per_token(4)


for name, slip, hint in [
    (
        "overwrites_last_row",
        dict(overwrite=True),
        "Your new row replaces the last old one: it belongs at row `length`.",
    ),
    (
        "length_moves_early",
        dict(eager=True),
        "length moves with layer 0, so layer 1 writes the same tokens one pass further.",
    ),
    (
        "counts_passes",
        dict(step_by_one=True),
        "length grows by one per pass. A prompt brings more than one token.",
    ),
    (
        "attends_to_whole_buffer",
        dict(whole_buffer=True),
        "You attend to the whole capacity. Only rows up to `end` hold tokens.",
    ),
    (
        "forgets_the_new_row",
        dict(drop_new_row=True),
        "A token attends to itself: append first, then take the view.",
    ),
    (
        "no_mask_in_prefill",
        dict(mask="none"),
        "Your prompt's tokens see their future. A cache does not replace the causal mask.",
    ),
    (
        "top_left_mask",
        dict(mask="top_left"),
        "A chunk's first query stands behind all old rows, not at row 0.",
    ),
    ("no_window", dict(use_window=False), "You ignore config.sliding_window(layer)."),
    ("k_and_v_swapped", dict(swap=True), "K and V have changed places."),
    ("v_not_written", dict(k_only=True), "Only K is written; V needs its row too."),
    (
        "growth_loses_rows",
        dict(lose_rows=True),
        "After growth the old rows are gone: move the rows in use to the new buffers.",
    ),
    (
        "grows_late",
        dict(late=1),
        "Your buffer grows one row too late: `tokens` rows fit if tokens <= capacity.",
    ),
    (
        "grows_early",
        dict(early=1),
        "Your buffer grows although the row fits: `tokens` rows fit if tokens <= capacity.",
    ),
    (
        "grows_to_fit",
        dict(exact=True),
        "You grow to what is needed now, so the next token copies everything again: quadratic.",
    ),
    (
        "counts_reserved_rows",
        dict(counts="capacity"),
        "You count the rows reserved; only those in use are copied.",
    ),
    (
        "counts_new_rows",
        dict(counts="new"),
        "You count the rows after the move; only those in use before it are copied.",
    ),
    ("counts_k_alone", dict(counts="k_only"), "You count K alone; V moves as well."),
    ("counts_nothing", dict(counts="none"), "growth_copy_bytes stays 0 although rows moved."),
    ("written_k_alone", dict(both=False), "written_bytes counts K alone; V is written as well."),
    (
        "concat_in_disguise",
        dict(concat=True),
        "Each step builds the buffer anew. Write the row into the one you have.",
    ),
    (
        "rewind_shrinks",
        dict(shrink=True),
        "You copy on rewind. The rows may stay: nothing reads beyond `length`.",
    ),
    (
        "rewind_clamps",
        dict(clamp=True),
        "You forget what you can. Asking for more than the cache holds is an error: ValueError.",
    ),
    ("rewind_one_more", dict(off=1), "You forget one token too many."),
    (
        "rewind_unwrites",
        dict(keep_bytes=True),
        "written_bytes counts what was written; forgetting does not undo that.",
    ),
]:
    answers.wrong("3.2", hint, name)(partial(SlippedCache, **slip))


@answers.wrong(
    "3.2",
    "A cache longer than its counter says: keys and values stay, `length` does not move back.",
)
class NeverRewinds(KVCache):
    def rewind(self, tokens):
        if not 0 <= tokens <= self.length:
            raise ValueError(f"tokens: got {tokens}")


@answers.alternative("3.2")
class TheLessonsCache(lesson.KVCache):
    def rewind(self, tokens):
        if tokens not in range(self.length + 1):
            raise ValueError(f"tokens: got {tokens}")
        self.length -= tokens


# ---------------------------------------------------------------- 3.3 predict


def slipped_traffic(
    num_hidden_layers,
    num_attention_heads,
    num_key_value_heads,
    head_dim,
    dtype,
    prompt_tokens,
    new_tokens,
    *,
    k_and_v=2,
    all_layers=True,
    heads="kv",
    itemsize=None,
    kib=1024,
    last=0,
    copies="held_before",
    doubling="in_use",
    first=64,
):
    """The three numbers with one slip, spelled by a switch."""
    count = num_key_value_heads if heads == "kv" else num_attention_heads
    size = (
        k_and_v
        * (num_hidden_layers if all_layers else 1)
        * count
        * head_dim
        * (itemsize or dtype.itemsize)
        / kib
    )
    steps = new_tokens - 1 + last
    held = prompt_tokens + steps
    concat = {
        "held_before": range(prompt_tokens, held),
        "held_after": range(prompt_tokens + 1, held + 1),
        "new_alone": range(steps),
        "prompt_too": range(prompt_tokens, held + 1),
        "once": [prompt_tokens],
        "square": [held * held],
    }[copies]
    capacity, moved = max(first, 1 << (prompt_tokens - 1).bit_length()), 0
    if doubling == "prompt_too":
        capacity = first
    while capacity < held or (doubling == "early" and capacity == held):
        moved += 2 * capacity if doubling == "new_capacity" else capacity
        capacity *= 2
        if doubling == "last_alone" and capacity < held:
            moved = 0
    return held * size, sum(concat) * size, moved * size


for name, slip, hint in [
    ("k_alone", dict(k_and_v=1), "You count K alone; V is kept as well."),
    ("one_layer", dict(all_layers=False), "Every layer keeps its own K and V."),
    ("query_heads", dict(heads="query"), "You count query heads. Only the KV heads are kept."),
    ("always_two_bytes", dict(itemsize=2), "You count 2 bytes a value whatever the dtype."),
    ("kilobytes", dict(kib=1000), "You divide by 1000: that is kB. A KiB has 1024 bytes."),
    ("bytes", dict(kib=1), "These are bytes; KiB are asked for."),
    (
        "last_token_enters",
        dict(last=1),
        "Nothing is computed from the last generated token: it never enters the cache.",
    ),
    (
        "concat_after",
        dict(copies="held_after"),
        "A step copies what was there before it. Its own row is written, not copied.",
    ),
    (
        "concat_new_alone",
        dict(copies="new_alone"),
        "The prompt's rows are copied at every step too.",
    ),
    ("concat_one_more", dict(copies="prompt_too"), "You count one step too many."),
    (
        "concat_once",
        dict(copies="once"),
        "You count one step. Each of the others copies everything again.",
    ),
    (
        "concat_square",
        dict(copies="square"),
        "n² counts too much: early steps copy little. Sum what each step finds.",
    ),
    (
        "doubling_from_64",
        dict(doubling="prompt_too"),
        "Room for a long prompt is made while the cache is empty: nothing moves.",
    ),
    (
        "doubling_new_capacity",
        dict(doubling="new_capacity"),
        "You count the new capacity; only the rows in use are copied.",
    ),
    ("doubling_early", dict(doubling="early"), "A cache that is exactly full has not grown yet."),
    (
        "doubling_last_move",
        dict(doubling="last_alone"),
        "You count the last move alone. Sum all of them.",
    ),
    ("smallest_bucket_one", dict(first=1), "The first bucket has 64 tokens: no moves below that."),
]:
    answers.wrong("3.3", hint, name)(partial(slipped_traffic, **slip))


@answers.alternative("3.3")
def step_by_step(
    num_hidden_layers,
    num_attention_heads,
    num_key_value_heads,
    head_dim,
    dtype,
    prompt_tokens,
    new_tokens,
):
    size = 2 * num_hidden_layers * num_key_value_heads * head_dim * dtype.itemsize / 1024
    held, concat, doubling, capacity = prompt_tokens, 0, 0, lesson.bucket(prompt_tokens)
    for _ in range(new_tokens - 1):
        concat += held
        if held == capacity:
            doubling, capacity = doubling + held, 2 * capacity
        held += 1
    return held * size, concat * size, doubling * size


# ---------------------------------------------------------------- 3.4 the chat loop


def slipped_chat(
    model,
    cache,
    turns,
    max_new_tokens,
    stop_token_ids,
    *,
    restart=False,
    forget=False,
    again=False,
    everything=False,
    late=0,
    twice=False,
    drop_stop=False,
    never_stops=False,
    one_more=False,
    first_row=False,
    flush=False,
):
    """The chat loop with some slips, spelled by switches."""
    answers, left_over, told = [], [], []
    for turn in turns:
        answer, position = [], 0
        new = (told if everything else [] if forget else left_over) + turn
        told = told + turn
        while len(answer) < max_new_tokens + one_more:
            start = position if restart else cache.length + late
            hidden = model(torch.tensor(new), torch.arange(start, start + len(new)), cache.attend)
            position += len(new)
            token = int(model.logits(hidden[:1] if first_row else hidden[-1:]).argmax())
            if drop_stop and token in stop_token_ids:
                break
            answer.append(token)
            new = list(answer) if again else [new[-1], token] if twice else [token]
            if token in stop_token_ids and not never_stops:
                break
        if flush:
            model(
                torch.tensor(new), torch.arange(cache.length, cache.length + len(new)), cache.attend
            )
        answers.append(answer)
        left_over, told = ([] if flush else answer[-1:]), told + answer
    return answers


for name, slip, hint in [
    (
        "as_given",
        dict(restart=True, forget=True, again=True),
        "All three bugs are there. Write down the passes of the example.",
    ),
    (
        "positions_restart",
        dict(restart=True),
        "The second turn starts at position 0 again. How many tokens does the cache hold?",
    ),
    (
        "last_token_forgotten",
        dict(forget=True),
        "An answer's last token never enters the cache. The next turn has to bring it.",
    ),
    (
        "whole_answer_again",
        dict(again=True),
        "Each pass feeds the whole answer so far: its older tokens are in the cache.",
    ),
    (
        "two_bugs_left_token",
        dict(restart=True, again=True),
        "Two bugs are left: the positions, and what each pass feeds.",
    ),
    (
        "two_bugs_left_positions",
        dict(forget=True, again=True),
        "Two bugs are left: a token forgotten, and one fed again.",
    ),
    (
        "two_bugs_left_answer",
        dict(restart=True, forget=True),
        "Two bugs are left, both where a new turn begins.",
    ),
    (
        "whole_chat_again",
        dict(everything=True),
        "Each turn feeds the whole conversation again, on top of what the cache holds.",
    ),
    (
        "positions_off_by_one",
        dict(late=1),
        "Your positions are one too high: the first token stands at cache.length.",
    ),
    (
        "last_token_twice",
        dict(twice=True),
        "Each pass feeds the token before the new one again: it is in the cache already.",
    ),
    (
        "drops_stop_token",
        dict(drop_stop=True),
        "The stop token belongs to the answer: append it, then break.",
    ),
    ("never_stops", dict(never_stops=True), "A stop token does not end your answers."),
    ("one_too_many", dict(one_more=True), "Your answers have one token more than max_new_tokens."),
    (
        "first_row",
        dict(first_row=True),
        "You read the first row's logits. Which row predicts the next token?",
    ),
    (
        "runs_the_last_token",
        dict(flush=True),
        "You run every answer's last token at once: the very last one for nothing.",
    ),
]:
    answers.wrong("3.4", hint, name)(partial(slipped_chat, **slip))


@answers.alternative("3.4")
def by_what_the_cache_lacks(model, cache, turns, max_new_tokens, stop_token_ids):
    told, answers = [], []
    for turn in turns:
        told, answers = told + turn, [*answers, []]
        while len(answers[-1]) < max_new_tokens and not set(answers[-1]) & stop_token_ids:
            new = told[cache.length :]
            hidden = model(torch.tensor(new), torch.arange(len(told))[-len(new) :], cache.attend)
            told = [*told, int(model.logits(hidden)[-1].argmax())]
            answers[-1].append(told[-1])
    return answers
