"""How many bytes a chain of operations moves, and how many kernels it launches: counted operation
by operation.

Each operation that makes or changes a tensor is one pass: it reads its operands and writes its
result, which is the least that it can do. On PyTorch's meta device, where tensors have shapes but
no numbers, a chain is counted at full size without the memory.

    python -m lessons.l07_kernel_fusion.lab.traffic [--rows 4096] [--size 4096] [--dtype bfloat16]
"""

import argparse
import sys

import torch
from torch import Tensor

from lessons.l07_kernel_fusion import naive
from lessons.toolbox.measure.passes import Pass, passes_of, total_bytes

EPS = 1e-5


def fused_pass(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> Pass:
    """What a kernel moves that reads every input once and writes every output once. inputs,
    outputs: any shapes.
    """
    return Pass(name, sum(x.nbytes for x in inputs), sum(x.nbytes for x in outputs))


def chains(
    rows: int, size: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, tuple[list[Pass], Pass]]:
    """{operation: (its eager passes, its one kernel's)} for `rows` rows of `size` values; QK-norm's
    rows are heads of 128.

    The weight counts once: every program reads it again, but from a cache. Raises ValueError for
    sizes below 1.
    """
    if rows < 1 or size < 1:
        raise ValueError(f"rows, size: got {rows}, {size}; accepted: 1 or more")
    x, other = (torch.empty(rows, size, dtype=dtype, device="meta") for _ in range(2))
    weight = torch.empty(size, dtype=dtype, device="meta")
    q, k = (torch.empty(rows, heads, 128, dtype=dtype, device="meta") for heads in (32, 8))
    head = torch.empty(128, dtype=dtype, device="meta")
    return {
        "RMSNorm": (
            passes_of(naive.rms_norm, x, weight, EPS),
            fused_pass("rms_norm", [x, weight], [x]),
        ),
        "add + RMSNorm": (
            passes_of(naive.add_rms_norm, x, other, weight, EPS),
            fused_pass("add_rms_norm", [x, other, weight], [other, x]),
        ),
        "SwiGLU": (passes_of(naive.silu_mul, x, other), fused_pass("silu_mul", [x, other], [x])),
        "QK-norm": (
            passes_of(naive.qk_norm, q, k, head, head, EPS),
            fused_pass("qk_norm", [q, k, head, head], [q, k]),
        ),
        "softmax": (passes_of(naive.softmax, x), fused_pass("softmax", [x], [x])),
    }


def table(found: dict[str, tuple[list[Pass], Pass]]) -> list[str]:
    """Markdown rows: launches and MB of each chain, eager and fused."""
    rows = [
        "| operation | eager: launches | MB | fused: launches | MB | eager ÷ fused |",
        "|---|---|---|---|---|---|",
    ]
    for name, (passes, kernel) in found.items():
        eager, fused = total_bytes(passes), total_bytes([kernel])
        rows.append(
            f"| {name} | {len(passes)} | {eager / 1e6:.4g} | 1 | {fused / 1e6:.4g} | "
            f"{eager / fused:.2f} |"
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lessons.l07_kernel_fusion.lab.traffic", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--size", type=int, default=4096, help="values in a row")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args(argv)
    try:
        found = chains(options.rows, options.size, getattr(torch, options.dtype))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"{options.rows} rows of {options.size} values, {options.dtype}; QK-norm: 32 + 8 heads of "
        f"128\n"
    )
    print(*table(found), sep="\n")
    for name, (passes, _) in found.items():
        print(
            f"\n{name}: "
            + " · ".join(
                f"{p.name} {p.read_bytes / 1e6:.3g}+{p.written_bytes / 1e6:.3g}" for p in passes
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
