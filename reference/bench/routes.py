"""Chats behind a router, under three policies: round robin, lesson 22's prefix, and what the
replicas tell of their blocks, this one for each of --kv-weights. One replica is killed after half
of the turns, and started again.

    python -m reference.bench.routes --out build
    python -m reference.bench.routes --chats 12 --turns 4 --replicas 2

Each pool holds its share of the chats and half as much again. So a chat that stays where it was
finds its blocks, and one that moves about does not. All chats take a turn, then all the next, in an
order drawn anew; --clients of them at a time. Prints a table, writes routes.json and routes.svg.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import asyncio
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from reference.bench.speed_args import record_of
from reference.ladder.command import place_of

SCHEMA = 1
BLOCK, ANSWER = 16, 16  # tokens
FIRST, NEXT = 1600, 160  # characters of a chat's first message, and of the next ones
AROUND = 12  # tokens that the template writes around a message, at most
SYSTEM = "You answer questions about Python, in a few words."
EVENTS = '{"enable_kv_cache_events": true}'
READY_S = 300.0


def parse_args(argv) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m reference.bench.routes",
        description=" ".join(__doc__.split("\n\n")[0].split()),
    )
    parser.add_argument("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--chats", type=int, default=36)
    parser.add_argument("--turns", type=int, default=6, help="of each chat")
    parser.add_argument("--clients", type=int, default=4, help="requests at a time")
    parser.add_argument(
        "--kv-weights", type=float, nargs="+", default=[1, 8], help="the router's --kv-weight"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the record")
    args = parser.parse_args(argv)
    for name, least in (("replicas", 2), ("chats", args.replicas), ("turns", 2), ("clients", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if min(args.kv_weights) < 0:
        parser.error(f"--kv-weights must be at least 0, got {min(args.kv_weights)}")
    args.model, args.out = place_of(args.model), args.out.expanduser()
    return args


def policies_of(args) -> dict[str, list[str]]:
    """{name: the router's flags} of what is compared."""
    found = {name: ["--policy", name] for name in ("round-robin", "prefix")}
    for weight in args.kv_weights:
        found[f"kv, weight {weight:g}"] = ["--policy", "kv", "--kv-weight", f"{weight:g}"]
    return found


def flags_of(args) -> list[str]:
    """A replica's flags: its pool holds its share of the chats, and half as much again."""
    from reference.engine.model import load_tokenizer

    tokenizer, longest = load_tokenizer(args.model), 0
    for nth in range(len(policies_of(args))):
        for messages in new_chats(args, nth):
            text = "\n".join([SYSTEM, *messages])
            longest = max(longest, len(tokenizer.encode(text)))
    chat = -(-(longest + args.turns * (ANSWER + 2 * AROUND)) // BLOCK)
    blocks = max(chat * (args.clients + 1), int(1.5 * chat * args.chats / args.replicas))
    return [
        f"--block-size={BLOCK}",
        f"--max-model-len={(chat + 1) * BLOCK}",
        f"--num-gpu-blocks-override={blocks}",
        f"--kv-events-config={EVENTS}",
    ]


def new_chats(args, nth: int) -> list[list[str]]:
    """The messages of each chat, cut from the held-out text. nth: of the policy, because what one
    has left in the pools must be of no use to the next.
    """
    from lessons.toolbox.model.corpus import corpus

    text, draw = "\n".join(corpus()[1]), random.Random(f"{args.seed} {nth}")
    chats = []
    for chat in range(args.chats):
        sizes = [FIRST] + [NEXT] * (args.turns - 1)
        at = draw.randrange(len(text) - sum(sizes))
        messages = []
        for size in sizes:
            messages.append(text[at : at + size])
            at += size
        messages[0] = f"policy {nth}, chat {chat}: {messages[0]}"
        chats.append(messages)
    return chats


class Load:
    """The chats of one policy, through a router. urls: of the router and of its replicas."""

    def __init__(self, client, router: str, replicas: list[str], chats, args):
        self.client, self.router, self.replicas = client, router, replicas
        self.messages = [[{"role": "system", "content": SYSTEM}] for _ in chats]
        self.chats, self.clients = chats, asyncio.Semaphore(args.clients)
        self.draw = random.Random(args.seed)
        self.before = {url: (0.0, 0.0) for url in replicas}
        self.failed = 0

    async def turn(self, nth: int) -> dict:
        """All chats take a turn. Returns the seconds to their first tokens, and what was cached."""
        await self.scrape()
        order = self.draw.sample(range(len(self.chats)), len(self.chats))
        waits = await asyncio.gather(*[self.ask(chat, nth) for chat in order])
        found, asked = await self.scrape()
        waits = [wait for wait in waits if wait is not None]
        return {"ttft_s": waits, "found_tokens": found, "asked_tokens": asked}

    async def ask(self, chat: int, nth: int) -> float | None:
        """One turn of a chat; None: it failed."""
        import json

        import httpx

        messages = self.messages[chat]
        messages.append({"role": "user", "content": self.chats[chat][nth]})
        body = dict(messages=messages, max_tokens=ANSWER, temperature=0, ignore_eos=True)
        text, first, url = "", None, f"{self.router}/v1/chat/completions"
        async with self.clients:
            start = time.perf_counter()
            try:
                async with self.client.stream("POST", url, json=body | {"stream": True}) as answer:
                    answer.raise_for_status()
                    async for line in answer.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        found = json.loads(line[len("data: ") :])
                        for choice in found["choices"]:
                            first = first or time.perf_counter() - start
                            text += choice["delta"].get("content") or ""
            except (httpx.HTTPError, KeyError):  # an error in the stream has no choices
                self.failed += 1
                first = None
        messages.append({"role": "assistant", "content": text})
        return first

    async def scrape(self) -> tuple[float, float]:
        """(tokens found in the replicas' caches, tokens looked for) since the last call. A replica
        that was restarted counts from zero.
        """
        total = [0.0, 0.0]
        for url in self.replicas:
            text = await text_of(self.client, f"{url}/metrics")
            now = counter(text, "hits"), counter(text, "queries")
            was = self.before[url] if now[1] >= self.before[url][1] else (0.0, 0.0)
            total = [sum_ + new - old for sum_, new, old in zip(total, now, was)]
            self.before[url] = now
        return total[0], total[1]


def counter(text: str, name: str) -> float:
    """One of the counters of a prefix cache, from /metrics; 0 if it is not there."""
    start = f"vllm:prefix_cache_{name}_total"
    found = [line for line in text.splitlines() if line.startswith(start)]
    return float(found[0].split()[-1]) if found else 0.0


async def text_of(client, url: str) -> str:
    """What is there; "" if no one answers."""
    import httpx

    try:
        return (await client.get(url)).text
    except httpx.TransportError:
        return ""


async def until_ready(client, router: str, count: int) -> None:
    """Wait until a router sends requests to so many replicas. Raises OSError if it never does."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        lines = (await text_of(client, f"{router}/metrics")).splitlines()
        ready = [line for line in lines if line.startswith("router_replica_ready{")]
        if sum(line.endswith(" 1.0") for line in ready) >= count:
            return
        await asyncio.sleep(0.1)
    raise OSError(f"the router at {router} found no {count} replicas in {READY_S:.0f} s")


async def measure(policy: str, flags: list[str], nth: int, fleet, args, tick) -> dict:
    """All turns under one policy. flags: the router's. Returns its entry of the record."""
    import httpx

    from reference.bench.own_server import own_process, wait_for

    urls = [each.url for each in fleet.servers]
    flags = [*flags, "--health-interval", "0.2", "--replicas", *urls]
    turns = []
    async with httpx.AsyncClient(timeout=READY_S) as client:
        with own_process("reference.router", *flags) as router:
            await asyncio.to_thread(wait_for, router)
            await until_ready(client, router.url, len(urls))
            await asyncio.sleep(1.0)  # for the events of all
            load = Load(client, router.url, urls, new_chats(args, nth), args)
            for turn in range(args.turns):
                if turn == args.turns // 2:
                    fleet.restart(0)
                turns.append(await load.turn(turn))
                tick()
            await until_ready(client, router.url, len(urls))  # for the next policy
    return {"name": policy, "failed": load.failed, "turns": turns}


class Fleet:
    """The replicas, of which one can be killed and started again at the same port."""

    def __init__(self, args, stack: ExitStack):
        self.args, self.stack, self.flags = args, stack, flags_of(args)
        self.servers = [self.start(None) for _ in range(args.replicas)]

    def start(self, port: str | None):
        from reference.bench.own_server import own_server

        return self.stack.enter_context(own_server(self.args.model, *self.flags, port=port))

    def restart(self, at: int) -> None:
        """Kill one, and start it again; it takes a while until it is ready."""
        server = self.servers[at]
        server.kill()
        self.servers[at] = self.start(server.url.rpartition(":")[2])


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from rich.console import Console
    from rich.progress import Progress

    from lessons.toolbox.draw.figure import save
    from lessons.toolbox.measure.records import write_json
    from reference.bench.own_server import wait_for
    from reference.bench.routes_figure import ALT, draw_routes, print_table

    check_writable(args.out)
    console = Console(width=None if sys.stdout.isatty() else 110)
    entries = []
    with ExitStack() as stack, Progress(console=console) as progress:
        policies = policies_of(args)
        bar = progress.add_task("turns", total=len(policies) * args.turns)
        fleet = Fleet(args, stack)
        for server in fleet.servers:
            wait_for(server)
        for nth, (policy, flags) in enumerate(policies.items()):
            tick = lambda: progress.advance(bar)
            entries.append(asyncio.run(measure(policy, flags, nth, fleet, args, tick)))
    names = ("replicas", "chats", "turns", "clients", "seed")
    sizes = {name: getattr(args, name) for name in names}
    record = record_of(args.model, SCHEMA, **sizes, entries=entries)
    print_table(record, console)
    write_json(args.out / "routes.json", record)
    save(draw_routes(record), args.out / "routes", alt=ALT)
    console.print(f"data: {args.out / 'routes.json'}", markup=False)
    return 0


def main(argv=None) -> int:
    """The command; every failure is one line."""
    return run_command("routes", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
