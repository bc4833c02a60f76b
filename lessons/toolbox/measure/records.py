"""Recorded benchmarks: written whole, drawn anywhere. A figure comes from its JSON alone, without
PyTorch or the device.
"""

import json
import os
from pathlib import Path

import numpy as np

from lessons.toolbox.draw import plotting

TITLE_FACTS = (
    "speedup",
    "first",
    "x",
    "naive_growth",
    "optimized_growth",
    "floor_percent",
    "where",
    "beside",
)
AHEAD = 1.05  # times as fast, from which on a figure calls it faster: clocks differ by less
METRICS = {"time": "lower", "bandwidth": "higher", "flops": "higher"}  # metric -> which is better
BAND = ("median_s", "p20_s", "p80_s")
UNITS = {"time": ("ms", 1e3), "bandwidth": ("GB/s", 1e-9), "flops": ("TFLOP/s", 1e-12)}


def write_json(path: Path, record: dict) -> None:
    """Write `record` whole or not at all. NaN and infinity are errors: they are not JSON."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # after an error or Ctrl-C


def read_json(path: str | os.PathLike) -> dict:
    """The record of one benchmark. Raises ValueError in one line for a file that is none."""
    record = _loaded(path)
    if not isinstance(record, dict) or record.get("schema") != 1 or "series" not in record:
        raise ValueError(f"{path} is no benchmark record; accepted: JSON of schema 1 with series")
    return record


def _loaded(path: str | os.PathLike) -> object:
    """What a file says. Raises ValueError in one line if it is no JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no benchmark record: {error!r}") from None


def recorded(results: Path, lesson: str, name: str | None = None) -> list[dict]:
    """The records of a lesson ("03") under results/ that figure_of draws, or the one called `name`:
    those of GPUs first, then those of the folder cpu/. Other records are beside them, of what was
    counted or simulated, and of commands that have their own figure or none.
    """
    paths = sorted(results.glob(f"*/l{lesson}_*.json"))
    paths.sort(key=lambda path: path.parent.name == "cpu")
    found = [record for record in map(_loaded, paths) if _is_benchmark(record)]
    return [record for record in found if name in (None, record["name"])]


def _is_benchmark(record: object) -> bool:
    """Whether bench.py has written it."""
    return isinstance(record, dict) and record.keys() >= {"schema", "name", "series", "metric"}


def medians(record: dict, *roles: str, steady: bool = False) -> dict[int, float]:
    """{x: median seconds} of the first series of these roles (default: of any) that was measured;
    {} if none was. steady: without the points that are flagged as noisy.
    """
    for series in record["series"].values():
        found = {p["x"]: p for p in series["points"] if p["status"] == "ok"}
        if found and series["role"] in (roles or plotting.ROLES):
            return {x: p["median_s"] for x, p in found.items() if not (steady and is_noisy(p))}
    return {}


def is_noisy(point: dict) -> bool:
    """Whether its runs differed so much that no sentence may rest on it."""
    return any(flag.startswith("noisy") for flag in point.get("flags", ()))


def is_sound(record: dict) -> bool:
    """Whether no output was wrong and no provider failed."""
    return not any(line.startswith(("WRONG", "FAILED")) for line in complaints(record))


def complaints(record: dict) -> list[str]:
    """What no figure may hide, one line each: what happened to which providers, and at which sizes
    if not at all of them.
    """
    found = {}  # remark -> label -> sizes
    for label, series in record["series"].items():
        for point in series["points"]:
            for remark in _remarks(point):
                sizes = found.setdefault(remark, {}).setdefault(label, [])
                sizes.append(plotting.size_number(point["x"]))
    lines = []
    for remark, labels in found.items():
        where = [
            label if len(sizes) == len(record["x"]) else f"{label} at {', '.join(sizes)}"
            for label, sizes in labels.items()
        ]
        lines.append(f"{remark}: {'; '.join(where)}")
    return lines


def _remarks(point: dict) -> list[str]:
    """What happened to a point. Few runs stand in the record, and a time below the floor is ringed
    in the plot.
    """
    status = point["status"]
    if status == "ok":
        hidden = ("beats", "only")
        return [flag.split(":")[0] for flag in point["flags"] if not flag.startswith(hidden)]
    shown = status.upper() if status in ("wrong", "failed") else status
    return [f"{shown} ({point['reason']})"]


# ---------------------------------------------------------------- the figure


def title_of(record: dict) -> str:
    """The message with its numbers filled in from the record, of points that are not noisy; says so
    where the numbers were not measured.
    """
    naive, optimized, library = (
        medians(record, role, steady=True) for role in ("naive", "optimized", "library")
    )
    facts = {}
    if common := sorted(set(naive) & set(optimized)):
        first, x = common[0], common[-1]
        facts |= {"first": first, "x": x, "speedup": naive[x] / optimized[x]}
        facts["naive_growth"] = naive[x] / naive[first]
        facts["optimized_growth"] = optimized[x] / optimized[first]
        facts["where"] = where_faster(
            {n: naive[n] / optimized[n] for n in common}, record["x_name"]
        )
    elif optimized:  # where nothing naive runs, as in a number of splits on a GPU
        first, x = min(optimized), max(optimized)
        facts |= {"first": first, "x": x, "optimized_growth": optimized[x] / optimized[first]}
    if common := sorted(set(library) & set(optimized)):
        facts["beside"] = where_faster(
            {n: library[n] / optimized[n] for n in common}, record["x_name"]
        )
    if optimized and record["floor_s"]:
        x = facts.setdefault("x", max(optimized))
        facts["floor_percent"] = 100 * record["floor_s"][record["x"].index(x)] / optimized[x]
    try:
        return record["title"].format(**facts)
    except KeyError:
        what = record["ylabel"][:1].upper() + record["ylabel"][1:]
        if medians(record, "optimized") and not optimized:
            return f"{what}: its runs differ too much for a message with a number"
        return f"{what}: not enough was measured here for a message with a number"


def where_faster(speedups: dict[int, float], x_name: str) -> str:
    """At which sizes the optimized version wins, and its best there; its worst, if it wins nowhere.

    speedups: {x: naive over optimized}, x ascending, at least one; x_name: what x counts.
    """
    sizes = list(speedups)
    ahead = [x for x in sizes if speedups[x] >= AHEAD]
    if not ahead:
        worst = min(sizes, key=speedups.get)
        return f"nowhere faster, {speedups[worst]:.2f}x at {plotting.size_number(worst)} {x_name}"
    first, last = (plotting.size_number(x) for x in (ahead[0], ahead[-1]))
    start, end = sizes.index(ahead[0]), sizes.index(ahead[-1])
    if ahead == sizes:
        place = f"faster at every number of {x_name}"
    elif ahead != sizes[start : end + 1]:
        place = f"faster at {len(ahead)} of {len(sizes)} numbers of {x_name}"
    elif len(ahead) == 1:
        place = f"faster only at {first} {x_name}"
    elif start == 0:
        place = f"faster up to {last} {x_name}"
    elif end == len(sizes) - 1:
        place = f"faster from {first} {x_name} on"
    else:
        place = f"faster from {first} to {last} {x_name}"
    best = max(ahead, key=speedups.get)
    return f"{place}, {speedups[best]:.1f}x at {plotting.size_number(best)}"


def figure_of(record: dict) -> plotting.ClassFigure:
    """The class plot of a record: absolute values on a GPU, which has a name; ratios on a CPU,
    whose times mean little.
    """
    metric, x = record["metric"], record["x"]
    amounts = {"bandwidth": record["bytes"], "flops": record["flops"]}.get(metric)

    def shown(seconds):  # [N, ...] -> the metric in its base unit
        return seconds if amounts is None else (np.array(amounts) / seconds.T).T

    lines = {}
    left_out = record.get("not_drawn", ())  # a figure with more than five lines is not read
    drawn = {label: s for label, s in record["series"].items() if label not in left_out}
    record = record | {"series": drawn}
    for label, series in drawn.items():
        seconds = np.array([[p.get(key, np.nan) for key in BAND] for p in series["points"]])
        full = [p["x"] for p in series["points"] if p["status"] == "out of memory"]
        stopped = f" (out of memory at {plotting.size_number(full[0])})" if full else ""
        if np.isfinite(seconds).any():
            lines[label + stopped] = (series["role"], shown(seconds))
    if not lines:
        nothing = f"record {record['name']!r} holds no measured point, so there is nothing to draw"
        raise ValueError("; ".join([nothing, *complaints(record)]))
    limit = shown(np.array(record["floor_s"])) if record["floor_s"] else None
    scale, ylabel = _scale(record, lines, limit)
    return plotting.class_plot(
        x,
        {label: (role, scale * values) for label, (role, values) in lines.items()},
        title=title_of(record),
        xlabel=record["x_name"],
        ylabel=ylabel,
        better=METRICS[metric],
        floor=None if limit is None else scale * limit,
        floor_label=record["floor_label"],
        caption=_caption(record),
    )


def _scale(record, lines, limit) -> tuple[float, str]:
    """(factor on base units, axis label)."""
    metric, ylabel = record["metric"], record["ylabel"]
    if record["device_type"] != "cpu":
        unit, factor = UNITS[metric]
        return factor, f"{ylabel} ({unit})"
    if metric != "time" and limit is not None:
        return 100 / max(limit), f"{ylabel} (% of the dashed line's peak)"
    # in units of the first optimized line's first point
    optimized = [label for label, (role, _) in lines.items() if role == "optimized"]
    label = (optimized or list(lines))[0]
    values = lines[label][1][:, 0]
    first = np.isfinite(values).argmax()
    size = plotting.size_number(record["x"][first])
    return 1 / values[first], f"{ylabel}\n(× {label} at {size})"


def _caption(record) -> str:
    """The line under the figure: device, dtype, shape, and what would make the picture untrue.

    The rest stands in the record: versions, date, repetitions, what was not run and why. Noise
    shows in the band, and where memory ran out stands on the line's own label.
    """
    device = record["fingerprint"].get("device", "unknown device")
    quick = "quick run, fewer sizes" if record["quick"] else None
    harmless = ("not run", "out of memory", "noisy", "launch not counted")
    alarms = [line for line in complaints(record) if not line.startswith(harmless)]
    facts = [device, record["dtype"], record["shape"], quick, *alarms]
    return " · ".join(fact for fact in facts if fact)


def draw(json_path: str | os.PathLike) -> tuple[Path, Path]:
    """Draw a record beside itself as PNG and SVG and return both paths. Raises ValueError for what
    is no record.
    """
    record = read_json(json_path)
    labels = ", ".join(record["series"])
    alt = f"{title_of(record)}. {record['ylabel']} over {record['x_name']} for {labels}."
    return plotting.save(figure_of(record), Path(json_path).with_suffix(""), alt=alt)
