"""Wrong answers to lesson 18's exercises: real slips, the museum's among them, and the hint for
whoever made them.
"""

from functools import partial

import torch

from lessons.toolbox.kernels.triton_ import tl, triton
from solutions.l18_weight_quantization import NF4
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 18.1 three grids

TABLE = torch.tensor(NF4, dtype=torch.float64)
ZERO_BITS, SCALE_BITS = 4, 16


def ranges(groups, range_of="with zero"):
    """(the lowest, the highest) that the codes of each group have to reach."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if range_of == "with zero":
        return low.clamp(max=0), high.clamp(min=0)
    if range_of == "symmetric":
        most = torch.maximum(-low, high)
        return -most, most
    return low, high


def shared(low, high, per):
    """The range of a larger piece of the matrix, for each of its groups."""
    dims = {"group": (), "row": (1, 2), "tensor": (0, 1, 2)}[per]
    if not dims:
        return low, high
    return low.amin(dims, keepdim=True), high.amax(dims, keepdim=True)


def half_up(x):
    return torch.floor(x + 0.5)


def slipped_int4(
    groups,
    *,
    per="group",
    range_of="with zero",
    steps=15,
    to_whole=torch.round,
    zero_of=torch.round,
    off=0,
    fit="clamp",
    empty=1.0,
):
    """The values of int4 with some slips."""
    low, high = shared(*ranges(groups, range_of), per)
    scale = (high - low) / steps
    scale = torch.where(scale != 0, scale, empty)
    zero = zero_of(-low / scale)
    codes = to_whole(groups / scale) + zero
    codes = {
        "clamp": codes.clamp(0, 15),
        "none": codes,
        "wrap": codes % 16,
        "signed": codes.clamp(-8, 7),
    }[fit]
    return (codes - zero - off) * scale


def slipped_e4m3(
    weight, scale, *, kind=torch.float8_e4m3fn, beyond="saturates", divide=True, undo=True
):
    """The values of e4m3 with some slips."""
    ratio = weight / scale if divide else weight * scale
    inside = ratio.clamp(-448, 448)
    if kind == "whole":
        rounded = inside.round()
    else:
        rounded = inside.to(kind).to(weight.dtype)
    if beyond != "saturates":
        rounded = torch.where(ratio.abs() > 448, ratio.sign() * beyond, rounded)
    if not undo:
        return rounded
    return rounded * scale if divide else rounded / scale


def slipped_nf4(groups, *, table=TABLE, per="group", of="largest magnitude", choose="nearest"):
    """The values of nf4 with some slips."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    low, high = shared(low, high, per)
    largest = {
        "largest magnitude": torch.maximum(-low, high),
        "largest": high,
        "spread": groups.std(-1, keepdim=True),
    }[of]
    largest = torch.where(largest != 0, largest, 1.0)
    ratio = groups / largest
    if choose == "nearest":
        codes = (ratio[..., None] - table).abs().argmin(-1)
    else:  # the next one below
        codes = (torch.searchsorted(table, ratio, right=True) - 1).clamp(0, len(table) - 1)
    return table[codes] * largest


def formats(
    weight, group_size, e4m3_scale, *, int4=None, e4m3=None, nf4=None, bits=None, down=False
):
    """round_to_formats, with the slips of each format and other counts of bits."""
    if down:  # groups of neighbours in a column
        groups = weight.T.reshape(-1, 1, group_size)
    else:
        groups = weight.unflatten(1, (-1, group_size))

    def whole(values):
        if down:
            return values.reshape(weight.shape[::-1]).T
        return values.flatten(1)

    counts = {
        "int4": 4 + (SCALE_BITS + ZERO_BITS) / group_size,
        "e4m3": 8.0,
        "nf4": 4 + 32 / group_size,
    } | (bits(group_size, weight.numel()) if bits else {})
    values = {
        "int4": whole(slipped_int4(groups, **(int4 or {}))),
        "e4m3": slipped_e4m3(weight, e4m3_scale, **(e4m3 or {})),
        "nf4": whole(slipped_nf4(groups, **(nf4 or {}))),
    }
    return {name: (values[name], counts[name]) for name in values}


for name, slip, hint in [
    (
        "one_scale_for_the_tensor",
        dict(int4=dict(per="tensor")),
        "One scale for the whole matrix: every group has one of its own.",
    ),
    (
        "one_scale_for_a_row",
        dict(int4=dict(per="row")),
        "One scale for a whole row: that is per channel. Every group has one of its own.",
    ),
    (
        "groups_down_the_columns",
        dict(down=True),
        "A group is a run of neighbours in a row, along the inputs, not down the outputs.",
    ),
    (
        "zero_point_off_by_one",
        dict(int4=dict(off=1)),
        "Your zero point is off by one: the code that means 0.0 must give 0.0.",
    ),
    (
        "zero_point_not_whole",
        dict(int4=dict(zero_of=lambda x: x)),
        "The zero point is stored in 4 bits, so it is a whole number, and 0.0 has a code.",
    ),
    (
        "range_without_zero",
        dict(int4=dict(range_of="as it is")),
        "If all weights are positive, the zero point falls outside of 0 … 15: let the range hold 0.",
    ),
    (
        "symmetric",
        dict(int4=dict(range_of="symmetric")),
        "This range is as wide below 0 as above it, whatever the weights are. Use both ends.",
    ),
    (
        "sixteen_steps",
        dict(int4=dict(steps=16)),
        "16 codes have 15 steps between them.",
    ),
    (
        "truncated",
        dict(int4=dict(to_whole=torch.trunc)),
        "Round to the nearest code: cutting off makes the error twice as large.",
    ),
    (
        "halves_rounded_up",
        dict(int4=dict(to_whole=half_up, zero_of=half_up)),
        "torch.round takes a half to the even neighbour.",
    ),
    (
        "a_code_of_16",
        dict(int4=dict(fit="none")),
        "Both ends may round up, and then the largest weight gets code 16: clamp to 0 … 15.",
    ),
    (
        "codes_wrap_around",
        dict(int4=dict(fit="wrap")),
        "Code 16 keeps its low four bits alone and becomes 0: clamp first.",
    ),
    (
        "codes_as_signed",
        dict(int4=dict(fit="signed")),
        "With a zero point the codes are 0 to 15, not -8 to 7.",
    ),
    (
        "a_group_of_zeros_is_nan",
        dict(int4=dict(empty=0.0)),
        "A group of zeros has a range of 0, and 0 / 0 is NaN.",
    ),
    (
        "e4m3_overflows_to_nan",
        dict(e4m3=dict(beyond=torch.nan)),
        "E4M3 has no infinity, so a plain cast may give NaN beyond 448. Clamp before the cast.",
    ),
    (
        "e4m3_overflows_to_infinity",
        dict(e4m3=dict(beyond=torch.inf)),
        "What lies beyond the largest number becomes the largest number.",
    ),
    (
        "e4m3_up_to_240",
        dict(e4m3=dict(kind=torch.float8_e4m3fnuz)),
        "This is another E4M3 (fnuz), which ends at 240.",
    ),
    (
        "e5m2",
        dict(e4m3=dict(kind=torch.float8_e5m2)),
        "This is E5M2: two bits of mantissa in place of three.",
    ),
    (
        "e4m3_as_whole_numbers",
        dict(e4m3=dict(kind="whole")),
        "The steps of a floating format grow with the number. These are INT8's even steps.",
    ),
    (
        "e4m3_scale_the_wrong_way",
        dict(e4m3=dict(divide=False)),
        "Divide by the scale before the cast and multiply after it.",
    ),
    (
        "e4m3_not_scaled_back",
        dict(e4m3=dict(undo=False)),
        "What the codes mean includes the scale: multiply after the cast.",
    ),
    (
        "nf4_as_uniform_int4",
        dict(nf4=dict(table=torch.linspace(-1, 1, 16, dtype=torch.float64))),
        "NF4's numbers do not lie at even distances: there is a table of them.",
    ),
    (
        "nf4_one_scale_for_the_tensor",
        dict(nf4=dict(per="tensor")),
        "NF4 has a scale for each group, too.",
    ),
    (
        "nf4_largest_without_magnitude",
        dict(nf4=dict(of="largest")),
        "The largest magnitude may be that of a negative weight.",
    ),
    (
        "nf4_scaled_by_the_spread",
        dict(nf4=dict(of="spread")),
        "The table ends at ±1, so the scale is the largest magnitude, not the standard deviation.",
    ),
    (
        "nf4_rounded_down",
        dict(nf4=dict(choose="below")),
        "Take the nearest number of the table, not the next one below.",
    ),
    (
        "int4_is_4_bits",
        dict(bits=lambda size, total: {"int4": 4.0}),
        "The scale and the zero of each group are stored, too.",
    ),
    (
        "zero_points_are_free",
        dict(bits=lambda size, total: {"int4": 4 + SCALE_BITS / size}),
        "A zero point takes 4 bits a group.",
    ),
    (
        "scales_of_32_bits",
        dict(bits=lambda size, total: {"int4": 4 + (32 + ZERO_BITS) / size}),
        "INT4's scales are stored in 16 bits here.",
    ),
    (
        "nf4_is_4_bits",
        dict(bits=lambda size, total: {"nf4": 4.0}),
        "NF4 stores a scale of 32 bits for each group.",
    ),
    (
        "bits_of_a_group",
        dict(bits=lambda size, total: {"int4": 4.0 * size + 20, "nf4": 4.0 * size + 32}),
        "These are the bits of a group. Asked are the bits of one weight.",
    ),
    (
        "e4m3_counts_its_scale",
        dict(bits=lambda size, total: {"e4m3": 8 + 32 / size}),
        "E4M3 has one scale for the whole matrix here, which counts as 0 bits.",
    ),
]:
    answers.wrong("18.1", hint, name)(partial(formats, **slip))


@answers.alternative("18.1")
def group_by_group(weight, group_size, e4m3_scale):
    int4, nf4 = [], []
    for row in weight:
        for group in row.split(group_size):
            if not group.any():
                int4.append(group)
                nf4.append(group)
                continue
            low, high = group.min().clamp(max=0), group.max().clamp(min=0)
            scale = (high - low) / 15
            zero = (-low / scale).round()
            codes = torch.clamp((group / scale).round() + zero, min=0, max=15)
            int4.append((codes - zero) * scale)
            largest = group.abs().max()
            middles = (TABLE[1:] + TABLE[:-1]) / 2
            nf4.append(TABLE[torch.bucketize(group / largest, middles)] * largest)
    e4m3 = (weight / e4m3_scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * e4m3_scale
    return {
        "e4m3": (e4m3, 8.0),
        "int4": (torch.cat(int4).view_as(weight), (4 * group_size + 20) / group_size),
        "nf4": (torch.cat(nf4).view_as(weight), (4 * group_size + 32) / group_size),
    }


@answers.alternative("18.1")
def e4m3_by_exponents(weight, group_size, e4m3_scale):
    """E4M3 without the data type: a mantissa of three bits, the smallest exponent -6."""
    ratio = weight / e4m3_scale
    exponent = (torch.frexp(ratio).exponent - 1).clamp(min=-6)
    step = torch.ldexp(torch.ones_like(ratio), exponent - 3)
    e4m3 = (torch.round(ratio / step) * step).clamp(-448, 448) * e4m3_scale
    groups = weight.view(len(weight), -1, group_size)
    return {
        "int4": (slipped_int4(groups).view_as(weight), 4 + 20 / group_size),
        "e4m3": (e4m3, 8.0),
        "nf4": (slipped_nf4(groups).view_as(weight), 4 + 32 / group_size),
    }


# ---------------------------------------------------------------- 18.2 two codes in a byte


class Slipped:
    """PackedLinear, whose steps the wrong answers below replace."""

    def __init__(self, codes, scales, zeros, group_size, order=None, input_scales=None):
        self.scales, self.zeros, self.group_size = scales, zeros, group_size
        self.order, self.input_scales = order, input_scales
        self.packed = self.pack(self.stored(codes))

    def stored(self, codes):
        return codes if self.order is None else codes[:, self.order]

    def pack(self, codes):
        low, high = codes.unflatten(1, (-1, self.group_size)).chunk(2, dim=-1)
        return (low | high << 4).flatten(1)

    def unpack(self):
        halves = self.packed.unflatten(1, (-1, self.group_size // 2))
        return torch.cat([halves & 15, halves >> 4], dim=-1)  # [N, groups, group_size]

    def meant(self, codes):
        return (codes.float() - self.zeros[..., None].float()) * self.scales[..., None]

    def scaled(self, x):
        return x if self.input_scales is None else x / self.input_scales

    def ordered(self, x):
        return x if self.order is None else x[:, self.order]

    def __call__(self, x):
        return self.ordered(self.scaled(x)) @ self.meant(self.unpack()).flatten(1).T


@answers.wrong("18.2", "Your nibbles are swapped: the first half of a group lies in the low bits.")
class NibblesSwapped(Slipped):
    def pack(self, codes):
        packed = super().pack(codes)
        return packed >> 4 | packed << 4

    def unpack(self):
        return super().unpack().roll(self.group_size // 2, -1)


@answers.wrong("18.2", "You pack into the low bits first and read the high bits first.")
class NibblesSwappedWhenRead(Slipped):
    def unpack(self):
        return super().unpack().roll(self.group_size // 2, -1)


@answers.wrong(
    "18.2",
    "Neighbours share a byte in your layout. Here column i and column i + half of a group do.",
)
class NeighboursShareAByte(Slipped):
    def pack(self, codes):
        return codes[:, ::2] | codes[:, 1::2] << 4

    def unpack(self):
        pairs = torch.stack([self.packed & 15, self.packed >> 4], dim=-1)
        return pairs.view(len(pairs), -1, self.group_size)


@answers.wrong("18.2", "The two halves are those of a group, not those of the whole row.")
class HalvesOfARow(Slipped):
    def pack(self, codes):
        low, high = codes.chunk(2, dim=1)
        return low | high << 4

    def unpack(self):
        row = torch.cat([self.packed & 15, self.packed >> 4], dim=1)
        return row.unflatten(1, (-1, self.group_size))


@answers.wrong("18.2", "You store one code in a byte. Two fit: the second one is shifted up by 4.")
class OneCodeInAByte(Slipped):
    def pack(self, codes):
        return codes

    def unpack(self):
        return self.packed.unflatten(1, (-1, self.group_size))


@answers.wrong("18.2", "The high half was shifted up by 4, so it has to be shifted down again.")
class HighHalfNotShifted(Slipped):
    def unpack(self):
        halves = self.packed.unflatten(1, (-1, self.group_size // 2))
        return torch.cat([halves & 15, halves & 240], dim=-1)


@answers.wrong("18.2", "A byte's low half has to be cut out with a mask.")
class LowHalfNotMasked(Slipped):
    def unpack(self):
        halves = self.packed.unflatten(1, (-1, self.group_size // 2))
        return torch.cat([halves, halves >> 4], dim=-1)


@answers.wrong(
    "18.2",
    "Your groups are runs of the matrix's columns. With act-order they are runs of stored columns.",
)
class GroupsIgnoreTheOrder(Slipped):
    def stored(self, codes):
        return codes

    def ordered(self, x):
        return x


@answers.wrong("18.2", "Stored column j is column order[j] of the matrix, not the other way round.")
class OrderTheOtherWayRound(Slipped):
    def stored(self, codes):
        return codes if self.order is None else codes[:, self.order.argsort()]

    def ordered(self, x):
        return x if self.order is None else x[:, self.order.argsort()]


@answers.wrong("18.2", "The columns are stored in another order, so the inputs must follow it.")
class InputsNotReordered(Slipped):
    def ordered(self, x):
        return x


@answers.wrong(
    "18.2",
    "AWQ's scales were applied to one side only: the matrix was multiplied, so divide the inputs.",
)
class InputScalesForgotten(Slipped):
    def scaled(self, x):
        return x


@answers.wrong(
    "18.2", "Matrix and inputs are both multiplied by AWQ's scales. The two have to cancel."
)
class InputsMultiplied(Slipped):
    def scaled(self, x):
        return x if self.input_scales is None else x * self.input_scales


@answers.wrong(
    "18.2", "input_scales lie in the matrix's columns: divide before you change the order."
)
class InputScalesInStoredOrder(Slipped):
    def __call__(self, x):
        return self.scaled(self.ordered(x)) @ self.meant(self.unpack()).flatten(1).T


@answers.wrong("18.2", "Subtract the zero point of each group from its codes.")
class ZerosForgotten(Slipped):
    def meant(self, codes):
        return codes.float() * self.scales[..., None]


@answers.wrong("18.2", "Your zero point is off by one: code == zero must mean 0.0.")
class ZerosOffByOne(Slipped):
    def meant(self, codes):
        return (codes.float() - self.zeros[..., None].float() - 1) * self.scales[..., None]


@answers.wrong("18.2", "All of your zero points are 8. That is the symmetric format.")
class ZerosAreEight(Slipped):
    def meant(self, codes):
        return (codes.float() - 8) * self.scales[..., None]


@answers.wrong("18.2", "The zero point counts codes: subtract it before you multiply by the scale.")
class ScaledBeforeTheZero(Slipped):
    def meant(self, codes):
        return codes.float() * self.scales[..., None] - self.zeros[..., None].float()


@answers.wrong("18.2", "uint8 minus uint8 wraps around below 0. Convert first.")
class SubtractedInBytes(Slipped):
    def meant(self, codes):
        return (codes - self.zeros[..., None]).float() * self.scales[..., None]


@answers.wrong("18.2", "The codes are 0 to 15: bit 3 is no sign.")
class SignedNibbles(Slipped):
    def meant(self, codes):
        codes = torch.where(codes > 7, codes.float() - 16, codes.float())
        return (codes - self.zeros[..., None].float()) * self.scales[..., None]


@answers.wrong("18.2", "Column k belongs to group k // group_size.")
class GroupsInterleaved(Slipped):
    def meant(self, codes):
        by_column = codes.transpose(1, 2).reshape(codes.shape)
        values = super().meant(by_column)
        return values.reshape(codes.transpose(1, 2).shape).transpose(1, 2)


@answers.wrong("18.2", "All groups have the scale and the zero of the first one of the row.")
class FirstScaleForAll(Slipped):
    def meant(self, codes):
        return (codes.float() - self.zeros[:, :1, None].float()) * self.scales[:, :1, None]


@answers.wrong("18.2", "The product is asked in float32: 16 bits lose too much.")
class ProductIn16Bits(Slipped):
    def __call__(self, x):
        matrix = self.meant(self.unpack()).flatten(1).bfloat16().float()
        return self.ordered(self.scaled(x)).bfloat16().float() @ matrix.T


@answers.wrong(
    "18.2",
    "You keep the dequantized matrix as well: it is eight times as large as what you packed.",
)
class KeepsTheMatrix(Slipped):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.matrix = self.meant(self.unpack()).flatten(1)

    def __call__(self, x):
        return self.ordered(self.scaled(x)) @ self.matrix.T


@answers.wrong("18.2", "You go through the groups in Python. All of them unpack in one operation.")
class GroupByGroup(Slipped):
    def __call__(self, x):
        x, out = self.ordered(self.scaled(x)), 0
        for index, values in enumerate(self.meant(self.unpack()).unbind(1)):
            start = index * self.group_size
            out = out + x[:, start : start + self.group_size] @ values.T
        return out


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
    """Never a whole matrix: the low halves meet their inputs, then the high ones, then the zeros."""

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


def slipped_gptq(
    weight,
    factor,
    group_size,
    *,
    feedback="row of U",
    divide=True,
    sign=1,
    targets="later",
    scales_from="now",
    per="group",
    levels=7,
    lowest=-8,
    to_whole=torch.round,
    highest=7,
    clamp=True,
    empty=1.0,
    error_of="weight",
):
    """gptq with some slips, spelled by switches."""
    now, K = weight.clone(), weight.shape[1]
    codes = torch.zeros(weight.shape, dtype=torch.int64)
    scales = weight.new_zeros(len(weight), K // group_size)
    for j in range(K):
        group = j // group_size
        part = slice(group * group_size, (group + 1) * group_size)
        if j % group_size == 0 or scales_from == "every column":
            source = weight if scales_from == "before" else now
            pieces = source if per in ("row", "tensor") else source[:, part]
            largest = pieces.abs().amax(-1)
            scales[:, group] = (largest.max() if per == "tensor" else largest) / levels
        scale = scales[:, group]
        ratio = now[:, j] / torch.where(scale > 0, scale, empty)
        column = to_whole(ratio)
        column = column.clamp(lowest, highest) if clamp else column
        codes[:, j] = column.nan_to_num(0).long()
        from_ = {"weight": now, "before": weight}[error_of][:, j]
        error = from_ - column * scale
        if divide:
            error = error / factor[j, j]
        reach = {
            "row of U": factor[j],
            "the next column": factor[j] * (torch.arange(K) == j + 1),
            "the group": factor[j] * (torch.arange(K) // group_size == group),
            "U squared": factor[j] ** 2,
            "none": torch.zeros(K, dtype=weight.dtype),
            "H inverse": (factor.T @ factor)[j],
            "evenly": torch.ones(K, dtype=weight.dtype) / K,
        }[feedback]
        later = torch.arange(K) > j if targets == "later" else torch.arange(K) != j
        now = now - sign * error[:, None] * reach * later
    return codes, scales


for name, slip, hint in [
    (
        "no_error_feedback",
        dict(feedback="none"),
        "Nothing is passed on: this is round to nearest. Later columns can make up for the error.",
    ),
    (
        "the_error_is_added",
        dict(sign=-1),
        "Later columns lose e · U[j, k]: yours make the error larger.",
    ),
    (
        "not_divided_by_the_diagonal",
        dict(divide=False),
        "e is the error divided by U[j, j].",
    ),
    (
        "the_next_column_alone",
        dict(feedback="the next column"),
        "All later columns share the error, not just the next one.",
    ),
    (
        "feedback_ends_at_the_group",
        dict(feedback="the group"),
        "A group shares a scale. The error goes to all later columns, of later groups as well.",
    ),
    (
        "a_row_of_the_inverse",
        dict(feedback="H inverse"),
        "A row of H⁻¹ is right for the first column alone. Row j of U knows which columns are done.",
    ),
    (
        "shared_out_evenly",
        dict(feedback="evenly"),
        "How much a column takes depends on how its input goes together with input j: U[j, k].",
    ),
    (
        "scales_from_the_original",
        dict(scales_from="before"),
        "A group's scale is chosen when the group begins, from the weights as they are by then.",
    ),
    (
        "scales_at_every_column",
        dict(scales_from="every column"),
        "One scale holds for a whole group: choose it at its first column and leave it.",
    ),
    (
        "one_scale_for_a_row",
        dict(per="row"),
        "The scale is that of the group's columns, not of the whole row.",
    ),
    (
        "one_scale_for_the_tensor",
        dict(per="tensor"),
        "Each row has scales of its own, and each group of it.",
    ),
    (
        "divided_by_eight",
        dict(levels=8),
        "The largest code above 0 is 7.",
    ),
    (
        "codes_from_0_to_15",
        dict(lowest=0, highest=15),
        "The format is symmetric: codes run from -8 to 7.",
    ),
    (
        "codes_beyond_four_bits",
        dict(clamp=False),
        "Feedback may make a weight larger than what the scale was chosen for: clamp to -8 … 7.",
    ),
    (
        "cut_off",
        dict(to_whole=torch.trunc),
        "Round to the nearest code.",
    ),
    (
        "a_row_of_zeros_is_nan",
        dict(empty=0.0),
        "A group of zeros has scale 0, and 0 / 0 is NaN, which then spreads to later columns.",
    ),
    (
        "error_of_the_original",
        dict(error_of="before"),
        "The error is that of the column as it is now: what came from the left is in it.",
    ),
]:
    answers.wrong("18.3", hint, name)(partial(slipped_gptq, **slip))


@answers.wrong("18.3", "Your answer is right, but the caller's weight has changed. Work on a copy.")
def in_place(weight, factor, group_size):
    codes, scales = slipped_gptq(weight, factor, group_size)
    weight -= 1
    return codes, scales


@answers.wrong("18.3", "You go through the rows in Python. All rows take the same step at once.")
def row_by_row(weight, factor, group_size):
    rows = [slipped_gptq(row[None], factor, group_size) for row in weight]
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


@triton.jit
def slipped_kernel(
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
    SLIP: tl.constexpr,
):
    """gemv_kernel with one slip, chosen by its name."""
    HALF: tl.constexpr = GROUP_SIZE // 2
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if SLIP == "rows of the first program":
        row = tl.arange(0, BLOCK_N)
    is_row = row < N
    is_in = is_row
    if SLIP == "unmasked":
        is_in = row >= 0
    byte = tl.arange(0, HALF)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    groups = K // GROUP_SIZE
    if SLIP == "the last group is left out":
        groups -= 1
    for group in range(0, groups):
        start = group * HALF
        if SLIP == "groups of bytes":
            start = group * GROUP_SIZE % (K // 2)
        line, of_group = stride_packed, stride_group
        if SLIP == "dense rows":
            line, of_group = K // 2, K // GROUP_SIZE
        packed = tl.load(
            packed_ptr + row[:, None] * line + start + byte[None, :], mask=is_in[:, None], other=0
        )
        if SLIP == "loaded twice":
            packed = tl.load(
                packed_ptr + row[:, None] * line + start + byte[None, :],
                mask=is_in[:, None],
                other=0,
            )
        column = group * GROUP_SIZE + byte
        low_column, high_column = column, column + HALF
        if SLIP == "nibbles swapped":
            low_column, high_column = column + HALF, column
        if SLIP == "neighbours":
            low_column = group * GROUP_SIZE + 2 * byte
            high_column = low_column + 1
        if SLIP == "halves of a row":
            low_column = group * HALF + byte
            high_column = low_column + K // 2
        x_low = tl.load(x_ptr + low_column).to(tl.float32)
        x_high = tl.load(x_ptr + high_column).to(tl.float32)
        which = group
        if SLIP == "first scale":
            which = 0
        scale = tl.load(scales_ptr + row * of_group + which, mask=is_in, other=0.0)
        scale = scale.to(tl.float32)
        zero = tl.load(zeros_ptr + row * of_group + which, mask=is_in, other=0)
        zero = zero.to(tl.float32)[:, None]
        if SLIP == "zero forgotten":
            zero = zero * 0.0
        if SLIP == "zero off by one":
            zero = zero + 1.0
        if SLIP == "zero is 8":
            zero = zero * 0.0 + 8.0
        low, high = (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
        if SLIP == "low not masked":
            low = packed.to(tl.float32)
        if SLIP == "high not shifted":
            high = (packed & 240).to(tl.float32)
        if SLIP == "wraps below zero":
            low = ((packed & 15) - zero.to(tl.uint8)).to(tl.float32) + zero
        term = tl.sum((low - zero) * x_low[None, :] + (high - zero) * x_high[None, :], axis=1)
        if SLIP == "low half alone":
            term = tl.sum((low - zero) * x_low[None, :], axis=1)
        if SLIP == "scaled before the zero":
            high_term = (high * scale[:, None] - zero) * x_high[None, :]
            term = tl.sum((low * scale[:, None] - zero) * x_low[None, :] + high_term, axis=1)
            scale = scale * 0.0 + 1.0
        if SLIP == "zero once a group":
            codes = low * x_low[None, :] + high * x_high[None, :]
            term = tl.sum(codes, axis=1) - tl.sum(zero, axis=1)
        if SLIP == "overwritten":
            acc = scale * term
        elif SLIP == "scaled at the end":
            acc = (acc + term) * scale
        elif SLIP == "sixteen bits":
            acc = (acc + scale * term).to(tl.float16).to(tl.float32)
        else:
            acc += scale * term
    tl.store(out_ptr + row, acc, mask=is_row)


def gemv(x, packed, scales, zeros, group_size, *, kernel=slipped_kernel, rows=8, **options):
    """The wrapper of 18.4 around another kernel."""
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
        **options,
    )
    return out


for slip, hint in [
    (
        "nibbles swapped",
        "The low four bits belong to the first half of the group's inputs.",
    ),
    ("neighbours", "A byte holds column i and column i + half of its group, not two neighbours."),
    ("halves of a row", "The two halves are those of a group, not those of the whole row."),
    ("low not masked", "The low four bits have to be cut out: & 15."),
    ("high not shifted", "The high four bits have to be shifted down: >> 4."),
    ("low half alone", "Each byte holds two codes. The high ones are missing."),
    ("first scale", "Every group has its own scale and zero: + group."),
    ("zero forgotten", "A code means (code - zero) · scale."),
    ("zero off by one", "Your zero point is off by one: code == zero must add nothing."),
    ("zero is 8", "All of your zero points are 8. That is the symmetric format."),
    (
        "zero once a group",
        "If you take the zero out of the sum, it is multiplied by the sum of the group's inputs.",
    ),
    ("wraps below zero", "uint8 minus uint8 wraps around below 0. Convert to float32 first."),
    ("scaled before the zero", "The zero counts codes: subtract it before you scale."),
    ("scaled at the end", "The scale of a group multiplies that group's sum alone."),
    ("overwritten", "Each group adds to acc: `=` forgets the groups in front."),
    ("groups of bytes", "A group of GROUP_SIZE codes takes half as many bytes."),
    ("the last group is left out", "Walk over all K // GROUP_SIZE groups."),
    ("rows of the first program", "Program p has rows p · BLOCK_N and on."),
    ("unmasked", "Rows beyond N lie outside of the tensors: their loads need a mask."),
    ("dense rows", "Rows may lie apart: use stride_packed and stride_group."),
    ("loaded twice", "You load every byte twice. Unpack both codes from one load."),
    ("sixteen bits", "Add up in float32: float16 loses the small terms."),
]:
    answers.wrong("18.4", hint, slip.replace(" ", "_"))(partial(gemv, SLIP=slip))


@answers.wrong("18.4", "PyTorch did the work here. The kernel has to: a result leaves by tl.store.")
def beside_an_empty_kernel(x, packed, scales, zeros, group_size):
    halves = packed.unflatten(1, (-1, group_size // 2))
    codes = torch.cat([halves & 15, halves >> 4], dim=-1).float()
    matrix = (codes - zeros[..., None].float()) * scales[..., None].float()
    return matrix.flatten(1) @ x.float()


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
