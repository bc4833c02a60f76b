"""The router's arguments and its flags."""

import json
from contextlib import suppress
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from lessons.toolbox.command import OneLineParser
from lessons.toolbox.model.arguments import check_positive, check_whole, is_number, refuse
from reference.router.block_index import CREDITS

POLICIES = ("prefix", "least", "round-robin", "kv")
COSTS = ("kv_bytes", "compute_s", "bytes_per_s", "fixed_s")
ACCEPTED_URL = "http://host:port, https://host:port, or dns://name:port for all addresses of a name"


@dataclass
class RouterArgs:
    """Raises ValueError, in one line, for a value that cannot work.

    replicas: their addresses, which also decide who gets which prefix, so several routers in front
    of the same replicas should spell them alike. dns://name:port stands for every address that the
    name has, as a headless service of Kubernetes has one for each pod; it is looked up again at
    every health_interval. policy: prefix, kv (what replicas tell of their blocks, against what they
    have to do), least (fewest requests in flight) or round-robin. kv_weight: of a block to compute,
    against one of an answer that is written. host_credit, folder_credit: what a block in host
    memory, or in files, is worth of one in the pool. index_blocks: pairs of a block and a replica
    that the router knows at most. replica_api_key: for /kv_events, where the servers have a key.
    balance: under the policy prefix, how many times the mean a replica's requests in flight may be.
    ready_path: what a replica answers with 200 while it takes requests; vLLM's servers have
    /health. Times are seconds: health_interval between two questions for it, connect_timeout until
    a replica has taken a connection, answer_timeout without a byte of an answer, read_timeout of a
    request's headers and of its body, write_timeout of a write to a client that does not read,
    events_timeout without a word of a replica's blocks, tokenize_timeout of the question for a
    prompt's tokens, shutdown_timeout of what runs when the router is told to end. max_body_bytes:
    of a request. The router has no keys of its own: a client's key goes to the replica. impl:
    "exercises" routes by your solution of exercise 26.5.

    prefill: replicas that compute long prompts for the others and send them K and V; both sorts
    have --kv-transfer-config. prefill_timeout: s, after which the prompt is computed where it is
    decoded. send_from: tokens from which a prompt is sent; or send_costs, from which that number
    follows, in JSON: {"kv_bytes": a token's, "compute_s": to compute it, "bytes_per_s": the link's,
    "fixed_s": of the second request}; lesson 26's costs.py prints them for models and links.
    """

    replicas: list[str]
    policy: str = "prefix"
    balance: float = 1.25
    kv_weight: float = 1.0
    host_credit: float = CREDITS["host"]
    folder_credit: float = CREDITS["folder"]
    index_blocks: int = 1_000_000
    replica_api_key: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    ready_path: str = "/ready"
    health_interval: float = 1.0
    connect_timeout: float = 2.0
    answer_timeout: float = 600.0
    events_timeout: float = 5.0
    tokenize_timeout: float = 0.5
    read_timeout: float = 30.0
    write_timeout: float = 30.0
    shutdown_timeout: float = 30.0
    max_body_bytes: int = 2**20
    limit_concurrency: int = 4096
    prefill: list[str] = field(default_factory=list)
    prefill_timeout: float = 60.0
    send_from: float = 256.0
    send_costs: dict[str, float] | str | None = None
    impl: str = ""
    api_key: list[str] = field(default_factory=list, init=False)

    def __post_init__(self):
        if not self.replicas:
            refuse("replicas", self.replicas, "one address or more")
        self.replicas = [check_url(url) for url in self.replicas]
        if len(set(self.replicas)) < len(self.replicas):
            refuse("replicas", self.replicas, "each address once")
        self.prefill = [check_url(url) for url in self.prefill]
        if len({*self.prefill, *self.replicas}) < len(self.prefill) + len(self.replicas):
            refuse("prefill", self.prefill, "each address once, and none of replicas")
        self.send_costs = read_costs(self.send_costs)
        if not is_number(self.send_from, 0):
            refuse("send_from", self.send_from, "a number of tokens, 0 or more")
        if self.policy not in POLICIES:
            refuse("policy", self.policy, ", ".join(POLICIES))
        if not is_number(self.balance, 1.0):
            refuse("balance", self.balance, "a number, 1 or more")
        if not is_number(self.kv_weight, 0):
            refuse("kv_weight", self.kv_weight, "a number, 0 or more")
        for name in ("host_credit", "folder_credit"):
            if not is_number(getattr(self, name), 0, 1):
                refuse(name, getattr(self, name), "0 (not worth a hit) to 1 (as the pool's)")
        check_whole(index_blocks=self.index_blocks)
        if not 0 <= self.port < 2**16:
            refuse("port", self.port, "0 to 65535; 0 takes a free one")
        if not self.ready_path.startswith("/"):
            refuse("ready_path", self.ready_path, "a path, as /ready")
        check_whole(max_body_bytes=self.max_body_bytes, limit_concurrency=self.limit_concurrency)
        for each in fields(self):
            if each.name.endswith(("_timeout", "_interval")):
                check_positive(**{each.name: getattr(self, each.name)})


def read_costs(given: dict[str, float] | str | None) -> dict[str, float] | None:
    """send_costs as an object. Raises ValueError."""
    costs = given
    if isinstance(given, str):
        with suppress(ValueError):
            costs = json.loads(given)
    if costs is None:
        return None
    if not (isinstance(costs, dict) and sorted(costs) == sorted(COSTS)):
        refuse("send_costs", given, f"an object of {', '.join(COSTS)}")
    for name, value in costs.items():
        if not (is_number(value, 0) and (value > 0 or name == "fixed_s")):
            refuse(f"send_costs.{name}", value, "a number above 0")
    return costs


def check_url(url: str) -> str:
    """The address without a slash behind it. Raises ValueError for what is none."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # or it would fail whenever it is looked up
        is_name = parts.scheme == "dns" and parts.port  # because DNS tells addresses, but no port
        is_address = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:  # a port of letters, half of an IPv6 address, no name
        refuse("replicas", url, ACCEPTED_URL)
    if (
        not (is_address or is_name)
        or not parts.hostname
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
        or "@" in url
    ):
        refuse("replicas", url, ACCEPTED_URL)
    return url.rstrip("/")


def read_args(arguments: list[str]) -> RouterArgs:
    """The flags: one for each field of RouterArgs. Exits with one line for a wrong one; raises
    ValueError for a value that cannot work.
    """
    parser = OneLineParser(
        prog="python -m reference.router",
        description="One address in front of several servers of the same model.",
        epilog="reference/router/args.py explains the flags.",
        allow_abbrev=False,
    )
    for each in fields(RouterArgs):
        flag = f"--{each.name.replace('_', '-')}"
        if each.name == "replicas":
            parser.add_argument(flag, nargs="+", required=True, metavar="URL", help=ACCEPTED_URL)
        elif each.name == "prefill":
            text = "those that compute long prompts for the others"
            parser.add_argument(flag, nargs="+", default=[], metavar="URL", help=text)
        elif each.name == "send_costs":
            parser.add_argument(flag, metavar="JSON", help="from which --send-from follows")
        elif each.init:
            text = f"(default: {each.default})"
            parser.add_argument(flag, type=each.type, default=each.default, help=text)
    return RouterArgs(**vars(parser.parse_args(arguments)))
