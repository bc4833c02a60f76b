"""Exercises of lesson 03: a chunk over caches of different lengths, a cache that can forget, its
bytes, a chat loop with bugs.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.naive import attention
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.model.config import ModelConfig

SMALLEST_BUCKET = 64  # tokens


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
    appended before the call. The rows behind were never written and may hold anything, NaN
    included; nothing of them may show. context_lens: [B] int64, each at least T and at most
    `capacity`. softmax_scale: 1 / √D if None. Query t of sequence b sees row j if j <=
    context_lens[b] - T + t. window: only the last `window` of these rows. Query head h reads KV
    head h // (Hq / Hkv). The arguments stay as they were. Errors: none to raise. Aim: no Python
    loop over sequences, because a server extends hundreds of them in a step.

    Example, T = 2, one head, D = 1, softmax_scale = 1, capacity 4, context_lens = [3]:
        q = [0, 0], v_cache = [3, 6, 9, NaN]
        query 0 stands at row 1, sees rows 0 and 1        -> (3 + 6) / 2 = 4.5
        query 1 stands at row 2, sees rows 0, 1 and 2     -> (3 + 6 + 9) / 3 = 6
    """
    _, num_queries, _, head_dim = q.shape  # [B, T, Hq, D]
    _, capacity, num_kv_heads, _ = k_cache.shape
    # SOLUTION
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    row = torch.arange(capacity, device=q.device)
    # [B, T], a query's own row
    own = context_lens[:, None] - num_queries + torch.arange(num_queries, device=q.device)
    # [B, T, capacity]
    sees = row <= own[:, :, None]
    if window is not None:
        sees = sees & (row > own[:, :, None] - window)
    in_use = row < context_lens[:, None]
    # a weight of 0 does not hide it: 0 · NaN is NaN
    v = v_cache.masked_fill(~in_use[:, :, None, None], 0)
    # [B, T, Hkv, group, D]
    grouped = q.unflatten(2, (num_kv_heads, -1))
    scores = torch.einsum("bthgd,bnhd->bhgtn", grouped, k_cache) * scale
    scores = scores.masked_fill(~sees[:, None, None], -torch.inf)
    out = torch.einsum("bhgtn,bnhd->bthgd", torch.softmax(scores, dim=-1), v)
    return out.flatten(2, 3)
    # END


@exercise(
    "3.2",
    "A preallocated cache that can also forget",
    minutes=35,
    difficulty=2,
    replaces="lessons.l03_kv_cache.cache:KVCache",
)
class KVCache:
    """K and V of one sequence in two buffers, keys and values: [layers, capacity, Hkv, D]; the
    first `length` rows are in use.

    reserve, append, attend as in the lesson; `rewind` is new: it takes back the newest tokens, as
    speculative decoding does with rejected ones (lesson 16), or a chat when its user edits the last
    message.

    Example: two layers, capacity 64, kv_bytes_per_token 256 bytes.
        append(0, k, v) and append(1, k, v) with 64 rows each    -> both return 64; length 64, written_bytes 64 · 256
        append(0, …) with one row more                           -> 65; capacity 128, growth_copy_bytes 64 · 256, length still 64
        append(1, …) with that token's row                       -> 65; length 65
        rewind(5)                                                -> length 60, capacity 128, nothing copied
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int = SMALLEST_BUCKET,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.config = config
        # tokens that every layer holds, and so the next token's position
        self.length = 0
        self.written_bytes = 0  # K and V of appended tokens
        self.growth_copy_bytes = 0  # K and V copied only to make room
        shape = (config.num_hidden_layers, capacity, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    @property
    def used_bytes(self) -> int:
        return self.length * self.config.kv_bytes_per_token(self.keys.element_size())

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` rows in all. Nothing happens if they fit; otherwise the capacity
        becomes the next power of two (SMALLEST_BUCKET at least), the rows in use move to new
        buffers, and growth_copy_bytes counts their K and V."""
        # SOLUTION
        if tokens <= self.capacity:
            return
        self.growth_copy_bytes += self.used_bytes
        new_capacity = max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(old.shape[0], new_capacity, *old.shape[2:])
            new[:, : self.length] = old[:, : self.length]
            setattr(self, name, new)
        # END

    def append(self, layer: int, k: Tensor, v: Tensor) -> int:
        """Write new rows of one layer behind the old ones. k, v: [T, Hkv, D]. Returns how many rows
        `layer` holds now.

        The layers 0, 1, … of a pass append in this order, the same number of rows each; `length`
        moves once they all have.
        """
        # SOLUTION
        end = self.length + len(k)
        self.reserve(end)
        self.keys[layer, self.length : end] = k
        self.values[layer, self.length : end] = v
        self.written_bytes += k.nbytes + v.nbytes
        if layer == self.config.num_hidden_layers - 1:
            self.length = end
        return end
        # END

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append, then let the T new tokens attend to everything: q: [T, Hq, D]; k, v: [T, Hkv, D]
        -> [T, Hq, D].

        `attention` (lesson 2, imported above) is bottom-right aligned. The scale is
        config.softmax_scale, the window config.sliding_window(layer).
        """
        # SOLUTION
        end = self.append(layer, k, v)
        return attention(
            q,
            self.keys[layer, :end],
            self.values[layer, :end],
            self.config.softmax_scale,
            window=self.config.sliding_window(layer),
        )
        # END

    def rewind(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens of every layer, without copying or allocating.

        Raises ValueError if `tokens` is negative or more than the cache holds; the cache is then as
        before.
        """
        # SOLUTION
        if not 0 <= tokens <= self.length:
            raise ValueError(
                f"tokens: got {tokens}; accepted: 0 to {self.length}, what the cache holds"
            )
        self.length -= tokens
        # END


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
    copied by the doubling KVCache.

    The prompt (prompt_tokens >= 1) enters the cache in one piece, then one token a step, until
    new_tokens (>= 1) have been generated. Nothing is computed from the last generated token, so it
    never enters. ConcatCache: each step copies all that it held before. Storing the prompt in an
    empty cache copies nothing. KVCache: starts at 64 tokens, grows to the next power of two when a
    token does not fit, and copies the rows in use. Errors: none to raise. Aim: formulas; a loop
    over the doublings is fine, one over the tokens is not.

    Example: 1 layer, 4 query heads, 2 KV heads, head_dim 128, float16: 1 KiB per token. Prompt 63, 3 new tokens:
        held 63 + 2 = 65; ConcatCache copied 63 + 64 = 127; KVCache moved once, when token 65 came: 64  -> (65.0, 127.0, 64.0)
    Write down your guess first: Llama-3-8B (32 layers, 32 and 8 heads, 128) in bfloat16, prompt 1000, 7000 new tokens.
    """
    # SOLUTION
    kib_per_token = 2 * num_hidden_layers * num_key_value_heads * head_dim * dtype.itemsize / 1024
    steps = new_tokens - 1
    held = prompt_tokens + steps
    by_concat = prompt_tokens * steps + steps * (steps - 1) // 2
    capacity = max(64, 1 << (prompt_tokens - 1).bit_length())
    by_doubling = 0
    while capacity < held:
        by_doubling += capacity
        capacity *= 2
    return held * kib_per_token, by_concat * kib_per_token, by_doubling * kib_per_token
    # END


@exercise("3.4", "Find the bugs: a chat that keeps its cache", minutes=25, difficulty=3)
def chat(
    model, cache, turns: list[list[int]], max_new_tokens: int, stop_token_ids: set[int]
) -> list[list[int]]:
    """The greedy answer to each turn of a conversation; the cache lives on from turn to turn.

    turns: the user's tokens, turn by turn, none empty. An answer ends after max_new_tokens (1 or
    more) tokens, or after a token of stop_token_ids, which is its last. The next turn stands behind
    the whole answer, that last token included. model(tokens: [T] int64, positions: [T] int64,
    attend) -> hidden: [T, hidden_size]; model.logits(hidden) -> [T, V]. cache: empty;
    `cache.length` tokens are in it, `cache.attend` appends those of a pass. Positions count from 0
    through the whole conversation. Every token passes through the model once, the very last one
    never. `turns` stays as it was.

    Example: turns [5, 6] and [7], max_new_tokens=2, answers [1, 2] and [3, 4]
        passes: 5 6 | 1 | 2 7 | 3     at positions     0 1 | 2 | 3 4 | 5

    The code below runs, and its first answers even look right. It has three bugs. Delete the first
    line and find them.
    """
    # SOLUTION
    answers, left_over = [], []
    for turn in turns:
        answer, new = [], left_over + turn
        while len(answer) < max_new_tokens:
            positions = torch.arange(cache.length, cache.length + len(new))
            hidden = model(torch.tensor(new), positions, cache.attend)
            token = int(model.logits(hidden[-1:]).argmax())
            answer.append(token)
            new = [token]
            if token in stop_token_ids:
                break
        answers.append(answer)
        left_over = answer[-1:]
    return answers
    # STUB
    # answers = []
    # for turn in turns:
    #     answer, new, position = [], turn, 0
    #     while len(answer) < max_new_tokens:
    #         positions = torch.arange(position, position + len(new))
    #         hidden = model(torch.tensor(new), positions, cache.attend)
    #         position += len(new)
    #         token = int(model.logits(hidden[-1:]).argmax())
    #         answer.append(token)
    #         new = answer
    #         if token in stop_token_ids:
    #             break
    #     answers.append(answer)
    # return answers
    # END
