"""What the tests of caches and of decode kernels share: inputs, definitions, and a cache fed in
steps.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.rope import new_cos_sin_cache, rotate
from lessons.l03_kv_cache.batch import Batch, new_batch
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.numerics import attention_inputs, poisoned

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
CONFIG = ModelConfig(
    "llama",
    vocab_size=11,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=4,
    max_position_embeddings=512,
    sliding_windows=(None, 5),
)


# ---------------------------------------------------------------- kernels


def decode_inputs(
    name: str,
    lengths: list[int],
    capacity: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q: [B, Hq, D], caches: [B, capacity, Hkv, D] whose unused rows are NaN, context_lens: [B]
    int32. name: of ATTENTION_INPUTS.
    """
    cache_shape = (len(lengths), capacity, num_kv_heads, head_dim)
    q = torch.empty(len(lengths), num_heads, head_dim, dtype=dtype, device=DEVICE)
    k_cache = poisoned(cache_shape, dtype, DEVICE)
    v_cache = poisoned(cache_shape, dtype, DEVICE)
    for b, n in enumerate(lengths):
        shape = (1, max(n, 1), num_heads, num_kv_heads, head_dim)
        one, k, v = attention_inputs(name, *shape, dtype=dtype, seed=seed + b)
        q[b] = one[0]
        k_cache[b, :n] = k[:n]
        v_cache[b, :n] = v[:n]
    return q, k_cache, v_cache, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def decode_arguments() -> dict[str, Tensor]:
    """Arguments of a decode kernel's wrapper that nothing is wrong with, for tests to change one:
    shapes as in decode_inputs.
    """
    return dict(
        q=torch.zeros(2, 4, 8),
        k_cache=torch.zeros(2, 9, 2, 8),
        v_cache=torch.zeros(2, 9, 2, 8),
        context_lens=torch.ones(2, dtype=torch.int32),
    )


def heads_first(x: Tensor) -> Tensor:
    """The same values, where all rows of a head lie beside each other: [..., N, H, D]."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def padded(x: Tensor) -> Tensor:
    """The same values in the same order with NaN around every row, head and sequence: [...]."""
    larger = poisoned([size + 3 for size in x.shape], x.dtype, x.device)
    inner = larger[tuple(slice(1, size + 1) for size in x.shape)]
    inner.copy_(x)
    return inner


def padded_heads_first(x: Tensor) -> Tensor:
    """Both: [..., N, H, D]. Its storage is so large that the strides of the same values laid
    densely stay within it: what a planted bug reads is wrong, and never foreign memory.
    """
    return padded(x.transpose(-3, -2)).transpose(-3, -2)


def dense(x: Tensor) -> Tensor:
    """The same values as they are: [...]."""
    return x


LAYOUTS = {  # of K, of V: no two of q, K and V have the same strides
    "K dense, V heads first": (dense, heads_first),
    "K heads first, V dense": (heads_first, dense),
    "K dense, V wide": (dense, padded_heads_first),
    "K wide, V dense": (padded_heads_first, dense),
    "K wide, V between NaN": (padded_heads_first, padded),
}


def laid_out(layout: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q with a head's queries beside each other, K and V as LAYOUTS says: [..., N, H, D] each."""
    lay_k, lay_v = LAYOUTS[layout]
    return heads_first(q), lay_k(k), lay_v(v)


def far_apart(x: Tensor, dim: int, path: Path) -> Tensor:
    """The same values in a sparse file, 2^30 elements and more apart along `dim`, so that the third
    is beyond element 2^31. A CPU's, because no GPU reads such a file.
    """
    order = [dim] + [other for other in range(x.dim()) if other != dim]
    strides = [0] * x.dim()
    inner = 1
    for other in reversed(order[1:]):
        strides[other] = inner
        inner *= x.shape[other]
    strides[dim] = 2**30 + inner
    size = (x.shape[dim] - 1) * strides[dim] + inner
    file = torch.from_file(str(path), shared=True, size=size, dtype=x.dtype)
    return file.as_strided(x.shape, strides).copy_(x)


def decode_by_slicing(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """The definition of decode_attention: lesson 2's attention on the rows in use, one sequence at
    a time. Shapes as in decode_inputs.
    """
    outs = []
    for b, n in enumerate(context_lens.tolist()):
        k, v = k_cache[b, :n], v_cache[b, :n]
        outs.append(attention(q[b : b + 1], k, v, softmax_scale, window=window)[0])
    return torch.stack(outs)


def append_by_indexing(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """The definition of append_rows. Shapes as there."""
    kept = slot_mapping >= 0
    k_cache[slot_mapping[kept]] = k[kept]
    v_cache[slot_mapping[kept]] = v[kept]


# ---------------------------------------------------------------- a model


def randomise(model: nn.Module) -> nn.Module:
    """Give any Llama-like model weights under which attention is sharp, so that a wrong mask or
    position changes the tokens.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            matrix = parameter.dim() > 1
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if matrix else 0.1)
            if name.endswith("norm.weight"):
                parameter.add_(1)
            if "q_proj" in name or "q_b_proj" in name:
                parameter.mul_(3)
    return model.eval().requires_grad_(False)


# ---------------------------------------------------------------- a cache, fed in steps


class Streams:
    """Random q, k and v, not rotated, of every layer for `total` tokens of one sequence."""

    def __init__(
        self,
        config: ModelConfig,
        total: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
    ):
        self.config = config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        generator = torch.Generator().manual_seed(seed)
        self.layers = []
        for _ in range(config.num_hidden_layers):
            q = torch.randn(total, heads, config.head_dim, generator=generator)
            k = torch.randn(total, kv_heads, config.head_dim, generator=generator)
            v = torch.randn(total, kv_heads, config.v_head_dim, generator=generator)
            self.layers.append([x.to(DEVICE, dtype) for x in (q, k, v)])

    def whole(self, layer: int) -> Tensor:
        """What every token's attention gives, without a cache: [total, Hq, Dv]."""
        q, k, v = self.layers[layer]
        positions = torch.arange(len(q), device=q.device)
        cos_sin_cache = new_cos_sin_cache(self.config, len(q), q.device)
        q, k = rotate(q, positions, cos_sin_cache), rotate(k, positions, cos_sin_cache)
        window = self.config.sliding_window(layer)
        return attention(q, k, v, self.config.softmax_scale, window=window)

    def step(self, cache, batch: Batch, rows: slice, layers: range) -> dict[int, Tensor]:
        """layer -> what `cache` gives for the new tokens `rows`: [T, Hq, Dv]."""
        attend = cache.attending(batch)
        outs = {}
        for layer in layers:
            q, k, v = self.layers[layer]
            outs[layer] = attend(layer, q[rows].clone(), k[rows].clone(), v[rows].clone())
        return outs


def check_steps(
    cache,
    steps: list[int],
    seed: int,
    config: ModelConfig = CONFIG,
    dtype: torch.dtype = torch.float32,
    layers: range | None = None,
) -> None:
    """Feed `steps` tokens at a time through all layers (or those given), growing where a cache can.

    Raises AssertionError unless each output equals attention over everything so far.
    """
    streams = Streams(config, sum(steps), seed, dtype)
    layers = range(config.num_hidden_layers) if layers is None else layers
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    whole = {layer: streams.whole(layer) for layer in layers}
    held = 0
    for new in steps:
        if hasattr(cache, "reserve"):
            cache.reserve(held + new)
        batch = new_batch([([0] * new, held)], cache.block_size, DEVICE)
        rows = slice(held, held + new)
        for layer, out in streams.step(cache, batch, rows, layers).items():
            torch.testing.assert_close(out, whole[layer][rows], atol=tolerance, rtol=tolerance)
        held += new
