"""DeepSeek-V3.2's indexer as a layer: where index queries, weights and index keys come from.

    indexer = Indexer(V32)
    q, weights, k = indexer(x, q_latent, positions)      # numbers
    q, weights, codes, scales = in_fp8(q, weights, k)    # what the cache and the kernel hold

It has one key a token and 64 heads of queries, all of 128 numbers. The first 64 of them are rotated
by the position, in halves and not in pairs: DeepSeek's own code had this wrong until November 2025.
Then a Hadamard matrix turns queries and keys. It changes no product, because it is orthogonal, and
it spreads an outlier over all numbers of a row, which share one scale. The model was trained with
it, so it has to be there. Whether it makes codes of 8 bits more exact is another question
(MORE.md).

Sources: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, and its inference/model.py (class Indexer).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.l19_kv_quantization.formats import FORMATS


class IndexerShape(NamedTuple):
    """Sizes of an indexer, by the names of DeepSeek's config."""

    hidden_size: int
    q_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    qk_rope_head_dim: int
    index_topk: int


V32 = IndexerShape(7168, 1536, 64, 128, 64, 2048)


class Indexer(nn.Module):
    """shape: its sizes; theta: RoPE's base."""

    def __init__(self, shape: IndexerShape = V32, theta: float = 10000.0):
        super().__init__()
        self.shape, self.theta = shape, theta
        size = shape.index_n_heads * shape.index_head_dim
        self.wq_b = nn.Linear(shape.q_lora_rank, size, bias=False)
        self.wk = nn.Linear(shape.hidden_size, shape.index_head_dim, bias=False)
        self.k_norm = nn.LayerNorm(shape.index_head_dim)
        self.weights_proj = nn.Linear(shape.hidden_size, shape.index_n_heads, bias=False)

    def forward(
        self, x: Tensor, q_latent: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T, hidden_size], what the layer reads; q_latent: [T, q_lora_rank], MLA's compressed
        query; positions: [T] -> q: [T, Hi, Di], weights: [T, Hi], k: [T, Di].
        """
        heads, dim = self.shape.index_n_heads, self.shape.index_head_dim
        q = self.wq_b(q_latent).unflatten(-1, (heads, dim))
        k = self.k_norm(self.wk(x))
        rope = self.shape.qk_rope_head_dim
        q = hadamard(rotated(q, positions[:, None], rope, self.theta))
        k = hadamard(rotated(k, positions, rope, self.theta))
        # 1/√Hi because heads are added up, 1/√Di because products are
        weights = self.weights_proj(x).float() * heads**-0.5 * dim**-0.5
        return q, weights, k


def rotated(x: Tensor, positions: Tensor, rope: int, theta: float) -> Tensor:
    """RoPE on the first `rope` numbers of a row, number i with number i + rope / 2. x: [..., D],
    positions: [...], a number for each row.
    """
    turn, rest = x.split([rope, x.shape[-1] - rope], dim=-1)
    steps = torch.arange(0, rope, 2, device=x.device) / rope
    angles = positions[..., None].float() * theta**-steps
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = turn.chunk(2, dim=-1)
    turn = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turn, rest], dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """x: [..., D] times the Hadamard matrix of size D, over √D; D is a power of two.

    Sums and differences of neighbours, then of pairs, then of fours: log2 D steps in the place of a
    product of D × D.
    """
    size, step = x.shape[-1], 1
    y = x
    while step < size:
        pairs = y.unflatten(-1, (-1, 2, step))
        first, second = pairs.unbind(-2)
        y = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        step *= 2
    return y * size**-0.5


def in_fp8(q: Tensor, weights: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is computed with. q: [T, Hi, Di], weights: [T, Hi], k: [T, Di] -> q: [T, Hi, Di]
    bfloat16, codes of E4M3 as numbers; weights: [T, Hi] float32, with the scales of q; codes: [T,
    Di] uint8; scales: [T] float32.
    """
    fp8 = FORMATS["fp8"]
    q_codes, q_scales = fp8.quantize(q.float())
    codes, scales = fp8.quantize(k.float())
    numbers = q_codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    return numbers, weights.float() * q_scales[..., 0], codes, scales[..., 0]
