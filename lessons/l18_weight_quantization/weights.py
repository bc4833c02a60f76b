"""A quantized matrix: small codes, the scales that belong to them, and the way back to numbers.

Each format is a dataclass that holds one matrix of a linear layer, [N, K]: N outputs, K
inputs, as nn.Linear stores it. All formats have the same four members, so a layer, a file or a plot
need not know which one it holds:

    weight.shape            (N, K)
    weight.dequantize()     [N, K] float32: what the codes mean
    weight.nbytes           all that has to be read for one product
    weight.to(device)       the same on another device

A format stores what its kernel reads, so nothing is repacked when a model runs.
"""

import functools
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


class QuantizedWeight:
    """What all formats share. A subclass is a frozen dataclass whose tensor fields are its
    storage.
    """

    shape: tuple[int, int]  # N, K

    def dequantize(self) -> Tensor:
        """[N, K] float32."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors, [...], by the names of their fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same matrix on another device."""
        return replace(self, **{name: x.to(device) for name, x in self.tensors().items()})

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, scales and all, for each number of the matrix."""
        rows, columns = self.shape
        return 8 * self.nbytes / (rows * columns)


@dataclass(frozen=True)
class GroupedInt(QuantizedWeight):
    """Whole numbers of 4 or 8 bits; each group of neighbouring inputs has its own scale.

        w[n, k] = (code[n, k] − zero[n, group of k]) · scale[n, group of k]

    codes: [N, K · bits / 8] uint8. With 4 bits a byte holds two codes of one group: byte i of a
    group holds its column i in the low half and its column i + group_size / 2 in the high half, so
    a kernel that masks or shifts a run of bytes has a run of columns. scales: [N, K / group_size],
    floating. zeros: the same shape, uint8; None: 2^(bits − 1), the symmetric format. group_size: K
    for one scale a row. order: [K] int64 or None: stored column j is column order[j] of the matrix,
    because GPTQ may quantize the important columns first.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    def dequantize(self) -> Tensor:
        codes = unpack(self.codes, self.bits, self.group_size).float()
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros[..., None].float()
        stored = ((codes - zeros) * self.scales[..., None].float()).flatten(1)
        if self.order is None:
            return stored
        weight = torch.empty_like(stored)
        weight[:, self.order] = stored
        return weight


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes: [N, groups, group_size] uint8, each below 2^bits -> [N, groups · group_size · bits /
    8] uint8, in the order that GroupedInt describes. bits: 4 or 8.
    """
    if bits == 4:
        low, high = codes.chunk(2, dim=-1)
        codes = low | high << 4
    return codes.flatten(1)


def unpack(packed: Tensor, bits: int, group_size: int) -> Tensor:
    """The inverse of `pack`: [N, bytes] uint8 -> [N, groups, group_size] uint8."""
    groups = packed.unflatten(-1, (-1, group_size * bits // 8))
    return torch.cat([groups & 15, groups >> 4], dim=-1) if bits == 4 else groups


@dataclass(frozen=True)
class Float8Weight(QuantizedWeight):
    """Floating numbers of 8 bits.

        w[n, k] = values[n, k] · scale

    values: [N, K], torch.float8_e4m3fn or torch.float8_e5m2. scales: floating, [1, 1] for the whole
    matrix, [N, 1] for each row, or [⌈N / 128⌉, ⌈K / 128⌉] for tiles of 128 × 128, as DeepSeek-V3
    stores them.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.values.shape)

    def dequantize(self) -> Tensor:
        rows, columns = self.shape
        scales = self.scales.float()
        if scales.shape[1] > 1 or scales.shape[0] not in (1, rows):
            scales = scales.repeat_interleave(TILE, 0)[:rows]
            scales = scales.repeat_interleave(TILE, 1)[:, :columns]
        return self.values.float() * scales


TILE = 128  # rows and columns of a tile of Float8Weight

# The code book of NF4, as bitsandbytes has it. test_formats.py derives it from the normal's
# quantiles.
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
NF4_BLOCK = 64  # values that share one absmax
NESTED_BLOCK = 256  # absmax that share one nested absmax

# E2M1: a sign, two bits of exponent, one of mantissa. Codes 8 to 15 are the negative ones.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1, *(-value for value in _E2M1))
MXFP4_BLOCK = 32  # values that share one exponent
NVFP4_BLOCK = 16  # values that share one E4M3 scale
E8M0_BIAS = 127  # the stored exponent e means 2^(e − 127)


def dynamic_values() -> Tensor:
    """[256] float32, ascending: the 8-bit code book that bitsandbytes keeps absmax values in when
    it quantizes them too. The first bits of a code count powers of ten from 10⁰ down to 10⁻⁶; what
    is left divides that decade evenly (Dettmers 2015, 8-Bit Approximations for Parallelism, section
    2).
    """
    positive = []
    for bits in range(7):
        edges = torch.linspace(0.1, 1, 2**bits + 1)
        positive.append(10.0 ** (bits - 6) * (edges[:-1] + edges[1:]) / 2)
    positive = torch.cat(positive)
    return torch.cat([-positive, torch.tensor([0.0, 1.0]), positive]).sort().values


DYNAMIC_VALUES = dynamic_values()
DYNAMIC_BOOK = tuple(DYNAMIC_VALUES.tolist())


@functools.cache
def table_on(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A code book on a device: [codes] float32. It is copied there once, because a copy from the
    CPU waits for the GPU, and no CUDA graph can be captured over it (lesson 11).
    """
    return torch.tensor(values, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Nf4Weight(QuantizedWeight):
    """NF4, in the layout of bitsandbytes: 16 values that are quantiles of a normal distribution.

        w[i] = NF4_VALUES[code[i]] · absmax[i // 64], where i counts through the flattened matrix

    codes: [N · K / 2] uint8; the first of two neighbours is the high half of its byte. absmax:
    [N · K / 64] float32. With double quantization absmax is uint8, and

        absmax[b] = DYNAMIC_VALUES[absmax code[b]] · nested_absmax[b // 256] + offset

    nested_absmax: [⌈blocks / 256⌉] float32 or None; offset: [1] float32 or None.
    Source: Dettmers et al. 2023, QLoRA, section 3.
    """

    codes: Tensor
    absmax: Tensor
    shape: tuple[int, int]
    nested_absmax: Tensor | None = None
    offset: Tensor | None = None

    def block_absmax(self) -> Tensor:
        """[blocks] float32: what the largest value of each block was."""
        if self.nested_absmax is None:
            return self.absmax.float()
        nested = self.nested_absmax.repeat_interleave(NESTED_BLOCK)[: len(self.absmax)]
        values = table_on(DYNAMIC_BOOK, self.absmax.device)[self.absmax.int()]
        return values * nested + self.offset

    def dequantize(self) -> Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], dim=-1).view(-1, NF4_BLOCK)
        values = table_on(NF4_VALUES, codes.device)[codes.int()]
        return (values * self.block_absmax()[:, None]).view(self.shape)


def neighbours_packed(codes: Tensor) -> Tensor:
    """codes: [N, K] uint8 of 4 bits -> [N, K / 2] uint8; the first of two neighbours is the low
    half of its byte.
    """
    first, second = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return first | second << 4


def e2m1_numbers(packed: Tensor) -> Tensor:
    """packed: [N, K / 2] uint8, as `neighbours_packed` leaves it -> [N, K] float32."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    return table_on(E2M1_VALUES, codes.device)[codes.int()]


@dataclass(frozen=True)
class Mxfp4Weight(QuantizedWeight):
    """MXFP4, as gpt-oss stores it: numbers of 4 bits (E2M1), and one power of two for 32 of them.

        w[n, k] = E2M1_VALUES[code[n, k]] · 2^(exponents[n, k // 32] − 127)

    codes: [N, K / 2] uint8; the first of two neighbours is the low half of its byte. exponents:
    [N, K / 32] uint8 (E8M0; 255 means NaN).
    Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 and 6.3.
    """

    codes: Tensor
    exponents: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    def dequantize(self) -> Tensor:
        values = e2m1_numbers(self.codes).unflatten(1, (-1, MXFP4_BLOCK))
        exponents = self.exponents.int()
        scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - E8M0_BIAS)
        scales = scales.masked_fill(exponents == 255, float("nan"))
        return (values * scales[..., None]).flatten(1)


@dataclass(frozen=True)
class Nvfp4Weight(QuantizedWeight):
    """NVFP4, which Blackwell's tensor cores multiply: E2M1 numbers, an E4M3 scale for 16 of them,
    and one float32 scale for the matrix, so that the small scales need not be small numbers.

        w[n, k] = E2M1_VALUES[code[n, k]] · scales[n, k // 16] · tensor_scale

    codes: [N, K / 2] uint8; the first of two neighbours is the low half of its byte. scales:
    [N, K / 16] torch.float8_e4m3fn. tensor_scale: [1] float32; ModelOpt stores this number
    (weight_scale_2), compressed-tensors one divided by it (weight_global_scale).
    Source: NVIDIA 2025, Pretraining Large Language Models with NVFP4, section 2 and appendix A.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    def dequantize(self) -> Tensor:
        values = e2m1_numbers(self.codes).unflatten(1, (-1, NVFP4_BLOCK))
        # exact, because a code has 2 significant bits and a block's scale 4
        values = values * self.scales.float()[..., None]
        return values.flatten(1) * self.tensor_scale
