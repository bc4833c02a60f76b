"""What arrives at a cluster: when, how long the prompts are, and how long the answers will be.

    poisson("rate=8")            independent arrivals
    bursty("rate=8,cv=4")        the same rate in bursts

Conversations are in workloads.py, recorded traces in recorded.py.

Lengths come from lesson 14's distributions: prompts are uniform between half and one and a half
times their mean, answers are geometric, so an answer of any length may end with the next token.
"""

import math
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

from lessons.l14_continuous_batching.lab.workload import draw, geometric, uniform
from lessons.l26_kv_transfer.lab.traces import BLOCK_SIZE as NAMED_TOKENS

MOST_REQUESTS = 10**6
MOST_TOKENS = 10**7  # of a prompt or an answer


class TracedRequest(NamedTuple):
    """One line of a trace. output_tokens: how long the answer is, which no scheduler and no router
    knows. prefix: requests of one name begin with the same tokens, for prefix_tokens of them.
    hash_ids: or the names of the blocks of 512 tokens with which the prompt begins.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: str | None = None
    prefix_tokens: int = 0
    hash_ids: tuple[int, ...] = ()

    @property
    def is_named(self) -> bool:
        """Whether another prompt may begin alike."""
        return self.prefix is not None or bool(self.hash_ids)

    def tokens(self, row: int) -> list[int]:
        """Its prompt as request number `row`: token ids that are equal only in a shared prefix.
        All are below 2⁶³, as a hash of tokens wants them.
        """
        first = crc32((self.prefix or "").encode()) << 30
        shared = [*range(first, first + self.prefix_tokens)]
        for name in self.hash_ids:
            first = (1 << 62) + name * 2 * NAMED_TOKENS  # twice: an answer begins no other block
            shared += range(first, first + NAMED_TOKENS)
        return shared + [own_token(row)] * (self.prompt_tokens - len(shared))


def own_token(row: int) -> int:
    """A token that only request number `row` has: prefixes have no negative ones."""
    return -1 - row


def next_tokens(last: int, count: int) -> list[int]:
    """The next tokens of an answer. After a prompt that is a prefix as a whole it goes on with that
    prefix, because the next turn of a conversation begins with this answer.
    """
    return [last] * count if last < 0 else [*range(last + 1, last + 1 + count)]


Trace = Sequence[TracedRequest]  # in the order of arrival


def rate_of(trace: Trace) -> float:
    """Requests/s that arrive. A trace that arrives all at once has no rate: infinity."""
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    return len(trace) / span_s if span_s else math.inf


def at_rate(trace: Trace, rate_per_s: float) -> list[TracedRequest]:
    """The same requests, with all times stretched so that they arrive at this rate."""
    scale, first_s = rate_of(trace) / rate_per_s, trace[0].arrival_s
    if math.isinf(scale):
        raise ValueError("trace: all requests arrive at once; accepted: a trace that has a rate")
    return [r._replace(arrival_s=(r.arrival_s - first_s) * scale) for r in trace]


# ---------------------------------------------------------------- made


def poisson(options: str = "") -> list[TracedRequest]:
    """Arrivals that are independent of each other. options: "rate=8,requests=600,prompt=1024,
    output=200,prefixes=0,prefix=0,seed=0"; raises ValueError for others.
    """
    return made("poisson", options, cv=1)


def bursty(options: str = "") -> list[TracedRequest]:
    """The same, in bursts: the gaps between arrivals have a coefficient of variation of cv=4 (1
    would be Poisson). They are drawn from a gamma distribution.
    """
    return made("bursty", options, cv=4)


def made(kind: str, options: str, cv: float) -> list[TracedRequest]:
    """A trace of any variation of gaps, from the options of `poisson` and `bursty`."""
    values = {"rate": 8.0, "requests": 600, "prompt": 1024, "output": 200}
    values |= {"prefixes": 0, "prefix": 512, "seed": 0}
    if kind == "bursty":
        values["cv"] = cv
    values |= read_options(kind, options, values)
    count, seed = int(values["requests"]), int(values["seed"])
    rng = random.Random(seed)
    shape = values.get("cv", cv) ** -2.0  # of a gamma distribution; 1: exponential
    scale = 1 / (values["rate"] * shape)
    arrivals = accumulate(rng.gammavariate(shape, scale) for _ in range(count))
    mean = int(values["prompt"])
    prompts = draw(uniform(max(1, mean // 2), mean + mean // 2), count, seed + 1)
    answers = draw(geometric(max(1.001, values["output"])), count, seed + 2)
    shared = int(values["prefix"]) if values["prefixes"] else 0
    requests = []
    for arrival_s, prompt, output in zip(arrivals, prompts, answers):
        name = f"prefix {rng.randrange(int(values['prefixes']))}" if shared else None
        requests.append(TracedRequest(arrival_s, prompt + shared, output, name, shared))
    return requests


def read_options(kind: str, text: str, known: dict) -> dict:
    """ "rate=8,requests=100" as numbers, each above 0 (the seed and the prefixes may be 0)."""
    values = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        accepted = f"accepted: {kind}:{','.join(f'{key}={known[key]:g}' for key in known)}"
        try:
            values[name] = float(value)
        except ValueError:
            raise ValueError(f"--trace {kind}: got {part!r}; {accepted}") from None
        least = 0 if name in ("seed", "prefixes") else 1e-6
        most = MOST_REQUESTS if name == "requests" else MOST_TOKENS
        is_number = name in ("rate", "cv", "pause") or values[name] % 1 == 0
        if name not in known or not least <= values[name] <= most or not is_number:
            raise ValueError(f"--trace {kind}: got {part!r}; {accepted}")
    return values
