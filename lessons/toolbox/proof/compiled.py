"""What the compiler may say of a lesson's kernels: a table of bounds, for each kernel and chip.

BOUNDS = {
    "products": Bounds("gate_up|down", local_memory=0, matrix=of_16_bits),
    "wide loads": Bounds("gate_up_bf16", loads_128bit=8),
}

@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pytest

from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.kernels.compile_report import CHIPS, KernelSpec, Report


def reports_of(
    specs: Iterable[KernelSpec], kernels: str = "", chips: Iterable[int] = CHIPS
) -> list[Report]:
    """The reports on `chips` of all specs in whose labels the pattern `kernels` is found.

    Skips the test where nothing can be compiled. Raises AssertionError if no kernel is found.
    """
    reports = check_all([spec for spec in specs if re.search(kernels, spec.label)])
    found = [report for report in reports if report.chip in chips]
    assert found, f"no kernel {kernels!r} for the chips {list(chips)}"
    for report in found:
        if not report.was_run:
            pytest.skip(report.error)
    return found


def of_16_bits(report: Report) -> bool:
    """Whether matrix units can multiply: not float32, and nothing of Triton's on a T4."""
    return report.chip >= 80 and "fp32" not in report.name


@dataclass(frozen=True)
class Bounds:
    """Bounds of all kernels in whose labels the pattern `kernels` is found, on `chips`.

    Each kernel compiles, stays within the chip's shared memory and has its WGMMA not serialised.
    None: not asked.
    """

    kernels: str = ""
    chips: Iterable[int] = tuple(CHIPS)
    # {part of "label on sm_90": bytes at most}; kernels without an entry spill nothing
    spill_bytes: Mapping[str, int] = field(default_factory=dict)
    registers: int | None = None  # per thread, at most
    shared_bytes: int | None = None  # per block, at most
    local_memory: int | None = None  # instructions, at most
    loads_128bit: int | None = None  # at least; 0: none at all
    # True, False: any matrix instruction, none; a name or {chip: name}: this one
    matrix: bool | str | Mapping[int, str] | Callable[[Report], bool] | None = None
    without: tuple[str, ...] = ()  # how no instruction's name begins

    def check(self, specs: Iterable[KernelSpec]) -> None:
        """Raises AssertionError with every bound that a kernel of `specs` breaks."""
        reports = reports_of(specs, self.kernels, self.chips)
        broken = {
            f"{report.name} on sm_{report.chip}": complaints
            for report in reports
            if (complaints := list(self._broken_by(report)))
        }
        assert not broken, "\n".join(f"{at}: {', '.join(said)}" for at, said in broken.items())

    def _broken_by(self, report: Report) -> Iterable[str]:
        """What is wrong with one report, bound by bound."""
        if report.error:
            yield report.error
            return
        at = f"{report.name} on sm_{report.chip}"
        most = {
            "spill_bytes": max([0, *(n for part, n in self.spill_bytes.items() if part in at)]),
            "shared_bytes": min(self.shared_bytes or report.shared_limit_bytes,
                                report.shared_limit_bytes),
            "registers": self.registers,
            "local_memory_instructions": self.local_memory,
        }  # fmt: skip
        for name, bound in most.items():
            if bound is not None and getattr(report, name) > bound:
                yield f"{name} {getattr(report, name)}, at most {bound}"
        if report.serialized_wgmma:
            yield "WGMMA serialised"
        if self.loads_128bit is not None:
            least, loads = self.loads_128bit, report.loads_128bit
            if (loads < least) or (loads and not least):
                yield f"{loads} loads of 16 bytes, {f'at least {least}' if least else 'none'}"
        yield from self._wrong_instructions(report)

    def _wrong_instructions(self, report: Report) -> Iterable[str]:
        wanted, found = self.matrix, report.matrix_instruction
        if callable(wanted):
            wanted = wanted(report)
        elif isinstance(wanted, Mapping):
            wanted = wanted[report.chip]
        is_right = bool(found) == wanted if isinstance(wanted, bool) else found == wanted
        if wanted is not None and not is_right:
            yield f"matrix instruction {found}, expected {wanted}"
        for name in report.census:
            if name.startswith(self.without):
                yield f"instruction {name}"
