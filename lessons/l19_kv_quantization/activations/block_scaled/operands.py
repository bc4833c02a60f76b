"""One side of a block-scaled product, as Blackwell's tensor core reads it.

    x[r, k] = E2M1[code[r, k]] · scales[r, k // block] · row_scale[r]

Codes are stored as lesson 18 stores them. Scales are not: a tile of 128 rows and 4 scales each is
an *atom* of 512 bytes, in which the scales of rows r, r + 32, r + 64 and r + 96 are neighbours:

    byte of (row r, scale s) in its atom = r % 32 · 16 + r // 32 · 4 + s

Tensor memory wants exactly that: a copy of 32 lanes of 16 bytes puts row r into lane r % 32, column
r // 32, four scales in a column of 32 bits. Atoms follow each other along K, then down the rows.

Source: cuBLAS documentation, section "1D Block Scaling Factors Layout"; PTX ISA 9.0, 9.7.16.10.7.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lessons.l18_weight_quantization.methods.nvfp4 import (
    LARGEST_CODE,
    LARGEST_SCALE,
    block_scales,
)
from lessons.l18_weight_quantization.naive import grouped, nonzero, to_e2m1
from lessons.l18_weight_quantization.weights import (
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    Mxfp4Weight,
    Nvfp4Weight,
    neighbours_packed,
)

ROWS, SCALES = 128, 4  # of an atom
ATOM_BYTES = ROWS * SCALES
BLOCKS = {torch.float8_e4m3fn: NVFP4_BLOCK, torch.uint8: MXFP4_BLOCK}  # by the type of the scales


@dataclass(frozen=True)
class BlockScaled:
    """A matrix of [rows, K]. codes: [rows, K / 2] uint8; atoms: [⌈rows / 128⌉, ⌈scales of a row /
    4⌉, 512], E4M3 (NVFP4) or uint8 exponents (MXFP4, E8M0), see `in_atoms`; row_scale: [rows]
    float32.
    """

    codes: Tensor
    atoms: Tensor
    row_scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def block(self) -> int:
        """Numbers that share a scale."""
        return BLOCKS[self.atoms.dtype]


def in_atoms(scales: Tensor) -> Tensor:
    """scales: [rows, scales of a row], 8 bits each -> [⌈rows / 128⌉, ⌈scales / 4⌉, 512]. What is
    missing in the last atoms is 0.
    """
    rows, each = scales.shape
    stored = pad(scales.view(torch.uint8), (0, -each % SCALES, 0, -rows % ROWS))
    atoms = stored.view(
        -1, 4, 32, stored.shape[1] // SCALES, SCALES
    )  # [.., r // 32, r % 32, .., s]
    return atoms.permute(0, 3, 2, 1, 4).reshape(len(atoms), -1, ATOM_BYTES).view(scales.dtype)


def in_rows(atoms: Tensor, rows: int, each: int) -> Tensor:
    """The inverse of in_atoms: [rows, each]."""
    parts = atoms.view(torch.uint8).view(*atoms.shape[:2], 32, 4, SCALES).permute(0, 3, 2, 1, 4)
    stored = parts.reshape(len(atoms) * ROWS, -1)[:rows, :each]
    return stored.contiguous().view(atoms.dtype)


def of_weight(weight: Nvfp4Weight | Mxfp4Weight) -> BlockScaled:
    """A weight of lesson 18, [N, K], as the second operand."""
    rows, device = weight.shape[0], weight.codes.device
    if isinstance(weight, Nvfp4Weight):
        row_scale = weight.tensor_scale.expand(rows).contiguous()
        return BlockScaled(weight.codes, in_atoms(weight.scales), row_scale)
    row_scale = torch.ones(rows, dtype=torch.float32, device=device)
    return BlockScaled(weight.codes, in_atoms(weight.exponents), row_scale)


def of_tokens(x: Tensor) -> BlockScaled:
    """x: [T, K] floating -> NVFP4, each token with its own larger scale, as w4a4.nvfp4_tokens."""
    blocks = grouped(x, NVFP4_BLOCK)
    whole = nonzero(x.float().abs().amax(-1, keepdim=True)) / (LARGEST_CODE * LARGEST_SCALE)
    scales = block_scales(blocks, whole)
    codes = to_e2m1(blocks / (scales.float() * whole)[..., None]).flatten(1)
    return BlockScaled(neighbours_packed(codes), in_atoms(scales), whole[:, 0])


def check_product(a: BlockScaled, b: BlockScaled, block_n: int) -> None:
    """Raises ValueError for what the kernel does not multiply."""
    check_operand("a", a)
    check_operand("b", b)
    for what, of_a, of_b in (
        ("K", a.shape[1], b.shape[1]),
        ("scales in", a.atoms.dtype, b.atoms.dtype),
        ("device", a.codes.device, b.codes.device),
    ):
        if of_a != of_b:
            raise ValueError(f"a, b: got {what} {of_a} and {of_b}; accepted: the same for both")
    if b.shape[0] % 8:  # because a row of the output starts at a multiple of 16 bytes
        raise ValueError(f"b: got {b.shape[0]} rows; accepted: a multiple of 8")
    if block_n not in (128, 256):
        raise ValueError(f"block_n: got {block_n!r}; accepted: 128 or 256")
    device = a.codes.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (10, 0):
        raise ValueError(f"a: got {device}; accepted: a GPU of compute capability 10.0, a CPU")


def check_operand(name: str, x: BlockScaled) -> None:
    """Raises ValueError unless the tensors of an operand fit each other, dense and 16-byte aligned
    as the copy engine wants them.
    """
    if x.atoms.dtype not in BLOCKS:
        raise ValueError(
            f"{name}.atoms: got {x.atoms.dtype}; accepted: {' or '.join(map(str, BLOCKS))}"
        )
    if x.codes.dim() != 2 or not x.shape[1] or x.shape[1] % 32:
        raise ValueError(
            f"{name}.codes: got {tuple(x.codes.shape)}; accepted: [rows, K / 2] with K a multiple "
            f"of 32"
        )
    rows, columns = x.shape
    atoms = -(-rows // ROWS), -(-columns // (x.block * SCALES)), ATOM_BYTES
    for part, tensor, shape, dtype in (
        ("codes", x.codes, (rows, columns // 2), torch.uint8),
        ("atoms", x.atoms, atoms, x.atoms.dtype),
        ("row_scale", x.row_scale, (rows,), torch.float32),
    ):
        fits = tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        if not fits or tensor.data_ptr() % 16 or tensor.device != x.codes.device:
            raise ValueError(
                f"{name}.{part}: got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; "
                f"accepted: {dtype} {shape}, dense, 16-byte aligned, on one device"
            )
