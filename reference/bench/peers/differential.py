"""The same requests through our engine and through vLLM, and every field of the answers compared.

What two correct float32 engines may differ in is a tie: the order of their sums differs, so logits
differ by about 1e-5, and of two tokens closer than CLOSE each may take the other one. A difference
of tokens is a tie if a float64 model with the request's biases and penalties finds them that close.
Everything after a tie is another text, so an answer is compared up to there.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from random import Random

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.sampling import penalize
from reference.engine.llm import LLM
from reference.engine.sampling_params import SamplingParams
from reference.ladder.judging import MARGIN, logits_after

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = REPOSITORY / ".venv-peers/bin/python"
CLOSE = MARGIN  # of log-probabilities as of logits
FAITHFUL = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 32, "seed": 0}


class Theirs:
    """vLLM in a process of its own. It is asked by calling it."""

    def __init__(self, process: subprocess.Popen):
        self.process = process

    def __call__(self, requests: list[dict]) -> list[dict]:
        """What it gives for each request: a dict of fields, or {"error": one line}."""
        self.process.stdin.write(f"{json.dumps(requests)}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with exit code {self.process.wait()}")
        return json.loads(line)


@contextmanager
def vllm(model: str, python: Path = PYTHON, **arguments) -> Iterator[Theirs]:
    """Start it, and end it. arguments: of vLLM's LLM."""
    command = [python, Path(__file__).with_name("vllm_process.py")]
    told = json.dumps({"model": str(model), **arguments})
    # without compiling, because the comparison is of numbers and not of times
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*map(str, command), told], text=True, env=os.environ | quiet,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield Theirs(process)
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


# ---------------------------------------------------------------- ours


def ours(llm: LLM, requests: list[dict]) -> list[dict]:
    """What our engine gives for each request, as vllm_process.py writes it."""
    found: list[dict | None] = [None] * len(requests)
    params = {}
    for at, request in enumerate(requests):
        try:
            params[at] = params_of(**request["params"])
            llm.check_logprobs(params[at])
            llm.engine.add_request(f"differential-{at}", request["prompt"], params[at])
        except (ValueError, TypeError) as error:
            found[at] = {"error": f"{type(error).__name__}: {error}"}
            params.pop(at, None)
    outputs = {}
    while llm.engine.has_unfinished_requests:
        for request in llm.engine.advance():
            if request.finished:
                outputs[request.request_id] = request.output()
    for at in params:
        found[at] = written(outputs[f"differential-{at}"])
    return found


def params_of(**wishes) -> SamplingParams:
    """Ours, from JSON, whose keys are strings."""
    if wishes.get("logit_bias"):
        wishes["logit_bias"] = {int(token): bias for token, bias in wishes["logit_bias"].items()}
    return SamplingParams(**wishes)


def written(output) -> dict:
    """A RequestOutput as JSON can write it."""
    fields = ["index", "text", "token_ids", "cumulative_logprob", "finish_reason", "stop_reason"]
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": places(output.prompt_logprobs),
        "outputs": [
            {name: getattr(one, name) for name in fields} | {"logprobs": places(one.logprobs)}
            for one in output.outputs
        ],
        "finished": output.finished,
    }


def places(logprobs) -> list | None:
    """Log-probabilities of each place: [[token, logprob, rank, text], …]."""
    if logprobs is None:
        return None
    return [
        [[token, *astuple(value)] for token, value in (here or {}).items()] for here in logprobs
    ]


# ---------------------------------------------------------------- one beside the other


class Judge:
    """Which tokens are as good as tied. model: in float64."""

    def __init__(self, model: Decoder):
        self.model = model

    @torch.inference_mode()
    def is_tie(self, request: dict, prompt: list[int], output: list[int], pair: list[int]) -> bool:
        """Whether two tokens after prompt and output are within CLOSE of each other."""
        params = params_of(**request["params"])
        logits = logits_after(self.model, [*prompt, *output])
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        row = params.rows(Random(0))[0]
        first, second = penalize(logits, row, prompt, output)[pair].tolist()
        return abs(first - second) < CLOSE


def compare(request: dict, mine: dict, theirs: dict, judge: Judge) -> tuple[list[str], bool]:
    """(what differs, each in a line; whether a tie was met)."""
    if "error" in mine or "error" in theirs:
        both = "error" in mine and "error" in theirs
        return [] if both else [f"error: {mine.get('error')} | {theirs.get('error')}"], False
    wrong, met_tie = [], False
    for name in ("prompt", "prompt_token_ids", "finished"):
        if mine[name] != theirs[name]:
            wrong.append(f"{name}: {mine[name]!r} | {theirs[name]!r}")
    wrong += compare_places("prompt_logprobs", mine["prompt_logprobs"], theirs["prompt_logprobs"])
    if len(mine["outputs"]) != len(theirs["outputs"]):
        wrong.append(f"outputs: {len(mine['outputs'])} | {len(theirs['outputs'])}")
    for one, other in zip(mine["outputs"], theirs["outputs"]):
        a, b = one["token_ids"], other["token_ids"]
        parted = next((at for at, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), None)
        if parted is not None:
            pair = [a[parted], b[parted]]
            if judge.is_tie(request, mine["prompt_token_ids"], a[:parted], pair):
                met_tie = True
                continue
        wrong += compare_answers(request, one, other)
    return wrong, met_tie


def compare_answers(request: dict, one: dict, other: dict) -> list[str]:
    """What differs between two answers without a tie."""
    wrong = []
    for name in ("index", "token_ids", "text", "finish_reason", "stop_reason"):
        mine = one[name]
        if name == "text" and not isinstance(one["stop_reason"], str):
            mine = mine[: len(other[name])] + mine[len(other[name]) :].rstrip("\ufffd")
        if mine != other[name]:
            wrong.append(f"{name}: {one[name]!r} | {other[name]!r}")
    if request["params"].get("structured_outputs") is not None:
        return wrong  # see DIFFERENCES: vLLM's log-probabilities are those after the mask
    sums = one["cumulative_logprob"], other["cumulative_logprob"]
    if not are_close(*sums, CLOSE * max(1, len(one["token_ids"]))):
        wrong.append(f"cumulative_logprob: {sums[0]} | {sums[1]}")
    return wrong + compare_places("logprobs", one["logprobs"], other["logprobs"])


def compare_places(name: str, mine: list | None, theirs: list | None) -> list[str]:
    """What differs between log-probabilities. Tokens closer than CLOSE may change places."""
    if mine is None or theirs is None:
        return [] if mine is theirs else [f"{name}: {mine} | {theirs}"]
    if len(mine) != len(theirs):
        return [f"{name}: {len(mine)} places | {len(theirs)}"]
    wrong = []
    for at, (here, there) in enumerate(zip(mine, theirs)):
        if len(here) != len(there):
            wrong.append(f"{name}[{at}]: {here} | {there}")
        for one, other in zip(here, there):
            is_same = one[0] == other[0] and one[3] == other[3] and are_ranks(one[2], other[2])
            if not are_close(one[1], other[1]) or not (is_same or is_tied(one, here)):
                wrong.append(f"{name}[{at}]: {one} | {other}")
    return wrong


def are_ranks(one: int, other: int) -> bool:
    """Whether two ranks are equal, or deep: far down a vocabulary many tokens are within rounding
    of each other.
    """
    return one == other or abs(one - other) <= max(one, other) // 50


def is_tied(entry: list, entries: list[list]) -> bool:
    """Whether another of the entries has nearly the same log-probability."""
    return any(are_close(entry[1], one[1]) for one in entries if one[0] != entry[0])


def are_close(one: float | None, other: float | None, close: float = CLOSE) -> bool:
    """Whether two log-probabilities are equal for float32, or both missing."""
    if one is None or other is None:
        return one is other
    return one == other or abs(one - other) < close
