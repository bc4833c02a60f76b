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
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from reference.router.args import RouterArgs
from reference.simulator.routers import LeastLoaded, RoundRobin, Router

PREFIX_CHARS = 1024  # of a prompt that count: some 16 blocks of 16 tokens
FEW = 4  # requests that a replica may always have: they share its steps at little cost


class Prompt(NamedTuple):
    """What policies see of a request. prefix: how its prompt begins, None if it has none."""

    prefix: str | None


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
    """The policy of --policy."""
    if args.policy == "prefix":
        return PrefixHash(list(args.replicas), args.balance)
    return {"least": LeastLoaded, "round-robin": RoundRobin}[args.policy]()


def object_in(body: bytes) -> dict[str, Any] | None:
    """A body that is a JSON object; None: it is something else."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def prefix_of(body: bytes) -> str | None:
    """How the prompt of a request begins, in whichever API it is written; None without one.
    Requests of different models or cache salts share no cache, so they never begin alike.
    """
    request = object_in(body)
    if request is None:
        return None
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
