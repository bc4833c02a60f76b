"""Exercises of lesson 07: a kernel that adds and norms in one pass, the loop that uses it, three
operations with bugs, bytes.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def add_rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):
    """One program per row, its `size` values padded to BLOCK. x, residual, out: [R, N], contiguous;
    weight: [N].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    # SOLUTION 7.1
    inside = column < size
    at = row * size + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total = (residual + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + at, total, mask=inside)
    wide = total.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / size
    normed = (wide * tl.rsqrt(mean_square + eps)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + at, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)
    # END


@exercise(
    "7.1",
    "Write the kernel: add to the residual and norm it, in one pass",
    minutes=40,
    difficulty=3,
    replaces="lessons.l07_kernel_fusion.optimized:add_rms_norm",
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x, in place; returns weight · residual / √(mean of residual² + eps), row by row:
    [R, N].

    x, residual: [R, N], contiguous, N up to 16384; weight: [N]; all float32, float16 or bfloat16. x
    and weight stay as they were. The sum is rounded to the tensors' dtype, and that is what is kept
    and what is normed. The norm is computed in float32 and rounded twice, as Llama does: before it
    is multiplied with the weight, and after. Errors: none to raise. Write the body of
    `add_rms_norm_kernel` above; this function launches it. Every value is loaded once and stored
    once.

    Example, eps = 0: x = [1, 1], residual = [2, 3], weight = [1, 10]
        residual becomes [3, 4]; mean of squares 12.5; root 3.5355
            -> [3 / 3.5355, 10 · 4 / 3.5355] = [0.8485, 11.314]
    """
    out = torch.empty_like(x)
    if len(x):
        block = triton.next_power_of_2(x.shape[1])
        add_rms_norm_kernel[len(x),](
            x,
            residual,
            weight,
            out,
            x.shape[1],
            eps,
            BLOCK=block,
            num_warps=max(4, min(32, block // 512)),
        )
    return out


@exercise(
    "7.2",
    "The layer loop that carries its residual",
    minutes=25,
    difficulty=2,
    replaces="lessons.l07_kernel_fusion.fused_decoder:run_layers",
)
def run_layers(layers, last_norm, x: Tensor, attend: Callable) -> Tensor:
    """All layers of the decoder and its last norm, every addition inside a norm. x: [T,
    hidden_size] -> hidden: like x.

    The plain decoder:
        for each layer:
            x = x + layer.self_attn(layer.input_layernorm(x), attend of this layer)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return last_norm(x)
    Here no addition is alone. Each of the norms has a second way to be called, which is one
    kernel on a GPU:
        norm(x)                             -> the norm of x
        norm.after_adding(branch, residual) -> residual += branch, in place; the norm of it
    attend(layer, q, k, v) takes the layer's number first; layer.self_attn wants attend(q, k, v):
    use functools.partial.
    n layers take 2n calls of after_adding and one plain call of a norm, no more. x may be
    overwritten. Errors: none to raise.

    Example: 1 layer: input_layernorm(x), then self_attn, then
    post_attention_layernorm.after_adding, then mlp, then
        last_norm.after_adding.
    """
    # SOLUTION
    norms = [
        norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ] + [last_norm]
    normed = norms[0](x)
    for index, layer in enumerate(layers):
        branch = layer.self_attn(normed, partial(attend, index))
        normed = norms[2 * index + 1].after_adding(branch, x)
        normed = norms[2 * index + 2].after_adding(layer.mlp(normed), x)
    return normed
    # END


@exercise("7.3", "Find the bugs: three small operations", minutes=20, difficulty=2)
class SmallOps:
    """SwiGLU, QK-norm and softmax in PyTorch. Each method below runs, and each has one bug. Delete
    its first line and find it.

    Tensors are float32, float16 or bfloat16, results have their dtype; arguments stay as they were.
    Errors: none to raise. Example: each method has its own. They are small enough for pencil and
    paper, which is the quickest way to two of the bugs.
    """

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of a merged projection. gate_up: [T, 2I], the gate's half first -> [T,
        I].

        Example: gate_up = [[0, 2, 3, 4]] -> [[0 · 3, silu(2) · 4]] = [[0, 7.046]], because silu(z)
        = z / (1 + e^-z).
        """
        # SOLUTION
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
        # STUB
        # gate, up = gate_up.chunk(2, dim=-1)
        # return torch.nn.functional.silu(up) * gate
        # END

    def qk_norm(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """RMSNorm of every head by itself. q: [T, Hq, D], k: [T, Hkv, D], q_weight, k_weight: [D]
        -> like q, like k.

        In float32, rounded before the weight. Example: heads [3, 4] and [30, 40], weight 1, eps 0:
        both become [0.8485, 1.1314].
        """
        # SOLUTION
        found = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
            found.append(weight * normed.to(x.dtype))
        return tuple(found)
        # STUB
        # found = []
        # for x, weight in ((q, q_weight), (k, k_weight)):
        #     wide = x.float()
        #     normed = wide * torch.rsqrt(wide.square().mean(dim=(-2, -1), keepdim=True) + eps)
        #     found.append(weight * normed.to(x.dtype))
        # return tuple(found)
        # END

    def softmax(self, x: Tensor) -> Tensor:
        """exp(x) over the sum of exp(x), along the last dimension, for any finite x: [..., N] ->
        [..., N], in float32 inside.

        Example: [1000, 1000, -1000] -> [0.5, 0.5, 0].
        """
        # SOLUTION
        wide = x.float()
        weights = torch.exp(wide - wide.amax(dim=-1, keepdim=True))
        return (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        # STUB
        # weights = torch.exp(x.float())
        # return (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        # END


@exercise("7.4", "Predict: bytes of a chain, time of a step", minutes=20, difficulty=2)
def predict(
    rows: int,
    size: int,
    itemsize: int,
    num_layers: int,
    step_gb: float,
    launch_us: float,
    bandwidth_gb_per_s: float,
) -> tuple[float, float, float, float]:
    """What fusing saves: (MB of an eager add + RMSNorm, MB of one kernel, ms of an eager decode
    step, ms of a fused one).

    MB and GB are 10^6 and 10^9 bytes. The chain: rows · size values of `itemsize` bytes, 2 or 4.
    Count every pass over a whole tensor: its operands read, its result written. Leave out the
    weight and what is one number a row.
        eager, 16 bits:   residual + x · to float32 · square · mean · times the root · back to 16
                          bits · times the weight
        eager, 32 bits:   the same without the two casts
        one kernel:       x and residual read, residual and the norm written
    A step launches one kernel for each operation. A layer has 7 matrix products, 2 for the cache
    and attention, 10 for RoPE, 2 additions to the residual, 2 norms of 8 launches each, silu, and
    silu · up; fused, an addition with the norm after it is one, and silu · up is one. Beside the
    layers: embedding, RoPE's tables (9), the one norm that has no addition before it (8 launches,
    fused 1), the output head.
    A step takes as long as its launches, or as long as moving step_gb bytes, whichever is longer.
    Errors: none to raise.

    Example: 1 row of 1000 values, itemsize 2, 1 layer, 0 GB, 5 µs: eager 42 bytes a value, fused 8
        -> 0.042, 0.008 MB
        eager (7 + 2 + 10 + 2 + 16 + 2) + 1 + 9 + 8 + 1 = 58 launches,
        fused (7 + 2 + 10 + 2 + 1) + 12 = 34
            -> 0.29, 0.17 ms
    Write down your guess first: 16 layers (Llama-3.2-1B), 2.6 GB, 5 µs, 4800 GB/s. Which limit
    holds before, and which after?
    """
    # SOLUTION
    cast = 2 * (itemsize + 4) if itemsize == 2 else 0
    eager = 3 * itemsize + cast + (4 + 4) + 4 + (4 + 4) + 2 * itemsize
    fused = 4 * itemsize
    values, bytes_ms = rows * size / 1e6, step_gb / bandwidth_gb_per_s * 1e3
    eager_ms = (39 * num_layers + 1 + 9 + 8 + 1) * launch_us / 1e3
    fused_ms = (22 * num_layers + 1 + 9 + 1 + 1) * launch_us / 1e3
    return eager * values, fused * values, max(eager_ms, bytes_ms), max(fused_ms, bytes_ms)
    # END
