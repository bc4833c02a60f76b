"""Recorded benchmarks: written whole, drawn anywhere. A figure comes from its JSON alone, without
PyTorch or the device.
"""

import json
import os
import string
from pathlib import Path

from lessons.toolbox.draw import plotting

TITLE_FACTS = ("speedup", "x", "naive_growth", "optimized_growth", "floor_percent")
METRICS = {"time": "lower", "bandwidth": "higher", "flops": "higher"}  # metric -> which is better
UNITS = {
    "time": (("s", 1), ("ms", 1e3), ("µs", 1e6)),
    "bandwidth": (("TB/s", 1e-12), ("GB/s", 1e-9), ("MB/s", 1e-6)),
    "flops": (("TFLOP/s", 1e-12), ("GFLOP/s", 1e-9), ("MFLOP/s", 1e-6)),
}


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
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no benchmark record: {error}") from None
    if not isinstance(record, dict) or record.get("schema") != 1 or "series" not in record:
        raise ValueError(
            f"{path} is no benchmark record; accepted: the JSON that toolbox.measure.bench writes, "
            f"schema 1"
        )
    return record


def recorded(results: Path, lesson: str, name: str | None = None) -> list[dict]:
    """The records of a lesson ("03") under results/, or the one called `name`: those of GPUs first,
    then those of CPUs.

    `make gpu` keeps all of a device's records in its benchmarks.json, `make bench` writes one file
    each.
    """
    found = []
    for path in sorted(results.glob("*/benchmarks.json")):
        found += (
            json.loads(path.read_text(encoding="utf-8")).get(lesson, {}).get("records", {}).values()
        )
    found += [read_json(path) for path in sorted(results.glob(f"*/l{lesson}_*.json"))]
    return [record for record in found if name in (None, record["name"])]


def medians(record: dict, role: str) -> dict[int, float]:
    """{x: median seconds} of the first series of a role that was measured at all; {} if none was."""
    for series in record["series"].values():
        found = {p["x"]: p["median_s"] for p in series["points"] if p["status"] == "ok"}
        if series["role"] == role and found:
            return found
    return {}


def title_of(record: dict) -> str:
    """The message with its numbers filled in from the record; says so where the numbers were not
    measured.
    """
    naive, optimized = medians(record, "naive"), medians(record, "optimized")
    quoted = {field for _, field, *_ in string.Formatter().parse(record["title"]) if field}
    facts = {}
    if common := sorted(set(naive) & set(optimized)):
        x = common[-1]
        facts |= {
            "x": x,
            "speedup": naive[x] / optimized[x],
            "naive_growth": naive[x] / naive[common[0]],
            "optimized_growth": optimized[x] / optimized[common[0]],
        }
    if optimized and record["floor_s"]:
        x = facts.setdefault("x", max(optimized))
        facts["floor_percent"] = 100 * record["floor_s"][record["x"].index(x)] / optimized[x]
    if missing := sorted(quoted - set(facts)):
        return f"{record['name'].replace('_', ' ')}: not enough was measured here to state its message ({', '.join(missing)})"
    return record["title"].format(**facts)


def figure_of(record: dict) -> plotting.ClassFigure:
    """The class plot of a record: absolute values on a GPU, which has a name; ratios on a CPU,
    whose times mean little.
    """
    metric, x_values = record["metric"], record["x"]
    amount = {"time": None, "bandwidth": record["bytes"], "flops": record["flops"]}[metric]

    def shown(x, seconds):  # a time in seconds -> the metric in its base unit
        return seconds if amount is None else amount[x_values.index(x)] / seconds

    series = {}
    for label, s in record["series"].items():
        points = {
            p["x"]: tuple(shown(p["x"], p[k]) for k in ("median_s", "p20_s", "p80_s"))
            for p in s["points"]
            if p["status"] == "ok"
        }
        if points:
            stopped = next(
                (
                    f" (out of memory at {plotting.size_number(p['x'])})"
                    for p in s["points"]
                    if p["status"] == "out of memory"
                ),
                "",
            )
            series[label + stopped] = (s["role"], points)
    if not series:
        raise ValueError(
            f"record {record['name']!r} holds no measured point, so there is nothing to draw: "
            + "; ".join(complaints(record))
        )
    limit = (
        [shown(x, f) for x, f in zip(x_values, record["floor_s"])] if record["floor_s"] else None
    )
    scale, ylabel = _scale(record, series, limit)
    figure = plotting.class_plot(
        x_values,
        {
            label: (
                role,
                [tuple(v * scale for v in points[x]) if x in points else None for x in x_values],
            )
            for label, (role, points) in series.items()
        },
        title=title_of(record),
        xlabel=record["x_name"],
        ylabel=ylabel,
        better=METRICS[metric],
        floor=[v * scale for v in limit] if limit else None,
        floor_label=record["floor_label"],
        caption=_caption(record),
    )
    return figure


def _scale(record, series, limit) -> tuple[float, str]:
    """(factor on base units, axis label)."""
    metric = record["metric"]
    if record["device_type"] != "cpu":
        largest = max(v[0] for _, points in series.values() for v in points.values())
        unit, factor = next(
            ((u, f) for u, f in UNITS[metric] if largest * f >= 1), UNITS[metric][-1]
        )
        return factor, f"{record['ylabel']} ({unit})"
    if metric != "time" and limit:
        return 100 / max(limit), f"{record['ylabel']} (% of this machine's roof)"
    label, (_, points) = next(
        ((label, s) for label, s in series.items() if s[0] == "optimized"),
        next(iter(series.items())),
    )
    first = min(points)
    return 1 / points[first][0], f"{record['ylabel']}\n(× {label} at {plotting.size_number(first)})"


def complaints(record: dict) -> list[str]:
    """What no figure may hide, one line for each status and reason: which providers, and at which
    sizes if not at all of them.
    """
    found = {}
    for label, series in record["series"].items():
        reasons = {}
        for p in series["points"]:
            if p["status"] != "ok":
                _, sizes = reasons.setdefault(p["status"], (p["reason"], []))
                sizes.append(p["x"])
        for status, (reason, sizes) in reasons.items():
            found.setdefault((status, reason), []).append(label + _at(sizes, series))
    return [
        f"{status.upper() if status in ('wrong', 'failed') else status}: {', '.join(where)} "
        f"({reason})"
        for (status, reason), where in found.items()
    ]


def _at(sizes: list[float], series: dict) -> str:
    """ " at 16, 32"; nothing where it is every size of the series."""
    return (
        ""
        if len(sizes) == len(series["points"])
        else f" at {', '.join(map(plotting.size_number, sizes))}"
    )


def _caption(record) -> str:
    runs = [
        p["runs"] for s in record["series"].values() for p in s["points"] if p["status"] == "ok"
    ]
    # kind -> label -> sizes; few runs show in the range of repetitions, a time below the floor in
    # the plot itself
    flags = {}
    for label, s in record["series"].items():
        for p in s["points"]:
            for kind in (
                f.split(":")[0] for f in p.get("flags", ()) if not f.startswith(("beats", "only"))
            ):
                flags.setdefault(kind, {}).setdefault(label, []).append(p["x"])
    text = plotting.caption(
        record["fingerprint"],
        dtype=record["dtype"],
        shape=record["shape"] or None,
        repetitions=str(min(runs)) if min(runs) == max(runs) else f"{min(runs)} to {max(runs)}",
        quick="run, fewer sizes" if record["quick"] else None,
    )
    # Where memory ran out stands on the line's own label.
    return " · ".join(
        [
            text,
            "band: 20-80 %",
            *(c for c in complaints(record) if not c.startswith("out of memory")),
            *(
                f"{kind}: "
                + "; ".join(
                    label + _at(sizes, record["series"][label]) for label, sizes in labels.items()
                )
                for kind, labels in flags.items()
            ),
        ]
    )


def draw(json_path: str | os.PathLike) -> tuple[Path, Path]:
    """Draw a record beside itself as PNG and SVG and return both paths. Raises ValueError for what
    is no record.
    """
    record = read_json(json_path)
    figure = figure_of(record)
    alt = f"{title_of(record)}. {record['ylabel']} over {record['x_name']} for {', '.join(record['series'])}."
    return plotting.save(figure, Path(json_path).with_suffix(""), alt=alt)
