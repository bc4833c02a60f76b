"""Wrong answers to lesson 03's exercises: real slips, each with a hint."""

import torch

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.rope import new_cos_sin_cache
from lessons.l03_kv_cache import cache as lesson
from lessons.l03_kv_cache.batch import new_batch
from lessons.toolbox.kernels.triton_ import tl, triton
from solutions.l03_kv_cache import KVPool
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 3.1 a chunk over caches

answers.slips(
    "3.1",
    """
    top_left_mask: Your first query sees row 0 alone. Its row is context_lens[b] - T.
    - context_lens[:, None] - num_queries + step  # [B, T], a query's own row
    + 0 * context_lens[:, None] + step

    aligned_to_capacity: You align the queries with the buffer's end, not with the rows in use.
    - context_lens[:, None] - num_queries + step  # [B, T], a query's own row
    + 0 * context_lens[:, None] + capacity - num_queries + step

    no_causal_mask: Your queries see each other's future: the chunk is causal inside.
    - context_lens[:, None] - num_queries + step  # [B, T], a query's own row
    + context_lens[:, None] - 1 + 0 * step

    maximum_of_all: What you subtract is not each row's largest score: far below it every exp is 0,
        and 0 / 0 is NaN.
    - torch.softmax(scores, dim=-1), v)
    + (scores - scores.max()).exp(), v)
    - return out.flatten(2, 3)
    + total = (scores - scores.max()).exp().sum(-1).permute(0, 3, 1, 2)
    + return (out / total[..., None]).flatten(2, 3)

    strides_ignored: You read an argument as if its rows followed each other. Its strides say where
        they are.
    - grouped = q
    + strides = capacity * num_kv_heads * head_dim, num_kv_heads * head_dim, head_dim, 1
    + k_cache = k_cache.as_strided(k_cache.shape, strides)
    + grouped = q

    strict_mask: Your queries do not see their own row.
    - row <= own[:, :, None]
    + row < own[:, :, None]

    nan_values: A weight of 0 times NaN is NaN: the unused rows of v_cache have to go.
    - v_cache.masked_fill(~in_use[:, :, None, None], 0)
    + v_cache

    additive_mask: You subtract a large number from a score; NaN minus anything is NaN.
    - scores.masked_fill(~sees[:, None, None], -torch.inf)
    + scores - 1e9 * (~sees[:, None, None]).to(scores.dtype)

    first_length: Every sequence is cut at sequence 0's length.
    - scale = head_dim**-0.5 if softmax_scale
    + context_lens = context_lens[:1].expand(len(q))
    + scale = head_dim**-0.5 if softmax_scale

    longest_length: Every sequence is cut at the longest length: shorter ones read rows not in use.
    - scale = head_dim**-0.5 if softmax_scale
    + context_lens = context_lens.max().expand(len(q))
    + scale = head_dim**-0.5 if softmax_scale

    new_rows_not_counted: context_lens counts the new rows already; you add T once more.
    - scale = head_dim**-0.5 if softmax_scale
    + context_lens = context_lens + num_queries
    + scale = head_dim**-0.5 if softmax_scale

    tiled_heads: `repeat` gives KV heads 0, 1, 0, 1; query heads 0 and 1 share KV head 0: 0, 0, 1,
        1.
    - q.unflatten(2, (num_kv_heads, -1))
    + q.unflatten(2, (-1, num_kv_heads)).transpose(2, 3)
    - v)
    - return out.flatten(2, 3)
    + v)
    + return out.transpose(2, 3).flatten(2, 3)

    no_scale: The scores are not scaled by 1 / √D.
    - scale = head_dim**-0.5 if
    + scale = 1.0 if

    ignores_scale: softmax_scale is given, and you use 1 / √D all the same.
    - head_dim**-0.5 if softmax_scale is None else softmax_scale
    + head_dim**-0.5

    infinite_values: You clear NaN alone. Unused rows may hold infinity too, and 0 · inf is NaN.
    - v_cache.masked_fill(~in_use[:, :, None, None], 0)
    + torch.where(v_cache.isnan(), 0, v_cache)

    mask_of_minus_10000: -10000 hides nothing where all scores are lower still. Only -inf is below
        every score.
    - -torch.inf
    + -1e4

    scale_or_default: `softmax_scale or …` takes the default for 0.0 too. Ask `is None`.
    - head_dim**-0.5 if softmax_scale is None else softmax_scale
    + softmax_scale or head_dim**-0.5

    no_window: You ignore `window`.
    - if window is not None:
    -     sees = sees & (row > own[:, :, None] - window)

    window_off_by_one: Your window holds one row too many: it counts the query's own.
    - own[:, :, None] - window)
    + own[:, :, None] - window - 1)

    one_window_for_all: All queries share the last one's window. Each counts from its own row.
    - own[:, :, None] - window)
    + own[:, -1:, None] - window)

    returns_float32: You compute in float32, which is fine, and forget to return q's dtype.
    - return out.flatten(2, 3)
    + return out.flatten(2, 3).float()

    cleans_the_cache: You write zeros into the caller's cache. Work on a copy of what you change.
    - v_cache.masked_fill(
    + v_cache.masked_fill_(
    """,
)


@answers.alternative("3.1")
def by_pytorch(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None):
    """PyTorch's attention under a mask that is spelled out."""
    row = torch.arange(k_cache.shape[1])
    own = context_lens[:, None, None] + torch.arange(-q.shape[1], 0)[:, None]
    sees = (row <= own) & (row > own - (window or len(row)))
    in_use = (row < context_lens[:, None])[:, :, None, None]
    k, v = (torch.where(in_use, x, 0).transpose(1, 2) for x in (k_cache, v_cache))
    mask = sees[:, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(q.transpose(1, 2), k, v, mask, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


@answers.wrong("3.1", "A loop over sequences: a server extends hundreds of them in a step.")
def sequence_by_sequence(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None):
    return torch.stack(
        [
            naive.attention_per_head(
                q[b], k_cache[b, :n], v_cache[b, :n], softmax_scale, window=window
            )
            for b, n in enumerate(context_lens.tolist())
        ]
    )


# ---------------------------------------------------------------- 3.2 a pool that grows and forgets

answers.slips(
    "3.2",
    """
    no_spare_slot: A slot of -1 is Python's last. Without a slot more, it is the last block's last
        one.
    - self.num_blocks * self.block_size + 1
    + self.num_blocks * self.block_size

    garbage: torch.empty holds whatever was in memory, NaN perhaps. New slots hold zeros.
    - torch.zeros(len(self.layers)
    + torch.empty(len(self.layers)

    growth_loses_slots: After growth the old slots are gone: move the blocks to the new buffers.
    - self.blocks(self.k_slots)[:, :, :held] = old_k
    - self.blocks(self.v_slots)[:, :, :held] = old_v

    growth_keeps_slot_numbers: Blocks are longer now, so block 1 begins at another slot. Copy block
        by block.
    - self.k_slots = self.new_slots(old_k
    + flat_k, flat_v = self.k_slots, self.v_slots
    + self.k_slots = self.new_slots(old_k
    - self.blocks(self.k_slots)[:, :, :held] = old_k
    - self.blocks(self.v_slots)[:, :, :held] = old_v
    + self.k_slots[:, : flat_k.shape[1]] = flat_k
    + self.v_slots[:, : flat_v.shape[1]] = flat_v

    growth_of_one_block: Only block 0 moves. All blocks do.
    - self.blocks(self.k_slots)[:, :, :held] = old_k
    - self.blocks(self.v_slots)[:, :, :held] = old_v
    + self.blocks(self.k_slots)[:, :1, :held] = old_k[:, :1]
    + self.blocks(self.v_slots)[:, :1, :held] = old_v[:, :1]

    growth_of_k_alone: K moves, and V does not.
    - self.blocks(self.v_slots)[:, :, :held] = old_v

    table_stays: cos_sin_cache still ends where the old block did.
    - self.cos_sin_cache = new_cos_sin_cache(self.config, num_positions, old_k.device)

    grows_late: Your block grows one token too late: tokens <= block_size fit.
    - if tokens <= held:
    + if tokens <= held + 1:

    grows_early: Your block grows although the token fits.
    - if tokens <= held:
    + if tokens < held:

    grows_to_fit: You grow to what is needed now, so the next token copies everything again:
        quadratic.
    - max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())
    + tokens

    grows_once: You double once. A long prompt may need more than that.
    - max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())
    + max(SMALLEST_BUCKET, 2 * held)

    grows_from_one: A block that grows has SMALLEST_BUCKET slots at least.
    - max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())
    + 1 << (tokens - 1).bit_length()

    counts_the_spare_slot: You count the spare slot. Only blocks are copied.
    - self.k_slots = self.new_slots(old_k
    + self.growth_copy_bytes += self.k_slots.nbytes + self.v_slots.nbytes
    + self.k_slots = self.new_slots(old_k
    - self.growth_copy_bytes += old_k.nbytes + old_v.nbytes

    counts_new_slots: You count the new buffers; only old blocks move.
    - old_k.nbytes + old_v.nbytes
    + self.k_slots.nbytes + self.v_slots.nbytes

    counts_k_alone: You count K alone; V moves as well.
    - old_k.nbytes + old_v.nbytes
    + old_k.nbytes

    counts_nothing: growth_copy_bytes stays 0 although blocks moved.
    - self.growth_copy_bytes += old_k.nbytes + old_v.nbytes

    concat_in_disguise: Each step builds the buffers anew. Write into the ones you have.
    - index = layer - self.layers.start
    + index = layer - self.layers.start
    + self.k_slots, self.v_slots = self.k_slots + 0, self.v_slots + 0

    all_layers: ops get the slots of one layer, not of all.
    - index = layer - self.layers.start
    + index = slice(None)

    layers_from_0: A pool may store some layers alone: layer `layers.start` is its first.
    - index = layer - self.layers.start
    + index = layer

    unrotated_q: ops.write returns q, rotated; you attend with the q that came in.
    - q = self.ops.write(
    + self.ops.write(

    k_and_v_swapped: K and V have changed places.
    - self.ops.write(q, k, v, k_slots, v_slots, batch
    + self.ops.write(q, k, v, v_slots, k_slots, batch

    always_decodes: ops.decode is for one new token of each sequence. A prompt brings more.
    - self.ops.decode if batch.max_seqlen_q == 1 else self.ops.prefill
    + self.ops.decode

    decodes_one_token: A batch of single tokens is decoded too: look at max_seqlen_q, not at the
        packed length.
    - self.ops.decode if batch.max_seqlen_q == 1
    + self.ops.decode if len(batch.tokens) == 1

    always_prefills: One new token of each sequence is a step for ops.decode.
    - self.ops.decode if batch.max_seqlen_q == 1 else self.ops.prefill
    + self.ops.prefill

    ignores_first_block: The batch's first sequence is in first_block, and you read block 0.
    - k_cache = self.blocks(k_slots)[first_block:]
    - v_cache = self.blocks(v_slots)[first_block:]
    + k_cache = self.blocks(k_slots)
    + v_cache = self.blocks(v_slots)

    no_window: You ignore config.sliding_window(layer).
    - window = self.config.sliding_window(layer)
    + window = None

    one_window: Each layer has its own window.
    - window = self.config.sliding_window(layer)
    + window = self.config.sliding_window(1)

    no_scale: The scale is config.softmax_scale.
    - batch, self.config.softmax_scale, window
    + batch, 1.0, window

    written_k_alone: written_bytes counts K alone; V is written as well.
    - self.written_bytes += k.nbytes + v.nbytes
    + self.written_bytes += k.nbytes

    all_move_up: In your list every sequence moves up. Only the last sequence has to move, into the
        free block.
    - if block < len(remaining):
    -     self.move(len(remaining), block, last)
    -     remaining[block] = last
    - return remaining
    + for b in range(block, len(remaining)):
    +     self.move(b + 1, b, held[b + 1])
    + return held[:block] + held[block + 1 :]

    takes_the_last_block: You copy the pool's last block. The last sequence may be before it.
    - self.move(len(remaining), block, last)
    + self.move(self.num_blocks - 1, block, last)

    float32_after_growth: Your new buffers have another dtype than the old ones.
    - self.new_slots(old_k.shape[-2:], old_k.dtype, old_k.device)
    + self.new_slots(old_k.shape[-2:], torch.float32, old_k.device)
    - self.new_slots(old_v.shape[-2:], old_v.dtype, old_v.device)
    + self.new_slots(old_v.shape[-2:], torch.float32, old_v.device)

    grows_past_a_power_of_two: 128 tokens fit into 128 slots; your block grows to 256.
    - (tokens - 1).bit_length()
    + tokens.bit_length()

    written_float32: written_bytes counts 4 bytes a number whatever the dtype.
    - self.written_bytes += k.nbytes + v.nbytes
    + self.written_bytes += 4 * (k.numel() + v.numel())

    stores_all_layers: The pool stores `layers` alone, and you make room for all of the model's.
    - torch.zeros(len(self.layers)
    + torch.zeros(self.config.num_hidden_layers

    moves_the_wrong_way: You copy the ended sequence.
    - self.move(len(remaining), block, last)
    + self.move(block, len(remaining), last)

    list_alone: In your list every sequence moves up. Only the last sequence has to move, into the
        free block.
    - if block < len(remaining):
    -     self.move(len(remaining), block, last)
    -     remaining[block] = last
    - return remaining
    + return held[:block] + held[block + 1 :]

    erases: Nothing need be erased: nothing after a length is read.
    - if block < len(remaining):
    + self.blocks(self.k_slots)[:, len(remaining)] = 0
    + if block < len(remaining):

    moves_too_few: You copy as many tokens as the ended sequence had. The last one may have more.
    - self.move(len(remaining), block, last)
    + self.move(len(remaining), block, held[block])

    moves_the_whole_block: You copy the whole block. Only the tokens in use are needed.
    - self.move(len(remaining), block, last)
    + self.move(len(remaining), block, self.block_size)

    list_stays: The one that ended is still in your list.
    - return remaining
    + return [*remaining, last]

    takes_any_block: There is no sequence in that block: ValueError.
    - if not 0 <= block < len(held):
    -     raise
    + if block >= len(held):
    +     return list(held)
    + if block < 0:
    +     raise

    takes_negative_blocks: Block -1 is Python's last one, not a sequence: ValueError.
    - if not 0 <= block < len(held):
    + if block >= len(held):

    moves_k_alone: move copies K and forgets V.
    - for slots in (self.k_slots, self.v_slots):
    + for slots in (self.k_slots,):

    ChangesHeld: `held` is the caller's: return another list.
    - *remaining, last = held
    + remaining, last = held, held.pop()

    counts_itself: You append after what you wrote before. The batch says where its tokens go.
    - read = self.ops
    + self.appended = getattr(self, "appended", 0) + len(batch.tokens)
    + first = self.appended - len(batch.tokens)
    + batch = type(batch)(**{**vars(batch), "slot_mapping": torch.arange(first, self.appended)})
    + read = self.ops
    """,
)


@answers.alternative("3.2")
class TheLessonsPool(lesson.KVPool):
    def forget(self, block, held):
        if block not in range(len(held)):
            raise ValueError(f"block: got {block}")
        if block == len(held) - 1:
            return held[:-1]
        self.move(len(held) - 1, block, held[-1])
        return [*held[:block], held[-1], *held[block + 1 : -1]]


@answers.alternative("3.2")
class ByPadding(KVPool):
    """Grows by padding each block with zeros."""

    def reserve(self, tokens):
        if tokens <= self.block_size:
            return
        more = max(64, 2 ** (tokens - 1).bit_length()) - self.block_size
        grown = []
        for slots in (self.k_slots, self.v_slots):
            blocks = self.blocks(slots)
            self.growth_copy_bytes += blocks.nbytes
            padded = torch.nn.functional.pad(blocks, (0, 0, 0, 0, 0, more)).flatten(1, 2)
            grown.append(torch.cat([padded, torch.zeros_like(slots[:, -1:])], dim=1))
        self.k_slots, self.v_slots = grown
        self.block_size += more
        self.cos_sin_cache = new_cos_sin_cache(self.config, self.block_size)


# ---------------------------------------------------------------- 3.3 predict

answers.slips(
    "3.3",
    """
    k_alone: You count K alone; V is kept as well.
    - kib_per_token = 2 * num_hidden_layers *
    + kib_per_token = num_hidden_layers *

    one_layer: Every layer keeps its own K and V.
    - kib_per_token = 2 * num_hidden_layers *
    + kib_per_token = 2 *

    query_heads: You count query heads. Only the KV heads are kept.
    - num_hidden_layers * num_key_value_heads
    + num_hidden_layers * num_attention_heads

    always_two_bytes: You count 2 bytes a value whatever the dtype.
    - dtype.itemsize
    + 2

    kilobytes: You divide by 1000: that is kB. A KiB has 1024 bytes.
    - / 1024
    + / 1000

    bytes: These are bytes; KiB are asked for.
    - * dtype.itemsize / 1024
    + * dtype.itemsize

    last_token_enters: Nothing is computed from the last generated token: it never enters the cache.
    - steps = new_tokens - 1
    + steps = new_tokens

    last_token_held: Nothing is computed from the last generated token: it never enters the cache.
    - return held * kib_per_token
    + return (held + 1) * kib_per_token

    concat_after: A step copies what was there before it. Its own row is written, not copied.
    - by_concat = prompt_tokens * steps
    + by_concat = (prompt_tokens + 1) * steps

    concat_new_alone: The prompt's rows are copied at every step too.
    - prompt_tokens * steps + steps * (steps - 1) // 2
    + steps * (steps - 1) // 2

    concat_one_more: You count one step too many.
    - prompt_tokens * steps + steps * (steps - 1) // 2
    + prompt_tokens * new_tokens + new_tokens * steps // 2

    concat_once: You count one step. Each of the others copies everything again.
    - prompt_tokens * steps + steps * (steps - 1) // 2
    + prompt_tokens

    concat_square: n² counts too much: early steps copy little. Sum what each step finds.
    - prompt_tokens * steps + steps * (steps - 1) // 2
    + held * held

    doubling_from_64: Your block starts at 64 tokens. It starts with room for the prompt.
    - max(64, 1 << (prompt_tokens - 1).bit_length())
    + 64

    doubling_new_capacity: You count the new block; only the old one is copied.
    - by_doubling += capacity
    + by_doubling += 2 * capacity

    doubling_early: A cache that is exactly full has not grown yet.
    - while capacity < held:
    + while capacity <= held:

    doubling_last_move: You count the last move alone. Sum all of them.
    - by_doubling += capacity
    + by_doubling = capacity

    doubles_a_full_prompt: A prompt that is a power of two fills its block; yours starts twice as
        large.
    - (prompt_tokens - 1).bit_length()
    + prompt_tokens.bit_length()

    smallest_bucket_one: The first bucket has 64 tokens: no moves below that.
    - max(64, 1 << (prompt_tokens - 1).bit_length())
    + 1 << (prompt_tokens - 1).bit_length()
    """,
)


@answers.wrong("3.3", "A loop over the tokens. The sum of n numbers in a row has a formula.")
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


@answers.alternative("3.3")
def by_differences(
    num_hidden_layers,
    num_attention_heads,
    num_key_value_heads,
    head_dim,
    dtype,
    prompt_tokens,
    new_tokens,
):
    """Whatever is copied, from sums of which one is the beginning of the other."""
    size = 2 * num_hidden_layers * num_key_value_heads * head_dim * dtype.itemsize / 1024
    held = prompt_tokens + new_tokens - 1
    concat = (held * (held - 1) - prompt_tokens * (prompt_tokens - 1)) / 2
    return held * size, concat * size, (lesson.bucket(held) - lesson.bucket(prompt_tokens)) * size


# ---------------------------------------------------------------- 3.4 a chat that keeps its cache

# One slip before several, because a hint for several would be wrong where only one shows.
answers.slips(
    "3.4",
    """
    first_stop_token: Only one of stop_token_ids ends your answer. Any of them does.
    - in stop_token_ids
    + in sorted(stop_token_ids)[:1]

    argmax_of_all_rows: argmax over all rows at once. Which row predicts the next token?
    - hidden[batch.logits_at]
    + hidden

    positions_restart: The second turn starts at position 0 again. How many does the cache hold?
    - answer, new = [], left_over + turn
    + answer, new, held = [], left_over + turn, 0

    last_token_forgotten: An answer's last token never enters the cache. The next turn has to bring
        it.
    - answer, new = [], left_over + turn
    + answer, new = [], turn

    whole_answer_again: Each pass feeds the whole answer so far: its older tokens are in the cache.
    - new = [token]
    + new = list(answer)

    whole_chat_again: Each turn feeds the whole conversation again, on top of what the cache holds.
    - answers, left_over, held = [], [], 0
    + answers, told, held = [], [], 0
    - answer, new = [], left_over + turn
    + told += turn
    + answer, new = [], list(told)
    - left_over = answer[-1:]
    + told += answer

    runs_the_chat_again: Your answers are right, and each turn runs the whole conversation again.
    - answers, left_over, held = [], [], 0
    + answers, told = [], []
    - answer, new = [], left_over + turn
    + told += turn
    + answer, new, held = [], list(told), 0
    - left_over = answer[-1:]
    + told += answer

    positions_off_by_one: Your positions are one too high: the next token comes after those held.
    - batch = new_batch([(new, held)]
    + batch = new_batch([(new, held + 1)]

    last_token_twice: Each pass feeds the token before the new one again: it is in the cache
        already.
    - new = [token]
    + new = [new[-1], token]

    drops_stop_token: The stop token belongs to the answer: append it, then break.
    - answer.append(token)
    - new = [token]
    - if token in stop_token_ids:
    -     break
    + if token in stop_token_ids:
    +     break
    + answer.append(token)
    + new = [token]

    never_stops: A stop token does not end your answers.
    - if token in stop_token_ids:
    -     break

    one_too_many: Your answers have one token more than max_new_tokens.
    - < max_new_tokens
    + <= max_new_tokens

    first_row: You read the first row's logits. Which row predicts the next token?
    - hidden[batch.logits_at]
    + hidden[:1]

    runs_the_last_token: You run every answer's last token at once: the very last one for nothing.
    - left_over = answer[-1:]
    + batch = new_batch([(new, held)], cache.block_size)
    + model(batch.tokens, cache.attending(batch))
    + held += len(new)

    two_bugs_left_token: Two bugs are left: the positions, and what each pass feeds.
    = positions_restart, whole_answer_again

    two_bugs_left_positions: Two bugs are left: a token forgotten, and one fed again.
    = last_token_forgotten, whole_answer_again

    two_bugs_left_answer: Two bugs are left, both where a new turn begins.
    - answer, new = [], left_over + turn
    + answer, new, held = [], turn, 0

    as_given: All three bugs are there. Write down the passes of the example.
    = whole_answer_again, two_bugs_left_answer
    """,
)


@answers.alternative("3.4")
def by_what_the_cache_lacks(model, cache, turns, max_new_tokens, stop_token_ids):
    told, held, answers = [], 0, []
    for turn in turns:
        told, answers = told + turn, [*answers, []]
        while len(answers[-1]) < max_new_tokens and not set(answers[-1]) & stop_token_ids:
            batch = new_batch([(told[held:], held)], cache.block_size)
            hidden = model(batch.tokens, cache.attending(batch))
            held = len(told)
            told = [*told, int(model.logits(hidden)[-1].argmax())]
            answers[-1].append(told[-1])
    return answers


# ---------------------------------------------------------------- 3.5 a kernel with a loop

answers.slips(
    "3.5",
    """
    last_tile_alone: The sum has to grow from tile to tile: add to it.
    - acc += tl.sum(weights[:, None] * v, axis=0)
    + acc = tl.sum(weights[:, None] * v, axis=0)

    first_tile_alone: A sequence may have more rows than a tile: walk over all of them.
    - range(0, length, BLOCK_N)
    + range(0, tl.minimum(length, BLOCK_N), BLOCK_N)

    whole_tiles_alone: The last tile need not be full, and its rows count.
    - range(0, length, BLOCK_N)
    + range(0, length // BLOCK_N * BLOCK_N, BLOCK_N)

    same_rows_again: Each tile has rows of its own: they begin at `start`.
    - row = start + tl.arange(0, BLOCK_N)
    + row = tl.arange(0, BLOCK_N)

    to_the_end_of_the_cache: Rows after context_lens were never written: end the loop and the mask
        there, not at the capacity.
    - range(0, length, BLOCK_N)
    + range(0, capacity, BLOCK_N)
    - in_use = row < length
    + in_use = row < capacity

    only_weights_masked: A weight of 0 does not hide a row that is NaN: mask the load of V, too.
    - mask=in_use[:, None] & in_head[None, :], other=0.0
    + mask=(row < capacity)[:, None] & in_head[None, :], other=0.0

    only_values_masked: The weights after context_lens may be NaN, too: mask their load.
    - tl.load(weights_row + row, mask=in_use, other=0.0)
    + tl.load(weights_row + row, mask=row < capacity, other=0.0)

    no_mask_of_the_head: Columns from HEAD_DIM on are the next head's: mask them.
    - mask=in_use[:, None] & in_head[None, :], other=0.0
    + mask=in_use[:, None], other=0.0

    stores_a_whole_block: The result has HEAD_DIM columns, and BLOCK_D may be more: mask the store.
    - tl.store(out_row + column, acc, mask=in_head)
    + tl.store(out_row + column, acc)

    sum_over_the_head: Sum over the rows of the tile, which are its first axis.
    - tl.sum(weights[:, None] * v, axis=0)
    + tl.sum(tl.sum(weights[:, None] * v, axis=1), axis=0)

    dense_rows: Two rows of V are stride_row apart, not HEAD_DIM.
    - row.to(tl.int64)[:, None] * stride_row
    + row.to(tl.int64)[:, None] * HEAD_DIM

    first_head: Each program has a head of its own: add head times its stride.
    - sequence * stride_sequence + head * stride_head
    + sequence * stride_sequence

    first_sequence: Each program has a sequence of its own: add it times its stride.
    - sequence * stride_sequence + head * stride_head
    + head * stride_head

    strides_swapped: One stride leads to the next head, the other to the next row.
    - sequence * stride_sequence + head * stride_head
    + sequence * stride_sequence + head * stride_row
    - row.to(tl.int64)[:, None] * stride_row
    + row.to(tl.int64)[:, None] * stride_head

    rows_in_32_bits: Row · stride may be more than 2³¹: make the row int64 before you multiply.
    - row.to(tl.int64)[:, None]
    + row[:, None]

    mean: The weights are given, and they are not divided by the number of rows.
    - tl.store(out_row + column, acc, mask=in_head)
    + tl.store(out_row + column, acc / length, mask=in_head)

    weights_left_out: Each row counts by its weight.
    - tl.sum(weights[:, None] * v, axis=0)
    + tl.sum(v, axis=0)

    last_row_again: Lanes after the last row are masked. Yours load it once more.
    - row = start + tl.arange(0, BLOCK_N)
    - in_use = row < length
    + lane = start + tl.arange(0, BLOCK_N)
    + row, in_use = tl.minimum(lane, length - 1), lane < capacity + BLOCK_N
    - tl.load(weights_row + row, mask=in_use, other=0.0)
    + tl.where(lane < length, tl.load(weights_row + row), 0.0)
    """,
)


def in_pytorch(weights, v_cache, context_lens):
    in_use = torch.arange(weights.shape[2]) < context_lens[:, None]
    weights = weights.masked_fill(~in_use[:, None], 0.0)
    return torch.einsum(
        "bhn,bnhd->bhd", weights, v_cache.masked_fill(~in_use[:, :, None, None], 0.0)
    )


attacks(answers, "3.5", in_pytorch)


@triton.jit
def row_after_row_kernel(
    weights_ptr, v_ptr, out_ptr, lens_ptr, heads, capacity, by_b, by_n, by_h, D: tl.constexpr
):
    """A program per sequence, head and column: one number after the other."""
    b, h, d = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    total = 0.0
    for at in range(tl.load(lens_ptr + b).to(tl.int32)):
        n = b * 0 + at  # 64 bits
        weight = tl.load(weights_ptr + (b * heads + h) * capacity + n)
        total += weight * tl.load(v_ptr + b * by_b + n * by_n + h * by_h + d)
    tl.store(out_ptr + (b * heads + h) * D + d, total)


@answers.alternative("3.5")
def column_by_column(weights, v_cache, context_lens):
    heads, head_dim = v_cache.shape[2:]
    out = weights.new_zeros(len(weights), heads, head_dim)
    grid = head_dim, heads, len(weights)
    strides = v_cache.stride()[:3]
    row_after_row_kernel[grid](
        weights, v_cache, out, context_lens, heads, weights.shape[2], *strides, D=head_dim
    )
    return out


@triton.jit
def masked_to_the_end_kernel(
    weights_ptr, v_ptr, out_ptr, lens_ptr, heads, capacity, by_b, by_n, by_h, D, BLOCK: tl.constexpr
):
    """All tiles of the cache, with empty masks after the last row in use; a tile is [D, rows]."""
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d, length = tl.arange(0, BLOCK), tl.load(lens_ptr + b)
    total = tl.zeros((BLOCK, 8), tl.float32)
    for tile in range(tl.cdiv(capacity, 8)):
        n = tile * 8 + tl.arange(0, 8).to(tl.int64)
        w = tl.load(weights_ptr + (b * heads + h) * capacity + n, mask=n < length, other=0.0)
        at = b * by_b + n[None, :] * by_n + h * by_h + d[:, None]
        v = tl.load(v_ptr + at, mask=(n < length)[None, :] & (d < D)[:, None], other=0.0)
        total += w[None, :] * v
    tl.store(out_ptr + (b * heads + h) * D + d, tl.sum(total, axis=1), mask=d < D)


@answers.alternative("3.5")
def over_the_whole_cache(weights, v_cache, context_lens):
    batch, heads, capacity = weights.shape
    out = torch.empty(batch, heads, v_cache.shape[3])
    masked_to_the_end_kernel[heads, batch](
        weights,
        v_cache,
        out,
        context_lens,
        heads,
        capacity,
        *v_cache.stride()[:3],
        v_cache.shape[3],
        BLOCK=triton.next_power_of_2(v_cache.shape[3]),
    )
    return out
