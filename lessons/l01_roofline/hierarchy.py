"""The memories of a GPU, from the registers to HBM: how large each is, and how fast at best.

Sizes and rates are those of the whole chip. The clock is not on every data sheet, but it follows
from one: a float32 unit does one multiply-add, two FLOPs, in each clock.

    python -m lessons.l01_roofline.hierarchy

Sources: CUDA programming guide, appendix "Compute Capabilities" (64K registers of 4 bytes an SM; 32
banks of shared memory, 4 bytes each a clock); NVIDIA A100 whitepaper (L2: 5120 bytes a clock).
"""

from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from lessons.l01_roofline.planner.report import amount
from lessons.toolbox.measure.hardware import CHIPS, Chip

REGISTER_BYTES_PER_SM = 65536 * 4
SHARED_BYTES_PER_CLOCK = 32 * 4  # of an SM
OPERAND_BYTES_PER_FMA = 3 * 4  # a · b + c reads three float32 numbers
FP32_UNITS_PER_SM = {(7, 5): 64, (8, 0): 64, (8, 9): 128, (9, 0): 128, (10, 0): 128}
L2_BYTES_PER_CLOCK = {(8, 0): 5120}  # NVIDIA has published it for no other chip of our table


class Level(NamedTuple):
    """One memory of the whole chip. bytes_per_s is None where it is not published."""

    name: str
    num_bytes: float
    bytes_per_s: float | None


def clock_hz(chip: Chip) -> float:
    """The clock at which a data sheet counts its float32 FLOPs."""
    units = chip.sm_count * FP32_UNITS_PER_SM[chip.compute_capability]
    return chip.fp32_flops_per_s / (2 * units)


def levels(chip: Chip) -> list[Level]:
    """Registers, shared memory, L2 and HBM of a chip with a data sheet, fastest first. Raises
    ValueError for a chip that was measured, because of that only the rates are known.
    """
    if chip.compute_capability is None:
        raise ValueError(f"chip is {chip.name!r}, measured; accepted: one of {', '.join(CHIPS)}")
    clock, sms, capability = clock_hz(chip), chip.sm_count, chip.compute_capability
    operands = sms * FP32_UNITS_PER_SM[capability] * OPERAND_BYTES_PER_FMA
    l2_rate = L2_BYTES_PER_CLOCK.get(capability)
    return [
        Level("registers", sms * REGISTER_BYTES_PER_SM, operands * clock),
        Level(
            "shared memory",
            sms * chip.shared_memory_bytes,
            sms * SHARED_BYTES_PER_CLOCK * clock,
        ),
        Level("L2", chip.l2_bytes, None if l2_rate is None else l2_rate * clock),
        Level("HBM", chip.memory_bytes, chip.memory_bytes_per_s),
    ]


def main() -> None:
    table = Table("chip", *(f"{level.name}: bytes, bytes/s" for level in levels(CHIPS["a100"])))
    for chip in CHIPS.values():
        cells = []
        for level in levels(chip):
            rate = "–" if level.bytes_per_s is None else amount(level.bytes_per_s, "B/s")
            cells.append(f"{amount(level.num_bytes, 'B')}, {rate}")
        table.add_row(chip.name, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
