# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=03
# Generated from solutions/l03_kv_cache.py, checksum 534084e6c8f9. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 03: chunks, a pool that grows and forgets, its bytes, a chat with bugs."""

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l02_naive_attention.rope import new_cos_sin_cache
from lessons.l03_kv_cache.batch import Batch, new_batch
from lessons.l03_kv_cache.cache import SMALLEST_BUCKET, AttentionOps, check_at_least_one
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.model.config import ModelConfig


@exercise("3.1", "A chunk of new tokens over caches of different lengths", minutes=30, difficulty=3)
def chunk_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of the last T tokens of each of B sequences over its cache. q: [B, T, Hq, D] -> [B,
    T, Hq, D], of q's dtype.

    k_cache, v_cache: [B, capacity, Hkv, D], one dtype with q. The first context_lens[b] rows of
    sequence b are in use, and the last T of these belong to the queries themselves: they were
    written before the call. The rows after them were never written and may hold anything, NaN and
    infinity included; nothing of them may show. context_lens: [B] int64, each at least T and at
    most `capacity`. softmax_scale: 1 / √D if None. Query t of sequence b sees row j if j <=
    context_lens[b] - T + t. window: only the last `window` of these rows. Query head h reads KV
    head h // (Hq / Hkv). The arguments stay as they were. Errors: none to raise. Aim: no Python
    loop over sequences, because a server extends hundreds of them in a step.

    Example, T = 2, one head, D = 1, softmax_scale = 1, capacity 4, context_lens = [3]:
        q = [0, 0], v_cache = [3, 6, 9, NaN]
        query 0 belongs to row 1, sees rows 0 and 1        -> (3 + 6) / 2 = 4.5
        query 1 belongs to row 2, sees rows 0, 1 and 2     -> (3 + 6 + 9) / 3 = 6
    """
    _, num_queries, _, head_dim = q.shape  # [B, T, Hq, D]
    _, capacity, num_kv_heads, _ = k_cache.shape
    raise NotImplementedError("Exercise 3.1: A chunk of new tokens over caches of different lengths")


@exercise(
    "3.2",
    "A pool of preallocated blocks that grows and forgets",
    minutes=40,
    difficulty=2,
    replaces="lessons.l03_kv_cache.cache:KVPool",
)
class KVPool:
    """K and V of several sequences in two buffers, k_slots and v_slots: [layers, slots, Hkv, D].

    Blocks of block_size slots follow each other. Sequence b owns block b: the token at its
    position p has the slot b · block_size + p. After the blocks there is one more
    slot, which belongs to no sequence: `ops.write` puts tokens there whose slot is -1.

    The pool counts no tokens. The `Batch` of a step says where its tokens go and how many a
    sequence holds. So the newest tokens of a sequence are forgotten without a call: the next batch
    says that fewer are held, and writes over them (for example, a user edits the last message of
    a chat). `forget` forgets a whole sequence.

    Example: 2 layers, num_blocks=2, block_size=4, 256 bytes a token in all layers.
        the new pool         k_slots: [2, 2 · 4 + 1, Hkv, D], all zeros
        reserve(4)           nothing happens, 4 fit
        reserve(5)           block_size 64, k_slots: [2, 2 · 64 + 1, Hkv, D]. Both blocks moved:
                             slot 4, the first of block 1, is now slot 64. growth_copy_bytes 8 · 256
        forget(0, [9, 5])    -> [5]: the 5 tokens of block 1 are copied to the start of block 0
        forget(1, [9, 5])    -> [9]: nothing is copied
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        ops: AttentionOps,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layers: range | None = None,
        max_context_len: int | None = None,
    ):
        check_at_least_one(num_blocks=num_blocks, block_size=block_size)
        self.config, self.ops = config, ops
        self.num_blocks, self.block_size = num_blocks, block_size
        # which layers are stored here: all of them, unless they are given
        self.layers = range(config.num_hidden_layers) if layers is None else layers
        self.written_bytes = 0  # K and V of new tokens
        self.growth_copy_bytes = 0  # K and V copied only to make room
        self.cos_sin_cache = new_cos_sin_cache(config, max_context_len or block_size, device)
        num_kv_heads = config.num_key_value_heads
        self.k_slots = self.new_slots((num_kv_heads, config.head_dim), dtype, device)
        self.v_slots = self.new_slots((num_kv_heads, config.v_head_dim), dtype, device)

    @classmethod
    def for_model(
        cls, model: Decoder, num_blocks: int, block_size: int, ops: AttentionOps
    ) -> "KVPool":
        """An empty pool on the model's device, in its dtype."""
        return cls(model.config, num_blocks, block_size, ops, model.dtype, model.device)

    def blocks(self, slots: Tensor) -> Tensor:
        """[..., slots, Hkv, D] without the last slot as [..., num_blocks, block_size, Hkv, D]."""
        used = slots.narrow(-3, 0, self.num_blocks * self.block_size)
        return used.unflatten(-3, (self.num_blocks, self.block_size))

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` slots of one block over those of another."""
        for slots in (self.k_slots, self.v_slots):
            blocks = self.blocks(slots)
            blocks[:, target, :tokens] = blocks[:, source, :tokens]

    def new_slots(
        self, row: tuple[int, int], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Zeros for the stored layers: [layers, slots, *row], the unowned slot included."""
        raise NotImplementedError("Exercise 3.2: A pool of preallocated blocks that grows and forgets")

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in each block; nothing happens if they fit.

        Otherwise block_size becomes the next power of two (SMALLEST_BUCKET = 64 at least), every
        block moves to the start of its larger one, new slots hold zeros, growth_copy_bytes counts K
        and V of all slots of the old blocks, and cos_sin_cache gets a row for each slot of a block.
        """
        raise NotImplementedError("Exercise 3.2: A pool of preallocated blocks that grows and forgets")

    def attending(self, batch: Batch, first_block: int = 0) -> Attend:
        """A step's attend(layer, q: [T, Hq, D], k: [T, Hkv, D], v: [T, Hkv, Dv]) -> [T, Hq, Dv].

        First ops.write(q, k, v, k_slots, v_slots, batch, cos_sin_cache), with the slots of this
        layer alone: [slots, Hkv, D]. It returns q, rotated. Then ops.decode if no sequence has more
        than one new token (batch.max_seqlen_q), else ops.prefill: (q, k_cache, v_cache, batch,
        config.softmax_scale, config.sliding_window(layer)), with the layer's blocks from
        first_block on: [num_blocks, block_size, Hkv, D]. written_bytes counts k and v.
        """
        raise NotImplementedError("Exercise 3.2: A pool of preallocated blocks that grows and forgets")

    def forget(self, block: int, held: list[int]) -> list[int]:
        """The sequence in `block` has ended. Returns how many tokens each of the others holds.

        held: the same before, sequence b in block b; it stays as it was. The sequences must stay in
        the first blocks without a gap, so the last one takes the block that becomes free.
        Only its tokens in use are copied, and nothing if it is the last one that ends. Nothing is
        erased. Raises ValueError if no sequence is in `block`.
        """
        raise NotImplementedError("Exercise 3.2: A pool of preallocated blocks that grows and forgets")


@exercise(
    "3.3", "Predict: what a cache holds, and what making room copies", minutes=15, difficulty=1
)
def cache_traffic(
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    prompt_tokens: int,
    new_tokens: int,
) -> tuple[float, float, float]:
    """KiB (1024 bytes) after one request: held at the end, copied by ConcatCache to make room,
    copied by a KVPool that doubles.

    The prompt (prompt_tokens >= 1) enters the cache in one piece, then one token a step, until
    new_tokens (>= 1) have been generated. Nothing is computed from the last generated token, so it
    never enters. ConcatCache: each step copies all that it held before. Storing the prompt in an
    empty cache copies nothing. KVPool with one block: it starts with the power of two that holds
    the prompt, 64 tokens at least, and grows to the next one when a token does not fit. Growing
    copies the whole block, which is full then. Errors: none to raise. Aim: formulas; a loop over
    the doublings is fine, one over the tokens is not.

    Example: 1 layer, 4 query heads, 2 KV heads, head_dim 128, float16: 1 KiB per token. Prompt 63,
    3 new tokens:
        held 63 + 2 = 65
        ConcatCache copied 63 + 64 = 127
        KVPool moved once, when token 65 came: 64           -> (65.0, 127.0, 64.0)
    Write down your guess first: Llama-3-8B (32 layers, 32 and 8 heads, 128) in bfloat16, prompt
    1000, 7000 new tokens.
    """
    raise NotImplementedError("Exercise 3.3: Predict: what a cache holds, and what making room copies")


@exercise("3.4", "Find the bugs: a chat that keeps its cache", minutes=25, difficulty=3)
def chat(
    model, cache, turns: list[list[int]], max_new_tokens: int, stop_token_ids: set[int]
) -> list[list[int]]:
    """The greedy answer to each turn of a conversation; the cache lives on from turn to turn.

    turns: the user's tokens, turn by turn, none empty. An answer ends after max_new_tokens (1 or
    more) tokens, or after a token of stop_token_ids, which is its last. The next turn follows
    the whole answer, that last token included. model(tokens: [T] int64, attend) -> hidden: [T,
    hidden_size]; model.logits(hidden) -> [T, V]. cache: empty, one block of cache.block_size slots,
    which hold the whole conversation. new_batch([(new, held)], cache.block_size) is a step that
    runs the tokens `new` after `held` others; cache.attending(batch) serves it. Every token passes
    through the model once, the very last one never. `turns` stays as it was.

    Example: turns [5, 6] and [7], max_new_tokens=2, answers [1, 2] and [3, 4]
        steps: 5 6 | 1 | 2 7 | 3     at positions     0 1 | 2 | 3 4 | 5

    The code below runs and has three bugs. Delete the first line and find them.
    """
    raise NotImplementedError("Exercise 3.4: Find the bugs: a chat that keeps its cache")
    answers = []
    for turn in turns:
        answer, new, held = [], turn, 0
        while len(answer) < max_new_tokens:
            batch = new_batch([(new, held)], cache.block_size)
            hidden = model(batch.tokens, cache.attending(batch))
            token = int(model.logits(hidden[batch.logits_at]).argmax())
            held += len(new)
            answer.append(token)
            new = list(answer)
            if token in stop_token_ids:
                break
        answers.append(answer)
    return answers
