"""A profile as text: the kernel's figures, then its source with what each line did in the
margin.
"""

from collections import Counter
from functools import cache
from pathlib import Path

from lessons.toolbox.gpu.ptx import Line
from lessons.toolbox.profile import time_model
from lessons.toolbox.profile.counted import KernelProfile

BAR, GAP = 24, 2  # characters of a full bar; lines without counts that are still shown
WIDTH = 72  # of a source line
HEAD = f"{'line':>5} {'issued':>7} {'sectors':>17} {'shared passes':>17} {'MFLOP':>7}"


def text(profile: KernelProfile, num_findings: int = 8) -> str:
    """Everything that `make profile` prints of one kernel."""
    predicted = time_model.text(profile)
    return "\n".join([*facts(profile), "", *floors(profile), *predicted, "", *source(profile), "",
                      *conclusions(profile, num_findings)])  # fmt: skip


def facts(profile: KernelProfile) -> list[str]:
    """What the kernel is, and what it asks of memory."""
    programs, limit = profile.occupancy()
    total, known = profile.total, profile.assembled
    said = "{registers} registers a thread, {spill_bytes} bytes spilled, "
    loaded, stored = profile.loaded_bytes, profile.stored_bytes
    asked = 32 * total["sectors"]
    times = f"{profile.launches} launches of " if profile.launches > 1 else ""
    lines = [
        f"{profile.kernel.name}: {times}{profile.programs // profile.launches} programs of "
        f"{profile.warps} warps, compiled for {profile.chip.name}",
        f"  {said.format(**known) if known else ''}{profile.shared_bytes / 1024:.3g} KiB of shared "
        f"memory; {programs} programs fit on an SM (limit: {limit})",
        f"  memory: {size(loaded)} loaded and {size(stored)} stored at least; {size(asked)} asked "
        f"for, {asked / max(loaded + stored, 1):.1f} times as much",
    ]
    if total["flops"]:
        intensity = total["flops"] / max(loaded + stored, 1)
        lines.append(
            f"  matrix units: {total['flops'] / 1e6:,.4g} MFLOP, {intensity:.3g} FLOP a byte; "
            f"{profile.chip.name} has {profile.matrix_rate() / profile.chip.memory_bytes_per_s:.3g}"
        )
    return lines


def size(count: int) -> str:
    """Bytes as people say them."""
    return f"{count / 1e6:,.3g} MB" if count >= 1e6 else f"{count / 1e3:,.3g} kB"


def floors(profile: KernelProfile) -> list[str]:
    """What each part of the chip needs at least, as bars."""
    found = profile.floors_s()
    most = max(found.values())
    lines = ["  What each part of the chip needs at least, if all its SMs are busy (predicted):"]
    for name, seconds in found.items():
        bar = "█" * round(BAR * seconds / most)
        lines.append(f"    {name:20} {bar:{BAR}} {1e6 * seconds:8.3g} µs")
    return lines


def source(profile: KernelProfile) -> list[str]:
    """The source of each file with its counts."""
    files: dict[str, dict[int, Counter]] = {}
    for line, row in profile.lines.items():
        if line:
            files.setdefault(line.file, {})[line.number] = row
    issued = profile.total["issued"]
    found = []
    for file, rows in files.items():
        found += [f"  {Path(file).name}", HEAD]
        indent = min(map(indentation, (code(file, number) for number in rows)))
        last = min(rows) - 1
        for number in sorted(rows):
            if number - last - 1 > GAP:
                found.append(f"{'⋮':>5}")
                last = number - 1
            for silent in range(last + 1, number):
                found.append(f"{silent:>5} {'':>51}  {cut(code(file, silent)[indent:])}".rstrip())
            found.append(
                f"{number:>5} {margin(rows[number], issued)}  {cut(code(file, number)[indent:])}"
            )
            last = number
    return found


def margin(row: Counter, issued: int) -> str:
    """The four columns of a line. "64/8": 64 where 8 would do; one number where they are equal."""
    flops = f"{row['flops'] / 1e6:,.4g}" if row["flops"] else ""
    return (
        f"{row['issued'] / max(issued, 1):7.1%} {ratio(row['sectors'], row['least_sectors']):>17} "
        f"{ratio(row['passes'], row['least_passes']):>17} {flops:>7}"
    )


def ratio(many: int, least: int) -> str:
    if not many:
        return ""
    return f"{many:,}" if many == least else f"{many:,}/{least:,}"


@cache
def source_lines(file: str) -> tuple[str, ...]:
    try:
        return tuple(Path(file).read_text(encoding="utf-8").splitlines())
    except OSError:
        return ()


def code(file: str, number: int) -> str:
    """A line of the source."""
    lines = source_lines(file)
    return lines[number - 1] if number <= len(lines) else ""


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def conclusions(profile: KernelProfile, most: int) -> list[str]:
    """The sentences; one if there is nothing to say."""
    found = profile.findings()
    if not found:
        return ["  No line asks for more sectors or passes than its bytes need."]
    more = (
        [f"  … and {len(found) - most} more (they stand in the JSON)"] if len(found) > most else []
    )
    return [f"  • {text}" for text in found[:most]] + more


def busiest(profile: KernelProfile, most: int) -> list[tuple[Line, Counter]]:
    """The lines with the most instructions, in the order of the source."""
    rows = [(line, row) for line, row in profile.lines.items() if line]
    rows.sort(key=lambda item: -item[1]["issued"])
    return sorted(rows[:most], key=lambda item: (item[0].file, item[0].number))
