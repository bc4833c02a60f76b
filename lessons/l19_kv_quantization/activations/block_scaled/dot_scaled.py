"""The same product in Triton: `tl.dot_scaled`, and the compiler decides who does what.

Beside gluon_matmul.py there are no warps with roles, no mbarriers and no tensor memory in the text.
For sm_100 the compiler adds the last two, for older chips it makes 16-bit numbers of the codes. It
has NOT RUN on a GPU yet. What its code for sm_100 does on our machine depends on num_stages:

- 1: each product is waited for. Its results are those of naive.py.
- 2 or more: products go on beside the next step, and the scales of all steps have the same columns
  of tensor memory. The manual does not promise that a copy stays behind the product that reads
  them (PTX ISA, 9.7.16.6.2), so the machine calls it a race. See README.md.
"""

import torch
from torch import Tensor

from lessons.l19_kv_quantization.activations.block_scaled.operands import (
    ROWS,
    SCALES,
    BlockScaled,
    check_product,
)
from lessons.toolbox.kernels.triton_ import tl, triton

BLOCK_M, BLOCK_K = ROWS, 256


@triton.jit
def load_scales(desc, block, step, BLOCK: tl.constexpr, SCALES: tl.constexpr):
    """The scales of BLOCK rows and a step: [BLOCK, SCALES], from their atoms."""
    atoms = desc.load([block * (BLOCK // 128), step * (SCALES // 4), 0, 0])
    atoms = tl.reshape(atoms, (BLOCK // 128, SCALES // 4, 32, 4, 4))
    return tl.reshape(tl.permute(atoms, (0, 3, 2, 1, 4)), (BLOCK, SCALES))


@triton.jit
def dot_scaled_kernel(
    a_desc,
    b_desc,
    a_scale_desc,
    b_scale_desc,
    out_desc,
    row_scale_ptr,
    column_scale_ptr,
    num_rows,
    num_columns,
    num_steps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr,
):
    """As block_scaled_kernel. SCALES: of a row in a step."""
    m, n = tl.program_id(0), tl.program_id(1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(num_steps):
        a = a_desc.load([m * BLOCK_M, i * (BLOCK_K // 2)])
        b = b_desc.load([n * BLOCK_N, i * (BLOCK_K // 2)])
        a_scales = load_scales(a_scale_desc, m, i, BLOCK_M, SCALES)
        b_scales = load_scales(b_scale_desc, n, i, BLOCK_N, SCALES)
        acc = tl.dot_scaled(a, a_scales, "e2m1", tl.trans(b), b_scales, "e2m1", acc)
    row, column = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_scale = tl.load(row_scale_ptr + row, mask=row < num_rows, other=0.0)
    column_scale = tl.load(column_scale_ptr + column, mask=column < num_columns, other=0.0)
    acc = acc * (row_scale[:, None] * column_scale[None, :])
    out_desc.store([m * BLOCK_M, n * BLOCK_N], acc.to(tl.bfloat16))


def block_scaled_matmul(
    a: BlockScaled, b: BlockScaled, block_n: int = 128, num_stages: int = 3
) -> Tensor:
    """As gluon_matmul.block_scaled_matmul: [M, N] bfloat16. num_stages: steps whose tiles are
    fetched ahead, and 1. Raises ValueError.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    check_product(a, b, block_n)
    out = torch.empty(len(a.codes), len(b.codes), dtype=torch.bfloat16, device=a.codes.device)
    if not out.numel():
        return out
    scales = BLOCK_K // a.block

    def scales_of(x: BlockScaled, rows: int):
        tile = [rows // ROWS, scales // SCALES, 2, 256]
        return TensorDescriptor.from_tensor(x.atoms.unflatten(2, (2, -1)), tile)

    dot_scaled_kernel[triton.cdiv(len(out), BLOCK_M), triton.cdiv(out.shape[1], block_n)](
        TensorDescriptor.from_tensor(a.codes, [BLOCK_M, BLOCK_K // 2]),
        TensorDescriptor.from_tensor(b.codes, [block_n, BLOCK_K // 2]),
        scales_of(a, BLOCK_M),
        scales_of(b, block_n),
        TensorDescriptor.from_tensor(out, [BLOCK_M, block_n]),
        a.row_scale,
        b.row_scale,
        *out.shape,
        triton.cdiv(a.shape[1], BLOCK_K),
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K,
        SCALES=scales,
        num_warps=block_n // 32,  # so that a thread has 128 sums
        num_stages=num_stages,
    )
    return out
