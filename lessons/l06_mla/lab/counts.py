"""What latent attention keeps, reads and computes, counted: bytes a token, FLOPs of both forms,
where they cross.

Nothing here is measured. Shapes of models beside lesson 1's: the config.json that DeepSeek ships
with each checkpoint.
"""

from lessons.l01_roofline.calculators import kv_bytes_per_token
from lessons.l01_roofline.planner.models import MODELS, ModelShape
from lessons.toolbox.model.config import MLAConfig

V3 = MLAConfig(
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
_MLA = dict(
    num_experts_per_tok=6,
    num_shared_experts=2,
    num_dense_layers=1,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
V2_LITE = ModelShape(
    "deepseek-v2-lite",
    "15.7B",
    "arXiv 2405.04434, appendix B",
    2048,
    27,
    16,
    16,
    192,
    10944,
    102400,
    num_experts=64,
    moe_intermediate_size=1408,
    **_MLA,
)
V2 = ModelShape(
    "deepseek-v2",
    "236B",
    "arXiv 2405.04434, section 3.1.2",
    5120,
    60,
    128,
    128,
    192,
    12288,
    102400,
    num_experts=160,
    moe_intermediate_size=1536,
    q_lora_rank=1536,
    **_MLA,
)
COMPARED = (
    V2_LITE,
    V2,
    MODELS["deepseek-v3"],
    MODELS["llama-3-8b"],
    MODELS["llama-3-70b"],
    MODELS["llama-3-405b"],
)


def cached_kib_per_token(model: ModelShape) -> float:
    """KiB (1024 bytes) that a token of 16 bits a value keeps, over all layers."""
    return kv_bytes_per_token(model) / 1024


def expanded_kib_per_token(model: ModelShape) -> float:
    """KiB of k and v of every query head, what ordinary multi-head attention of this shape would
    keep.
    """
    values = model.num_attention_heads * (model.head_dim + model.value_dim)
    return 2 * model.num_hidden_layers * values / 1024


# ---------------------------------------------------------------- FLOPs of one layer


def pairs(new_tokens: int, context: int) -> int:
    """(query, key) pairs of the last `new_tokens` of `context` tokens, causal: each query sees
    those before it and itself.
    """
    return new_tokens * context - new_tokens * (new_tokens - 1) // 2


def expanded_flops(new_tokens: int, context: int, num_heads: int, mla: MLAConfig = V3) -> int:
    """k and v of all `context` latents for every head, then attention over them. A multiply and an
    add are two FLOPs.
    """
    expand = context * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    return (
        2 * num_heads * (expand + pairs(new_tokens, context) * (mla.qk_head_dim + mla.v_head_dim))
    )


def absorbed_flops(new_tokens: int, context: int, num_heads: int, mla: MLAConfig = V3) -> int:
    """W_UK into the new queries, attention over the latents, W_UV after it."""
    absorb = new_tokens * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    return (
        2 * num_heads * (absorb + pairs(new_tokens, context) * (mla.latent_dim + mla.kv_lora_rank))
    )


def crossover_tokens(context: int, mla: MLAConfig = V3) -> int:
    """How many new tokens, at the end of `context`, make absorbing the dearer form; context + 1 if
    it never is.

    Both grow with the heads alike, so their number does not matter.
    """
    dearer = (
        new
        for new in range(1, context + 1)
        if absorbed_flops(new, context, 1, mla) > expanded_flops(new, context, 1, mla)
    )
    return next(dearer, context + 1)


def crossover_limit(mla: MLAConfig = V3) -> float:
    """crossover_tokens for a context without end, rank · (nope + v) / (2 · rank - nope - v) in
    tokens.
    """
    return (
        mla.kv_lora_rank
        * (mla.qk_nope_head_dim + mla.v_head_dim)
        / (2 * mla.kv_lora_rank - mla.qk_nope_head_dim - mla.v_head_dim)
    )


def decode_bytes(
    sequences: int, context: int, mla: MLAConfig = V3, bytes_per_value: int = 2
) -> int:
    """Bytes of latents that a decode step of `sequences` reads in one layer, each row once for all
    heads.
    """
    return sequences * context * mla.latent_dim * bytes_per_value


def decode_flops(sequences: int, context: int, num_heads: int, mla: MLAConfig = V3) -> int:
    """FLOPs of absorbed decode attention in one layer, what `mla_decode_kernel` does."""
    return 2 * sequences * context * num_heads * (mla.latent_dim + mla.kv_lora_rank)
