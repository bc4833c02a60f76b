"""Wrong answers to lesson 07's exercises: real slips, each with a hint."""

import torch

from lessons.l07_kernel_fusion import naive, optimized, stand_ins
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 7.1 the kernel

answers.slips(
    "7.1",
    """
    eps_outside: eps is inside the root: 1 / √(mean + eps), not 1 / (√mean + eps).
    - tl.rsqrt(mean_square + eps)
    + (1.0 / (tl.sqrt(mean_square) + eps))

    eps_forgotten: You forget eps: rows near zero blow up.
    - tl.rsqrt(mean_square + eps)
    + tl.rsqrt(mean_square)

    sum_in_float16: You square and add in float16: 300² does not fit. Widen to float32 before you
        square.
    - tl.sum(wide * wide, axis=0)
    + tl.sum(wide.to(tl.float16) * wide.to(tl.float16), axis=0).to(tl.float32)

    mean_subtracted: You subtract the mean: that is LayerNorm.
    - wide = total.to(tl.float32)
    + wide = total.to(tl.float32)
    + wide = tl.where(inside, wide - tl.sum(wide, axis=0) / size, 0.0)

    divides_by_block: You divide by BLOCK, the padded length. The mean is over `size` values.
    - axis=0) / size
    + axis=0) / BLOCK

    no_division: You take the sum of squares for their mean: divide by size.
    - axis=0) / size
    + axis=0)

    padding_of_ones: Your padding is loaded as 1 and counts in the mean: other=0.0.
    - residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
    + residual = tl.load(residual_ptr + at, mask=inside, other=1.0)

    no_root: You divide by the mean of squares, not by its root.
    - tl.rsqrt(mean_square + eps)
    + (1.0 / (mean_square + eps))

    rounds_once: You round after the weight alone, as Gemma does. Llama rounds before it as well.
    - (wide * tl.rsqrt(mean_square + eps)).to(out_ptr.dtype.element_ty).to(tl.float32)
    + wide * tl.rsqrt(mean_square + eps)

    norms_unrounded: You norm the sum in float32. What is kept is the rounded sum, and that is what
        is normed.
    - wide = total.to(tl.float32)
    + wide = residual + x

    gemmas_weight: You multiply with 1 + weight: only Gemma's checkpoints hold the weight minus 1.
    - (normed * weight)
    + (normed * (1.0 + weight))

    no_weight: The weight is missing.
    - (normed * weight)
    + normed

    norms_x: You norm x alone; the norm is of the sum.
    - wide = total.to(tl.float32)
    + wide = x

    residual_normed: The residual must become the sum, not its norm.
    - tl.store(residual_ptr + at, total, mask=inside)
    +
    - tl.store(out_ptr + at, (normed
    + tl.store(residual_ptr + at, normed.to(residual_ptr.dtype.element_ty), mask=inside)
    + tl.store(out_ptr + at, (normed

    residual_x: The residual becomes x: add to what it held.
    - tl.store(residual_ptr + at, total, mask=inside)
    + tl.store(residual_ptr + at, x.to(residual_ptr.dtype.element_ty), mask=inside)

    residual_unchanged: The residual keeps its old values: store the sum into it.
    - tl.store(residual_ptr + at, total, mask=inside)
    + tl.store(residual_ptr + at, residual.to(residual_ptr.dtype.element_ty), mask=inside)

    returns_the_sum: You return the sum; the norm of it is asked for.
    - (normed * weight).to(out_ptr.dtype.element_ty)
    + total

    not_in_place: You add into a new tensor: the caller's residual does not change.
    - out = torch.empty_like(x)
    + out, residual = torch.empty_like(x), residual.clone()

    adds_into_x: You add into x; residual is the one that changes.
    - out = torch.empty_like(x)
    + out = torch.empty_like(x)
    + x, residual = residual, x

    no_mask: You load and store without a mask: the padding is the next row's beginning.
    - inside = column < size
    + inside = column < BLOCK
    - weight = tl.load(weight_ptr + column, mask=inside
    + weight = tl.load(weight_ptr + column, mask=column < size
    - out = torch.empty_like(x)
    + rows, mine = len(x), residual  # with room after the rows, so that the slip harms nothing else
    + x, residual = (torch.nn.functional.pad(t, (0, 0, 0, 2)) for t in (x, residual))
    + out = torch.empty_like(x)
    - add_rms_norm_kernel[len(x),](
    + add_rms_norm_kernel[rows,](
    - return out
    + mine.copy_(residual[:rows])
    + return out[:rows]
    """,
)


@answers.wrong(
    "7.1",
    "Two kernels: the sum is written and then read again. One kernel keeps the row in registers.",
)
def two_kernels(x, residual, weight, eps):
    return optimized.rms_norm(residual.add_(x), weight, eps)


answers.alternative("7.1")(optimized.add_rms_norm)
attacks(answers, "7.1", naive.add_rms_norm)


# ---------------------------------------------------------------- 7.2 the loop

answers.slips(
    "7.2",
    """
    own_norm_again: After a layer's MLP comes the NEXT layer's input_layernorm.
    - normed = norms[2 * index + 2].after_adding(layer.mlp(normed), x)
    + following = norms[2 * index] if index < len(layers) - 1 else last_norm
    + normed = following.after_adding(layer.mlp(normed), x)

    last_norm_forgotten: After the last MLP comes last_norm.
    - + [last_norm]
    + + [layers[-1].input_layernorm]

    branch_added_twice: after_adding adds the branch already; you add it once more.
    - normed = norms[2 * index + 1].after_adding(branch, x)
    + normed = norms[2 * index + 1].after_adding(branch, x)
    + x = x + branch

    last_branch_lost: The last MLP's output is never added.
    - normed = norms[2 * index + 2].after_adding(layer.mlp(normed), x)
    + branch = layer.mlp(normed)
    + is_last = layer is layers[-1]
    + normed = last_norm(x) if is_last else norms[2 * index + 2].after_adding(branch, x)

    layer_zero_everywhere: Every layer attends as layer 0: bind the layer's number.
    - partial(attend, index)
    + partial(attend, 0)

    mlp_reads_the_residual: The MLP reads the norm, not the residual stream.
    - layer.mlp(normed)
    + layer.mlp(x)

    carries_the_norm: You add to the normed stream. The residual is never normed itself.
    - normed = norms[2 * index + 1].after_adding(branch, x)
    - normed = norms[2 * index + 2].after_adding(layer.mlp(normed), x)
    + x = normed = norms[2 * index + 1].after_adding(branch, x)
    + x = normed = norms[2 * index + 2].after_adding(layer.mlp(normed), x)

    starts_unnormed: The first attention reads input_layernorm(x), not x.
    - normed = norms[0](x)
    + normed = x

    adds_alone: Right, but the additions are kernels, too: 2n more. Use after_adding.
    - normed = norms[2 * index + 1].after_adding(branch, x)
    - normed = norms[2 * index + 2].after_adding(layer.mlp(normed), x)
    + x = x + branch
    + x = x + layer.mlp(norms[2 * index + 1](x))
    + normed = norms[2 * index + 2](x)

    norms_twice: You norm what after_adding has normed.
    - normed = norms[2 * index + 2].after_adding(layer.mlp(normed), x)
    + norm = norms[2 * index + 2]
    + normed = norm(norm.after_adding(layer.mlp(normed), x))
    """,
)


@answers.alternative("7.2")
def with_a_look_ahead(layers, last_norm, x, attend):
    normed = None
    for index, layer in enumerate(layers):
        if normed is None:
            normed = layer.input_layernorm(x)
        normed = layer.post_attention_layernorm.after_adding(
            layer.self_attn(normed, lambda q, k, v, index=index: attend(index, q, k, v)), x
        )
        following = layers[index + 1].input_layernorm if index + 1 < len(layers) else last_norm
        normed = following.after_adding(layer.mlp(normed), x)
    return normed


# ---------------------------------------------------------------- 7.3 three small operations

answers.slips(
    "7.3",
    """
    as_given: All three bugs are there. Compute the examples by hand.
    = swiglu_left, qk_norm_left, softmax_left

    swiglu_left: One bug is left: which half goes through silu?
    - silu(gate) * up
    + silu(up) * gate

    qk_norm_left: One bug is left: over which dimensions does a head's mean run?
    - mean(dim=-1, keepdim=True)
    + mean(dim=(-2, -1), keepdim=True)

    softmax_left: One bug is left: exp(1000).
    - torch.exp(wide - wide.amax(dim=-1, keepdim=True))
    + torch.exp(wide)

    swiglu_fixed_alone: Two bugs are left, in qk_norm and softmax.
    = qk_norm_left, softmax_left

    qk_norm_fixed_alone: Two bugs are left, in swiglu and softmax.
    = swiglu_left, softmax_left

    softmax_fixed_alone: Two bugs are left, in swiglu and qk_norm.
    = swiglu_left, qk_norm_left

    sigmoid: sigmoid(gate) · up is the older GLU; silu(z) = z · sigmoid(z).
    - torch.nn.functional.silu(gate)
    + torch.sigmoid(gate)

    gelu: That is GeGLU: silu, not gelu.
    - functional.silu(gate)
    + functional.gelu(gate)

    exp_of_the_gate: exp(100) is infinite, and infinite over infinite is NaN: z / (1 + e^-z).
    - torch.nn.functional.silu(gate)
    + gate * torch.exp(gate) / (1 + torch.exp(gate))

    swiglu_returns_float32: swiglu may compute in float32, and returns its argument's dtype.
    - silu(gate) * up
    + silu(gate.float()) * up.float()

    norm_in_float16: You square in float16, and 300² does not fit. Compute the norm in float32.
    - wide = x.float()
    - normed
    + wide = x
    + normed

    norm_rounded_once: You round after the weight alone. The norm is rounded before it.
    - weight * normed.to(x.dtype)
    + (weight.float() * normed).to(x.dtype)

    softmax_in_float16: You compute the softmax in 16 bits. float32 inside, rounded once.
    - wide = x.float()
    - weights
    + wide = x
    + weights

    finite_first_maximum: Your maximum cannot fall below a number of yours. Values may.
    - wide.amax(dim=-1, keepdim=True)
    + wide.amax(dim=-1, keepdim=True).clamp(min=-1e4)

    both_halves: silu belongs on the gate alone.
    - silu(gate) * up
    + silu(gate) * torch.nn.functional.silu(up)

    silu_of_the_product: silu(gate) times up, not silu of the product.
    - silu(gate) * up
    + silu(gate * up)

    sum_of_halves: The halves are multiplied.
    - silu(gate) * up
    + silu(gate) + up

    interleaved_halves: gate and up are halves, not every other value.
    - gate_up.chunk(2, dim=-1)
    + gate_up[:, 0::2], gate_up[:, 1::2]

    across_the_heads: Your mean runs across the heads; it runs within one.
    - mean(dim=-1, keepdim=True)
    + mean(dim=-2, keepdim=True)

    one_weight_for_both: k has a weight of its own.
    - (k, k_weight)
    + (k, q_weight)

    q_alone: k is normed as well.
    - return tuple(found)
    + return found[0], k

    layer_norm: You subtract the mean: that is LayerNorm.
    - wide = x.float()
    - normed
    + wide = x.float() - x.float().mean(-1, keepdim=True)
    + normed

    eps_outside: eps is inside the root.
    - torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    + (1 / (wide.square().mean(dim=-1, keepdim=True).sqrt() + eps))

    no_eps: eps is forgotten.
    - mean(dim=-1, keepdim=True) + eps)
    + mean(dim=-1, keepdim=True))

    one_maximum_for_all: One maximum for all rows: a row far below it becomes 0 over 0.
    - wide.amax(dim=-1, keepdim=True)
    + wide.amax()

    first_for_the_maximum: You subtract the first value; only the maximum keeps exp at 1 or less.
    - wide.amax(dim=-1, keepdim=True)
    + wide[..., :1]

    mean_for_the_maximum: You subtract the mean; only the maximum keeps exp at 1 or less.
    - wide.amax(dim=-1, keepdim=True)
    + wide.mean(dim=-1, keepdim=True)

    sum_over_all_rows: Each row sums to 1 by itself.
    - weights.sum(dim=-1, keepdim=True)
    + weights.sum()

    columns: You divide by the sum of a column.
    - weights.sum(dim=-1, keepdim=True)
    + weights.sum(dim=0 if x.ndim > 1 else -1, keepdim=True)

    returns_float32: Compute in float32, and return x's dtype.
    - (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
    + weights / weights.sum(dim=-1, keepdim=True)
    """,
)


@answers.alternative("7.3")
class OfTheLibrary:
    def swiglu(self, gate_up):
        half = gate_up.shape[-1] // 2
        return stand_ins.silu_mul(gate_up[:, :half], gate_up[:, half:])

    def qk_norm(self, q, k, q_weight, k_weight, eps):
        return naive.qk_norm(q, k, q_weight, k_weight, eps)

    def softmax(self, x):
        return torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)


# ---------------------------------------------------------------- 7.4 predict

answers.slips(
    "7.4",
    """
    no_casts: In 16 bits the chain casts to float32 and back: two passes more.
    - cast = 2 * (itemsize + 4) if itemsize == 2 else 0
    + cast = 0

    casts_in_float32: float32 needs no casts.
    - cast = 2 * (itemsize + 4) if itemsize == 2 else 0
    + cast = 2 * (itemsize + 4)

    addition_reads_one: An addition reads two tensors and writes one.
    - eager = 3 * itemsize
    + eager = 2 * itemsize

    mean_writes_a_tensor: A mean writes one number a row, which does not count.
    - (4 + 4) + 4 + (4 + 4)
    + (4 + 4) + (4 + 4) + (4 + 4)

    no_pass_for_the_weight: Multiplying with the weight is a pass over the tensor.
    - (4 + 4) + 4 + (4 + 4) + 2 * itemsize
    + (4 + 4) + 4 + (4 + 4)

    square_in_place: The square reads a tensor and writes one, float32 both.
    - (4 + 4) + 4 +
    + 4 + 4 +

    residual_not_written: The kernel writes two tensors: the residual and the norm.
    - fused = 4 * itemsize
    + fused = 3 * itemsize

    kernel_like_a_norm: The kernel reads two tensors and writes two.
    - fused = 4 * itemsize
    + fused = 2 * itemsize

    adds_the_times: CPU and GPU work side by side: the longer of the two times counts.
    - max(eager_ms, bytes_ms), max(fused_ms, bytes_ms)
    + eager_ms + bytes_ms, fused_ms + bytes_ms

    shorter_time: The longer of the two times counts.
    - max(eager_ms, bytes_ms), max(fused_ms, bytes_ms)
    + min(eager_ms, bytes_ms), min(fused_ms, bytes_ms)

    one_junction: A layer has two junctions: after the attention and after the MLP.
    - (22 * num_layers
    + (21 * num_layers

    junction_of_two: Fused, an addition and the norm after it are one launch.
    - (22 * num_layers
    + (24 * num_layers

    no_norm_outside: n layers have 2n additions and 2n + 1 norms: one norm has no addition.
    - 1 + 9 + 8 + 1)
    + 1 + 9 + 1)
    - 1 + 9 + 1 + 1)
    + 1 + 9 + 1)

    norm_of_seven: The chain of a norm is 8 launches.
    - (39 * num_layers + 1 + 9 + 8 + 1)
    + (37 * num_layers + 1 + 9 + 7 + 1)

    merged_projections: q, k, v, gate and up are products of their own here.
    - (39 * num_layers
    + (36 * num_layers
    - (22 * num_layers
    + (19 * num_layers

    tables_in_every_layer: RoPE's tables are computed once a step, not in every layer.
    - (39 * num_layers
    + (48 * num_layers
    - (22 * num_layers
    + (31 * num_layers

    no_tables: RoPE's tables are 9 launches a step.
    - 1 + 9 + 8 + 1)
    + 1 + 8 + 1)
    - 1 + 9 + 1 + 1)
    + 1 + 1 + 1)

    no_rope: Fusing the norms leaves RoPE's 10 launches a layer.
    - (39 * num_layers
    + (29 * num_layers
    - (22 * num_layers
    + (12 * num_layers

    seconds: These are seconds; milliseconds are asked for.
    - bandwidth_gb_per_s * 1e3
    + bandwidth_gb_per_s
    - 8 + 1) * launch_us / 1e3
    + 8 + 1) * launch_us / 1e6
    - 1 + 1) * launch_us / 1e3
    + 1 + 1) * launch_us / 1e6

    microseconds: launch_us is in microseconds: divide by 1000.
    - 8 + 1) * launch_us / 1e3
    + 8 + 1) * launch_us
    - 1 + 1) * launch_us / 1e3
    + 1 + 1) * launch_us

    mebibytes: An MB is 10^6 bytes; 2^20 are a MiB.
    - rows * size / 1e6
    + rows * size / 2**20

    no_head: Embedding and output head are a launch each.
    - 1 + 9 + 8 + 1)
    + 1 + 9 + 8)
    - 1 + 9 + 1 + 1)
    + 1 + 9 + 1)

    first_norm_not_fused: The norm without an addition is one kernel too.
    - 1 + 9 + 1 + 1)
    + 1 + 9 + 8 + 1)
    """,
)


@answers.alternative("7.4")
def pass_by_pass(rows, size, itemsize, num_layers, step_gb, launch_us, bandwidth_gb_per_s):
    narrow, wide = itemsize, 4
    passes = [(2 * narrow, narrow), (wide, wide), (wide, 0), (wide, wide), (narrow, narrow)]
    if narrow != wide:
        passes += [(narrow, wide), (wide, narrow)]
    layer = {"eager": 7 + 2 + 10 + 2 + 2 * 8 + 2, "fused": 7 + 2 + 10 + 2 + 1}
    beside = {"eager": 1 + 9 + 8 + 1, "fused": 1 + 9 + 1 + 1}
    times = [
        max(
            1e-3 * launch_us * (num_layers * layer[way] + beside[way]),
            1e3 * step_gb / bandwidth_gb_per_s,
        )
        for way in layer
    ]
    return (sum(map(sum, passes)) * rows * size * 1e-6, 4 * narrow * rows * size * 1e-6, *times)
