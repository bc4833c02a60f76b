"""A trace: what the engine did in every step, to be looked at afterwards.

    with traced(llm.engine, "steps.json"):
        llm.generate(prompts)

python -m reference.trace steps.json                    writes steps.html: open it in a browser

The file holds one event a line, in Chrome's trace format, so https://ui.perfetto.dev opens it too:
a bar for each step, and for each answer the time that it waited, ran its prompt, and decoded. A
file that was cut off in the middle of a run still opens, as far as it goes.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from lessons.toolbox.command import OneLineParser, run_command
from reference.trace.places import Blocks

VERSION = 1
VIEWER = Path(__file__).with_name("trace_viewer.html")
LONGEST_PROMPT = 80  # characters of it that a trace keeps
WAITING, PREFILL, DECODE = "waiting", "prefill", "decode"


# ---------------------------------------------------------------- writing


class Recorder:
    """Stands in front of an engine's `run` and writes down what went in and what came out.

    Tables and the cache are written as changes, because most of them stay as they are.
    """

    def __init__(self, engine, file, clock: Callable[[], float] = time.monotonic):
        self.engine = engine
        self.file = file
        self.clock = clock  # the one by which requests tell their arrival
        self.start = clock()
        self.count = 0
        self.phases: dict[int, str] = {}  # by row
        self.sequences: dict[int, Any] = {}
        scheduler = engine.scheduler
        self.blocks = Blocks(scheduler.blocks)
        about = dict(
            name="engine",
            version=VERSION,
            num_blocks=scheduler.blocks.num_blocks,
            block_size=scheduler.blocks.block_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
        self.file.write("[\n")
        self.write("process_name", "M", 0, args=about)

    def run(self, run: Callable, step) -> list:
        """The engine's `run`, and a line about it."""
        began = self.clock()
        self.meet(began)
        chunks = [[c.sequence.row, c.sequence.computed, c.count] for c in step.chunks]
        preempted = self.note_preempted(began)
        for chunk in step.chunks:
            self.enter(chunk.sequence.row, PREFILL, began, only_from=WAITING)
        about = dict(
            step=self.count,
            chunks=chunks,
            waiting=[sequence.row for sequence in self.engine.scheduler.waiting],
            preempted=preempted,
            copies=step.copies,
            **self.blocks.changes(),
            free=self.engine.scheduler.blocks.num_free,
        )
        before = {row: len(sequence.output) for row, sequence in self.sequences.items()}
        try:
            touched = run(step)
        except BaseException as error:
            self.write_step(began, about | dict(error=type(error).__name__))
            raise
        self.blocks.look()
        for request in touched:
            for sequence in request.sequences:
                self.meet_one(sequence, began)
        about["drafts"] = getattr(self.engine.speculation, "in_step", {})
        after = {row: len(sequence.output) for row, sequence in self.sequences.items()}
        about["sampled"] = [row for row in after if after[row] > before.get(row, 0)]
        self.write_step(began, about)
        for row in about["sampled"]:
            self.enter(row, DECODE, self.clock())
        self.leave(self.clock())
        return touched

    def write_step(self, began: float, about: dict) -> None:
        """The line of a step that began then and has just ended."""
        self.write("step", "X", began, dur=micros(self.clock() - began), args=about)
        self.count += 1

    def meet(self, now: float) -> None:
        """New requests wait since their arrival; aborted ones are gone."""
        self.leave(now)
        scheduler = self.engine.scheduler
        for sequence in (*scheduler.running, *scheduler.waiting):
            self.meet_one(sequence, sequence.request.metrics.arrival)

    def meet_one(self, sequence, since: float) -> None:
        """An answer waits since then, if it is new."""
        row = sequence.row
        if row in self.sequences:
            return
        self.sequences[row] = sequence
        request = sequence.request
        about = dict(
            request=request.request_id,
            answer=sequence.index,
            prompt_tokens=len(sequence.prompt),
            max_tokens=sequence.max_new_tokens,
            prompt=(request.prompt or "")[:LONGEST_PROMPT],
        )
        self.write("answer", "b", since, cat="request", id=row, args=about)
        self.enter(row, WAITING, since)

    def note_preempted(self, now: float) -> list[int]:
        """Rows that had begun, and wait again."""
        rows = [sequence.row for sequence in self.engine.scheduler.waiting]
        preempted = [row for row in rows if self.phases[row] != WAITING]
        for row in preempted:
            self.enter(row, WAITING, now)
        return preempted

    def enter(self, row: int, phase: str, now: float, only_from: str | None = None) -> None:
        """A row's phase ends and the next begins, unless it is in that phase already."""
        last = self.phases.get(row)
        if last == phase or (only_from is not None and last != only_from):
            return
        if last is not None:
            self.write(last, "e", now, cat="request", id=row)
        self.write(phase, "b", now, cat="request", id=row)
        self.phases[row] = phase

    def leave(self, now: float) -> None:
        """Forget the rows that have ended, and say why they have."""
        ended = [row for row, sequence in self.sequences.items() if sequence.finished]
        for row in ended:
            sequence = self.sequences.pop(row)
            self.write(self.phases.pop(row), "e", now, cat="request", id=row)
            about = dict(reason=sequence.finish_reason, tokens=len(sequence.output))
            self.write("answer", "e", now, cat="request", id=row, args=about)

    def write(self, name: str, kind: str, at: float, **more) -> None:
        """An event in Chrome's format. at: seconds of the clock."""
        event = dict(name=name, ph=kind, ts=micros(max(0.0, at - self.start)), pid=1, tid=1, **more)
        self.file.write(json.dumps(event, separators=(",", ":")) + ",\n")

    def close(self) -> None:
        """The last event stands without a comma, so that the whole file is JSON."""
        self.leave(self.clock())
        end = dict(name="end", ph="i", ts=micros(self.clock() - self.start), pid=1, tid=1)
        self.file.write(json.dumps(end) + "\n]\n")


def micros(seconds: float) -> float:
    """Microseconds, which Chrome's format counts in."""
    return round(seconds * 1e6, 1)


@contextmanager
def traced(engine, path: str | Path) -> Iterator[Recorder]:
    """Within it, every step of the engine is written to `path`. Raises ValueError for a place that
    cannot be written to.
    """
    try:
        Path(path).touch()
    except OSError as error:
        raise ValueError(f"trace: {error}; accepted: a file that can be written") from None
    with open(path, "w", encoding="utf-8") as file:
        recorder = Recorder(engine, file)
        run = partial(recorder.run, engine.run)
        # This engine's, in front of its class's or of a part's that runs its steps.
        with mock.patch.object(engine, "run", run), closing(recorder):
            yield recorder


# ---------------------------------------------------------------- reading


class Trace(NamedTuple):
    """about: of the engine. steps: the "args" of each step's event, and its ts and dur in
    microseconds. events: all of them, as they stand in the file. cut_off: whether the end is lost.
    """

    about: dict
    steps: list[dict]
    events: list[dict]
    cut_off: bool


def read_trace(path: str | Path) -> Trace:
    """A trace that `traced` wrote. Raises ValueError in one line for anything else.

    A last line that is cut off is left out, because a run may have been killed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace: {error}; accepted: a file that reference.trace wrote") from None
    lines = text.splitlines()
    cut_off = lines[-1:] != ["]"]
    body = lines[1:] if cut_off else lines[1:-1]
    events = []
    for number, line in enumerate(body, 2):
        try:
            event = json.loads(line.removesuffix(","))
            if not isinstance(event, dict) or "name" not in event:
                raise ValueError("no event")
        except ValueError as error:
            if cut_off and number == len(lines):
                break
            raise ValueError(f"{path}: line {number} is broken ({error})") from None
        events.append(event)
    about = events[0].get("args") if events else None
    if lines[:1] != ["["] or not isinstance(about, dict) or about.get("version") != VERSION:
        raise ValueError(
            f"{path}: no trace of version {VERSION}; accepted: what reference.trace wrote"
        )
    timed = [event for event in events if event["name"] == "step"]
    steps = [event["args"] | dict(ts=event["ts"], dur=event["dur"]) for event in timed]
    return Trace(about, steps, events, cut_off)


def page(path: str | Path) -> str:
    """The viewer with a trace inside, one HTML file that needs nothing else. Raises ValueError."""
    trace = read_trace(path)
    data = json.dumps(dict(cut_off=trace.cut_off, name=Path(path).name, events=trace.events))
    # "</script>" inside a prompt would end the data
    safe = data.replace("</", "<\\/")
    return VIEWER.read_text(encoding="utf-8").replace("null /* the trace */", safe)


def shown(path: str | Path, height: int = 720):
    """The viewer in a notebook's cell. height: in pixels."""
    from html import escape

    from IPython.display import HTML

    frame = f'<iframe srcdoc="{escape(page(path))}" width="100%" height="{height}"></iframe>'
    return HTML(f"<div>{frame}</div>")


# ---------------------------------------------------------------- the command


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m reference.trace",
        description="Make a page of a trace, to be opened in a browser.",
    )
    parser.add_argument("trace", type=Path, help="a file that reference.trace wrote")
    parser.add_argument("--out", type=Path, help="the page; default: beside the trace")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)

    def run() -> int:
        out = options.out or options.trace.with_suffix(".html")
        out.write_text(page(options.trace), encoding="utf-8")
        trace = read_trace(options.trace)
        cut = ", the last line is cut off" if trace.cut_off else ""
        print(f"{out}: {len(trace.steps)} steps{cut}. Open it in a browser.")
        return 0

    return run_command("trace", run)


if __name__ == "__main__":
    sys.exit(main())
