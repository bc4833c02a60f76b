"""Size a deployment for a load, at the least cost, and defend it."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from lessons.l14_continuous_batching.lab.workload import draw, geometric, poisson, uniform
from lessons.toolbox.model.arguments import is_whole, refuse
from reference.simulator.costs import Deployment, new_deployment
from reference.simulator.plan import gpus_needed, serve_well
from reference.simulator.policies import POLICIES, Policy
from reference.simulator.served import Slo
from reference.simulator.traces import TracedRequest

# The task's own prices, so that an answer does not depend on the market.
DOLLARS_PER_HOUR = {"l40s": 1.0, "a100": 1.6, "h100": 2.9, "h200": 3.6}
MODELS = ("llama-3-8b", "llama-3-70b")
REQUESTS = 300
ATTAIN = 0.95  # of the requests have to keep the objective
FIELDS = ("gpu", "gpus_per_replica", "replicas", "policy", "max_num_batched_tokens")


@dataclass(frozen=True)
class Task:
    """What is to be served. Lengths are mean tokens, times seconds."""

    model: str
    rate_per_s: float
    prompt: int
    answer: int
    slo: Slo
    load: list[TracedRequest]

    def __str__(self) -> str:
        return (
            f"Serve {self.model} in 16 bits: {self.rate_per_s:.1f} requests a second on average, "
            f"independent of each other, prompts of {self.prompt // 2} to {self.prompt * 3 // 2} "
            f"tokens, answers of {self.answer} on average (geometric). {ATTAIN:.0%} of the "
            f"requests get their first token within {self.slo.ttft_s:g} s, and each next one "
            f"within {1000 * self.slo.itl_s:g} ms of the one before, but for one gap in a hundred."
        )


def task_of(seed: int) -> Task:
    """Another number is another task."""
    rng = random.Random(f"sizing {seed}")
    model = rng.choice(MODELS)
    rate = rng.uniform(4, 16) if model == MODELS[0] else rng.uniform(1, 4)
    prompt, answer = rng.choice((800, 2000, 4000)), rng.choice((80, 200, 400))
    slo = Slo(rng.choice((0.5, 1.0, 2.0)), rng.choice((0.05, 0.08)))
    prompts = draw(uniform(prompt // 2, prompt * 3 // 2), REQUESTS, seed)
    answers = draw(geometric(answer), REQUESTS, seed + 1)
    rows = zip(poisson(rate, REQUESTS, seed), prompts, answers)
    return Task(model, rate, prompt, answer, slo, [TracedRequest(*row) for row in rows])


def read_plan(path: Path) -> dict:
    """A plan's fields. Raises ValueError, in one line, for what is none, and OSError."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON ({error})") from None
    if not isinstance(plan, dict) or set(plan) != set(FIELDS):
        refuse("--plan", sorted(plan) if isinstance(plan, dict) else plan, ", ".join(FIELDS))
    for name, most in (
        ("gpus_per_replica", 8),
        ("replicas", 64),
        ("max_num_batched_tokens", 2**17),
    ):
        if not is_whole(plan[name], 1, most):
            refuse(name, plan[name], f"a whole number, 1 to {most}")
    if plan["gpu"] not in DOLLARS_PER_HOUR:
        refuse("gpu", plan["gpu"], ", ".join(DOLLARS_PER_HOUR))
    if plan["policy"] not in POLICIES:
        refuse("policy", plan["policy"], ", ".join(POLICIES))
    return plan


def dollars(gpu: str, gpus: int) -> float:
    """An hour of so many."""
    return DOLLARS_PER_HOUR[gpu] * gpus


def ours(task: Task) -> tuple[float, str]:
    """(dollars an hour, in words) of the cheapest that a plain search finds: chunks of 2048 tokens,
    each GPU with the fewest that hold the weights, as many replicas as are needed.
    """
    found = []
    for gpu in DOLLARS_PER_HOUR:
        try:
            deployment = new_deployment(task.model, gpu)
        except ValueError:
            continue  # eight of them do not hold the weights
        needed = gpus_needed(task.load, deployment, Policy("chunked"), task.slo, ATTAIN, 32)
        if needed.is_enough:
            found.append((dollars(gpu, needed.gpus), f"{needed.gpus} x {gpu}"))
    return min(found)


def judged(task: Task, plan: dict) -> tuple[float, float]:
    """(share of requests that keep the objective, dollars an hour). Raises ValueError for a model
    that does not fit.
    """
    deployment: Deployment = new_deployment(task.model, plan["gpu"], plan["gpus_per_replica"])
    policy = Policy(plan["policy"], max_num_batched_tokens=plan["max_num_batched_tokens"])
    served = serve_well(task.load, deployment, policy, plan["replicas"], task.slo)
    cost = dollars(plan["gpu"], plan["replicas"] * plan["gpus_per_replica"])
    return served.attained(task.slo), cost


def run(seed: int, path: Path | None) -> int:
    """Say the task, or what a plan of yours does and costs beside ours."""
    task = task_of(seed)
    print(task)
    if path is None:
        prices = ", ".join(f"{gpu} {price:.2f}" for gpu, price in DOLLARS_PER_HOUR.items())
        print(
            f"\nDollars an hour, in this task: {prices}.\nA plan is JSON with {', '.join(FIELDS)}."
        )
        return 0
    attained, cost = judged(task, read_plan(path))
    least, what = ours(task)
    is_enough = attained >= ATTAIN
    print(
        f"\nYours: {attained:.1%} keep the objective, ${cost:.2f} an hour. "
        f"A plain search: ${least:.2f} ({what})."
    )
    print("It holds." if is_enough else f"It does not hold: {ATTAIN:.0%} have to.")
    return 0 if is_enough else 1
