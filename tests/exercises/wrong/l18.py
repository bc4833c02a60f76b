"""Wrong answers to lesson 18's exercises: real slips, the museum's among them, and the hint for
the learner who made them.
"""

from functools import partial

import torch

from lessons.toolbox.kernels.triton_ import tl, triton
from solutions.l18_weight_quantization import E2M1, NF4, gptq, round_to_formats
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 18.1 four grids

answers.slips(
    "18.1",
    """
    one_scale_for_the_tensor: One scale for the whole matrix: every group has one of its own.
    - groups.amin(-1, keepdim=True)
    + groups.amin()
    - groups.amax(-1, keepdim=True)
    + groups.amax()

    one_scale_for_a_row: One scale for a whole row: that is per channel. Every group has one of its
        own.
    - groups.amin(-1, keepdim=True)
    + groups.amin((1, 2), keepdim=True)
    - groups.amax(-1, keepdim=True)
    + groups.amax((1, 2), keepdim=True)

    groups_down_the_columns: A group is a run of neighbours in a row, along the inputs, not down the
        outputs.
    - weight.unflatten(1, (-1, group_size))
    + weight.T.reshape(-1, 1, group_size)
    - ((codes - zero) * scale).flatten(1)
    + ((codes - zero) * scale).reshape(weight.shape[::-1]).T
    - (table[nearest] * largest).flatten(1)
    + (table[nearest] * largest).reshape(weight.shape[::-1]).T

    zero_point_off_by_one: Your zero point is off by one: the code that means 0.0 must give 0.0.
    - (codes - zero) * scale
    + (codes - zero - 1) * scale

    zero_point_below_zero: lo is not above 0, so the zero point is -lo / scale, which is not below 0.
    - torch.round(-low / scale)
    + torch.round(low / scale)

    zero_point_not_whole: The zero point is stored in 4 bits, so it is a whole number, and 0.0 has a
        code.
    - torch.round(-low / scale)
    + -low / scale

    range_without_zero: If all weights are positive, the zero point falls outside of 0 … 15: let the
        range hold 0.
    - .clamp(max=0)
    +
    - .clamp(min=0)
    +
    - torch.where(scale > 0, scale, 1.0)
    + torch.where(scale != 0, scale, 1.0)

    symmetric: This range is as wide below 0 as above it, whatever the weights are. Use both ends.
    - scale = (high - low) / 15
    + high = torch.maximum(-low, high)
    + low = -high
    + scale = (high - low) / 15

    sixteen_steps: 16 codes have 15 steps between them.
    - (high - low) / 15
    + (high - low) / 16

    truncated: Round to the nearest code: cutting off makes the error twice as large.
    - torch.round(groups / scale)
    + torch.trunc(groups / scale)

    halves_rounded_up: torch.round takes a half to the even neighbour.
    - torch.round(-low / scale)
    + torch.floor(-low / scale + 0.5)
    - torch.round(groups / scale)
    + torch.floor(groups / scale + 0.5)

    a_code_of_16: Both ends may round up, and then the largest weight gets code 16: clamp to 0 … 15.
    - .clamp(0, 15)

    codes_wrap_around: Code 16 keeps its low four bits alone and becomes 0: clamp first.
    - (torch.round(groups / scale) + zero).clamp(0, 15)
    + (torch.round(groups / scale) + zero) % 16

    codes_as_signed: With a zero point the codes are 0 to 15, not -8 to 7.
    - .clamp(0, 15)
    + .clamp(-8, 7)

    a_group_of_zeros_is_nan: A group of zeros has a range of 0, and 0 / 0 is NaN.
    - scale = torch.where(scale > 0, scale, 1.0)

    e4m3_overflows_to_nan: E4M3 has no infinity, so a plain cast may give NaN beyond 448. Clamp
        before the cast.
    - inside.to(torch.float8_e4m3fn).to(weight.dtype)
    + torch.where(
    +     (weight / e4m3_scale).abs() > 448,
    +     torch.nan,
    +     inside.to(torch.float8_e4m3fn).to(weight.dtype),
    + )

    e4m3_overflows_to_infinity: What is beyond the largest number becomes the largest number.
    - inside.to(torch.float8_e4m3fn).to(weight.dtype)
    + torch.where(
    +     (weight / e4m3_scale).abs() > 448,
    +     weight.sign() * torch.inf,
    +     inside.to(torch.float8_e4m3fn).to(weight.dtype),
    + )

    e4m3_up_to_240: This is another E4M3 (fnuz), which ends at 240.
    - inside.to(torch.float8_e4m3fn)
    + inside.to(torch.float8_e4m3fnuz)

    e5m2: This is E5M2: two bits of mantissa in place of three.
    - inside.to(torch.float8_e4m3fn)
    + inside.to(torch.float8_e5m2)

    e4m3_as_whole_numbers: The steps of a floating format grow with the number. These are INT8's
        even steps.
    - inside.to(torch.float8_e4m3fn).to(weight.dtype)
    + inside.round()

    e4m3_scale_the_wrong_way: Divide by the scale before the cast and multiply after it.
    - (weight / e4m3_scale)
    + (weight * e4m3_scale)
    - .to(weight.dtype) * e4m3_scale
    + .to(weight.dtype) / e4m3_scale

    e4m3_not_scaled_back: What the codes mean includes the scale: multiply after the cast.
    - .to(weight.dtype) * e4m3_scale
    + .to(weight.dtype)

    nf4_as_uniform_int4: NF4's numbers are not evenly spaced: there is a table of them.
    - torch.tensor(NF4, dtype=weight.dtype)
    + torch.linspace(-1, 1, 16, dtype=weight.dtype)

    nf4_one_scale_for_the_tensor: NF4 has a scale for each group, too.
    - groups.abs().amax(-1, keepdim=True)
    + groups.abs().amax()

    nf4_largest_without_magnitude: The largest magnitude may be that of a negative weight.
    - groups.abs().amax(-1, keepdim=True)
    + groups.amax(-1, keepdim=True)
    - torch.where(largest > 0, largest, 1.0)
    + torch.where(largest != 0, largest, 1.0)

    nf4_scaled_by_the_spread: The table ends at ±1, so the scale is the largest magnitude, not the
        standard deviation.
    - groups.abs().amax(-1, keepdim=True)
    + groups.std(-1, keepdim=True)

    nf4_rounded_down: Take the nearest number of the table, not the next one below.
    - ((groups / largest)[..., None] - table).abs().argmin(-1)
    + (torch.searchsorted(table, groups / largest, right=True) - 1).clamp(0, 15)

    int4_is_4_bits: The scale and the zero of each group are stored, too.
    - 4 + (16 + 4) / group_size
    + 4.0

    zero_points_are_free: A zero point takes 4 bits a group.
    - 4 + (16 + 4) / group_size
    + 4 + 16 / group_size

    scales_of_32_bits: INT4's scales are stored in 16 bits here.
    - 4 + (16 + 4) / group_size
    + 4 + (32 + 4) / group_size

    nf4_is_4_bits: NF4 stores a scale of 32 bits for each group.
    - 4 + 32 / group_size
    + 4.0

    bits_of_a_group: These are the bits of a group. Asked are the bits of one weight.
    - 4 + (16 + 4) / group_size
    + 4.0 * group_size + 20
    - 4 + 32 / group_size
    + 4.0 * group_size + 32

    e4m3_counts_its_scale: E4M3 has one scale for the whole matrix here, which counts as 0 bits.
    - (e4m3, 8.0)
    + (e4m3, 8 + 32 / group_size)

    clamped_before_the_scale: 448 is the largest code, not the largest weight: divide, then clamp.
    - (weight / e4m3_scale).clamp(-448, 448)
    + weight.clamp(-448, 448) / e4m3_scale

    e4m3_scale_not_used: The scale of E4M3 is given. You choose another one.
    - inside = (weight / e4m3_scale).clamp(-448, 448)
    + e4m3_scale = weight.abs().max() / 448
    + inside = (weight / e4m3_scale).clamp(-448, 448)

    scale_from_1e8_on: A group of tiny weights has a tiny scale. Only a group of zeros has none.
    - scale = torch.where(scale > 0, scale, 1.0)
    + scale = scale.clamp(min=1e-8)

    largest_from_1e8_on: A group of tiny weights has a tiny scale. Only a group of zeros has none.
    - largest = torch.where(largest > 0, largest, 1.0)
    + largest = largest.clamp(min=1e-8)

    e4m3_by_float16: Rounded to 16 bits first, a number may come to the middle of two of E4M3's, and go
        to the wrong one.
    - inside.to(torch.float8_e4m3fn)
    + inside.half().to(torch.float8_e4m3fn)

    e4m3_by_bfloat16: Rounded to 16 bits first, a number may come to the middle of two of E4M3's, and go
        to the wrong one.
    - inside.to(torch.float8_e4m3fn)
    + inside.bfloat16().to(torch.float8_e4m3fn)

    nf4_by_float16: In 16 bits the distances to two numbers of the table may be equal that are not.
    - nearest = ((groups / largest)[..., None] - table).abs().argmin(-1)
    + nearest = ((groups / largest).half()[..., None] - table.half()).abs().argmin(-1)

    int4_by_float16: In 16 bits a ratio just above a half is a half, and goes to the even code.
    - codes = (torch.round(groups / scale) + zero).clamp(0, 15)
    + codes = (torch.round((groups / scale).half()).double() + zero).clamp(0, 15)

    nvfp4_without_the_scale_of_the_matrix: The scale of the matrix moves the scales of the groups to
        where E4M3 is fine: the largest of them becomes 448.
    - whole = weight.abs().amax() / (6 * 448)
    + whole = 1.0

    nvfp4_largest_scale_is_1: The scale of the matrix makes the largest of the others 448, not 1.
    - weight.abs().amax() / (6 * 448)
    + weight.abs().amax() / 6

    nvfp4_codes_by_the_scale_before_rounding: Divide by the scale as it is stored: the codes make up
        for its rounding.
    - closest = ((groups / step)[..., None] - floats).abs().argmin(-1)
    + closest = ((groups / (largest / 6))[..., None] - floats).abs().argmin(-1)

    nvfp4_scales_not_rounded: A group's scale is stored as E4M3.
    - step = stored.to(weight.dtype) * whole
    + step = wanted * whole

    mxfp4: A power of two for each group is MXFP4. NVFP4's scale is an E4M3 number.
    - step = stored.to(weight.dtype) * whole
    + step = torch.exp2(torch.floor(torch.log2(largest)) - 2)

    nvfp4_one_scale_for_a_row: NVFP4 has a scale for each group.
    - wanted = largest / 6 / whole
    + wanted = largest.amax(1, keepdim=True) / 6 / whole

    nvfp4_is_4_bits: Each group of NVFP4 stores a scale of 8 bits, too.
    - 4 + 8 / group_size
    + 4.0

    nvfp4_groups_of_16: NVFP4 files have groups of 16. Here a scale serves group_size weights.
    - 4 + 8 / group_size
    + 4 + 8 / 16

    nvfp4_scales_of_16_bits: NVFP4's scales are stored in 8 bits.
    - 4 + 8 / group_size
    + 4 + 16 / group_size
    """,
)


@answers.alternative("18.1")
def group_by_group(weight, group_size, e4m3_scale):
    int4, nf4, nvfp4 = [], [], []
    floats, whole = torch.tensor(E2M1, dtype=torch.float64), weight.abs().max() / 6 / 448
    table = torch.tensor(NF4, dtype=torch.float64)
    for row in weight:
        for group in row.split(group_size):
            if not group.any():
                int4.append(group)
                nf4.append(group)
                nvfp4.append(group)
                continue
            low, high = group.min().clamp(max=0), group.max().clamp(min=0)
            scale = (high - low) / 15
            zero = (-low / scale).round()
            codes = torch.clamp((group / scale).round() + zero, min=0, max=15)
            int4.append((codes - zero) * scale)
            largest = group.abs().max()
            middles = (table[1:] + table[:-1]) / 2
            nf4.append(table[torch.bucketize(group / largest, middles)] * largest)
            scale = (largest / whole / 6).clamp(min=2**-9).to(torch.float8_e4m3fn).double()
            middles = (floats[1:] + floats[:-1]) / 2
            codes = torch.bucketize(group / scale / whole, middles)
            nvfp4.append(floats[codes] * whole * scale)
    e4m3 = (weight / e4m3_scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * e4m3_scale
    return {
        "e4m3": (e4m3, 8.0),
        "int4": (torch.cat(int4).view_as(weight), (4 * group_size + 20) / group_size),
        "nf4": (torch.cat(nf4).view_as(weight), (4 * group_size + 32) / group_size),
        "nvfp4": (torch.cat(nvfp4).view_as(weight), (4 * group_size + 8) / group_size),
    }


@answers.alternative("18.1")
def e4m3_by_exponents(weight, group_size, e4m3_scale):
    """E4M3 without the data type: a mantissa of three bits, the smallest exponent -6."""
    ratio = weight / e4m3_scale
    exponent = (torch.frexp(ratio).exponent - 1).clamp(min=-6)
    step = torch.ldexp(torch.ones_like(ratio), exponent - 3)
    e4m3 = (torch.round(ratio / step) * step).clamp(-448, 448) * e4m3_scale
    return round_to_formats(weight, group_size, e4m3_scale) | {"e4m3": (e4m3, 8.0)}


# ---------------------------------------------------------------- 18.2 two codes in a byte

answers.slips(
    "18.2",
    """
    NibblesSwapped: Your nibbles are swapped: the first half of a group is in the low bits.
    - (low | high << 4)
    + (high | low << 4)
    - [halves & 15, halves >> 4]
    + [halves >> 4, halves & 15]

    NibblesSwappedWhenRead: You pack into the low bits first and read the high bits first.
    - [halves & 15, halves >> 4]
    + [halves >> 4, halves & 15]

    PlusBeforeShift: In Python + binds tighter than <<, so low + high << 4 shifts both halves. Write
        low | high << 4.
    - (low | high << 4)
    + (low + high << 4)

    NeighboursShareAByte: Neighbours share a byte in your layout. Here column i and column i + half
        of a group do.
    - stored.unflatten(1, (-1, group_size)).chunk(2, dim=-1)
    + stored[:, ::2], stored[:, 1::2]
    - torch.cat([halves & 15, halves >> 4], dim=-1)
    + torch.stack([halves & 15, halves >> 4], dim=-1).flatten(2)

    HalvesOfARow: The two halves are those of a group, not those of the whole row.
    - stored.unflatten(1, (-1, group_size)).chunk(2, dim=-1)
    + stored.chunk(2, dim=-1)
    - halves = self.packed.unflatten(1, (-1, self.group_size // 2))
    + halves = self.packed
    - torch.cat([halves & 15, halves >> 4], dim=-1)
    + torch.cat([halves & 15, halves >> 4], dim=-1).unflatten(1, (-1, self.group_size))

    OneCodeInAByte: You store one code in a byte. Two fit: the second one is shifted up by 4.
    - (low | high << 4).flatten(1)
    + stored
    - halves = self.packed.unflatten(1, (-1, self.group_size // 2))
    +
    - torch.cat([halves & 15, halves >> 4], dim=-1)
    + self.packed.unflatten(1, (-1, self.group_size))

    HighHalfNotShifted: The high half was shifted up by 4, so it has to be shifted down again.
    - halves >> 4
    + halves & 240

    LowHalfNotMasked: A byte's low half has to be cut out with a mask.
    - halves & 15
    + halves

    GroupsIgnoreTheOrder: Your groups are runs of the matrix's columns. With act-order they are runs
        of stored columns.
    - codes if order is None else codes[:, order]
    + codes
    - if self.order is not None:
    -     x = x[:, self.order]

    OrderTheOtherWayRound: Stored column j is column order[j] of the matrix, not the other way
        round.
    - codes[:, order]
    + codes[:, order.argsort()]
    - x[:, self.order]
    + x[:, self.order.argsort()]

    InputsNotReordered: The columns are stored in another order, so the inputs must follow it.
    - if self.order is not None:
    -     x = x[:, self.order]

    InputScalesForgotten: AWQ's scales were applied to one side only: the matrix was multiplied, so
        divide the inputs.
    - if self.input_scales is not None:
    -     x = x / self.input_scales

    InputsMultiplied: Matrix and inputs are both multiplied by AWQ's scales. The two have to cancel.
    - x / self.input_scales
    + x * self.input_scales

    InputScalesInStoredOrder: input_scales are in the order of the matrix's columns: divide before
        you change the order.
    - if self.input_scales is not None:
    -     x = x / self.input_scales
    +
    - x = x[:, self.order]
    + x = x[:, self.order]
    - return x @ stored.T
    + if self.input_scales is not None:
    +     x = x / self.input_scales
    + return x @ stored.T

    ZerosForgotten: Subtract the zero point of each group from its codes.
    - (codes - self.zeros[..., None].float())
    + codes

    ZerosOffByOne: Your zero point is off by one: code == zero must mean 0.0.
    - (codes - self.zeros[..., None].float())
    + (codes - self.zeros[..., None].float() - 1)

    ZerosAreEight: All of your zero points are 8. That is the symmetric format.
    - (codes - self.zeros[..., None].float())
    + (codes - 8)

    ScaledBeforeTheZero: The zero point counts codes: subtract it before you multiply by the scale.
    - (codes - self.zeros[..., None].float()) * self.scales[..., None]
    + codes * self.scales[..., None] - self.zeros[..., None].float()

    SubtractedInBytes: uint8 minus uint8 wraps around below 0. Convert first.
    - torch.cat([halves & 15, halves >> 4], dim=-1).float()
    + torch.cat([halves & 15, halves >> 4], dim=-1)
    - (codes - self.zeros[..., None].float())
    + (codes - self.zeros[..., None]).float()

    SignedNibbles: The codes are 0 to 15: bit 3 is no sign.
    - (codes - self.zeros[..., None].float())
    + (torch.where(codes > 7, codes - 16, codes) - self.zeros[..., None].float())

    GroupsInterleaved: Column k belongs to group k // group_size.
    - ((codes - self.zeros[..., None].float()) * self.scales[..., None]).flatten(1)
    + codes.transpose(1, 2).reshape(codes.shape)
    + stored = (stored - self.zeros[..., None].float()) * self.scales[..., None]
    + stored = stored.reshape(codes.mT.shape).mT.flatten(1)

    FirstScaleForAll: All groups have the scale and the zero of the first one of the row.
    - (codes - self.zeros[..., None].float()) * self.scales[..., None]
    + (codes - self.zeros[:, :1, None].float()) * self.scales[:, :1, None]

    ProductIn16Bits: The product is asked in float32: 16 bits lose too much.
    - return x @ stored.T
    + return x.bfloat16().float() @ stored.bfloat16().float().T

    KeepsTheMatrix: You keep the dequantized matrix as well: it is eight times as large as what you
        packed.
    - self.packed = (low | high << 4).flatten(1)
    + self.packed = (low | high << 4).flatten(1)
    + whole = stored.unflatten(1, (-1, group_size)).float() - zeros[..., None].float()
    + self.matrix = (whole * scales[..., None]).flatten(1)
    - return x @ stored.T
    + return x @ self.matrix.T

    GroupByGroup: You go through the groups in Python. All of them unpack in one operation.
    - return x @ stored.T
    + groups = zip(x.split(self.group_size, 1), stored.split(self.group_size, 1))
    + return sum(part @ columns.T for part, columns in groups)

    keeps_the_matrix: The first call leaves an unpacked matrix in the layer, eight times the bytes.
    - return x @ stored.T
    + self.matrix = stored
    + return x @ stored.T

    keeps_it_in_a_dictionary: The first call leaves an unpacked matrix in the layer, eight times the
        bytes.
    - return x @ stored.T
    + self.cache = {"matrix": stored}
    + return x @ stored.T

    groups_of_the_example: The groups of the docstring's example have 4 columns, not those of all.
    - (-1, self.group_size // 2)
    + (-1, 2)

    order_of_the_way_back: The layer keeps the order that it was given, and no second one: argsort gives
        it when it is needed.
    - self.packed = (low | high << 4).flatten(1)
    + self.packed = (low | high << 4).flatten(1)
    + self.back = None if order is None else order.argsort()

    packed_in_place: `chunk` gives views of the codes that were given, and |= writes into them.
    - self.packed = (low | high << 4).flatten(1)
    + low |= high << 4
    + self.packed = low.flatten(1)
    """,
)


@answers.alternative("18.2")
class ByArithmetic:
    """Bytes by multiplying and adding, the matrix put back into its own order."""

    def __init__(self, codes, scales, zeros, group_size, order=None, input_scales=None):
        self.group_size, self.order, self.input_scales = group_size, order, input_scales
        self.scales, self.zeros = scales, zeros
        if order is not None:
            codes = codes.index_select(1, order)
        groups = codes.view(len(codes), -1, 2, group_size // 2).int()
        self.packed = (groups[:, :, 0] + 16 * groups[:, :, 1]).to(torch.uint8).flatten(1)

    def __call__(self, x):
        halves = self.packed.view(len(self.packed), -1, 1, self.group_size // 2)
        codes = torch.cat([halves % 16, halves // 16], dim=2).flatten(2)
        matrix = (codes.float() * self.scales[..., None]).flatten(1)
        matrix -= (self.scales * self.zeros).repeat_interleave(self.group_size, 1)
        if self.order is not None:
            matrix = matrix[:, self.order.argsort()]
        if self.input_scales is not None:
            matrix = matrix / self.input_scales
        return torch.nn.functional.linear(x, matrix)


@answers.alternative("18.2")
class HalfByHalf:
    """Never a whole matrix: the low halves meet their inputs, then the high ones, the zeros."""

    def __init__(self, codes, scales, zeros, group_size, order=None, input_scales=None):
        N, K = codes.shape
        self.scales, self.zeros, self.group_size = scales, zeros, group_size
        self.order = torch.arange(K) if order is None else order
        self.input_scales = torch.ones(K) if input_scales is None else input_scales
        pairs = codes[:, self.order].reshape(N, K // group_size, 2, group_size // 2)
        self.packed = torch.bitwise_or(pairs[:, :, 0], pairs[:, :, 1] * 16).reshape(N, K // 2)
        if order is None:
            self.order = None
        if input_scales is None:
            self.input_scales = None

    def __call__(self, x):
        if self.input_scales is not None:
            x = x * self.input_scales.reciprocal()
        if self.order is not None:
            x = torch.index_select(x, 1, self.order)
        low, high = x.unflatten(1, (-1, 2, self.group_size // 2)).unbind(2)
        packed = self.packed.unflatten(1, (-1, self.group_size // 2))
        sums = torch.einsum("tgi,ngi->tng", low, (packed & 15).float())
        sums += torch.einsum("tgi,ngi->tng", high, (packed >> 4).float())
        sums -= (low + high).sum(-1)[:, None] * self.zeros.float()
        return (sums * self.scales).sum(-1)


# ---------------------------------------------------------------- 18.3 GPTQ

answers.slips(
    "18.3",
    """
    no_error_feedback: Nothing is passed on: this is round to nearest. Later columns can make up for
        the error.
    - weight[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]

    the_error_is_added: Later columns lose e · U[j, k]: yours make the error larger.
    - weight[:, j + 1 :] -=
    + weight[:, j + 1 :] +=

    code_without_its_scale: A code means code · scale: take that from the weight, not the code.
    - codes[:, j] * scale)
    + codes[:, j])

    not_divided_by_the_diagonal: e is the error divided by U[j, j].
    - / factor[j, j]

    the_next_column_alone: All later columns share the error, not just the next one.
    - weight[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
    + weight[:, j + 1 : j + 2] -= error[:, None] * factor[j, j + 1 : j + 2]

    feedback_ends_at_the_group: A group shares a scale. The error goes to all later columns, of
        later groups as well.
    - weight[:, j + 1 :] -= error[:, None] * factor[j, j + 1 :]
    + end = (group + 1) * group_size
    + weight[:, j + 1 : end] -= error[:, None] * factor[j, j + 1 : end]

    a_row_of_the_inverse: A row of H⁻¹ is right for the first column alone. Row j of U knows which
        columns are done.
    - factor[j, j + 1 :]
    + (factor.T @ factor)[j, j + 1 :]

    shared_out_evenly: How much a column takes depends on how its input goes together with input j:
        U[j, k].
    - error[:, None] * factor[j, j + 1 :]
    + error[:, None] / weight.shape[1]

    scales_from_the_original: A group's scale is chosen when the group begins, from the weights as
        they are by then.
    - weight = weight.clone()
    + original, weight = weight, weight.clone()
    - weight[:, j : j + group_size].abs()
    + original[:, j : j + group_size].abs()

    scales_at_every_column: One scale holds for a whole group: choose it at its first column and
        leave it.
    - if j % group_size == 0:  # because the columns of this group hold all feedback so far
    -     scales[:, group] = weight[:, j : j + group_size].abs().amax(-1) / 7
    + scales[:, group] = weight.unflatten(1, (-1, group_size))[:, group].abs().amax(-1) / 7

    one_scale_for_a_row: The scale is that of the group's columns, not of the whole row.
    - weight[:, j : j + group_size].abs()
    + weight.abs()

    one_scale_for_the_tensor: Each row has scales of its own, and each group of it.
    - weight[:, j : j + group_size].abs().amax(-1)
    + weight.abs().max()

    divided_by_eight: The largest code above 0 is 7.
    - .abs().amax(-1) / 7
    + .abs().amax(-1) / 8

    codes_from_0_to_15: The format is symmetric: codes run from -8 to 7.
    - .clamp(-8, 7)
    + .clamp(0, 15)

    codes_beyond_four_bits: Feedback may make a weight larger than what the scale was chosen for:
        clamp to -8 … 7.
    - .clamp(-8, 7)

    cut_off: Round to the nearest code.
    - torch.round(ratio)
    + torch.trunc(ratio)

    a_row_of_zeros_is_nan: A group of zeros has scale 0, and 0 / 0 is NaN, which then spreads to
        later columns.
    - torch.where(scale > 0, scale, 1.0)
    + scale
    - codes[:, j] = torch.round(ratio).clamp(-8, 7).long()
    - error = (weight[:, j] - codes[:, j] * scale)
    + code = torch.round(ratio).clamp(-8, 7)
    + codes[:, j] = code.nan_to_num(0).long()
    + error = (weight[:, j] - code * scale)

    error_of_the_original: The error is that of the column as it is now: what came from the left is
        in it.
    - weight = weight.clone()
    + original, weight = weight, weight.clone()
    - error = (weight[:, j]
    + error = (original[:, j]

    in_place: Your answer is right, but the caller's weight has changed. Work on a copy.
    - weight = weight.clone()

    minus_8_left_out: Codes reach from -8 to 7.
    - clamp(-8, 7)
    + clamp(-7, 7)

    error_before_the_clamp: e is what the code misses, so it counts what the clamp cut off.
    - (weight[:, j] - codes[:, j] * scale)
    + (weight[:, j] - torch.round(ratio) * scale)

    halves_away_from_0: torch.round takes a half to the even neighbour.
    - torch.round(ratio)
    + (ratio.sign() * (ratio.abs() + 0.5).floor())

    scale_from_1e8_on: A group of tiny weights has a tiny scale, and it has to be divided by it.
    - ratio = weight[:, j] / torch.where(scale > 0, scale, 1.0)
    + ratio = weight[:, j] / scale.clamp(min=1e-8)
    """,
)


@answers.wrong("18.3", "You go through the rows in Python. All rows take the same step at once.")
def row_by_row(weight, factor, group_size):
    rows = [gptq(row[None], factor, group_size) for row in weight]
    codes, scales = zip(*rows)
    return torch.cat(codes), torch.cat(scales)


@answers.alternative("18.3")
def lazily(weight, factor, group_size):
    """Blocks, as the paper's algorithm 1: errors of a group reach later groups all at once."""
    now, codes, scales = weight.clone(), [], []
    for start in range(0, weight.shape[1], group_size):
        end = start + group_size
        block = now[:, start:end].clone()
        scale = block.abs().amax(1) / 7
        errors = torch.zeros_like(block)
        for i in range(group_size):
            safe = scale.masked_fill(scale == 0, 1)
            column = (block[:, i] / safe).round().clamp(-8, 7)
            codes.append(column.long())
            errors[:, i] = (block[:, i] - column * scale) / factor[start + i, start + i]
            block[:, i:] -= torch.outer(errors[:, i], factor[start + i, start + i : end])
        now[:, end:] -= errors @ factor[start:end, end:]
        scales.append(scale)
    return torch.stack(codes, 1), torch.stack(scales, 1)


@answers.alternative("18.3")
def with_unit_rows(weight, factor, group_size):
    """Each row of U divided by its diagonal once, so the error itself is passed on."""
    unit = factor / factor.diagonal()[:, None]
    columns = [column.clone() for column in weight.unbind(1)]
    codes, scales = [], []
    for j in range(len(columns)):
        if not j % group_size:
            group = torch.stack(columns[j : j + group_size])
            scales.append(group.abs().max(0).values / 7)
        scale = scales[-1]
        code = torch.where(scale > 0, (columns[j] / scale).round().clamp(-8, 7), 0)
        codes.append(code.to(torch.int64))
        error = columns[j] - code * scale
        for k in range(j + 1, len(columns)):
            columns[k] = columns[k] - error * unit[j, k]
    return torch.stack(codes, dim=1), torch.stack(scales, dim=1)


# ---------------------------------------------------------------- 18.4 the kernel

answers.slips(
    "18.4",
    """
    nibbles_swapped: The low four bits belong to the first half of the group's inputs.
    - tl.load(x_ptr + column)
    + tl.load(x_ptr + column + HALF)
    - tl.load(x_ptr + column + HALF)
    + tl.load(x_ptr + column)

    neighbours: A byte holds column i and column i + half of its group, not two neighbours.
    - column = group * GROUP_SIZE + byte
    + column = group * GROUP_SIZE + 2 * byte
    - column + HALF
    + column + 1

    inputs_counted_as_bytes: A group has half as many bytes as inputs: its inputs begin at group ·
        GROUP_SIZE.
    - column = group * GROUP_SIZE + byte
    + column = group * HALF + byte

    halves_of_a_row: The two halves are those of a group, not those of the whole row.
    - column = group * GROUP_SIZE + byte
    + column = group * HALF + byte
    - column + HALF
    + column + K // 2

    low_not_masked: The low four bits have to be cut out: & 15.
    - (packed & 15)
    + packed

    high_not_shifted: The high four bits have to be shifted down: >> 4.
    - (packed >> 4)
    + (packed & 240)

    low_half_alone: Each byte holds two codes. The high ones are missing.
    - low * x_low[None, :] + high * x_high[None, :]
    + low * x_low[None, :]

    first_scale: Every group has its own scale and zero: + group.
    - scales_ptr + row * stride_group + group
    + scales_ptr + row * stride_group
    - zeros_ptr + row * stride_group + group
    + zeros_ptr + row * stride_group

    zero_forgotten: A code means (code - zero) · scale.
    - (packed & 15).to(tl.float32) - zero
    + (packed & 15).to(tl.float32)
    - (packed >> 4).to(tl.float32) - zero
    + (packed >> 4).to(tl.float32)

    zero_off_by_one: Your zero point is off by one: code == zero must add nothing.
    - zero.to(tl.float32)[:, None]
    + zero.to(tl.float32)[:, None] + 1.0

    zero_is_8: All of your zero points are 8. That is the symmetric format.
    - (packed & 15).to(tl.float32) - zero
    + (packed & 15).to(tl.float32) - 8.0
    - (packed >> 4).to(tl.float32) - zero
    + (packed >> 4).to(tl.float32) - 8.0

    zero_once_a_group: If you take the zero out of the sum, it is multiplied by the sum of the
        group's inputs.
    - (packed & 15).to(tl.float32) - zero
    + (packed & 15).to(tl.float32)
    - (packed >> 4).to(tl.float32) - zero
    + (packed >> 4).to(tl.float32)
    - tl.sum(low * x_low[None, :] + high * x_high[None, :], axis=1)
    + (
    +     tl.sum(low * x_low[None, :] + high * x_high[None, :], axis=1) - tl.sum(zero, axis=1)
    + )

    wraps_below_zero: uint8 minus uint8 wraps around below 0. Convert to float32 first.
    - (packed & 15).to(tl.float32) - zero
    + ((packed & 15) - zero.to(tl.uint8)).to(tl.float32)

    scaled_before_the_zero: The zero counts codes: subtract it before you scale.
    - (packed & 15).to(tl.float32) - zero
    + (packed & 15).to(tl.float32) * scale.to(tl.float32)[:, None] - zero
    - (packed >> 4).to(tl.float32) - zero
    + (packed >> 4).to(tl.float32) * scale.to(tl.float32)[:, None] - zero
    - acc += scale.to(tl.float32) * tl.sum
    + acc += tl.sum

    scaled_at_the_end: The scale of a group multiplies that group's sum alone.
    - acc += scale.to(tl.float32) * tl.sum(low * x_low[None, :] + high * x_high[None, :], axis=1)
    + acc += tl.sum(low * x_low[None, :] + high * x_high[None, :], axis=1)
    + acc *= scale.to(tl.float32)

    overwritten: Each group adds to acc: `=` forgets the groups in front.
    - acc += scale
    + acc = scale

    groups_of_bytes: A group of GROUP_SIZE codes takes half as many bytes.
    - group * HALF + byte[None, :]
    + group * GROUP_SIZE % (K // 2) + byte[None, :]

    the_last_group_is_left_out: Walk over all K // GROUP_SIZE groups.
    - range(0, K // GROUP_SIZE)
    + range(0, K // GROUP_SIZE - 1)

    rows_of_the_first_program: Program p has rows p · BLOCK_N and on.
    - tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    + tl.arange(0, BLOCK_N)

    unmasked: Rows beyond N are outside of the tensors: their loads need a mask.
    - is_row = row < N
    + is_row = row >= 0
    - tl.store(out_ptr + row, acc, mask=is_row)
    + tl.store(out_ptr + row, acc, mask=row < N)

    scales_without_mask: Rows beyond N have no scales: their load needs a mask, too.
    - tl.load(scales_ptr + row * stride_group + group, mask=is_row, other=0.0)
    + tl.load(scales_ptr + row * stride_group + group)

    zeros_without_mask: Rows beyond N have no zeros: their load needs a mask, too.
    - tl.load(zeros_ptr + row * stride_group + group, mask=is_row, other=0)
    + tl.load(zeros_ptr + row * stride_group + group)

    dense_rows: Rows may be apart: use stride_packed and stride_group.
    - row[:, None] * stride_packed
    + row[:, None] * (K // 2)
    - scales_ptr + row * stride_group
    + scales_ptr + row * (K // GROUP_SIZE)
    - zeros_ptr + row * stride_group
    + zeros_ptr + row * (K // GROUP_SIZE)

    loaded_twice: You load every byte twice. Unpack both codes from one load.
    - packed = tl.load(packed_ptr + offset, mask=is_row[:, None], other=0)
    + packed = tl.load(packed_ptr + offset, mask=is_row[:, None], other=0)
    + packed = tl.load(packed_ptr + offset, mask=is_row[:, None], other=0)

    sixteen_bits: Add up in float32: float16 loses the small terms.
    - high * x_high[None, :], axis=1)
    + high * x_high[None, :], axis=1)
    + acc = acc.to(tl.float16).to(tl.float32)

    bytes_wrap: uint8 minus uint8 wraps around below 0. Convert first.
    - zero = zero.to(tl.float32)[:, None]
    - low = (packed & 15).to(tl.float32) - zero
    - high = (packed >> 4).to(tl.float32) - zero
    + zero = zero[:, None]
    + low = ((packed & 15) - zero).to(tl.float32)
    + high = ((packed >> 4) - zero).to(tl.float32)

    shifted_as_signed: A shift of a signed byte keeps its sign: codes from 8 on become negative.
    - high = (packed >> 4)
    + high = (packed.to(tl.int8, bitcast=True) >> 4)
    """,
)


def gemv(x, packed, scales, zeros, group_size, *, kernel, rows=8):
    """The wrapper of 18.4 around a kernel."""
    out = torch.empty(len(packed), dtype=torch.float32, device=x.device)
    kernel[(triton.cdiv(len(packed), rows),)](
        x,
        packed,
        scales,
        zeros,
        out,
        len(packed),
        len(x),
        packed.stride(0),
        scales.stride(0),
        GROUP_SIZE=group_size,
        BLOCK_N=rows,
    )
    return out


def in_pytorch(x, packed, scales, zeros, group_size):
    halves = packed.unflatten(1, (-1, group_size // 2))
    codes = torch.cat([halves & 15, halves >> 4], dim=-1).float()
    matrix = (codes - zeros[..., None].float()) * scales[..., None].float()
    return matrix.flatten(1) @ x.float()


attacks(answers, "18.4", in_pytorch)


@triton.jit
def zeros_outside_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    N,
    K,
    stride_packed,
    stride_group,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The zero times the sum of the inputs, once for each group."""
    HALF: tl.constexpr = GROUP_SIZE // 2
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N, HALF), tl.float32)
    for group in range(0, K // GROUP_SIZE):
        at = group * HALF + tl.arange(0, HALF)[None, :]
        packed = tl.load(
            packed_ptr + n[:, None] * stride_packed + at, mask=(n < N)[:, None], other=0
        )
        first = x_ptr + group * GROUP_SIZE + tl.arange(0, HALF)
        x_low, x_high = tl.load(first).to(tl.float32), tl.load(first + HALF).to(tl.float32)
        scale = tl.load(scales_ptr + n * stride_group + group, mask=n < N, other=0.0)
        zero = tl.load(zeros_ptr + n * stride_group + group, mask=n < N, other=0)
        codes = (packed % 16).to(tl.float32) * x_low[None, :]
        codes += (packed // 16).to(tl.float32) * x_high[None, :]
        codes -= zero.to(tl.float32)[:, None] * (x_low + x_high)[None, :]
        acc += codes * scale.to(tl.float32)[:, None]
    tl.store(out_ptr + n, tl.sum(acc, axis=1), mask=n < N)


answers.alternative("18.4")(partial(gemv, kernel=zeros_outside_kernel))


@triton.jit
def one_row_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    N,
    K,
    stride_packed,
    stride_group,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program per row, so nothing needs a mask."""
    n = tl.program_id(0)
    HALF: tl.constexpr = GROUP_SIZE // 2
    total = 0.0
    for group in range(0, K // GROUP_SIZE):
        byte = tl.arange(0, HALF)
        packed = tl.load(packed_ptr + n * stride_packed + group * HALF + byte).to(tl.int32)
        scale = tl.load(scales_ptr + n * stride_group + group).to(tl.float32)
        zero = tl.load(zeros_ptr + n * stride_group + group).to(tl.int32)
        low = scale * ((packed & 15) - zero).to(tl.float32)
        high = scale * ((packed >> 4) - zero).to(tl.float32)
        x_low = tl.load(x_ptr + group * GROUP_SIZE + byte).to(tl.float32)
        x_high = tl.load(x_ptr + group * GROUP_SIZE + HALF + byte).to(tl.float32)
        total += tl.sum(low * x_low) + tl.sum(high * x_high)
    tl.store(out_ptr + n, total)


answers.alternative("18.4")(partial(gemv, kernel=one_row_kernel, rows=1))
