"""Hadamard matrices, and the product of each token with one, naive and by a kernel.

H has entries 1 and −1, and rows that are orthogonal to each other: H Hᵀ = n · I. So H / √n is a
rotation (or a reflection). Every output is a sum of *all* inputs with signs, so one large input
becomes a small part of every output.

Naive: `rotate_by_matrix`, a product with the n × n matrix. Optimized: `rotate`. If n = A · B, a
Hadamard matrix of n is the Kronecker product of one of A and one of B. A token is then a tile X of
A rows and B columns, and its n outputs are the tile H_A · X · H_Bᵀ: two products with small
matrices, n · (A + B) multiplications in place of n². A tile of 32 × 32 suits a tensor core.

Sources: Ashkboos et al. 2024, QuaRot, section 3; Agarwal et al. 2024, HadaCore (tensor cores).
"""

import functools

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import DECODE_DTYPES
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.model.arguments import is_whole, refuse

PALEY = (12, 20, 24, 44)  # each is a prime of the form 4k + 3, plus 1
LEAST_SIDE = 16  # of a tile, because a matrix unit takes no fewer


def hadamard(n: int) -> Tensor:
    """[n, n] float64, entries ±1: Sylvester's doubling, from 1 or from one of PALEY. Raises
    ValueError for an n that is neither 2^m nor one of these times 2^m.
    """
    power = n & -n if is_whole(n) and n > 0 else 0
    odd = n // power if power else 0
    start = next((one for one in (1, *PALEY) if one // (one & -one) == odd and n % one == 0), None)
    if start is None:
        refuse("n", n, f"1, {', '.join(map(str, PALEY))}, or one of them times a power of two")
    matrix = paley(start) if start > 1 else torch.ones(1, 1, dtype=torch.float64)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.kron(matrix, two)
    return matrix


def paley(n: int) -> Tensor:
    """[n, n] float64 for a prime n − 1 = 4k + 3: which numbers are squares modulo the prime gives
    the signs (Paley 1933).
    """
    prime = n - 1
    squares = {x * x % prime for x in range(1, prime)}
    sign = torch.tensor([0.0 if not x else 1.0 if x in squares else -1.0 for x in range(prime)])
    places = torch.arange(prime)
    matrix = torch.ones(n, n, dtype=torch.float64)
    matrix[1:, 1:] = sign[(places[None] - places[:, None]) % prime].double()
    matrix[1:, 0] = -1
    matrix[1:, 1:] += torch.eye(prime, dtype=torch.float64)
    return matrix


def rotate_by_matrix(x: Tensor) -> Tensor:
    """Naive: x: [T, n] -> [T, n] in x's dtype, x · Hᵀ / √n by the whole matrix."""
    n = x.shape[1]
    matrix = hadamard(n).to(x.device, x.dtype)
    return x @ matrix.T / n**0.5


def sides_of(n: int) -> tuple[int, int]:
    """A, B of n = A · B: B a power of two, both as near to each other as there are matrices."""
    found = [(n // 2**m, 2**m) for m in range(n.bit_length()) if n % 2**m == 0]
    known = [(a, b) for a, b in found if is_known(a)]
    if not known:
        hadamard(n)  # says what is accepted
    return min(known, key=sum)


def is_known(n: int) -> bool:
    """Whether `hadamard` has a matrix of this size."""
    return any(n % one == 0 and n // one & (n // one - 1) == 0 for one in (1, *PALEY))


@functools.cache
def small_matrices(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """H_A: [A, A] and H_B: [B, B], made once: a copy to a device in every product could not be
    captured in a CUDA graph (lesson 11).
    """
    return tuple(hadamard(side).to(device, dtype) for side in sides_of(n))


@triton.jit
def rotate_kernel(
    x_ptr,
    left_ptr,
    right_ptr,
    out_ptr,
    factor,
    stride_x,
    stride_out,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: one token, as the tile H_A · X · H_Bᵀ · factor."""
    token = tl.program_id(0).to(tl.int64)
    a, b = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B)
    is_a, is_b = a < A, b < B
    inside = is_a[:, None] & is_b[None, :]
    place = a[:, None] * B + b[None, :]
    x = tl.load(x_ptr + token * stride_x + place, mask=inside, other=0.0)
    # Both matrices are read transposed, so that a product takes them as they are.
    right = tl.load(
        right_ptr + b[None, :] * B + b[:, None], mask=is_b[:, None] & is_b[None, :], other=0.0
    )
    left = tl.load(
        left_ptr + a[:, None] * A + a[None, :], mask=is_a[:, None] & is_a[None, :], other=0.0
    )
    rows = tl.dot(x, right, input_precision="ieee")  # [A, B] float32: every row of the tile
    if out_ptr.dtype.element_ty == tl.float16:
        # tf32 keeps as many bits as float16, and drops the others. Half of the last bit is added,
        # so that they are rounded. NaN stays out: its bits might become another number's.
        rounded = (rows.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
        rows = tl.where(rows == rows, rounded, rows)
    tile = tl.dot(left.to(tl.float32), rows, input_precision=PRECISION)
    out = (tile * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * stride_out + place, out, mask=inside)


def rotate(x: Tensor) -> Tensor:
    """Optimized: x: [T, n] in float32, float16 or bfloat16 -> [T, n] in x's dtype. Raises
    ValueError for another x, or for an n without a Hadamard matrix.
    """
    if x.ndim != 2 or x.dtype not in DECODE_DTYPES:
        refuse("x", f"{x.dtype} {tuple(x.shape)}", "[T, n] in float32, float16 or bfloat16")
    count, n = x.shape
    sides = sides_of(n)
    left, right = small_matrices(n, x.dtype, x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(count, n, dtype=x.dtype, device=x.device)
    if count:
        block_a, block_b = (max(LEAST_SIDE, triton.next_power_of_2(side)) for side in sides)
        rotate_kernel[(count,)](
            x,
            left,
            right,
            out,
            n**-0.5,
            x.stride(0),
            out.stride(0),
            *sides,
            block_a,
            block_b,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=warps_of(block_a * block_b, x.dtype == torch.float32),
        )
    return out


def warps_of(values: int, is_float32: bool) -> int:
    """Warps for a tile: a thread holds 32 values, or 8 in float32, whose products have no matrix
    unit and keep more in registers.
    """
    return min(8, max(1, values // (256 if is_float32 else 1024)))


def operations(n: int) -> tuple[int, int]:
    """Multiplications of a token: by the whole matrix, and by two small ones."""
    return n * n, n * sum(sides_of(n))
