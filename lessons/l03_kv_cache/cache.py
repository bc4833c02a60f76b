"""A KV cache that is written once: space reserved ahead, each step writes one row and reads views.
Plain PyTorch.

Read `KVCache.attend` beside `ConcatCache.attend` in naive.py: append, then attend, without the copy
in between. optimized.py puts kernels in the place of `write` and `decode`.

Sources: Pope et al. 2022, Efficiently Scaling Transformer Inference, section 2; grouped queries
without repeating K and V: Ainslie et al. 2023, section 2.2.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.optimized import attention_for
from lessons.toolbox.model.config import ModelConfig

SMALLEST_BUCKET = 64  # tokens


class KVCache:
    """K and V of one sequence in two buffers, [layers, capacity, Hkv, D]; the first `length` rows
    are in use.

    capacity: tokens to reserve. A sequence that outgrows it moves to the next power of two, so that
    all moves together copy less than twice the tokens that are kept: growth_copy_bytes grows
    linearly (ConcatCache's: quadratically).
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int = SMALLEST_BUCKET,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if capacity < 1:
            raise ValueError(f"capacity: got {capacity}; accepted: 1 or more tokens")
        self.config = config
        self.length = 0  # tokens that every layer holds, and so the next token's position
        self.written_bytes = 0
        self.growth_copy_bytes = 0
        # Not zeroed: no row is read before it is written, and zeroing would touch memory that may
        # never be used.
        self.keys, self.values = (
            torch.empty(config.num_hidden_layers, capacity, *row, dtype=dtype, device=device)
            for row in self.rows(config)
        )

    @staticmethod
    def rows(config: ModelConfig) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of a token's K and V in one layer: [Hkv, D] twice; with latent attention
        (lesson 6) V is narrower.
        """
        return (config.num_key_value_heads, config.head_dim), (
            config.num_key_value_heads,
            config.v_head_dim,
        )

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    @property
    def allocated_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def used_bytes(self) -> int:
        # as held: config.kv_bytes_per_token is the least possible
        return self.length * (self.allocated_bytes // self.capacity)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in all. Moves the rows in use to a larger bucket when the buffers
        are too small.
        """
        if tokens <= self.capacity:
            return
        self.growth_copy_bytes += self.used_bytes
        self.keys, self.values = (
            _enlarged(buffer, self.length, bucket(tokens)) for buffer in (self.keys, self.values)
        )

    def append(self, layer: int, k: Tensor, v: Tensor) -> int:
        """Write new rows behind the old ones, k, v: [T, Hkv, D]. Returns how many rows `layer`
        holds now.
        """
        end = self.length + len(k)
        self.reserve(end)
        self.write(layer, k, v)
        self.written_bytes += k.nbytes + v.nbytes
        if layer == self.config.num_hidden_layers - 1:
            self.length = end  # only now, because every layer of this pass writes the same rows
        return end

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append, then attend to everything: q: [T, Hq, D] of the last T tokens; k, v: [T, Hkv, D]
        -> [T, Hq, D].
        """
        end = self.append(layer, k, v)
        return self.decode(layer, q, end) if len(q) == 1 else self.prefill(layer, q, end)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy k, v: [T, Hkv, D] into the rows behind those in use."""
        rows = slice(self.length, self.length + len(k))
        self.keys[layer, rows], self.values[layer, rows] = k, v

    def prefill(self, layer: int, q: Tensor, end: int) -> Tensor:
        """The newest tokens attend to the first `end` rows, each to those before it. q: [T, Hq, D]
        -> [T, Hq, D].
        """
        return attention_for(q.device)(
            q,
            self.keys[layer, :end],
            self.values[layer, :end],
            self.config.softmax_scale,
            window=self.config.sliding_window(layer),
        )

    def decode(self, layer: int, q: Tensor, end: int) -> Tensor:
        """The newest token attends to the first `end` rows. q: [1, Hq, D] -> [1, Hq, D]."""
        return decode_attention_torch(
            q,
            self.keys[layer, :end],
            self.values[layer, :end],
            self.config.softmax_scale,
            self.config.sliding_window(layer),
        )


def bucket(tokens: int) -> int:
    """The capacity to reserve for `tokens`: the next power of two, SMALLEST_BUCKET at least."""
    return max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


def _enlarged(buffer: Tensor, length: int, capacity: int) -> Tensor:
    """buffer: [layers, old capacity, Hkv, D] -> [layers, capacity, Hkv, D] with the same first
    `length` rows.
    """
    larger = buffer.new_empty(buffer.shape[0], capacity, *buffer.shape[2:])
    larger[:, :length] = buffer[:, :length]
    return larger


def decode_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None = None
) -> Tensor:
    """The newest token attends to all: q: [1, Hq, D]; k, v: [length, Hkv, D], views are fine -> [1,
    Hq, D], or v's width.

    No mask, because nothing lies in the newest token's future; a window is a slice. The query heads
    of a KV head are the rows of one matrix, so K and V are never repeated. Two batched products
    rather than scaled_dot_product_attention(enable_gqa=True), because on a CPU the latter is slower
    for one query beyond about 1000 keys.
    """
    if window is not None:
        k, v = k[-window:], v[-window:]
    rows = q.view(k.shape[1], -1, q.shape[-1])  # [Hkv, group, D]
    # [Hkv, group, length]
    scores = torch.bmm(rows, k.permute(1, 2, 0)) * softmax_scale
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.bmm(torch.softmax(wide, dim=-1).to(v.dtype), v.transpose(0, 1)).view(
        *q.shape[:2], -1
    )
