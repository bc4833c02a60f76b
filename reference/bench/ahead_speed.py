"""What one step ahead saves the engine: its own host code with a device that only takes time.

    python -m reference.bench.ahead_speed --out build
    python -m reference.bench.ahead_speed --device-ms 5

The engine schedules, builds batches, and writes texts as always. Its model and its sampler are a
device whose pass takes a set time and gives any tokens, so a step's time is known apart from that
of the host. A step that takes longer than its pass has overhead. Prints a table and writes
ahead_speed.json.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import os
import sys
import time
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from reference.bench.speed_args import record_of
from reference.ladder.command import REPOSITORY, place_of

SCHEMA = 1
DEVICE_MS = (1.0, 2.0, 5.0, 10.0, 20.0)  # of a pass
BATCH, STEPS, WARM = 32, 100, 10  # requests, and steps that are timed after a few others
LOOPS = {"in turns": False, "ahead": True}  # async_scheduling


def parse_args(argv) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m reference.bench.ahead_speed",
        description=" ".join(__doc__.split("\n\n")[0].split()),
    )
    parser.add_argument("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    parser.add_argument("--prompts", type=Path, default=REPOSITORY / "models/prompts.json")
    parser.add_argument("--device-ms", type=float, default=None, help="only this device")
    parser.add_argument("--steps", type=int, default=STEPS, help="that are timed")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the record")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    if args.device_ms is not None and not 0 < args.device_ms <= 1000:
        parser.error(f"--device-ms must be above 0 and at most 1000, got {args.device_ms}")
    args.model = place_of(args.model)
    args.prompts, args.out = args.prompts.expanduser(), args.out.expanduser()
    return args


class SleepingDevice:
    """Runs one pass after the other, each for pass_s seconds from when it was launched and the one
    before has ended.
    """

    def __init__(self, pass_s: float):
        self.pass_s, self.free_at = pass_s, 0.0

    def launch(self) -> float:
        """Returns when the pass will have ended, at once."""
        self.free_at = max(time.perf_counter(), self.free_at) + self.pass_s
        return self.free_at

    @staticmethod
    def wait(until: float) -> None:
        """Sleep, and be awake in time: a sleep may take some hundred microseconds longer."""
        if (left := until - time.perf_counter()) > 0.001:
            time.sleep(left - 0.001)
        while time.perf_counter() < until:
            pass


def put_on(engine, device: SleepingDevice) -> None:
    """Let the device take the place of an engine's model and sampler. What Python does for them
    stays: the batch of the pass, that of the sampler, and reading the tokens.
    """
    import torch

    from lessons.l14_continuous_batching.loop import StepSampler
    from lessons.l25_one_step_ahead.model_device import Drawn

    class Late(Drawn):
        """Tokens that are there when their pass has ended."""

        def __init__(self, tokens, there_at: float):
            super().__init__(tokens, tokens)
            self.there_at = there_at

        def read(self) -> list[int]:
            device.wait(self.there_at)
            return super().read()

    class Draw(StepSampler):
        """The host's part of drawing, and tokens that differ from place to place."""

        def draw(self, logits, sequences):
            rows = [sequence.row for sequence in sequences]
            if rows != self.rows:
                self.rows, self.batch = rows, self.new_batch(sequences, logits.device)
            return torch.tensor([100 + 7 * len(s.output) % 3000 for s in sequences])

        def __call__(self, logits, sequences) -> list[int]:
            return Late(self.draw(logits, sequences), device.free_at).read()

    def forward(tokens, attend):
        device.launch()
        return torch.zeros(len(tokens), 1)

    engine.runner.forward = forward
    engine.runner.logits = lambda hidden, rows: torch.zeros(len(rows), 1)
    engine.sampler.choose = Draw()
    if (ahead := getattr(engine.run, "__self__", None)) is not engine:
        drawn, ahead.draw = ahead.drawn, Draw()

        def drawn_late(logits, sequences):
            launched = drawn(logits, sequences)
            launched.tokens = Late(launched.tokens.tokens, device.free_at)
            return launched

        ahead.drawn = drawn_late


def step_s(model: str, prompts, is_ahead: bool, pass_s: float, steps: int) -> list[float]:
    """Seconds of each timed step, all with BATCH requests that decode and sample."""
    from reference.engine.llm import LLM
    from reference.engine.sampling_params import SamplingParams

    engine = LLM(
        model, dtype="float32", device="cpu", max_num_seqs=BATCH, async_scheduling=is_ahead,
        max_num_batched_tokens=8192,
    ).engine  # fmt: skip
    put_on(engine, SleepingDevice(pass_s))
    limit = WARM + steps + 8
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=limit, ignore_eos=True)
    for index in range(BATCH):
        engine.add_request(str(index), prompts[index % len(prompts)], params)
    for _ in range(WARM):
        engine.advance()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.advance()
        times.append(time.perf_counter() - start)
    return times


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported
    import torch
    from rich.console import Console
    from rich.progress import track

    from lessons.toolbox.measure.records import write_json
    from lessons.toolbox.model.checkpoint import load_tokenizer
    from reference.bench.speed_rows import band
    from reference.ladder.command import load_requests

    torch.set_num_threads(1)
    check_writable(args.out)
    console = Console(width=None if sys.stdout.isatty() else 110)
    prompts, _ = load_requests(args.prompts, load_tokenizer(args.model))
    devices = DEVICE_MS if args.device_ms is None else (args.device_ms,)
    entries = []
    for device_ms in track(devices, "devices", console=console):
        entry = {"device_ms": device_ms}
        for name, is_ahead in LOOPS.items():
            times = step_s(args.model, prompts, is_ahead, device_ms / 1000, args.steps)
            shares = [1 - device_ms / 1000 / seconds for seconds in times]
            entry[name] = {"step_s": band(times), "overhead": band(shares)}
        entries.append(entry)
    print_table(entries, console)
    sizes = {"batch": BATCH, "steps": args.steps}
    write_json(
        args.out / "ahead_speed.json", record_of(args.model, SCHEMA, **sizes, entries=entries)
    )
    console.print(f"data: {args.out / 'ahead_speed.json'}", markup=False)
    return 0


def print_table(entries: list[dict], console) -> None:
    """A row for each device."""
    from rich.table import Table

    table = Table(title=f"Steps of {BATCH} requests that sample; overhead: what is not the pass")
    table.add_column("pass, ms", justify="right")
    for name in LOOPS:
        table.add_column(f"{name}: step, ms", justify="right")
        table.add_column("overhead", justify="right")
    for entry in entries:
        cells = [f"{entry['device_ms']:g}"]
        for name in LOOPS:
            step_ms = 1000 * entry[name]["step_s"]["median"]
            cells += [f"{step_ms:.2f}", f"{entry[name]['overhead']['median']:.1%}"]
        table.add_row(*cells)
    console.print(table)


def main(argv=None) -> int:
    """The command; every failure is one line."""
    return run_command("ahead_speed", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
