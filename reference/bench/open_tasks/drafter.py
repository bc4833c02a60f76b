"""Choose who drafts, and how many tokens, for two workloads and two loads.

What is drafted and accepted is counted by running the engine on the embedded models. How long a
step takes is predicted for Llama-3-8B on an H100, and what a draft takes is a share of that, which
this task sets, as `sizing` sets its prices.
"""

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from lessons.l15_chunked_prefill.lab.costs import Work
from lessons.l16_speculative_sampling.lab.repeats import renamed
from lessons.toolbox.command import check_writable
from lessons.toolbox.model.arguments import is_whole, one_line, refuse
from reference.bench.open_tasks import handed_in
from reference.bench.open_tasks.handed_in import Allowed, Tried
from reference.simulator.costs import RooflineCost, new_deployment

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "models"
PROSE = Path(__file__).with_name("prose.json")
# method -> (of speculative_config, folder of the model that drafts)
METHODS = {
    "none": (None, None),
    "ngram": ("ngram", None),
    "suffix": ("suffix", None),
    "draft": ("draft", "tiny-draft"),
    "pard": ("draft", "tiny-pard"),
    "medusa": ("medusa", "tiny-medusa"),
    "eagle": ("eagle", "tiny-eagle"),
    "eagle3": ("eagle", "tiny-eagle3"),
    "mtp": ("mtp", "tiny-mtp"),
}
# Of a pass of the target over one token of each sequence: a model of 1.2 billion weights, and one
# layer with the head. This is once for a draft where AT_ONCE, else for each drafted token.
SHARES = {"draft": 0.15, "pard": 0.15, "medusa": 0.08}
SHARES |= dict.fromkeys(("eagle", "eagle3", "mtp"), 0.1)
AT_ONCE = ("pard", "medusa")
LOOKUP_S = 0.1e-3  # of the host for a draft that is found in texts, for all sequences of a step
LOADS = {"alone": 1, "busy": 256}  # sequences that decode together
CONTEXT = 500  # tokens of each
MOST = 16  # drafted tokens
WORKLOADS = ("code", "text")
CASES = tuple(f"{workload}_{load}" for workload in WORKLOADS for load in LOADS)
REQUESTS, MOST_PROMPT, NEW_TOKENS, RUNNING = 6, 96, 64, 4
SAMPLED = dict(temperature=0.8, top_p=0.95)
FIELDS = ("workload", "method", "num_speculative_tokens")
NUMBERS = ("drafted", "accepted", "tokens", "alone_ms", "busy_ms")
ALLOWED = dict.fromkeys(NUMBERS, Allowed(absolute=0.02, relative=0.02))


class Choice(NamedTuple):
    """One workload, who drafts for it, and at most how many tokens."""

    workload: str
    method: str
    count: int


class Answers(NamedTuple):
    """tokens: of each request. drafted, accepted, emitted: in all passes of a sequence."""

    tokens: list[list[int]]
    passes: int
    drafted: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class Task:
    """prompts: of each workload, in the order in which they come."""

    seed: int
    prompts: dict[str, list[str]]

    def __str__(self) -> str:
        loads = ", ".join(f"{name}: {count}" for name, count in LOADS.items())
        return (
            f"Two workloads, {NEW_TOKENS} tokens for each request, {RUNNING} at once. code: "
            f"{REQUESTS} functions to complete, greedy, then the same with another name for self. "
            f"text: {REQUESTS} beginnings of prose, at temperature {SAMPLED['temperature']}, each "
            f"with its seed. Choose who drafts and how many tokens, for each workload and each "
            f"load (sequences that decode together, {loads}). Answers have to be those without a "
            "drafter."
        )


def task_of(seed: int) -> Task:
    """Another number is another task."""
    rng = random.Random(f"drafter {seed}")
    asked = json.loads((MODELS / "prompts.json").read_text(encoding="utf-8"))
    functions = [one["prompt"] for one in asked if "self" in one["prompt"]]
    code = rng.sample(functions, REQUESTS)
    prose = rng.sample(json.loads(PROSE.read_text(encoding="utf-8")), REQUESTS)
    return Task(seed, {"code": [*code, *map(renamed, code)], "text": prose})


def read_choice(where: str, given) -> Choice:
    """Raises ValueError, in one line."""
    handed_in.check_fields(f"{where}: choice", given, FIELDS)
    workload, method, count = (given[name] for name in FIELDS)
    for name, value, accepted in (
        ("workload", workload, WORKLOADS),
        ("method", method, METHODS),
    ):
        if not isinstance(value, str) or value not in accepted:
            refuse(f"{where}: {name}", value, ", ".join(accepted))
    fewest, most = (0, 0) if method == "none" else (1, 4 if method == "medusa" else MOST)
    if not is_whole(count, fewest, most):
        accepted = f"a whole number, {fewest} to {most} with {method}"
        refuse(f"{where}: num_speculative_tokens", count, accepted)
    return Choice(workload, method, count)


# ---------------------------------------------------------------- counted


@lru_cache(maxsize=2 * handed_in.MOST)
def answered(seed: int, choice: Choice) -> Answers:
    """What the engine answers to a workload, with this drafter."""
    from reference.engine.llm import LLM
    from reference.engine.sampling_params import SamplingParams

    llm = LLM(
        str(MODELS / "tiny"),
        device="cpu",
        dtype="float32",
        max_num_seqs=RUNNING,
        speculative_config=config_of(choice),
    )
    encode, ways = llm.get_tokenizer(), SAMPLED if choice.workload == "text" else {"temperature": 0}
    prompts = [
        encode(text, add_special_tokens=False)["input_ids"][-MOST_PROMPT:]
        for text in task_of(seed).prompts[choice.workload]
    ]
    params = [
        SamplingParams(**ways, seed=row, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        for row in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    emitted = sum(map(len, tokens))
    if choice.method == "none":
        return Answers(tokens, emitted, 0, 0, emitted)
    counts = llm.engine.speculation.counts
    return Answers(tokens, counts.passes, counts.drafted, counts.accepted, counts.emitted)


def config_of(choice: Choice) -> dict | None:
    """The engine's speculative_config."""
    method, folder = METHODS[choice.method]
    if method is None:
        return None
    config = {"method": method, "num_speculative_tokens": choice.count}
    if folder is not None:
        config["model"] = str(MODELS / folder)
    return config | ({"parallel_drafting": True} if choice.method == "pard" else {})


def difference(seed: int, choice: Choice) -> str | None:
    """In words, where an answer is not the one without a drafter."""
    wanted = answered(seed, Choice(choice.workload, "none", 0)).tokens
    for row, (got, want) in enumerate(zip(answered(seed, choice).tokens, wanted)):
        if got != want:
            same = [a == b for a, b in zip(got, want)]
            place = same.index(False) if False in same else len(same)
            return f"request {row} has other tokens than without a drafter, from token {place} on"
    return None


# ---------------------------------------------------------------- predicted


@lru_cache(maxsize=1)
def cost() -> RooflineCost:
    """Of Llama-3-8B's passes on an H100, predicted from the data sheet."""
    return new_deployment("llama-3-8b", "h100").cost


def pass_s(batch: int, tokens: float) -> float:
    """Seconds of a pass over so many tokens of each sequence."""
    work = Work(batch * tokens, batch * tokens * CONTEXT, batch * CONTEXT, batch * tokens)
    return float(cost().seconds(work))


def draft_s(choice: Choice, batch: int) -> float:
    """Seconds of the draft before a pass."""
    if choice.method in ("none", "ngram", "suffix"):
        return 0.0 if choice.method == "none" else LOOKUP_S
    rounds = 1 if choice.method in AT_ONCE else choice.count
    return rounds * SHARES[choice.method] * pass_s(batch, 1)


def numbers(seed: int, choice: Choice) -> dict[str, float]:
    """Tokens of a pass of a sequence: drafted, accepted, all. And milliseconds for a token of a
    request, at each load.
    """
    found = answered(seed, choice)
    drafted, accepted, tokens = (
        count / found.passes for count in (found.drafted, found.accepted, found.emitted)
    )
    times = {
        f"{load}_ms": 1e3 * (pass_s(batch, 1 + drafted) + draft_s(choice, batch)) / tokens
        for load, batch in LOADS.items()
    }
    return {"drafted": drafted, "accepted": accepted, "tokens": tokens, **times}


# ---------------------------------------------------------------- the command


def run(seed: int, plan: Path | None, measure: Path | None, out: Path) -> int:
    """Say the task, measure choices, or check what is handed in."""
    task, path = task_of(seed), plan or measure
    print(task)
    if path is None:
        check_writable(out)
        file = out / f"drafter_{seed}.json"
        file.write_text(json.dumps(task.prompts, indent=1) + "\n", encoding="utf-8")
        print(f"\n{file} has the prompts. A choice is JSON with {', '.join(FIELDS)}.")
        print(f"Methods: {', '.join(METHODS)}. Cases: {', '.join(CASES)}.")
        return 0
    found = handed_in.read_json(path)
    handed_in.check_fields(
        str(path), found, ("tried", "chosen") if plan else ("tried",), ("chosen",)
    )
    rows = handed_in.read_tried(found, read_choice, NUMBERS if plan else ())
    chosen = read_chosen(rows, found["chosen"]) if plan else {}
    print()
    wrong = []
    for row in rows:
        again = numbers(seed, row.choice)
        handed_in.print_numbers(row.name, again)
        if (other := difference(seed, row.choice)) is not None:
            print(f"  {other}")
        wrong += handed_in.wrong_numbers(row, again, ALLOWED) if plan else []
    if not plan:
        return 0
    print()
    for case, row in chosen.items():
        wrong += judged(seed, case, row, rows)
    return handed_in.verdict(wrong)


def read_chosen(rows: list[Tried], given) -> dict[str, Tried]:
    """A row for each case. Raises ValueError, in one line."""
    handed_in.check_fields("chosen", given, CASES)
    found = {case: handed_in.one_named(rows, given[case], f"chosen: {case}") for case in CASES}
    for case, row in found.items():
        if row.choice.workload != case.partition("_")[0]:
            raise ValueError(
                one_line(f"chosen: {case}: {row.name} was tried on {row.choice.workload}")
            )
    return found


def judged(seed: int, case: str, row: Tried, rows: list[Tried]) -> list[str]:
    """Print a case beside no drafter and n-grams; what does not hold, a line each."""
    workload, _, load = case.partition("_")

    def ms(choice: Choice) -> float:
        return numbers(seed, choice)[f"{load}_ms"]

    mine, plain = ms(row.choice), ms(Choice(workload, "none", 0))
    grams = ms(Choice(workload, "ngram", 4))
    print(
        one_line(
            f"{case}: {row.name} {mine:.2f} ms a token; no drafter {plain:.2f}, n-grams of 4 "
            f"{grams:.2f}"
        )
    )
    wrong = []
    if (other := difference(seed, row.choice)) is not None:
        wrong.append(f"{case}: {row.name}: {other}")
    least = min(plain, grams)
    if mine > 1.01 * least:
        plainer = "no drafter" if plain == least else "n-grams of 4"
        wrong.append(f"{case}: {row.name} takes {mine:.2f} ms a token, {plainer} {least:.2f}")
    faster = [
        one
        for one in rows
        if one.choice.workload == workload
        and ms(one.choice) < 0.99 * mine
        and difference(seed, one.choice) is None
    ]
    if faster:
        best = min(faster, key=lambda one: ms(one.choice))
        wrong.append(f"{case}: {best.name}, {ms(best.choice):.2f} ms a token, is faster")
    return [one_line(line) for line in wrong]
