"""Which of three schedulers wrote this log? Clients noted when they asked and when each token came;
the server's inside is not to be seen.
"""

import csv
import random
from pathlib import Path

from lessons.l14_continuous_batching.lab.workload import draw, poisson, uniform
from lessons.toolbox.model.arguments import refuse
from reference.simulator.costs import new_deployment
from reference.simulator.policies import Policy, simulate
from reference.simulator.served import Served
from reference.simulator.traces import TracedRequest

# what an answer calls it -> the simulator's policy
SCHEDULERS = {"waves": "static", "whole": "continuous", "chunks": "chunked"}
REQUESTS = 80


def load_of(seed: int) -> list[TracedRequest]:
    """The same requests for all three."""
    rate_per_s = random.Random(seed).uniform(3.0, 6.0)
    arrivals_s = poisson(rate_per_s, REQUESTS, seed)
    prompts = draw(uniform(256, 8192), REQUESTS, seed)
    answers = draw(uniform(20, 400), REQUESTS, seed + 1)
    return [TracedRequest(*row) for row in zip(arrivals_s, prompts, answers)]


def names_of(seed: int) -> list[str]:
    """Who wrote A, B and C."""
    names = list(SCHEDULERS)
    random.Random(f"detective {seed}").shuffle(names)
    return names


def logs_of(seed: int) -> dict[str, Served]:
    """By scheduler: one H100 with Llama-3-8B, predicted from data sheets."""
    load, deployment = load_of(seed), new_deployment("llama-3-8b", "h100")
    return {
        name: simulate(load, deployment, Policy(policy), 1) for name, policy in SCHEDULERS.items()
    }


def write_log(path: Path, load: list[TracedRequest], served: Served) -> None:
    """What the clients saw: a line for each token. Times in seconds."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["request", "asked_s", "prompt_tokens", "token", "came_s"])
        for row, (asked, first) in enumerate(zip(load, served.first)):
            times = served.token_s[first : first + served.counts[row]]
            for token, came_s in enumerate(times):
                facts = [row, f"{asked.arrival_s:.4f}", asked.prompt_tokens]
                rows.writerow([*facts, token, f"{came_s:.4f}"])


def run(seed: int, answer: str | None, out: Path) -> int:
    """Write the three logs, or say how many of an answer are right."""
    names = names_of(seed)
    if answer is not None:
        given = answer.split(",")
        if sorted(given) != sorted(SCHEDULERS):
            refuse("--answer", answer, f"each of {', '.join(SCHEDULERS)} once, in the order A,B,C")
        right = sum(map(str.__eq__, given, names))
        print(f"{right} of 3 are right" + ("" if right == 3 else "; look at the gaps once more"))
        return 0 if right == 3 else 1
    out.mkdir(parents=True, exist_ok=True)
    logs, load = logs_of(seed), load_of(seed)
    for letter, name in zip("ABC", names):
        path = out / f"detective_{seed}_{letter}.csv"
        write_log(path, load, logs[name])
        print(path)
    return 0
