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

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple

from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Attend, Attention, Decoder, RMSNorm, swap
from lessons.l03_kv_cache.cache import AttentionOps
from lessons.l03_kv_cache.generate import Rung
from lessons.l04_positions.stand_ins import LESSON_04_TORCH
from lessons.l07_kernel_fusion import stand_ins
from lessons.toolbox.model.config import ModelConfig

PARALLEL = ("cohere", "phi", "nemotron_h")  # variants of which a layer is one junction, not two


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
    if model.device.type != "cuda":
        return ops_of(stand_ins)
    from lessons.l07_kernel_fusion import optimized, rows  # here, because a CPU needs no kernels

    return ops_of(optimized if model.dtype in rows.DTYPES else stand_ins)


# ---------------------------------------------------------------- parts


class FusedRMSNorm(nn.Module):
    """An RMSNorm with its weight, by `ops`."""

    def __init__(self, norm: RMSNorm, ops: Ops):
        super().__init__()
        self.weight, self.eps, self.ops = norm.weight, norm.eps, ops

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        return self.ops.rms_norm(x, self.weight, self.eps)

    def after_adding(self, branch: Tensor, residual: Tensor) -> Tensor:
        """residual += branch, in place; returns the norm of it. branch, residual: [T, hidden_size]
        -> [T, hidden_size].
        """
        return self.ops.add_rms_norm(branch, residual, self.weight, self.eps)


class AddedNorm(nn.Module):
    """A norm that the kernels do not compute (Gemma's, OLMo's, Qwen3-Next's), in the place of a
    FusedRMSNorm: it adds, then norms.
    """

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.norm, self.weight, self.eps = norm, norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        return self.norm(x)

    def after_adding(self, branch: Tensor, residual: Tensor) -> Tensor:
        """residual += branch, in place; returns the norm of it. Both: [T, hidden_size]."""
        return self.norm(residual.add_(branch))


class FusedMLP(nn.Module):
    """An MLP with its weights; silu and the product are one operation."""

    def __init__(self, mlp: MLP, ops: Ops):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        return self.down_proj(self.ops.silu_mul(self.gate_proj(x), self.up_proj(x)))


class FusedAttention(nn.Module):
    """An Attention with its weights; the norms of q and k are one operation."""

    def __init__(self, attention: Attention, ops: Ops):
        super().__init__()
        self.head_dim, self.ops = attention.head_dim, ops
        self.q_proj, self.k_proj = attention.q_proj, attention.k_proj
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm

    def forward(self, x: Tensor, attend: Callable) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hq, D]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hkv, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hkv, D]
        if not isinstance(self.q_norm, nn.Identity):
            weights = self.q_norm.weight, self.k_norm.weight
            q, k = self.ops.qk_norm(q, k, *weights, self.q_norm.eps)
        out = attend(q, k, v)  # [T, Hq, D]
        return self.o_proj(out.flatten(-2))


# ---------------------------------------------------------------- the whole


def run_layers(layers: Sequence[nn.Module], last_norm, x: Tensor, attend: Attend) -> Tensor:
    """All layers and the last norm. x: [T, hidden_size], which becomes the residual stream ->
    hidden: [T, hidden_size].

    A layer's output is not added when the layer ends, but when the next norm begins. So n layers
    have 2n junctions, and each is one launch.
    """
    layers = list(layers)  # because a slice of a ModuleList is a new module
    residual, normed = x, layers[0].input_layernorm(x)
    next_norms = [layer.input_layernorm for layer in layers[1:]] + [last_norm]
    for index, (layer, next_norm) in enumerate(zip(layers, next_norms)):
        branch = layer.self_attn(normed, partial(attend, index))
        normed = layer.post_attention_layernorm.after_adding(branch, residual)
        normed = next_norm.after_adding(layer.mlp(normed), residual)
    return normed


class Addition(nn.Module):
    """Where nothing is normed: where a stage of some layers ends, and where OLMo has no norm."""

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        return x

    def after_adding(self, branch: Tensor, residual: Tensor) -> Tensor:
        """residual += branch, in place; returns it. Both: [T, hidden_size]."""
        return residual.add_(branch)


class FusedDecoder(Decoder):
    """A decoder with the parts of another one, and with additions fused into the norms."""

    def __init__(self, model: Decoder):
        nn.Module.__init__(self)  # not Decoder's, because all parts are there already
        self.config = model.config
        self.embed_tokens, self.layers = model.embed_tokens, model.layers
        self.norm, self.lm_head = model.norm, model.lm_head

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """tokens: [T] int64 -> hidden: [T, hidden_size]."""
        return run_layers(self.layers, self.norm, self.embed_tokens(tokens), attend)

    def run_layers(self, x: Tensor, attend: Attend, layers: range | None = None) -> Tensor:
        """The layers of a range, or all that are here. x: [T, hidden_size], overwritten."""
        layers = self.stage_layers if layers is None else layers
        stage = self.layers[layers.start : layers.stop]

        def attend_in_stage(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(layers.start + index, q, k, v)

        return run_layers(stage, Addition(), x, attend_in_stage)


def fused(model: Decoder, ops: Ops | None = None) -> Decoder:
    """A twin of `model`, for inference: the same weights (shared, not copied), fewer and shorter
    passes between them.

    ops: default `ops_for(model)`. A fused model is returned as it is; parts of other families, such
    as Gemma's norms and MLP, stay, and so do layers whose attention and MLP are side by side.
    Raises ValueError for a decoder whose layers have other norms than lesson 2's, because a
    junction of the residual stream is an addition and an RMSNorm.
    """
    if isinstance(model, FusedDecoder):
        return model
    ops = ops or ops_for(model)
    parts = {MLP: partial(FusedMLP, ops=ops), Attention: partial(FusedAttention, ops=ops)}
    if model.config.variant in PARALLEL:
        return swap(model, parts)
    kinds = {RMSNorm: partial(FusedRMSNorm, ops=ops)}
    kinds |= other_norms(model.config)
    norms = [model.norm]
    for index in model.stage_layers:
        layer = model.layers[index]
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    if strange := [type(norm).__name__ for norm in norms if type(norm) not in kinds]:
        raise ValueError(
            f"model: got {type(model).__name__} with {strange[0]}; accepted: a decoder whose "
            "layers have the norms of lessons.l02_naive_attention (decoder.py, variants/)"
        )
    return FusedDecoder(swap(model, kinds | parts))


def other_norms(config: ModelConfig) -> dict[type[nn.Module], Callable]:
    """{a norm of lesson 2's variants that the model has: what takes its place}. Imported for the
    few models that have them.
    """
    if config.norms_after or config.variant == "gemma" or config.state is not None:
        from lessons.l02_naive_attention.variants.gemma import GemmaRMSNorm

        return {GemmaRMSNorm: AddedNorm}
    if config.variant == "olmo":
        from lessons.l02_naive_attention.variants.olmo import NoNorm, WideRMSNorm

        return {WideRMSNorm: AddedNorm, NoNorm: lambda norm: Addition()}
    if config.variant == "starcoder2":
        return {nn.LayerNorm: AddedNorm}
    return {}


def grouped_attention() -> AttentionOps:
    """Lesson 5's kernels, which read each KV head once."""
    from lessons.l05_gqa.optimized import LESSON_05  # here, because a CPU needs no kernels

    return LESSON_05


# In PyTorch lesson 5 does what lesson 4 does: its decode repeats no head either.
FUSED_LAYERS = Rung("fused layers", grouped_attention, LESSON_04_TORCH, prepare=fused)
