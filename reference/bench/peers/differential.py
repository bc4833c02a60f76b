"""The same requests through our engine and through vLLM, and every field of the answers compared.

What two correct float32 engines may differ in is a tie: the order of their sums differs, so logits
differ by about 1e-5, and of two tokens closer than CLOSE each may take the other one. A difference
of tokens is a tie if a float64 model with the request's biases and penalties finds them that close.
Everything after a tie is another text, so an answer is compared up to there.
"""

from __future__ import annotations

from dataclasses import astuple
from random import Random

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.sampling import penalize
from reference.engine.llm import LLM
from reference.engine.sampling_params import SamplingParams
from reference.ladder.judging import MARGIN, logits_after

CLOSE = MARGIN  # of log-probabilities as of logits
FAITHFUL = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 32, "seed": 0}


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
    """What is true of a model's next token, as far as float32 can know. model: in float64."""

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

    @torch.inference_mode()
    def may_have(self, tokens: list[int], token: int, logprob: float, rank: int) -> bool:
        """Whether these may be the log-probability and the rank of `token` after `tokens`: among
        tokens within CLOSE of each other the order is free.
        """
        logprobs = logits_after(self.model, tokens).log_softmax(-1)
        true = logprobs[token].item()
        first = 1 + (logprobs > true + CLOSE).sum().item()
        last = (logprobs > true - CLOSE).sum().item()
        return abs(true - logprob) < CLOSE and first <= rank <= last


def compare(request: dict, mine: dict, theirs: dict, judge: Judge) -> tuple[list[str], bool]:
    """(what differs, each in a line; whether a tie was met)."""
    if "error" in mine or "error" in theirs:
        both = "error" in mine and "error" in theirs
        return [] if both else [f"error: {mine.get('error')} | {theirs.get('error')}"], False
    wrong, met_tie = [], False
    for name in ("prompt", "prompt_token_ids", "finished"):
        if mine[name] != theirs[name]:
            wrong.append(f"{name}: {mine[name]!r} | {theirs[name]!r}")
    prompt = mine["prompt_token_ids"]
    wrong += compare_places("prompt_logprobs", mine, theirs, prompt, 0, judge)
    if len(mine["outputs"]) != len(theirs["outputs"]):
        wrong.append(f"outputs: {len(mine['outputs'])} | {len(theirs['outputs'])}")
    for one, other in zip(mine["outputs"], theirs["outputs"]):
        a, b = one["token_ids"], other["token_ids"]
        parted = next((at for at, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), None)
        is_tie = parted is not None and judge.is_tie(
            request, prompt, a[:parted], [a[parted], b[parted]]
        )
        met_tie |= is_tie
        if is_tie:
            one, other = until(one, parted), until(other, parted)
        else:
            wrong += compare_ends(one, other)
        if request["params"].get("structured_outputs") is None:  # see DIFFERENCES
            wrong += [] if is_tie else compare_sums(one, other)
            wrong += compare_places("logprobs", one, other, [*prompt, *a], len(prompt), judge)
    return wrong, met_tie


def until(answer: dict, end: int) -> dict:
    """An answer's log-probabilities of its first `end` tokens."""
    logprobs = answer["logprobs"]
    return {"logprobs": None if logprobs is None else logprobs[:end]}


def compare_ends(one: dict, other: dict) -> list[str]:
    """What differs between two answers without a tie, apart from log-probabilities."""
    wrong = []
    for name in ("index", "token_ids", "text", "finish_reason", "stop_reason"):
        mine = one[name]
        if name == "text" and not isinstance(one["stop_reason"], str):
            mine = mine[: len(other[name])] + mine[len(other[name]) :].rstrip("\ufffd")
        if mine != other[name]:
            wrong.append(f"{name}: {one[name]!r} | {other[name]!r}")
    return wrong


def compare_sums(one: dict, other: dict) -> list[str]:
    """The same of the log-probability of the whole answers."""
    sums = one["cumulative_logprob"], other["cumulative_logprob"]
    is_close = are_close(*sums, CLOSE * max(1, len(one["token_ids"])))
    return [] if is_close else [f"cumulative_logprob: {sums[0]} | {sums[1]}"]


def compare_places(
    name: str, one: dict, other: dict, tokens: list[int], begin: int, judge: Judge
) -> list[str]:
    """What differs between the log-probabilities `name` of two answers. tokens: their text, of
    which the first `begin` come before the first place.
    """
    mine, theirs = one[name], other[name]
    if mine is None or theirs is None:
        return [] if mine is theirs else [f"{name}: {mine} | {theirs}"]
    if len(mine) != len(theirs):
        return [f"{name}: {len(mine)} places | {len(theirs)}"]
    wrong = []
    for at, (here, there) in enumerate(zip(mine, theirs)):
        if len(here) != len(there):
            wrong.append(f"{name}[{at}]: {here} | {there}")
        for a, b in zip(here, there):
            if not are_the_same(a, b, tokens[: begin + at], judge):
                wrong.append(f"{name}[{at}]: {a} | {b}")
    return wrong


def are_the_same(one: list, other: list, tokens: list[int], judge: Judge) -> bool:
    """Whether two entries, [token, logprob, rank, text], say the same of the place after `tokens`,
    or name two tokens that are as good as tied.
    """
    if not are_close(one[1], other[1]) or (one[0] == other[0] and one[3] != other[3]):
        return False
    if (one[0], one[2]) == (other[0], other[2]):
        return True
    return all(judge.may_have(tokens, *entry[:3]) for entry in (one, other))


def are_close(one: float | None, other: float | None, close: float = CLOSE) -> bool:
    """Whether two log-probabilities are equal for float32, or both missing."""
    if one is None or other is None:
        return one is other
    return one == other or abs(one - other) < close
