"""A profile as figures: the busiest lines of a kernel, and all kernels under the roofline."""

from pathlib import Path

from lessons.toolbox.draw.figure import ROLES, frame, log_axis, number, save, style
from lessons.toolbox.draw.plotting import roofline
from lessons.toolbox.profile.counted import KernelProfile
from lessons.toolbox.profile.margin import busiest, source_lines

LINES = 12
CODE = 60  # characters of a line
COUNTED = "compiled code, counted on a CPU; nothing is timed"


@style()
def line_figure(profile: KernelProfile):
    """Bars: the share of warp instructions of each of the busiest lines. In red behind the code:
    how many times the sectors or passes that it needs.
    """
    rows = busiest(profile, LINES)
    issued = profile.total["issued"]
    shares = [100 * row["issued"] / issued for _, row in rows]
    title = (
        f"{profile.kernel.name}: {sum(shares):.0f} % of its instructions stand in {len(rows)} lines"
    )
    caption = (
        f"{profile.chip.name} · {profile.programs} programs of {profile.warps} warps · {COUNTED}"
    )
    fig, (text, ax) = frame(title, caption, (13, 2.2 + 0.42 * len(rows)), widths=(1.5, 1))
    text.axis("off")
    text.set(xlim=(0, 1))
    for at, ((line, row), share) in enumerate(zip(rows, shares)):
        code = " ".join(source_lines(line.file)[line.number - 1].split())
        code = code if len(code) <= CODE else code[: CODE - 1] + "…"
        text.text(0, at, f"{line.number:>4}  {code}", family="monospace", fontsize=11, va="center")
        ax.barh(at, share, 0.8, color=ROLES["optimized"].colour)
        told = f"{share:.0f} %{wasted(row)}"
        colour = ROLES["naive"].colour if wasted(row) else "black"
        ax.text(share + 0.3, at, told, va="center", fontsize=12, color=colour)
    ax.set_xlim(0, 1.8 * max(shares))  # room for the words behind the longest bar
    for axes in (text, ax):
        axes.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_yticks([])
    ax.set_xlabel("warp instructions (% of the kernel's)")
    return fig


def wasted(row) -> str:
    """ ", 8 × the sectors" where a line asks for more than it needs."""
    for many, least, what in (
        ("sectors", "least_sectors", "sectors"),
        ("passes", "least_passes", "passes"),
    ):
        if row[many] > 1.05 * row[least]:
            return f", {row[many] / row[least]:.2g} × the {what}"
    return ""


def roofline_figure(shown: list[tuple[str, KernelProfile]]):
    """The kernels that have matrix products: FLOP a byte as counted, FLOP/s at most."""
    chip = shown[0][1].chip
    points = {}
    for function, profile in shown:
        flops = profile.total["flops"]
        if flops:
            moved = profile.loaded_bytes + profile.stored_bytes
            most_s = max(profile.floors_s().values())
            role = "optimized" if function == shown[-1][0] else "naive"
            points[profile.kernel.name] = (role, flops / moved, flops / most_s)
    if not points:
        return None
    rate = shown[-1][1].matrix_rate()
    best = max(points.values(), key=lambda point: point[2])
    return roofline(
        points,
        bandwidths={chip.name: chip.memory_bytes_per_s},
        peaks={"matrix units": rate},
        title=f"At most {number(best[2] / 1e12)} TFLOP/s: what the counts allow on {chip.name}",
        caption=f"{COUNTED} · the height is a bound, not a measurement",
    )


@style()
@style()
def model_figure(record: dict):
    """Predicted over measured time of all points of results/h200/time_model.json, axes in µs."""
    points, device, median = record["table"], record["device"], record["errors"]["all"]["median"]
    title = f"Half of the predictions are within {100 * median:.0f} % of the H200's time"
    caption = f"{device} · {record['points']} kernels · grey band: within 35 %"
    fig, ax = frame(title, caption, (9, 8))
    times = [1e6 * point["measured_s"] for point in points]
    ends = [0.8 * min(times), 1.25 * max(times)]
    ax.fill_between(ends, [0.65 * x for x in ends], [1.35 * x for x in ends], color="0.9")
    ax.plot(ends, ends, color="0.5", linewidth=1)
    for role, of_launches, what in (
        ("naive", True, "launches of the profiles"),
        ("optimized", False, "benchmarks, larger shapes"),
    ):
        some = [p for p in points if (p["source"] == "counters.json") == of_launches]
        x, y = ([1e6 * p[name] for p in some] for name in ("measured_s", "predicted_s"))
        ax.scatter(x, y, 60, color=ROLES[role].colour, label=what, zorder=3)
    log_axis(ax.xaxis, *ends)
    log_axis(ax.yaxis, *ends)
    ax.set(xlim=ends, ylim=ends)
    ax.set(xlabel="measured time (µs)", ylabel="predicted time (µs)")
    ax.legend(loc="upper left")
    return fig


def draw(shown: list[tuple[str, KernelProfile]], stem: Path) -> list[Path]:
    """Write the figures; returns their PNG files."""
    drawn = {}
    for _, profile in shown:
        name = f"{stem.name}_{profile.kernel.name}"
        alt = f"Bars of the busiest lines of {profile.kernel.name}"
        drawn.setdefault(name, (line_figure(profile), alt))
    if under_roof := roofline_figure(shown):
        drawn[f"{stem.name}_roofline"] = under_roof, "The kernels' counted points under a roofline"
    return [save(fig, stem.with_name(name), alt=alt)[0] for name, (fig, alt) in drawn.items()]
