"""What the tests of this lesson share: caches whose pages are in random order, small models,
requests and histories of a block manager.
"""

import random
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l06_mla.deepseek import DeepseekDecoder
from lessons.l11_cuda_graphs.lab.testing import CONFIG, new_model, new_prompts
from lessons.l12_paged_kv.naive import gathered_attention
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import MLAConfig, ModelConfig
from lessons.toolbox.proof.numerics import attention_inputs, poisoned

__all__ = [
    "CONFIG",
    "DEVICE",
    "MODELS",
    "PagedInputs",
    "new_deepseek",
    "new_model",
    "new_prompts",
    "paged",
]

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
NO_BLOCK = 2**30  # the entries of a block table after a sequence's blocks


class PagedInputs(NamedTuple):
    """The arguments of gathered_attention and paged_prefill, in their order."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor

    @property
    def decode(self) -> tuple[Tensor, ...]:
        """The arguments of paged_decode, for one new token a sequence: q: [B, Hq, D] and the
        rest.
        """
        return self[:4] + self[5:]


def paged(
    lengths: list[int],
    new: list[int] | None = None,
    *,
    block_size: int,
    heads: tuple[int, int, int, int] = (4, 2, 16, 16),
    kind: str = "normal",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    order: str = "random",
) -> PagedInputs:
    """Sequences of these lengths, of which the last `new` tokens are queries (None: one each).

    heads: Hq, Hkv, D, Dv. Blocks are in random order (or "ascending"). What no sequence uses is NaN
    in the caches and NO_BLOCK in the table, and K and V have strides of their own.
    """
    num_heads, num_kv_heads, head_dim, v_head_dim = heads
    new = [1] * len(lengths) if new is None else new
    counts = [-(-n // block_size) for n in lengths]
    total = sum(counts) + 3
    # Gaps of different sizes between heads and blocks, so that one stride cannot do for another.
    k_cache = poisoned((total, block_size, num_kv_heads, head_dim + 8), dtype, DEVICE)
    v_cache = poisoned((total, block_size + 1, num_kv_heads, v_head_dim), dtype, DEVICE)
    k_cache, v_cache = k_cache[..., :head_dim], v_cache[:, :block_size]
    free = list(range(sum(counts)))
    if order == "random":
        free = random.Random(seed).sample(range(total), sum(counts))
    table = torch.full((len(lengths), max([*counts, 1]) + 1), NO_BLOCK, dtype=torch.int32)
    queries = []
    for b, (length, count) in enumerate(zip(lengths, new)):
        widest = max(head_dim, v_head_dim)
        shape = (max(count, 1), max(length, 1), num_heads, num_kv_heads, widest)
        q, k, v = attention_inputs(kind, *shape, dtype=dtype, seed=seed + b)
        queries.append(q.expand(shape[0], -1, -1)[:count, :, :head_dim])
        for index in range(counts[b]):
            block, rows = free.pop(0), slice(index * block_size, (index + 1) * block_size)
            table[b, index] = block
            held = k[:length][rows]
            k_cache[block, : len(held)] = held[..., :head_dim]
            v_cache[block, : len(held)] = v[:length][rows][..., :v_head_dim]
    starts = [0]
    for count in new:
        starts.append(starts[-1] + count)
    cu_seqlens_q = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    q = torch.cat(queries).to(DEVICE)
    return PagedInputs(q, k_cache, v_cache, table.to(DEVICE), cu_seqlens_q, context_lens)


def decoded(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    **options,
) -> Tensor:
    """The definition of paged_decode: gather, then lesson 2's attention. Shapes as there."""
    starts = torch.arange(len(q) + 1)
    return gathered_attention(q, k_cache, v_cache, block_table, starts, context_lens, **options)


def new_deepseek() -> DeepseekDecoder:
    """A small model with latents, in float64, where nothing ties."""
    config = ModelConfig(
        "deepseek_v2",
        vocab_size=CONFIG.vocab_size,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        v_head_dim=12,
        intermediate_size=32,
        max_position_embeddings=64,
        mla=MLAConfig(20, 32, 8, 16, 12),
    )
    model = DeepseekDecoder(config).eval().requires_grad_(False).double()
    for weight in model.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5)
    return model


MODELS = {"heads": new_model, "latents": new_deepseek}
