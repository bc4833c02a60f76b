"""Who gets a request: the replica whose prefix cache holds its beginning, unless that one has too
much to do.

Rendezvous hashing (Thaler and Ravishankar, 1998): each prefix ranks the replicas by a hash of both.
No table is kept, several routers agree, and a replica that comes or goes moves only the prefixes
that it gains or had. With bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016): a replica far
above the mean is passed over, and then the second of the ranking gets all that overflows, so the
cache of that one soon has the prefix too.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from lessons.l13_prefix_caching.naive import HashBlocks
from reference.features.block_events import KEY_BYTES
from reference.router.args import RouterArgs
from reference.simulator.routers import LeastLoaded, RoundRobin, Router

PREFIX_CHARS = 1024  # of a prompt that count: some 16 blocks of 16 tokens
FEW = 4  # requests that a replica may always have: they share its steps at little cost


@dataclass(frozen=True)
class Prompt:
    """What policies see of a request. prefix: how its prompt begins, None if it has none. tokens:
    of the prompt, None where they are not known. model: the name that the request gives.
    """

    prefix: str | None
    tokens: list[int] | None = None
    model: str | None = None
    made: dict[int, list[bytes]] = field(default_factory=dict, compare=False)

    def keys(self, block_size: int) -> list[bytes]:
        """Lesson 13's hashes of the whole blocks that leave a token to compute, as events have
        them.
        """
        if block_size not in self.made:
            count = (len(self.tokens) - 1) // block_size
            found = HashBlocks(block_size).hashes(self.tokens, count)
            self.made[block_size] = [key[:KEY_BYTES] for key in found]
        return self.made[block_size]


class PrefixHash:
    """As said above. names: of the replicas, which may change. balance: how far above the mean one
    may be.
    """

    def __init__(self, names: Sequence[str], balance: float):
        self.names = names
        self.balance = balance

    def ranked(self, prefix: str) -> list[int]:
        """The replicas, the one that should have this prefix first."""
        # Python's own hash() differs between processes, and so would two routers
        scores = [
            blake2b(f"{name}\n{prefix}".encode("utf-8", "replace"), digest_size=8).digest()
            for name in self.names
        ]
        return sorted(range(len(scores)), key=lambda at: scores[at], reverse=True)

    def choose(self, request: Prompt, loads: np.ndarray) -> int:
        """As in Router. One replica at least is below the bound, because the bound is above the
        mean.
        """
        if request.prefix is None:
            return int(loads.argmin())
        alive = loads[loads < np.inf]
        bound = max(FEW, math.ceil(self.balance * (alive.sum() + 1) / len(alive)))
        return next(at for at in self.ranked(request.prefix) if loads[at] < bound)


def new_policy(args: RouterArgs) -> Router:
    """The policy of --policy, but for kv, which needs what replicas tell."""
    if args.policy == "prefix":
        return PrefixHash(list(args.replicas), args.balance)
    return {"least": LeastLoaded, "round-robin": RoundRobin}[args.policy]()


def prompt_of(body: bytes) -> Prompt:
    """What the body of a request says of its prompt, before its tokens are known."""
    request = request_of(body)
    model = request.get("model")
    return Prompt(prefix_of(body), model=model if isinstance(model, str) else None)


def request_of(body: bytes) -> dict[str, Any]:
    """A body as JSON; {} for what is no object."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return request if isinstance(request, dict) else {}


def prefix_of(body: bytes) -> str | None:
    """How the prompt of a request begins, in whichever API it is written; None without one.
    Requests of different models or cache salts share no cache, so they never begin alike.
    """
    request = request_of(body)
    names = ("system", "instructions", "prompt", "inputs")
    parts = [request[name] for name in names if request.get(name)]
    for name in ("messages", "input"):
        parts += opening(request.get(name))
    if not parts:
        return None
    of_whom = json.dumps([request.get("model"), request.get("cache_salt")])
    return of_whom + json.dumps(parts)[:PREFIX_CHARS]


def opening(messages: Any) -> list[Any]:
    """The messages up to the first that is not the system's. All turns of a conversation begin with
    these, so they hash alike even while the conversation is shorter than PREFIX_CHARS.
    """
    if not isinstance(messages, list):
        return [messages] if messages else []
    begin = []
    for message in messages:
        begin.append(message)
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "developer"):
            break
    return begin
