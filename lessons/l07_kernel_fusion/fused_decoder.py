"""The decoder with its small operations fused: a twin that shares every weight with the plain one
and gives the same logits.

The plain decoder adds, then norms; here one function does both wherever a branch joins the residual
stream (`run_layers`); silu · up is one function, and so are the two QK-norms. Parts are replaced by
their type: what this file does not know (another attention, a mixture of experts) stays, and
RMSNorms and MLPs inside it are still replaced.

Weights are not merged (one projection for q, k, v; one for gate, up), although that would save
launches: a merged matrix beside the separate ones is a copy of most of the model. A loader can read
them into place instead, as vLLM's does.
"""

import copy
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType
from typing import NamedTuple

from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Attend, Attention, Decoder, RMSNorm
from lessons.l02_naive_attention.rope import Rotate
from lessons.l07_kernel_fusion import optimized, stand_ins
from lessons.l07_kernel_fusion.rows import DTYPES


class Ops(NamedTuple):
    """The fused operations, each with the signature that it has in naive.py."""

    rms_norm: Callable
    add_rms_norm: Callable
    silu_mul: Callable
    qk_norm: Callable


def ops_of(module: ModuleType) -> Ops:
    """Those of naive.py, optimized.py or stand_ins.py, looked up now, so that a learner's drop-in
    counts.
    """
    return Ops(*(getattr(module, name) for name in Ops._fields))


def ops_for(model: Decoder) -> Ops:
    """The kernels where they are compiled and have the model's dtype; PyTorch where they would be
    interpreted, or for float64.
    """
    return ops_of(optimized if model.device.type == "cuda" and model.dtype in DTYPES else stand_ins)


# ---------------------------------------------------------------- parts


class FusedRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        return self.ops.rms_norm(x, self.weight, self.eps)

    def after_adding(self, branch: Tensor, residual: Tensor) -> Tensor:
        """residual += branch, in place; returns the norm of it. branch, residual: [T, hidden_size]
        -> [T, hidden_size].
        """
        return self.ops.add_rms_norm(branch, residual, self.weight, self.eps)


class FusedMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        return self.down_proj(self.ops.silu_mul(self.gate_proj(x), self.up_proj(x)))


class FusedAttention(Attention):
    def forward(self, x: Tensor, rotate: Rotate, attend: Callable) -> Tensor:
        # [T, Hq, D]
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        # [T, Hkv, D]
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        # [T, Hkv, D]
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if isinstance(self.q_norm, RMSNorm):
            q, k = self.ops.qk_norm(q, k, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        # [T, Hq, D]
        out = attend(rotate(q), rotate(k), v)
        return self.o_proj(out.flatten(-2))


FUSED = {RMSNorm: FusedRMSNorm, MLP: FusedMLP, Attention: FusedAttention}


# ---------------------------------------------------------------- the whole


def run_layers(
    layers: nn.ModuleList, last_norm: FusedRMSNorm, x: Tensor, rotate: Rotate, attend: Attend
) -> Tensor:
    """All layers and the last norm. x: [T, hidden_size], which becomes the residual stream ->
    hidden: [T, hidden_size].

    A layer's output is not added when the layer ends, but when the next norm begins: n layers have
    2n junctions, each one launch.
    """
    residual, normed = x, layers[0].input_layernorm(x)
    next_norms = [layer.input_layernorm for layer in layers[1:]] + [last_norm]
    for index, (layer, next_norm) in enumerate(zip(layers, next_norms)):
        branch = layer.self_attn(normed, rotate, partial(attend, index))
        normed = layer.post_attention_layernorm.after_adding(branch, residual)
        normed = next_norm.after_adding(layer.mlp(normed), residual)
    return normed


class FusedDecoder(Decoder):
    """The plain decoder with `run_layers` in the place of its loop."""

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens: [T] int64, positions: [T] int64 -> hidden: [T, hidden_size]."""
        return run_layers(
            self.layers, self.norm, self.embed_tokens(tokens), self.rotation(positions), attend
        )


@lru_cache
def fused_class(kind: type) -> type:
    """A decoder's class above FusedDecoder: what a subclass changed stays, and its super().forward
    is the fused one.
    """
    return (
        FusedDecoder
        if kind is Decoder
        else type(f"Fused{kind.__name__}", (kind, FusedDecoder), {"__doc__": kind.__doc__})
    )


def fused(model: Decoder, ops: Ops | None = None) -> Decoder:
    """A twin of `model`, for inference: the same weights (shared, not copied), fewer and shorter
    passes between them.

    ops: default `ops_for(model)`. A fused model is returned as it is. Raises ValueError for a
    decoder whose layers have other norms than lesson 2's, because a junction of the residual stream
    is an addition and an RMSNorm.
    """
    if isinstance(model, FusedDecoder):
        return model
    norms = [
        norm
        for layer in model.layers
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ] + [model.norm]
    if strange := [type(norm).__name__ for norm in norms if type(norm) is not RMSNorm]:
        raise ValueError(
            f"model: got {type(model).__name__} with {strange[0]}; accepted: a decoder whose "
            f"layers have the "
            "RMSNorm of lessons.l02_naive_attention.decoder"
        )
    twin = twin_of(model, ops or ops_for(model))
    twin.__class__ = fused_class(type(model))
    return twin


def twin_of(module: nn.Module, ops: Ops) -> nn.Module:
    """The module with the known parts inside it replaced, sharing parameters and buffers; itself if
    it holds none.
    """
    children = {name: twin_of(child, ops) for name, child in module.named_children()}
    kind = FUSED.get(type(module))
    if kind is None and all(children[name] is child for name, child in module.named_children()):
        return module
    twin = copy.copy(module)  # shallow, so every parameter is shared
    # its own, because a shallow copy would share this dictionary too
    twin._modules = {**module._modules, **children}
    if kind is not None:
        twin.__class__, twin.ops = kind, ops
    return twin
