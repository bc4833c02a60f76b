"""The model's matrices as a CPU multiplies fastest: merged where they share an input, and packed.

Two savings, both of which leave every product as it is, up to rounding:

- q, k and v are products of the same input, and so are gate and up. Side by side they are one
  matrix, so the input is read once and a step makes 4 products a layer instead of 7.
- oneDNN, the library beneath PyTorch, multiplies blocks of a matrix. A plain matrix is cut into
  blocks in every call; a packed one was cut when it was loaded.

Memory: a packed matrix is a copy. A caller that keeps the plain model keeps every matrix twice; the
engine does not, so it holds twice only what is also read row by row: the embedding of a model that
uses it as its last matrix, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Attention, Decoder, RMSNorm, swap
from lessons.l07_kernel_fusion import stand_ins
from lessons.l07_kernel_fusion.fused_decoder import FusedAttention, FusedMLP, FusedRMSNorm, ops_of

if TYPE_CHECKING:
    from lessons.l17_tree_speculation.heads.heads import Heads

ROWS = 32  # tokens of a step for which the blocks are chosen; they serve any number
# Fewer rows are filled up: oneDNN adds one product after the other to the same few sums, and one to
# three rows have too few of them to keep the core busy. One row takes 1.2 times as long as four.
LEAST = 4


class PackedLinear(nn.Module):
    """nn.Linears of one input as one product, their outputs side by side."""

    def __init__(self, *linears: nn.Linear):
        super().__init__()
        self.widths = [linear.out_features for linear in linears]
        self.in_features, self.out_features = linears[0].in_features, sum(self.widths)
        # Outside of inference mode, because what is made in it can be used in it only.
        with torch.inference_mode(False), torch.no_grad():
            weight = torch.cat([linear.weight for linear in linears])
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
            self.bias = None
            if linears[0].bias is not None:
                self.bias = torch.cat([linear.bias for linear in linears])

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, sum of widths]
        rows = len(x)
        if more := rounded_up(rows) - rows:
            x = F.pad(x, (0, 0, 0, more))
        y = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y[:rows] if more else y


@lru_cache(4096)
def rounded_up(rows: int) -> int:
    """To a number that needs four binary digits and zeros: eight of them from one power of two to
    the next. oneDNN writes code for each number of rows that it meets, half a megabyte a matrix,
    and keeps it. A server meets all numbers.
    """
    unit = 1 << max(0, rows.bit_length() - 4)
    return max(LEAST, -(-rows // unit) * unit)


class PackedAttention(nn.Module):
    """Lesson 7's FusedAttention with one product for q, k and v."""

    def __init__(self, attention: FusedAttention):
        super().__init__()
        self.head_dim, self.ops = attention.head_dim, attention.ops
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.qkv_proj = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = over_packed(attention.o_proj)
        self.heads = [width // self.head_dim for width in self.qkv_proj.widths]

    def forward(self, x: Tensor, attend: Callable) -> Tensor:
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        q, k, v = qkv.split(self.heads, dim=-2)
        if not isinstance(self.q_norm, nn.Identity):
            weights = self.q_norm.weight, self.k_norm.weight
            q, k = self.ops.qk_norm(q, k, *weights, self.q_norm.eps)
        out = attend(q, k, v)  # [T, Hq, D]
        return self.o_proj(out.flatten(-2))


class PackedMLP(nn.Module):
    """Lesson 7's FusedMLP with one product for gate and up."""

    def __init__(self, mlp: FusedMLP):
        super().__init__()
        self.ops = mlp.ops
        self.gate_up_proj = PackedLinear(mlp.gate_proj, mlp.up_proj)
        self.down_proj = over_packed(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        gate, up = self.gate_up_proj(x).split(self.gate_up_proj.widths, dim=-1)
        return self.down_proj(self.ops.silu_mul(gate, up))


def packed(model: Decoder) -> Decoder:
    """A twin of a fused model with packed matrices; the model itself where none can be packed: on a
    GPU, in a dtype that oneDNN does not multiply, in a build of PyTorch without it.

    The attention of models with latents stays as it is, because lesson 6 reads its matrices, and so
    do parts with quantized matrices, which have a product of their own. Parts with room for
    adapters keep their layers apart, because each has adapters of its own; below them the matrices
    are packed.
    """
    if model.device.type != "cpu" or not can_pack(model.dtype):
        return model
    factories = {FusedAttention: PackedAttention, FusedMLP: PackedMLP}
    factories = {kind: if_plain(new) for kind, new in factories.items()}
    factories |= {type(part): adapted_over_packed for part in model.modules() if has_adapters(part)}
    twin = copy.copy(swap(model, factories))
    # A dictionary of its own, because a shallow copy shares it with the original.
    # But Gemma's, which may cap what it computes, and one that another rank holds.
    head = model.lm_head
    if type(head) is nn.Linear or getattr(head, "holds_plain_linear", False):
        twin._modules = {**twin._modules, "lm_head": over_packed(model.lm_head)}
    return twin


def packed_heads(heads: Heads) -> Heads:
    """The same for what drafts: the layer of EAGLE or MTP with the fused parts of the model around
    it, and Medusa's blocks. In another dtype or place they stay as they are, and so does a layer
    with latents, whose matrices lesson 6 reads.
    """
    weight, config = next(heads.parameters()), getattr(heads, "config", None)
    has_latents = config is not None and config.mla is not None
    if weight.device.type != "cpu" or has_latents or not can_pack(weight.dtype):
        return heads
    ops = ops_of(stand_ins)

    def attention(part: Attention) -> PackedAttention:
        return PackedAttention(FusedAttention(part, ops))

    def mlp(part: MLP) -> PackedMLP:
        return PackedMLP(FusedMLP(part, ops))

    norm = partial(FusedRMSNorm, ops=ops)
    # The attention first, because whatever is packed inside of it has no matrix to merge any more.
    parts = swap(heads, {Attention: attention, MLP: mlp, RMSNorm: norm})
    return swap(parts, {nn.Linear: PackedLinear})


def if_plain(new: Callable) -> Callable:
    """`new` of a part; the part itself where one of its matrices is quantized or has adapters."""

    def factory(part: nn.Module) -> nn.Module:
        return part if any(map(has_own_product, part.children())) else new(part)

    return factory


def has_adapters(layer: nn.Module) -> bool:
    """Whether it is a layer of lesson 21, which adds adapters to a base layer."""
    return hasattr(layer, "with_base")


def has_own_product(layer: nn.Module) -> bool:
    """Whether a layer multiplies in a way of its own: lesson 18's over codes, lesson 21's."""
    return getattr(layer, "has_own_product", False)


def over_packed(layer: nn.Module) -> nn.Module:
    """A plain layer packed, or the plain layer inside of one that talks to other ranks (lesson
    20).
    """
    return swap(layer, {nn.Linear: PackedLinear})


def adapted_over_packed(layer: nn.Module) -> nn.Module:
    """A layer with the same adapters over a packed matrix; itself over one that is quantized."""
    if type(layer.base) is not nn.Linear:
        return layer
    return layer.with_base(PackedLinear(layer.base))


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this PyTorch packs matrices of the dtype. Tried, because no list says so."""
    try:
        linear = nn.Linear(4, 3, device="cpu", dtype=dtype)
        return PackedLinear(linear)(torch.zeros(2, 4, dtype=dtype)).shape == (2, 3)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
