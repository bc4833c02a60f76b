"""The ladder: the same requests, greedy, through every rung of the course; proof that the tokens
never change.

    python -m reference.ladder --model models/tiny --out build

Prints a table, writes ladder.json (its schema is in the README) and ladder.png/.svg. Exit code 1 if
a rung's tokens differ from the first rung's where the model was not in doubt: at the first
difference, its two best logits must lie within MARGIN of each other for a difference to be excused,
and then the margin is printed.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention_per_head
from lessons.l02_naive_attention.request import read_requests
from lessons.l06_mla.deepseek import load_decoder
from lessons.toolbox.exercises.exercise import ExerciseError
from lessons.toolbox.exercises.loading import use_implementation
from lessons.toolbox.measure import device as devices
from lessons.toolbox.measure.hardware import read_bandwidth
from lessons.toolbox.measure.records import write_json
from lessons.toolbox.model.checkpoint import CheckpointError, load_tokenizer
from lessons.toolbox.model.config import ModelConfig
from reference.ladder_report import draw, print_sample, print_table, record
from reference.peers import PEERS, load_peer_model
from reference.rungs import RUNGS, Rung, RungFailed, call_rung, first_line, latent_kv

MARGIN = 1e-3  # in logits; float32 sums in another order move logits by about 1e-5
SLOW_BUDGET_S = 40  # a rung predicted to take longer serves every 2nd, 4th … request, and says so
REPEATS = 3  # of every rung but a slow one; the median is reported


@dataclass
class Measured:
    """What running a rung or a peer gave. `outputs`: request index -> generated ids; `runs`:
    tokens/s of each run.
    """

    name: str
    served: list[int]
    lesson: str | None = None
    outputs: dict[int, list[int]] = field(default_factory=dict)
    runs: list[float] = field(default_factory=list)
    not_run: str | None = None
    kv_bytes_per_token: int = 0
    roofline_share: float | None = None
    verdict: str = ""  # why tokens differ, or what excuses it

    @property
    def tokens(self) -> int:
        """Tokens that were generated in one run, never tokens that were asked for."""
        return sum(map(len, self.outputs.values()))

    @property
    def tokens_per_s(self) -> float | None:
        return median(self.runs) if self.runs else None

    @property
    def identical(self) -> bool | None:
        return None if not self.runs else not self.verdict.startswith("differs")


def load_requests(path: Path, tokenizer) -> tuple[list[list[int]], list[int]]:
    """Prompts as token ids, each opened by the tokenizer's start token if it has one, and how many
    new tokens each asks for.

    Raises ValueError for a file that holds no such requests.
    """
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    try:
        requests = json.loads(path.read_text(encoding="utf-8"))
        prompts = [
            start + tokenizer(r["prompt"], add_special_tokens=False)["input_ids"] for r in requests
        ]
        limits = [r["max_new_tokens"] for r in requests]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: {type(error).__name__}: {error}; accepted: a JSON list of "
            '{"prompt": text, "max_new_tokens": count}'
        ) from None
    if prompts and not any(limits):
        raise ValueError(
            f"{path}: max_new_tokens is 0 everywhere; accepted: at least one request that asks for "
            f"a token"
        )
    return prompts, limits


def run_once(measured: Measured, run, prompts, limits, device, tick) -> None:
    """One timed pass over the requests that a rung serves, the device waited for; adds its tokens/s
    to `runs`.
    """
    served = measured.served
    devices.synchronize(device)
    start = time.perf_counter()
    outputs = run(
        [prompts[i] for i in served], [limits[i] for i in served], lambda row, token: tick()
    )
    devices.synchronize(device)
    seconds = time.perf_counter() - start
    measured.outputs = dict(zip(served, outputs))
    measured.runs.append(measured.tokens / seconds)


def requests_within_budget(model, rung: Rung, prompts, limits) -> list[int]:
    """All requests, or every 2nd, 4th, 8th of them, so that a rung without a cache stays within
    SLOW_BUDGET_S.
    """
    everything = list(range(len(prompts)))
    if rung.has_cache:
        return everything
    tokens = 3
    start = time.perf_counter()
    typical = sorted(prompts, key=len)[len(prompts) * 2 // 3]
    call_rung(rung, model, [typical], tokens, None)
    predicted_s = (time.perf_counter() - start) / tokens * sum(limits)
    stride = 1
    while predicted_s / stride > SLOW_BUDGET_S and stride < len(prompts):
        stride *= 2
    return everything[::stride]


def judge(measured: Measured, rungs: list[Measured], model, prompts) -> None:
    """Compare every output with the lowest rung that served the same request; excuse a difference
    only within MARGIN.
    """
    excused = []
    for index, tokens in measured.outputs.items():
        wanted = next(r.outputs[index] for r in rungs if index in r.outputs)
        if tokens == wanted:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(tokens, wanted)) if a != b),
            min(len(tokens), len(wanted)),
        )
        where = f"request {index}, new token {at}"
        best, margin = best_two(model, prompts[index] + wanted[:at])
        # one ended early, or took a token that nothing excuses
        if {*tokens[at : at + 1], *wanted[at : at + 1]} != best:
            measured.verdict = (
                f"differs from the first rung: {where}, where the tokens are not the two of the "
                f"best logits"
            )
            return
        if margin > MARGIN:
            measured.verdict = (
                f"differs from the first rung: {where}, where the two best logits are {margin:.4g} "
                f"apart "
                f"(tolerance {MARGIN:g})"
            )
            return
        excused.append(f"{where}: best two logits only {margin:.2g} apart (tolerance {MARGIN:g})")
    if excused:
        measured.verdict = "a tie: " + "; ".join(excused)


def best_two(model: Decoder, tokens: list[int]) -> tuple[set[int], float]:
    """The two best next tokens after `tokens`, and how far apart their logits are, recomputed
    without any cache.
    """
    config = model.config

    def attend(layer, q, k, v):
        return attention_per_head(
            q, k, v, config.softmax_scale, window=config.sliding_window(layer)
        )

    ids = torch.tensor(tokens, device=model.device)
    best = model.logits(
        model(ids, torch.arange(len(tokens), device=model.device), attend)[-1:]
    ).topk(2)
    return set(best.indices[0].tolist()), float(best.values[0, 0] - best.values[0, 1])


def floor_bytes(model: Decoder, prompts, outputs: dict[int, list[int]]) -> int:
    """Bytes that decoding one request at a time reads at least: for each token every weight once,
    and its context's K and V.
    """
    weight_bytes = sum(p.nbytes for p in model.parameters())  # a tied embedding counts once
    kv_bytes = model.config.kv_bytes_per_token(model.dtype.itemsize)
    return sum(
        weight_bytes + kv_bytes * (len(prompts[index]) + i)
        for index, tokens in outputs.items()
        for i in range(len(tokens))
    )


def climb(
    model: Decoder, path: str, prompts, limits, bandwidth: float, console: Console
) -> tuple[list[Measured], list[Measured]]:
    """Measure every rung and every peer, judge their tokens, and return (rungs, peers). bandwidth:
    bytes/s, the roofline.
    """
    peer_model = load_peer_model(path, model.device, model.dtype) if PEERS else None
    climbed = [rung for rung in RUNGS if rung.serves(model.config)]
    rungs = [new_measurement(model, rung, prompts, limits) for rung in climbed]
    peers = [Measured(name, list(range(len(prompts)))) for name in PEERS]
    # Every contender as (measured, run, passes), later called in turn, so that a drifting machine
    # hits all alike.
    contenders = [
        (measured, partial(call_rung, rung, model), REPEATS if rung.has_cache else 1)
        for measured, rung in zip(rungs, climbed)
    ]
    contenders += [(measured, partial(PEERS[measured.name], peer_model), 1) for measured in peers]
    take_turns(contenders, prompts, limits, model.device, console, guests=peers)
    for measured in rungs + peers:
        judge(measured, rungs, model, prompts)
    for measured in rungs:
        floor_s = floor_bytes(model, prompts, measured.outputs) / bandwidth
        measured.roofline_share = floor_s * measured.tokens_per_s / measured.tokens
    return rungs, peers


def take_turns(
    contenders, prompts, limits, device, console: Console, guests: list[Measured]
) -> None:
    """Fill every measurement, one pass of each contender a round. A guest that fails is reported,
    not fatal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = [
            progress.add_task(m.name, total=sum(limits[i] for i in m.served) * passes, start=False)
            for m, _, passes in contenders
        ]
        for turn in range(REPEATS):
            for bar, (measured, run, passes) in zip(bars, contenders):
                if turn >= passes or measured.not_run:
                    continue
                progress.start_task(bar)
                try:
                    if turn == 0:
                        run([prompts[measured.served[0]]], [2], None)  # warm-up
                    run_once(measured, run, prompts, limits, device, partial(progress.advance, bar))
                except Exception as error:
                    if measured not in guests:
                        raise
                    measured.not_run = first_line(error)
                if turn + 1 == passes:
                    speed = (
                        "not run" if measured.not_run else f"{measured.tokens_per_s:.1f} tokens/s"
                    )
                    # The total becomes what was generated, because a stop token may end a request
                    # early.
                    progress.update(
                        bar,
                        total=progress.tasks[bar].completed,
                        description=f"{measured.name}: {speed}",
                    )
                    progress.stop_task(bar)


def new_measurement(model: Decoder, rung: Rung, prompts, limits) -> Measured:
    """An empty measurement of a rung: which requests it will serve, and what a token costs it in
    cache bytes.
    """
    return Measured(
        rung.name,
        requests_within_budget(model, rung, prompts, limits),
        rung.lesson,
        kv_bytes_per_token=kv_bytes_of(rung, model.config, model.dtype.itemsize),
    )


def kv_bytes_of(rung: Rung, config: ModelConfig, bytes_per_value: int) -> int:
    """What a token adds to the rung's cache, in bytes."""
    if not rung.has_cache:
        return 0
    if config.mla is None or rung.serves is latent_kv:
        return config.kv_bytes_per_token(bytes_per_value)
    # The other rungs hold DeepSeek's keys and values of all heads, made from the latents.
    return (
        config.num_hidden_layers
        * config.num_attention_heads
        * (config.head_dim + config.v_head_dim)
        * bytes_per_value
    )


# ---------------------------------------------------------------- command line


def parse_args(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m reference.ladder", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--model", default="models/tiny", help="folder or hub name of a Llama-family checkpoint"
    )
    parser.add_argument("--prompts", type=Path, default=Path("models/prompts.json"))
    parser.add_argument(
        "--requests", type=int, default=None, help="serve only the first N requests"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build"), help="folder for ladder.json, .png and .svg"
    )
    parser.add_argument(
        "--impl",
        default=None,
        help="exercises: climb on your solved exercises wherever they stand in",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default=devices.default_device().type)
    args = parser.parse_args(argv)
    if args.requests is not None and args.requests < 1:
        parser.error(f"--requests must be at least 1, got {args.requests}")
    if args.device == "cuda" and not devices.has_gpu():
        parser.error(
            "--device cuda: this machine has no usable CUDA device (python -m "
            "lessons.toolbox.measure.device says why)"
        )
    return args


def main(argv=None) -> int:
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 132)  # a log has no width of its own
    try:
        for exercise_id, replaced, how in use_implementation(args.impl) if args.impl else ():
            console.print(
                f"exercise {exercise_id} for {replaced}: {how}", markup=False, highlight=False
            )
        model = load_decoder(args.model, device=args.device, dtype=torch.float32)
        tokenizer = load_tokenizer(args.model)
        prompts, limits = load_requests(args.prompts, tokenizer)
        prompts, limits = prompts[: args.requests], limits[: args.requests]
        # every rung refuses the same mistakes: better now than in the middle
        read_requests(model.config, prompts, limits)
        # With the weights' own size as working set: a small model's weights may stay in a large
        # cache, and then read faster.
        bandwidth = read_bandwidth(
            model.device, sum(p.nbytes for p in model.parameters()), budget_s=1.0
        )
        rungs, peers = climb(model, args.model, prompts, limits, bandwidth, console)
        data = record(rungs, peers, model, args.model, len(prompts), bandwidth)
        write_json(args.out / "ladder.json", data)
        draw(data, args.out / "ladder")
    except KeyboardInterrupt:
        print("ladder: interrupted; nothing was written.", file=sys.stderr)
        return 130
    except (CheckpointError, ExerciseError, RungFailed, ValueError, OSError) as error:
        print(f"ladder: {error}", file=sys.stderr)
        return 2
    print_table(data, console)
    print_sample(tokenizer, prompts, rungs, console)
    console.print(f"figure: {args.out / 'ladder.png'}   data: {args.out / 'ladder.json'}")
    wrong = [r.name for r in rungs if not r.identical]
    if wrong:
        print(f"ladder: FAILED, tokens differ: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
