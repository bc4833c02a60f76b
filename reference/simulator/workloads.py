"""Conversations that come back, and the published traces of serving.

chats("rate=4,turns=8,pause=60")     a person reads the answer, thinks, and asks again
mooncake("rate=4")                   lesson 26's requests with the statistics of Mooncake's trace
"""

import random
from itertools import accumulate

from lessons.l14_continuous_batching.lab.workload import draw, geometric, uniform
from lessons.l26_kv_transfer.lab.traces import drawn
from reference.simulator.traces import TracedRequest, read_options

CHATS = {"rate": 4.0, "requests": 600, "turns": 8, "pause": 60.0, "prompt": 2048, "turn": 256}
CHATS |= {"output": 200, "seed": 0}
MOONCAKE = {"rate": 4.0, "requests": 1000, "seed": 0}


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which independent requests arrive."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))


def chats(options: str = "") -> list[TracedRequest]:
    """Conversations of `turns` requests. Each turn brings `turn` new tokens, and its prompt is all
    that was said before. pause: seconds from a request to the next of its conversation, in the
    mean; they are drawn from an exponential distribution. rate: requests/s, of all together.

    The trace begins in the middle of a day: there are conversations that began before it.
    """
    values = CHATS | read_options("chats", options, CHATS)
    turns, seed, wanted = int(values["turns"]), int(values["seed"]), int(values["requests"])
    rate, pause_s = values["rate"], values["pause"]
    before_s = 2 * turns * pause_s
    count = 1 + int((before_s * rate + wanted) / turns)
    begins = poisson_arrivals(rate / turns, count, seed)
    prompts = draw(uniform_around(int(values["prompt"])), count, seed + 1)
    rng, found = random.Random(seed + 2), []
    for chat, (at_s, tokens) in enumerate(zip(begins, prompts)):
        added = draw(uniform_around(int(values["turn"])), turns, rng.randrange(2**32))
        answers = draw(geometric(max(1.001, values["output"])), turns, rng.randrange(2**32))
        for turn in range(turns):
            if at_s >= before_s:
                begin_s = at_s - before_s
                found.append(TracedRequest(begin_s, tokens, answers[turn], f"chat {chat}", tokens))
            tokens += answers[turn] + added[turn]
            at_s += rng.expovariate(1 / pause_s)
    return sorted(found, key=lambda request: request.arrival_s)[:wanted]


def uniform_around(mean: int):
    """Lengths from half to one and a half times their mean."""
    return uniform(max(1, mean // 2), mean + mean // 2)


def mooncake(options: str = "") -> list[TracedRequest]:
    """Lesson 26's requests, which arrive independently of each other."""
    values = MOONCAKE | read_options("mooncake", options, MOONCAKE)
    count, seed = int(values["requests"]), int(values["seed"])
    arrivals = poisson_arrivals(values["rate"], count, seed)
    return [
        TracedRequest(at_s, request.input_length, request.output_length, hash_ids=request.hash_ids)
        for at_s, request in zip(arrivals, drawn(seed, count))
    ]
