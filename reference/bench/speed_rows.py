"""What reference.bench.speed measures: three workloads, who serves them, and what the engine adds
to a step.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from lessons.l02_naive_attention.decoder import Decoder
from reference.bench.peers.contenders import LIBRARIES, installed
from reference.engine.llm import LLM
from reference.engine.sampling_params import SamplingParams
from reference.ladder.command import load_requests
from reference.ladder.contest import (
    ONE_BY_ONE,
    Contender,
    first_line,
    run_pass,
    subset,
    warm_up,
)
from reference.ladder.judging import judge
from reference.ladder.peers import continuous_batching, left_padded_batch, one_by_one

CPU = torch.device("cpu")
ENGINE = "the engine"
# transformers' ways to generate
ALONE, PADDED, CONTINUOUS = PEERS = "one by one", "padded batch", "continuous batching"
PREFIX = 320  # tokens that all requests of the row "shared" begin with
ROW_BUDGET_S = 100.0  # of a row: another round begins only if it would end before


class Row(NamedTuple):
    """A workload. slots: requests that may run side by side."""

    name: str
    prompts: list[list[int]]
    max_new_tokens: list[int]
    slots: int  # 1: one request after the other


# ---------------------------------------------------------------- the workloads


def demo_row(prompts: list[list[int]], limits: list[int]) -> Row:
    """The requests of the ladder as they are."""
    return Row("demo", prompts, limits, slots=32)


def mixed_row(prompts: list[list[int]], limits: list[int]) -> Row:
    """96 requests of all lengths, more than there are slots."""
    draw = random.Random(0)
    text = [token for prompt in prompts for token in prompt]
    ours = [cut(draw, text, 8, 48) for _ in range(96)]
    return Row("mixed", ours, [draw.randint(8, 256) for _ in ours], slots=64)


def shared_row(prompts: list[list[int]], limits: list[int]) -> Row:
    """48 questions behind one long text."""
    draw = random.Random(0)
    text = [token for prompt in prompts for token in prompt]
    prefix = (text * (PREFIX // len(text) + 1))[:PREFIX]
    ours = [prefix + cut(draw, text, 8, 32) for _ in range(48)]
    return Row("shared", ours, [draw.randint(8, 64) for _ in ours], slots=48)


def alone_row(prompts: list[list[int]], limits: list[int]) -> Row:
    """A few requests of the ladder, of mean length, one after the other."""
    few = subset(prompts, limits, ONE_BY_ONE)
    return Row("alone", [prompts[i] for i in few], [limits[i] for i in few], slots=1)


def cut(draw: random.Random, text: list[int], least: int, most: int) -> list[int]:
    """A piece of the text, `least` to `most` tokens long."""
    count = min(draw.randint(least, most), len(text))
    start = draw.randrange(len(text) - count + 1)
    return text[start : start + count]


ROWS: dict[str, Callable[..., Row]] = {
    "demo": demo_row,
    "mixed": mixed_row,
    "shared": shared_row,
    "alone": alone_row,
}


def new_row(name: str, path: Path, tokenizer, count: int | None) -> Row:
    """The row of this name, or its first `count` requests, made from the prompts in a file."""
    row = ROWS[name](*load_requests(path, tokenizer))
    return row._replace(prompts=row.prompts[:count], max_new_tokens=row.max_new_tokens[:count])


# ---------------------------------------------------------------- who serves them


class EngineRun:
    """The engine as a contender. It returns token ids, as the others do, and no text."""

    def __init__(self, path: str, slots: int):
        self.path, self.slots = path, slots

    def renew(self) -> None:
        """A new engine for the next pass, because a prefix cache remembers the last one."""
        self.llm = LLM(self.path, dtype="float32", device="cpu", max_num_seqs=self.slots)

    def __call__(self, prompts, limits, on_token=None) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=limit, detokenize=False) for limit in limits
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


def contender_names(row: Row) -> list[str]:
    """Who serves a row, in their order."""
    ways = PEERS if row.slots > 1 else (ALONE,)
    return [ENGINE, *ways, *installed()]


def new_contenders(path: str, peer_model, row: Row) -> list[Contender]:
    """The engine first, then transformers' ways and the libraries that `make peers` installs. One
    by one serves a few requests of mean length, and is the only way of the row "alone".
    """
    every = list(range(len(row.prompts)))
    few = subset(row.prompts, row.max_new_tokens, ONE_BY_ONE)
    runs = {
        ALONE: one_by_one,
        PADDED: left_padded_batch,
        CONTINUOUS: partial(continuous_batching, slots=row.slots),
    }
    eos = peer_model.generation_config.eos_token_id
    eos = tuple(eos) if isinstance(eos, list) else (eos,)
    engine = EngineRun(path, row.slots)
    contenders = [Contender(ENGINE, engine, every, renew=engine.renew)]
    for name in contender_names(row)[1:]:
        if name in runs:
            served = few if name == ALONE else every
            contenders.append(Contender(name, partial(runs[name], peer_model), served))
        else:
            library = LIBRARIES[name](path, "float32", eos)
            run = library if row.slots > 1 else library.one_by_one
            contenders.append(Contender(name, run, every, is_guest=True, renew=library.renew))
    return contenders


def measure_row(
    row: Row, path: str, model: Decoder, peer_model, rounds: int, tick: Callable
) -> list[Contender]:
    """Every contender once a round, so that a drifting machine hits all alike; then their tokens
    are held to the engine's. A library that refuses the model is left out. tick(description=…):
    called before each pass.
    """
    contenders = new_contenders(path, peer_model, row)
    requests = row.prompts, row.max_new_tokens
    start = time.perf_counter()
    for done in range(rounds):
        if done and (time.perf_counter() - start) * (done + 1) / done > ROW_BUDGET_S:
            break
        for contender in contenders:
            tick(description=f"{row.name}: {contender.name}")
            try:
                contender.renew()
                if not done:
                    warm_up(contender, *requests, CPU)
                    contender.renew()
                run_pass(contender, *requests, CPU, lambda: None)
            except RuntimeError as error:
                if not contender.is_guest:
                    raise
                contender.not_run = first_line(error)
        contenders = [each for each in contenders if not each.not_run]
    for peer in contenders[1:]:
        judge(peer, contenders[:1], model, row.prompts, reference=ENGINE)
    return contenders


def band(values: list[float]) -> dict[str, float]:
    """Median and the range of the middle 60 %."""
    low, high = np.percentile(values, (20, 80))
    return {"median": median(values), "p20": float(low), "p80": float(high)}


def row_entry(row: Row, contenders: list[Contender]) -> dict:
    """A row of the record: speeds in tokens per second of processor time, ratios round by round."""
    engine = contenders[0]
    entries = []
    for contender in contenders:
        ratios = [ours / theirs for ours, theirs in zip(engine.cpu_runs, contender.cpu_runs)]
        entries.append(
            {
                "name": contender.name,
                "requests": len(contender.served),
                "tokens": contender.tokens,
                "tokens_per_cpu_s": band(contender.cpu_runs),
                "engine_is_faster": band(ratios),
                "identical": contender.identical,
                "verdict": contender.verdict,
            }
        )
    return {
        "name": row.name,
        "requests": len(row.prompts),
        "slots": row.slots,
        "rounds": len(engine.cpu_runs),
        "contenders": entries,
    }


# ---------------------------------------------------------------- the engine's overhead


def overhead(path: str, prompts, params: SamplingParams, batch: int, steps: int) -> dict:
    """How much of a decode step is not the model's forward pass: scheduling, batches, sampling,
    text. Each step is timed, and the shares of processor time are banded.
    """
    llm = LLM(path, dtype="float32", device="cpu", max_num_seqs=batch)
    engine = llm.engine
    for index in range(batch):
        engine.add_request(str(index), prompts[index % len(prompts)], params)
    while engine.scheduler.waiting or not all(s.is_decoding for s in engine.scheduler.running):
        engine.advance()
    spent = watch(engine.runner.model)
    shares, times = [], []
    for _ in range(steps):
        before, start = spent[0], time.process_time()
        engine.advance()
        times.append(time.process_time() - start)
        shares.append(1 - (spent[0] - before) / times[-1])
    return {"share": band(shares), "step_cpu_s": band(times), "batch": batch, "steps": steps}


def watch(model: Decoder) -> list[float]:
    """[seconds of processor time in the model's layers and its last matrix], which grow from now
    on. The last matrix is called apart, for the rows that are sampled.
    """
    spent, began = [0.0], [0.0]

    def begin(module, inputs) -> None:
        began[0] = time.process_time()

    def end(module, inputs, output) -> None:
        spent[0] += time.process_time() - began[0]

    for module in (model, model.lm_head):
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
    return spent
