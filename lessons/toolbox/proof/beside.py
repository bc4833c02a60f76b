"""Triton 3.6 beside the Triton of requirements.txt: what each makes of the same kernel for the same
GPU. A borrowed GPU's machine has the Triton of its PyTorch, and the counts and the proofs that are
made here come from another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lessons.toolbox.kernels.compile_check import EARLIER, RECORDED, recorded
from lessons.toolbox.kernels.compile_report import Report


@dataclass(frozen=True)
class Pair:
    """A launch for one chip, compiled by two versions: reports of the same job."""

    earlier: Report
    pinned: Report

    @property
    def ratio(self) -> float:
        """The instructions of the earlier version's code over those of the pinned version's."""
        return instructions(self.earlier) / instructions(self.pinned)

    @property
    def spills_differ(self) -> bool:
        return bool(self.earlier.spill_bytes) != bool(self.pinned.spill_bytes)


def instructions(report: Report) -> int:
    """The machine instructions of a kernel, without the padding after its end."""
    return sum(report.census.values()) - report.census.get("NOP", 0)


def jobs() -> list[Pair]:
    """The launches that both were asked to compile, as the kernels are now."""
    ours = recorded(RECORDED)
    return [Pair(r, ours[key]) for key, r in recorded(EARLIER).items() if key in ours]


def pairs() -> list[Pair]:
    """The launches that the earlier version has compiled."""
    return [pair for pair in jobs() if pair.earlier.error is None]


def refused() -> list[str]:
    """The names of the launches that the earlier version cannot compile, and the pinned one can."""
    lost = [pair for pair in jobs() if pair.earlier.error is not None]
    return sorted(pair.pinned.name for pair in lost if pair.pinned.error is None)


def paragraph(found: list[Pair], lost: Sequence[str] = ()) -> str:
    """What results/README.md says of them; "" without any. lost: `refused`."""
    if not found:
        return ""
    ratios = [pair.ratio for pair in found]
    worse = [p for p in found if p.spills_differ and p.earlier.spill_bytes]
    better = [p for p in found if p.spills_differ and p.pinned.spill_bytes]
    slow = [f"`{p.pinned.name}`" for p in found if p.earlier.serialized_wgmma]
    return (
        f"{found[0].earlier.compiler.capitalize()}, which a machine with torch 2.11 has, has "
        f"compiled {len(found)} of these launches for sm_90. Its code has {min(ratios):.2f} to "
        f"{max(ratios):.2f} times the instructions, in the median {median(ratios):.2f} times. "
        f"{listed(worse, 'It alone spills in')} {listed(better, 'It alone spills nothing in')}"
        + (f" It alone waits for each product in {', '.join(slow)}." if slow else "")
        + (f" It cannot compile {', '.join(f'`{name}`' for name in lost)}." if lost else "")
    )


def listed(found: list[Pair], what: str) -> str:
    """ "It alone spills in a (8 bytes) and b (16 bytes)." """
    bytes_of = {p.earlier.name: max(p.earlier.spill_bytes, p.pinned.spill_bytes) for p in found}
    names = [f"`{name}` ({count} bytes)" for name, count in sorted(bytes_of.items())]
    return f"{what} {', '.join(names) or 'no launch'}."
