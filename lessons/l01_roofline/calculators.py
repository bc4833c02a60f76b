"""What a model costs before it runs: bytes, FLOPs, the physical floor of a step, tokens per second,
dollars.

Everything here is a prediction from shapes and data sheets; nothing is measured. A real engine is
slower than these floors, and the quotient of the two is the only honest score. "G" is 10⁹ here and
on data sheets; memory tools count GiB = 2³⁰. The roofline itself is
`toolbox.measure.hardware.attainable_flops`; here is what goes into it.

Sources: Roofline (Williams, Waterman and Patterson 2009); Efficiently Scaling Transformer Inference
(Pope et al. 2022, 2).
"""

import math
from dataclasses import dataclass

from lessons.l01_roofline.planner.models import ModelShape


def positive(name: str, value: float) -> float:
    """`value`, if it is a finite number above zero. Raises ValueError that names the argument."""
    if not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise ValueError(f"{name} is {value!r}; accepted: a number above 0")
    return value


# ---------------------------------------------------------------- bytes


def weight_bytes(model: ModelShape, bits_per_weight: float = 16) -> float:
    """Bytes of all weights. Raises ValueError unless bits_per_weight is above 0 (16: float16, 4.5:
    4 bits and their scales).
    """
    return model.params * positive("bits_per_weight", bits_per_weight) / 8


def kv_bytes_per_token(model: ModelShape, bits_per_value: float = 16) -> float:
    """Bytes that one token of one sequence keeps in the KV cache, all layers together. 2 · layers ·
    KV heads · head_dim values, or layers · (latent + rotary key) for MLA."""
    return model.kv_values_per_token * positive("bits_per_value", bits_per_value) / 8


def sequences_that_fit(
    memory_bytes: float,
    weights_bytes: float,
    kv_bytes_per_token: float,
    context: int,
    state_bytes: float = 0,
) -> int:
    """How many sequences of `context` tokens fit beside the weights; 0 if not even one, or not even
    the weights. state_bytes: what a sequence keeps however long it is (lesson 27).
    """
    per_sequence = positive("kv_bytes_per_token", kv_bytes_per_token) * positive("context", context)
    per_sequence += state_bytes
    return max(0, int((positive("memory_bytes", memory_bytes) - weights_bytes) // per_sequence))


def activation_bytes(
    model: ModelShape, tokens: int, batch: int, bits_per_value: float = 16
) -> float:
    """The most bytes that one pass over `tokens` new tokens holds beside weights and cache, on one
    GPU. `batch` of the tokens get logits, and probabilities beside them, both in float32.

    Layers run one after the other, so one layer counts: the residual stream and what goes into the
    layer, and the wider of attention (q, k, v and output) and MLP (gate, up and their product). It
    assumes kernels that write no N×N scores (lesson 9).
    """
    attention = model.num_attention_heads * (model.head_dim + model.value_dim)
    attention += model.num_key_value_heads * (model.head_dim + model.value_dim)
    mlp = model.mlp_matrices * model.intermediate_size
    if model.num_experts:
        experts = model.num_experts_per_tok + model.num_shared_experts
        mixture = experts * (model.mlp_matrices * model.moe_intermediate_size + model.hidden_size)
        mlp = max(mixture, mlp if model.num_dense_layers else 0)
    values = positive("tokens", tokens) * (2 * model.hidden_size + max(attention, mlp))
    logits = 2 * 4 * positive("batch", batch) * model.vocab_size
    return values * positive("bits_per_value", bits_per_value) / 8 + logits


def move_s(moved_bytes: float, bytes_per_s: float) -> float:
    """Seconds to move so many bytes over a link once."""
    return moved_bytes / bytes_per_s


def gpus_needed(total_bytes: float, memory_bytes_per_gpu: float) -> int:
    """Fewest GPUs that hold `total_bytes`, as a power of two, because tensor parallelism splits
    heads and widths evenly.
    """
    total = positive("total_bytes", total_bytes)
    fraction = total / positive("memory_bytes_per_gpu", memory_bytes_per_gpu)
    return 2 ** max(0, math.ceil(math.log2(fraction)))


# ---------------------------------------------------------------- FLOPs and floors


def attention_flops(model: ModelShape, pairs: float) -> float:
    """FLOPs of softmax(qkᵀ)v over all layers and heads for so many (query, key) pairs: one multiply
    and one add per element.
    """
    heads = model.num_kv_layers * model.num_attention_heads
    return 2 * pairs * heads * (model.head_dim + model.value_dim)


@dataclass(frozen=True)
class Floor:
    """A piece of work and the least time it can take. bandwidth in bytes/s, peak in FLOP/s."""

    bytes_moved: float
    flops: float
    bandwidth: float
    peak: float

    @property
    def memory_s(self) -> float:
        return self.bytes_moved / self.bandwidth

    @property
    def compute_s(self) -> float:
        return self.flops / self.peak

    @property
    def seconds(self) -> float:
        # Not the sum, because a good kernel moves and computes at the same time.
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        """What to buy more of: "memory" or "compute"."""
        return "memory" if self.memory_s >= self.compute_s else "compute"

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes_moved


def decode_floor(
    model: ModelShape,
    batch: int,
    context: int,
    bandwidth: float,
    peak: float,
    bits_per_weight: float = 16,
    bits_per_kv: float = 16,
) -> Floor:
    """One decode step: `batch` sequences, each with `context` tokens in its cache, get one token
    each.

    bandwidth: bytes/s, peak: FLOP/s. The weights are read once for all of them, the KV cache once
    for each, and a state is read and written. Activations are small and left out.
    """
    batch, context = positive("batch", batch), positive("context", context)
    weights = model.params_read(batch) * positive("bits_per_weight", bits_per_weight) / 8
    seen = model.seen_tokens(context)
    kv = batch * (seen * kv_bytes_per_token(model, bits_per_kv) + 2 * model.state_bytes)
    flops = batch * (2 * model.active_params + model.state_flops)
    flops += attention_flops(model, batch * seen)
    return Floor(weights + kv, flops, bandwidth, peak)


def prefill_floor(
    model: ModelShape,
    prompt_tokens: int,
    bandwidth: float,
    peak: float,
    bits_per_weight: float = 16,
    bits_per_kv: float = 16,
) -> Floor:
    """One prompt until its first token: every token through every layer, the output head for the
    last one only.

    bandwidth: bytes/s, peak: FLOP/s.
    """
    tokens = positive("prompt_tokens", prompt_tokens)
    moved = model.params_read(tokens) * positive("bits_per_weight", bits_per_weight) / 8
    moved += tokens * kv_bytes_per_token(model, bits_per_kv) + model.state_bytes  # written, once
    body = tokens * (2 * (model.active_params - model.embedding_params) + model.state_flops)
    head = 2 * model.embedding_params
    causal_pairs = model.causal_pairs(tokens)  # token t sees t keys, or a window of them
    flops = body + head + attention_flops(model, causal_pairs)
    return Floor(moved, flops, bandwidth, peak)


def tokens_per_s(step_s: float, batch: int) -> float:
    """Tokens per second of all sequences together, one each per step."""
    return positive("batch", batch) / positive("step_s", step_s)


# ---------------------------------------------------------------- money


def cost_per_million_tokens(
    dollars_per_hour: float, tokens_per_s: float, utilisation: float = 1.0
) -> float:
    """Dollars per 10⁶ tokens for hardware that is paid by the hour and busy for the share
    `utilisation` (0 to 1) of it.
    """
    if positive("utilisation", utilisation) > 1:
        raise ValueError(f"utilisation is {utilisation!r}; accepted: above 0 and at most 1")
    tokens_per_hour = 3600 * positive("tokens_per_s", tokens_per_s) * utilisation
    return positive("dollars_per_hour", dollars_per_hour) / tokens_per_hour * 1e6


def tokens_per_dollar(dollars_per_hour: float, tokens_per_s: float) -> float:
    """The same the other way round, for busy hardware: how many tokens a dollar pays for."""
    return 1e6 / cost_per_million_tokens(dollars_per_hour, tokens_per_s)


def break_even_tokens_per_day(dollars_per_hour: float, api_dollars_per_million: float) -> float:
    """Tokens a day from which rented hardware is cheaper than an API; compare it with what the
    hardware can serve in a day.
    """
    dollars_per_day = 24 * positive("dollars_per_hour", dollars_per_hour)
    return dollars_per_day / positive("api_dollars_per_million", api_dollars_per_million) * 1e6
