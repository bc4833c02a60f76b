"""Wrong answers to lesson 07's exercises: real slips, and the hint for whoever made them."""

from functools import partial

import torch
from torch.nn.functional import silu

from lessons.l07_kernel_fusion import naive, optimized, stand_ins
from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 7.1 the kernel


@triton.jit
def slipped_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, size, eps, SLIP: tl.constexpr, BLOCK: tl.constexpr
):
    """The kernel with one slip. The names of the slips exist only here, to spell the wrong answers
    briefly.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    if SLIP == "no_mask":
        inside = column < BLOCK
    at = row * size + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(
        residual_ptr + at, mask=inside, other=1.0 if SLIP == "padding_of_ones" else 0.0
    ).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = residual + x if SLIP == "norms_unrounded" else (residual + x).to(dtype).to(tl.float32)
    if SLIP == "norms_x":
        wide = x
    elif SLIP == "mean_subtracted":
        wide = tl.where(inside, total - tl.sum(total, axis=0) / size, 0.0)
    else:
        wide = total
    if SLIP == "sum_in_float16":
        sum_of_squares = tl.sum(wide.to(tl.float16) * wide.to(tl.float16), axis=0).to(tl.float32)
    else:
        sum_of_squares = tl.sum(wide * wide, axis=0)
    mean = (
        sum_of_squares
        if SLIP == "no_division"
        else sum_of_squares / (BLOCK if SLIP == "divides_by_block" else size)
    )
    if SLIP == "eps_outside":
        factor = 1.0 / (tl.sqrt(mean) + eps)
    elif SLIP == "eps_forgotten":
        factor = tl.rsqrt(mean)
    elif SLIP == "no_root":
        factor = 1.0 / (mean + eps)
    else:
        factor = tl.rsqrt(mean + eps)
    normed = wide * factor if SLIP == "rounds_once" else (wide * factor).to(dtype).to(tl.float32)
    out = (
        normed * (1.0 + weight)
        if SLIP == "gemmas_weight"
        else normed
        if SLIP == "no_weight"
        else normed * weight
    )
    if SLIP == "residual_normed":
        kept = normed
    elif SLIP == "residual_x":
        kept = x
    elif SLIP == "residual_unchanged":
        kept = residual
    else:
        kept = total
    tl.store(residual_ptr + at, kept.to(dtype), mask=inside)
    tl.store(out_ptr + at, (total if SLIP == "returns_the_sum" else out).to(dtype), mask=inside)


def slipped_norm(x, residual, weight, eps, *, slip):
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    if slip == "no_mask":  # room behind the rows, so that the slip harms nobody else
        room = [
            torch.nn.functional.pad(tensor.flatten(), (0, block)) for tensor in (x, residual, out)
        ]
        slipped_kernel[len(x),](
            room[0], room[1], weight, room[2], x.shape[1], eps, SLIP=slip, BLOCK=block
        )
        residual.copy_(room[1][: x.numel()].view(x.shape))
        return room[2][: x.numel()].view(x.shape)
    slipped_kernel[len(x),](x, residual, weight, out, x.shape[1], eps, SLIP=slip, BLOCK=block)
    return out


for name, hint in [
    ("eps_outside", "eps is inside the root: 1 / √(mean + eps), not 1 / (√mean + eps)."),
    ("eps_forgotten", "You forget eps: rows near zero blow up."),
    (
        "sum_in_float16",
        "You square and add in float16: 300² does not fit. Widen to float32 before you square.",
    ),
    ("mean_subtracted", "You subtract the mean: that is LayerNorm."),
    ("divides_by_block", "You divide by BLOCK, the padded length. The mean is over `size` values."),
    ("no_division", "You take the sum of squares for their mean: divide by size."),
    ("padding_of_ones", "Your padding is loaded as 1 and counts in the mean: other=0.0."),
    ("no_mask", "You load and store without a mask: the padding is the next row's beginning."),
    ("no_root", "You divide by the mean of squares, not by its root."),
    (
        "rounds_once",
        "You round after the weight alone, as Gemma does. Llama rounds before it as well.",
    ),
    (
        "norms_unrounded",
        "You norm the sum in float32. What is kept is the rounded sum, and that is what is normed.",
    ),
    (
        "gemmas_weight",
        "You multiply with 1 + weight: only Gemma's checkpoints hold the weight minus 1.",
    ),
    ("no_weight", "The weight is missing."),
    ("norms_x", "You norm x alone; the norm is of the sum."),
    ("residual_normed", "The residual must become the sum, not its norm."),
    ("residual_x", "The residual becomes x: add to what it held."),
    ("residual_unchanged", "The residual keeps its old values: store the sum into it."),
    ("returns_the_sum", "You return the sum; the norm of it is asked for."),
]:
    answers.wrong("7.1", hint, name)(partial(slipped_norm, slip=name))


@answers.wrong(
    "7.1",
    "Two kernels: the sum is written and then read again. One kernel keeps the row in registers.",
)
def two_kernels(x, residual, weight, eps):
    return optimized.rms_norm(residual.add_(x), weight, eps)


@answers.wrong("7.1", "You add into a new tensor: the caller's residual does not change.")
def not_in_place(x, residual, weight, eps):
    return optimized.add_rms_norm(x, residual.clone(), weight, eps)


@answers.wrong("7.1", "You add into x; residual is the one that changes.")
def adds_into_x(x, residual, weight, eps):
    return optimized.add_rms_norm(residual, x, weight, eps)


answers.alternative("7.1")(optimized.add_rms_norm)


# ---------------------------------------------------------------- 7.2 the loop


def slipped_loop(
    layers,
    last_norm,
    x,
    attend,
    *,
    norm_order="next",
    branch_twice=False,
    lose_last=False,
    same_layer=False,
    mlp_reads="normed",
    carries="residual",
    starts="normed",
    alone=False,
    double=False,
):
    """The loop with one slip, spelled by a switch."""
    normed, residual = (layers[0].input_layernorm(x) if starts == "normed" else x), x
    for index, layer in enumerate(layers):
        branch = layer.self_attn(normed, partial(attend, 0 if same_layer else index))
        if alone:  # the addition by itself, then a plain norm
            residual = residual + branch
            normed = layer.post_attention_layernorm(residual)
        else:
            normed = layer.post_attention_layernorm.after_adding(branch, residual)
        if branch_twice:
            residual = residual + branch
        if carries == "normed":
            residual = normed
        branch = layer.mlp(normed if mlp_reads == "normed" else residual)
        is_last = index == len(layers) - 1
        following = last_norm if is_last else layers[index + 1].input_layernorm
        if norm_order == "own":
            following = last_norm if is_last else layer.input_layernorm
        elif norm_order == "no_last":
            following = layers[min(index + 1, len(layers) - 1)].input_layernorm
        if is_last and lose_last:
            return last_norm(residual)
        if alone:
            residual = residual + branch
            normed = following(residual)
        else:
            normed = following.after_adding(branch, residual)
        if double:
            normed = following(normed)
        if carries == "normed":
            residual = normed
    return normed


for name, slip, hint in [
    (
        "own_norm_again",
        dict(norm_order="own"),
        "After a layer's MLP comes the NEXT layer's input_layernorm.",
    ),
    ("last_norm_forgotten", dict(norm_order="no_last"), "After the last MLP comes last_norm."),
    (
        "branch_added_twice",
        dict(branch_twice=True),
        "after_adding adds the branch already; you add it once more.",
    ),
    ("last_branch_lost", dict(lose_last=True), "The last MLP's output is never added."),
    (
        "layer_zero_everywhere",
        dict(same_layer=True),
        "Every layer attends as layer 0: bind the layer's number.",
    ),
    (
        "mlp_reads_the_residual",
        dict(mlp_reads="residual"),
        "The MLP reads the norm, not the residual stream.",
    ),
    (
        "carries_the_norm",
        dict(carries="normed"),
        "You add to the normed stream. The residual is never normed itself.",
    ),
    ("starts_unnormed", dict(starts="x"), "The first attention reads input_layernorm(x), not x."),
    (
        "adds_alone",
        dict(alone=True),
        "Right, but the additions are kernels, too: 2n more. Use after_adding.",
    ),
    ("norms_twice", dict(double=True), "You norm what after_adding has normed."),
]:
    answers.wrong("7.2", hint, name)(partial(slipped_loop, **slip))


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


class SlippedOps:
    """The three operations with some slips, spelled by switches."""

    def __init__(self, swiglu="right", norm="right", softmax="right"):
        self._swiglu, self._norm, self._softmax = swiglu, norm, softmax

    def swiglu(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        if self._swiglu == "interleaved":
            gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
        return {
            "up": lambda: silu(up) * gate,
            "sigmoid": lambda: torch.sigmoid(gate) * up,
            "sum": lambda: silu(gate) + up,
            "gelu": lambda: torch.nn.functional.gelu(gate) * up,
            "both": lambda: silu(gate) * silu(up),
            "product": lambda: silu(gate * up),
            "exp": lambda: gate * torch.exp(gate) / (1 + torch.exp(gate)) * up,
            "wide_result": lambda: silu(gate.float()) * up.float(),
        }.get(self._swiglu, lambda: silu(gate) * up)()

    def qk_norm(self, q, k, q_weight, k_weight, eps):
        slip, found = self._norm, []
        for x, weight in ((q, q_weight), (k, q_weight if slip == "one_weight" else k_weight)):
            wide = x if slip == "narrow" else x.float()
            wide = wide - (wide.mean(-1, keepdim=True) if slip == "layer_norm" else 0)
            dims = (-2, -1) if slip == "all_heads" else -2 if slip == "across" else -1
            squares = wide.square().mean(dims, keepdim=True)
            inside = 0 if slip == "no_eps" else eps
            rstd = (
                1 / (squares.sqrt() + eps)
                if slip == "eps_outside"
                else torch.rsqrt(squares + inside)
            )
            normed = wide * rstd
            if slip == "rounds_once":
                found.append((weight.float() * normed).to(x.dtype))
            else:
                found.append(weight * normed.to(x.dtype))
        return (found[0], k) if slip == "q_alone" else tuple(found)

    def softmax(self, x):
        slip, wide = self._softmax, x if self._softmax == "narrow" else x.float()
        shift = {
            "none": 0,
            "global": wide.amax(),
            "first": wide[..., :1],
            "mean": wide.mean(-1, keepdim=True),
            "finite": wide.amax(-1, keepdim=True).clamp(min=-1e4),
        }.get(slip, wide.amax(-1, keepdim=True))
        weights = torch.exp(wide - shift)
        total = (
            weights.sum()
            if slip == "all_rows"
            else weights.sum(0 if slip == "columns" and x.ndim > 1 else -1, keepdim=True)
        )
        return (weights / total).to(torch.float32 if slip == "wide_result" else x.dtype)


for name, slip, hint in [
    (
        "as_given",
        dict(swiglu="up", norm="all_heads", softmax="none"),
        "All three bugs are there. Compute the examples by hand.",
    ),
    ("swiglu_left", dict(swiglu="up"), "One bug is left: which half goes through silu?"),
    (
        "qk_norm_left",
        dict(norm="all_heads"),
        "One bug is left: over which dimensions does a head's mean run?",
    ),
    ("softmax_left", dict(softmax="none"), "One bug is left: exp(1000)."),
    (
        "swiglu_fixed_alone",
        dict(norm="all_heads", softmax="none"),
        "Two bugs are left, in qk_norm and softmax.",
    ),
    (
        "qk_norm_fixed_alone",
        dict(swiglu="up", softmax="none"),
        "Two bugs are left, in swiglu and softmax.",
    ),
    (
        "softmax_fixed_alone",
        dict(swiglu="up", norm="all_heads"),
        "Two bugs are left, in swiglu and qk_norm.",
    ),
    (
        "sigmoid",
        dict(swiglu="sigmoid"),
        "sigmoid(gate) · up is the older GLU; silu(z) = z · sigmoid(z).",
    ),
    ("gelu", dict(swiglu="gelu"), "That is GeGLU: silu, not gelu."),
    (
        "exp_of_the_gate",
        dict(swiglu="exp"),
        "exp(100) is infinite, and infinite over infinite is NaN: z / (1 + e^-z).",
    ),
    (
        "swiglu_returns_float32",
        dict(swiglu="wide_result"),
        "swiglu may compute in float32, and returns its argument's dtype.",
    ),
    (
        "norm_in_float16",
        dict(norm="narrow"),
        "You square in float16, and 300² does not fit. Compute the norm in float32.",
    ),
    (
        "norm_rounded_once",
        dict(norm="rounds_once"),
        "You round after the weight alone. The norm is rounded before it.",
    ),
    (
        "softmax_in_float16",
        dict(softmax="narrow"),
        "You compute the softmax in 16 bits. float32 inside, rounded once.",
    ),
    (
        "finite_first_maximum",
        dict(softmax="finite"),
        "Your maximum cannot fall below a number of yours. Values may.",
    ),
    ("both_halves", dict(swiglu="both"), "silu belongs on the gate alone."),
    (
        "silu_of_the_product",
        dict(swiglu="product"),
        "silu(gate) times up, not silu of the product.",
    ),
    ("sum_of_halves", dict(swiglu="sum"), "The halves are multiplied."),
    (
        "interleaved_halves",
        dict(swiglu="interleaved"),
        "gate and up are halves, not every other value.",
    ),
    (
        "across_the_heads",
        dict(norm="across"),
        "Your mean runs across the heads; it runs within one.",
    ),
    ("one_weight_for_both", dict(norm="one_weight"), "k has a weight of its own."),
    ("q_alone", dict(norm="q_alone"), "k is normed as well."),
    ("layer_norm", dict(norm="layer_norm"), "You subtract the mean: that is LayerNorm."),
    ("eps_outside", dict(norm="eps_outside"), "eps is inside the root."),
    ("no_eps", dict(norm="no_eps"), "eps is forgotten."),
    (
        "one_maximum_for_all",
        dict(softmax="global"),
        "One maximum for all rows: a row far below it becomes 0 over 0.",
    ),
    (
        "first_for_the_maximum",
        dict(softmax="first"),
        "You subtract the first value; only the maximum keeps exp at 1 or less.",
    ),
    (
        "mean_for_the_maximum",
        dict(softmax="mean"),
        "You subtract the mean; only the maximum keeps exp at 1 or less.",
    ),
    ("sum_over_all_rows", dict(softmax="all_rows"), "Each row sums to 1 by itself."),
    ("columns", dict(softmax="columns"), "You divide by the sum of a column."),
    ("returns_float32", dict(softmax="wide_result"), "Compute in float32, and return x's dtype."),
]:
    answers.wrong("7.3", hint, name)(partial(SlippedOps, **slip))


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


def slipped_prediction(
    rows,
    size,
    itemsize,
    num_layers,
    step_gb,
    launch_us,
    bandwidth_gb_per_s,
    *,
    casts=True,
    always_cast=False,
    add=3,
    mean_writes=0,
    weight_pass=True,
    square=8,
    kernel=4,
    combine=max,
    junctions=2,
    last_norm=True,
    norm=8,
    products=7,
    tables=9,
    ms=1e3,
    mega=1e6,
    rope=10,
    bytes_unit=1e3,
    fused_first=1,
    ends=2,
):
    """The four numbers with one slip, spelled by a switch."""
    cast = 2 * (itemsize + 4) if (itemsize == 2 and casts) or always_cast else 0
    eager = (
        add * itemsize + cast + square + 4 + mean_writes + 8 + (2 * itemsize if weight_pass else 0)
    )
    values, bytes_ms = rows * size / mega, step_gb / bandwidth_gb_per_s * bytes_unit
    beside = tables + ends
    eager_launches = (
        (products + 2 + rope + 2 + 2 * norm + 2) * num_layers + beside + (norm if last_norm else 0)
    )
    fused_launches = (
        (products + 2 + rope + junctions + 1) * num_layers
        + beside
        + (fused_first if last_norm else 0)
    )
    return (
        eager * values,
        kernel * itemsize * values,
        combine(eager_launches * launch_us / ms, bytes_ms),
        combine(fused_launches * launch_us / ms, bytes_ms),
    )


for name, slip, hint in [
    (
        "no_casts",
        dict(casts=False),
        "In 16 bits the chain casts to float32 and back: two passes more.",
    ),
    ("casts_in_float32", dict(always_cast=True), "float32 needs no casts."),
    ("addition_reads_one", dict(add=2), "An addition reads two tensors and writes one."),
    (
        "mean_writes_a_tensor",
        dict(mean_writes=4),
        "A mean writes one number a row, which does not count.",
    ),
    (
        "no_pass_for_the_weight",
        dict(weight_pass=False),
        "Multiplying with the weight is a pass over the tensor.",
    ),
    ("square_in_place", dict(square=4), "The square reads a tensor and writes one, float32 both."),
    (
        "residual_not_written",
        dict(kernel=3),
        "The kernel writes two tensors: the residual and the norm.",
    ),
    ("kernel_like_a_norm", dict(kernel=2), "The kernel reads two tensors and writes two."),
    (
        "adds_the_times",
        dict(combine=lambda a, b: a + b),
        "CPU and GPU work side by side: the longer of the two times counts.",
    ),
    ("shorter_time", dict(combine=min), "The longer of the two times counts."),
    (
        "one_junction",
        dict(junctions=1),
        "A layer has two junctions: after the attention and after the MLP.",
    ),
    (
        "junction_of_two",
        dict(junctions=4),
        "Fused, an addition and the norm after it are one launch.",
    ),
    (
        "no_norm_outside",
        dict(last_norm=False),
        "n layers have 2n additions and 2n + 1 norms: one norm has no addition.",
    ),
    ("norm_of_seven", dict(norm=7), "The chain of a norm is 8 launches."),
    (
        "merged_projections",
        dict(products=4),
        "q, k, v, gate and up are products of their own here.",
    ),
    (
        "tables_in_every_layer",
        dict(tables=9, rope=19),
        "RoPE's tables are computed once a step, not in every layer.",
    ),
    ("no_tables", dict(tables=0), "RoPE's tables are 9 launches a step."),
    ("no_rope", dict(rope=0), "Fusing the norms leaves RoPE's 10 launches a layer."),
    ("seconds", dict(ms=1e6, bytes_unit=1), "These are seconds; milliseconds are asked for."),
    ("microseconds", dict(ms=1), "launch_us is in microseconds: divide by 1000."),
    ("mebibytes", dict(mega=2**20), "An MB is 10^6 bytes; 2^20 are a MiB."),
    ("no_head", dict(ends=1), "Embedding and output head are a launch each."),
    (
        "first_norm_not_fused",
        dict(fused_first=8),
        "The norm without an addition is one kernel too.",
    ),
]:
    answers.wrong("7.4", hint, name)(partial(slipped_prediction, **slip))


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
