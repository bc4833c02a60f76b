"""A cache for a batch, and one decode step over it. Both versions of the lesson use it; lesson 12
cuts its rows into pages.

    inputs: [4, B] int64     what changes from step to step, one column a sequence:
                             tokens         the token to run
                             positions      where it stands
                             slot_mapping   where its K and V go; -1: nowhere
                             context_lens   how many rows it sees, its own included; 0: none
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l02_naive_attention.naive import masked_softmax
from lessons.l02_naive_attention.optimized import attention_torch
from lessons.l02_naive_attention.request import Request
from lessons.l03_kv_cache.cache import KVCache
from lessons.l04_positions.naive import cos_sin_cache_of
from lessons.l04_positions.optimized import rope_cache
from lessons.l09_flash_attention.optimized import flash_attention
from lessons.l10_flash_decoding.optimized import flash_decode
from lessons.toolbox.model.config import ModelConfig

Step = Callable[[Tensor], Tensor]  # inputs: [4, B] on the CPU -> logits: [B, V]


class SlotCache:
    """K and V of up to `rows` sequences: sequence b owns the slots b · capacity … (b + 1) ·
    capacity - 1.

    keys, values: [layers, rows · capacity + 1, Hkv, D]. The last slot is nobody's: what shall be
    written nowhere goes there, because a PyTorch write cannot be skipped without a shape that
    depends on the data. Raises ValueError for no room.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if rows < 1 or capacity < 1:
            raise ValueError(
                f"rows, capacity: got {rows}, {capacity}; accepted: 1 or more sequences of 1 or "
                f"more tokens"
            )
        self.config, self.rows, self.capacity = config, rows, capacity
        # Zeroed, because PyTorch's decode below multiplies what it masks by 0, and 0 times what
        # memory may hold (NaN) is NaN.
        self.keys, self.values = (
            torch.zeros(
                config.num_hidden_layers, rows * capacity + 1, *row, dtype=dtype, device=device
            )
            for row in KVCache.rows(config)
        )

    def prefilling(self, row: int) -> Attend:
        """attend for a whole prompt that goes into `row`, from its first slot on."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            slots = slice(row * self.capacity, row * self.capacity + len(k))
            self.keys[layer, slots], self.values[layer, slots] = k, v
            return self.prefill(q, k, v, self.config.sliding_window(layer))

        return attend

    def decoder(self, model: Decoder) -> Decoder:
        """The decoder whose q and k `decoding` takes: here one that has turned them to their
        positions.
        """
        return model

    def decoding(
        self, positions: Tensor, slot_mapping: Tensor, context_lens: Tensor, rows_read: int
    ) -> Attend:
        """attend for one new token of each of B sequences, those of the rows 0 … B - 1; the three
        tensors: [B] int64.

        rows_read: the slots of each sequence that may be looked at, at least the longest context.
        """

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.write(layer, q, k, v, positions, slot_mapping)
            batch = slice(0, len(q)), slice(0, rows_read)
            keys, values = (
                x[layer, :-1].unflatten(0, (self.rows, self.capacity))[batch]
                for x in (self.keys, self.values)
            )
            return self.decode(q, keys, values, context_lens, self.config.sliding_window(layer))

        return attend

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slot_mapping: Tensor
    ) -> None:
        """k, v: [B, Hkv, D] into the slots slot_mapping: [B] int64; -1 goes to the slot that is
        nobody's. q: [B, Hq, D] stays.
        """
        slots = torch.where(slot_mapping < 0, self.rows * self.capacity, slot_mapping)
        self.keys[layer].index_put_((slots,), k)
        self.values[layer].index_put_((slots,), v)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """A whole prompt attends to itself. q: [T, Hq, D]; k, v: [T, Hkv, D] -> [T, Hq, D]."""
        return attention_torch(q, k, v, self.config.softmax_scale, window=window)

    def decode(
        self, q: Tensor, keys: Tensor, values: Tensor, context_lens: Tensor, window: int | None
    ) -> Tensor:
        """q: [B, Hq, D]; keys, values: [B, rows_read, Hkv, D]; context_lens: [B] -> [B, Hq, D]."""
        return batched_decode_attention(
            q, keys, values, context_lens, self.config.softmax_scale, window
        )

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` slots of one sequence over those of another. Pages (lesson 12)
        need no copy.
        """
        for buffer in (self.keys, self.values):
            rows = buffer[:, :-1].unflatten(1, (self.rows, self.capacity))
            rows[:, target, :tokens] = rows[:, source, :tokens]


class KernelSlotCache(SlotCache):
    """SlotCache by kernels: lesson 4's turns q and k and writes, 9's reads prompts, 10's reads; -1
    writes nothing.

    How many splits lesson 10 launches is a shape: in a graph it stays as captured, fit for
    `rows_read`, not for today's lengths.
    """

    def decoder(self, model: Decoder) -> Decoder:
        return model.unrotated()

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slot_mapping: Tensor
    ) -> None:
        table = cos_sin_cache_of(self.config, q.device)
        rope_cache(
            q,
            k,
            v,
            self.keys[layer],
            self.values[layer],
            positions,
            slot_mapping,
            table,
            last_position=len(table) - 1,
        )

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        return flash_attention(
            q, k, v, softmax_scale=self.config.softmax_scale, window=window, max_seqlen_q=len(q)
        )[0]

    def decode(
        self, q: Tensor, keys: Tensor, values: Tensor, context_lens: Tensor, window: int | None
    ) -> Tensor:
        return flash_decode(q, keys, values, context_lens, self.config.softmax_scale, window)


def new_slot_cache(model: Decoder, rows: int, capacity: int) -> SlotCache:
    """An empty cache for `rows` sequences of at most `capacity` tokens, on the model's device."""
    # interpreted, the kernels take seconds a token
    cache = KernelSlotCache if model.device.type == "cuda" else SlotCache
    return cache(model.config, rows, capacity, model.dtype, model.device)


def batched_decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    context_lens: Tensor,
    softmax_scale: float,
    window: int | None = None,
) -> Tensor:
    """One query per sequence over its rows, in PyTorch: q: [B, Hq, D]; keys, values: [B, N, Hkv, D]
    -> [B, Hq, D].

    context_lens: [B] int64, rows in use; 0 gives zeros. It decides what is masked and never a
    shape, so that the same operations serve every step: they can be captured. The price: all N rows
    are read, and what is not in use must be finite.
    """
    row = torch.arange(keys.shape[1], device=q.device)
    # [B, N]
    sees = row < context_lens[:, None]
    if window is not None:
        sees = sees & (row >= context_lens[:, None] - window)
    # [B, Hkv, group, D]
    grouped = q.unflatten(1, (keys.shape[2], -1))
    # [B, Hkv, group, N]
    scores = torch.matmul(grouped, keys.permute(0, 2, 3, 1)) * softmax_scale
    probs = masked_softmax(scores, sees[:, None, None, :])
    return torch.matmul(probs, values.transpose(1, 2)).flatten(1, 2)


def step_inputs(running: list[Request], capacity: int) -> Tensor:
    """The next step of `running`, request b in row b of a cache of `capacity` tokens a row: [4, B]
    int64, on the CPU.
    """
    # - 1: the newest token has not run yet
    held = [len(request.prompt) + len(request.output) - 1 for request in running]
    return torch.tensor(
        [
            [request.output[-1] for request in running],
            held,
            [row * capacity + length for row, length in enumerate(held)],
            [length + 1 for length in held],
        ]
    )


def decode_logits(model: Decoder, cache: SlotCache, inputs: Tensor, rows_read: int) -> Tensor:
    """One decode step: inputs: [4, B] on the model's device -> logits: [B, V]. Looks at no value of
    `inputs` from Python.
    """
    tokens, positions, slot_mapping, context_lens = inputs
    attend = cache.decoding(positions, slot_mapping, context_lens, rows_read)
    return model.logits(cache.decoder(model)(tokens, positions, attend))
