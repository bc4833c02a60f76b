"""x · Wᵀ with W quantized: the wrapper of the kernels in products.py, for every format of this
lesson.

`matmul(x, weight, bias)` is what a QuantizedLinear multiplies by on a GPU. The reasons for its
tiles:

- **Few rows** (decode): memory decides. The time is the bytes of the codes over the bandwidth, as
  long as unpacking keeps up. An H200 has 132 processors. Each starts 128 instructions of one thread
  a clock, 1.755 · 10⁹ times a second (assumed; its clock varies). At 4.3 TB/s that leaves 3.4
  instructions for a weight of 4 bits and 6.9 for one of 8. Tiles have 16 rows, because a matrix
  unit takes no fewer.
- **More rows**: each weight is unpacked once for a tile of rows, so tiles are taller, up to 128.
  From 64 rows on the product runs on Hopper's warpgroup instructions, which want W in shared
  memory.
- **Where it stops paying**: codes of b bits are read in b / 16 of the time that BF16 takes, but
  every row costs the same 2 · N · K operations. The two are equal at

      rows = (bits / 8) · FLOP/s / (2 · bytes/s) = 790e12 / 4.3e12 · bits / 16

  That is 184 rows for BF16, 92 for 8 bits, and 47 for 4 (4.13 with the scales of groups of 128).
  These rates are what one may hope to reach. The README takes those of the data sheet, 989e12 and
  4.8e12, so its batches are a little larger. Above its own number of rows a format is bound by the
  tensor cores, while BF16 is bound by memory up to 184. So the advantage of 16 / bits shrinks from
  47 (92) rows on, to nothing at 184. Beyond that unpacking is only a cost.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import DECODE_DTYPES, check_one_device
from lessons.l10_flash_decoding.splits import choose_num_splits, sms_of
from lessons.l18_weight_quantization.kernels.operands import (
    SHORTEST_STEP,
    Operand,
    is_one_group,
    operand_of,
    step_bytes,
)
from lessons.l18_weight_quantization.kernels.products import (
    add_partials_kernel,
    quantized_matmul_kernel,
)
from lessons.l18_weight_quantization.naive import dequantize_matmul
from lessons.l18_weight_quantization.weights import QuantizedWeight
from lessons.toolbox.kernels.triton_ import triton


class Tiles(NamedTuple):
    """Rows of x and outputs that a program owns, bytes of W's rows a step, and how it is
    launched.
    """

    block_m: int
    block_n: int
    block_bytes: int | None  # None: as long as the format's groups allow
    num_warps: int
    num_stages: int


# By the most rows that they are for. Chosen by the compiler (no spills, instructions a weight);
# timed on an H200 and not tuned there. A program holds two sums of its tile: its own and the
# group's.
FEW_ROWS = {1: Tiles(16, 64, None, 4, 4), 2: Tiles(16, 128, None, 4, 4)}  # by codes a byte
MORE_ROWS = {
    32: Tiles(32, 64, None, 4, 4),
    64: Tiles(64, 64, None, 4, 3),
    2**31: Tiles(128, 64, None, 8, 3),
}
# Without matrix units, or for float32, whose products shall not be rounded to tf32.
PLAIN = Tiles(16, 32, SHORTEST_STEP, 4, 2)
PROGRAMS_PER_SM = 4  # what an H200 holds of the tiles for 16 rows, by registers and shared memory
LEAST_STEPS = 4  # of a split: fewer would not fill the pipeline of loads
PARTIALS_BLOCK = 512


def matmul(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    tiles: Tiles | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """x: [M, K] in float32, float16 or bfloat16; bias: [N] or None -> [M, N] in x's dtype.

    Sums are float32. tiles, num_splits: None for those that fit the machine. A format that the
    kernel does not read is dequantized first. Raises ValueError for an x or a bias that does not
    fit.
    """
    check_matmul(x, weight, bias)
    operand = operand_of(weight)
    if operand is None:
        return dequantize_matmul(x, weight, bias)
    check_scales(operand)
    if operand.arrange is not None:
        x = operand.arrange(x)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(len(x), len(operand.codes), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tiles = tiles_for(x, operand) if tiles is None else tiles
    grid, steps_a_split = plan(len(x), operand, tiles, sms_of(x.device), num_splits)
    num_splits = grid[2]
    if num_splits == 1:
        launch(x, operand, bias, out, tiles, grid, steps_a_split)
        return out
    partials = torch.empty(num_splits, *out.shape, dtype=torch.float32, device=x.device)
    launch(x, operand, None, partials, tiles, grid, steps_a_split)
    add_partials_kernel[(triton.cdiv(out.numel(), PARTIALS_BLOCK),)](
        partials, bias, out, out.numel(), out.shape[1], num_splits, BLOCK=PARTIALS_BLOCK
    )
    return out


def plan(
    num_rows: int, operand: Operand, tiles: Tiles, num_sms: int, num_splits: int | None = None
) -> tuple[tuple[int, int, int], int]:
    """The grid (tiles of rows, tiles of outputs, splits) and how many steps a split has.

    Rows first, because programs that run together then share a few tiles of the matrix, which is
    the larger operand. Splits only where tiles alone leave processors idle, and none that is empty.
    """
    num_outputs, row_bytes = operand.codes.shape
    grid = triton.cdiv(num_rows, tiles.block_m), triton.cdiv(num_outputs, tiles.block_n)
    steps = triton.cdiv(row_bytes, step_bytes(operand, tiles.block_bytes))
    if num_splits is None:
        most = max(1, steps // LEAST_STEPS)
        num_splits = choose_num_splits(grid[0] * grid[1], most, num_sms * PROGRAMS_PER_SM)
    steps_a_split = triton.cdiv(steps, min(num_splits, steps))
    return (*grid, triton.cdiv(steps, steps_a_split)), steps_a_split


def launch(
    x: Tensor,
    operand: Operand,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    grid: tuple[int, int, int],
    steps_a_split: int,
) -> None:
    """quantized_matmul_kernel over a grid. x: [M, K], arranged; out: [M, N], or partials [splits,
    M, N] float32.
    """
    num_outputs, row_bytes = operand.codes.shape
    quantized_matmul_kernel[grid](
        x,
        operand.codes.view(torch.int32).view(torch.uint32),
        operand.scales,
        operand.zeros,
        None if operand.table is None else operand.table.to(x.dtype),
        operand.tensor_scale,
        bias,
        out,
        len(x),
        num_outputs,
        row_bytes,
        steps_a_split,
        x.stride(0),
        operand.codes.stride(0) // 4,
        *operand.scales.stride(),
        *(operand.zeros.stride() if operand.zeros is not None else (0, 0)),
        num_warps=tiles.num_warps,
        **constexprs_of(operand, tiles),
    )


def constexprs_of(operand: Operand, tiles: Tiles) -> dict:
    """The constants of quantized_matmul_kernel, for a launch and for lab/specs.py."""
    step = step_bytes(operand, tiles.block_bytes)
    return {
        "GROUP_BYTES": min(operand.group_bytes, operand.codes.shape[1]),
        "SCALE_ROWS": operand.scale_rows,
        "CODES": operand.codes_a_byte,
        "MIDDLE": operand.middle,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_BYTES": step,
        "NUM_STAGES": tiles.num_stages,
        "ONE_GROUP": is_one_group(operand, step),
        "WHOLE_STEPS": operand.codes.shape[1] % step == 0,
        "UNPACK": operand.hook,
    }


def tiles_for(x: Tensor, operand: Operand) -> Tiles:
    """Tiles for x: [M, K] on the chip that holds it."""
    has_matrix_units = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)
    if x.dtype == torch.float32 or not has_matrix_units:
        return PLAIN
    few = FEW_ROWS[operand.codes_a_byte]
    by_rows = {few.block_m: few, **MORE_ROWS}
    return next(tiles for rows, tiles in by_rows.items() if len(x) <= rows)


def check_scales(operand: Operand) -> None:
    """Raise ValueError unless there is a scale, and a zero point if there are any, for each
    group.
    """
    num_outputs, row_bytes = operand.codes.shape
    groups = triton.cdiv(row_bytes, min(operand.group_bytes, row_bytes))
    shape = (triton.cdiv(num_outputs, operand.scale_rows), groups)
    for name in ("scales", "zeros"):
        given = getattr(operand, name)
        if given is not None and given.shape != shape:
            raise ValueError(f"{name}: got {tuple(given.shape)}; accepted: {shape}, one a group")
    whole = operand.tensor_scale
    if whole is not None and whole.shape != (1,):
        raise ValueError(f"tensor_scale: got {tuple(whole.shape)}; accepted: (1,)")


def check_matmul(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    dtypes: tuple[torch.dtype, ...] = DECODE_DTYPES,
) -> None:
    """Raise ValueError unless x: [M, K], in one of dtypes, and bias: [N] fit the matrix, [N, K], on
    one device.
    """
    rows, columns = weight.shape
    if x.ndim != 2 or x.shape[1] != columns or x.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"x: got {x.dtype} {tuple(x.shape)}; accepted: [M, {columns}] in {names}")
    if bias is not None and (bias.shape != (rows,) or bias.dtype != x.dtype):
        raise ValueError(
            f"bias: got {bias.dtype} {tuple(bias.shape)}; accepted: None, or {x.dtype} [{rows}]"
        )
    check_one_device(x=x, **weight.tensors(), **({} if bias is None else {"bias": bias}))
