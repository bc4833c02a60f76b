"""Mixed traffic for minutes: streams, clients that leave, structured outputs, adapters, several
answers, mistakes, deadlines. Every answer is compared with the same request answered offline.

    python -m tests.server.soak --seconds 600
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx

from tests.server.paths import MODEL, REPOSITORY
from tests.server.soak_cases import FLAGS, LONG, MISTAKES, PROMPTS, Case, new_cases

# ---------------------------------------------------------------- the server


def started_server() -> tuple[subprocess.Popen, str]:
    """A server with few blocks, so that requests preempt each other; and its address."""
    command = [sys.executable, "-m", "reference.server", "--model", MODEL, *FLAGS]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if found := re.search(r"http://\S+", line):
            break
    else:
        raise RuntimeError("the server has ended before it listened")
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return process, found[0]


def processes_of(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in tasks.read_text().split():
                found += processes_of(int(child))
    return found


def resident_mb(pid: int) -> dict[int, float]:
    """Memory of a process and of its own, each in MB, without pages of files."""
    found = {}
    for one in processes_of(pid):
        with suppress(OSError):
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
            kb = re.search(r"^Anonymous:\s+(\d+)", text, re.MULTILINE)[1]
            found[one] = int(kb) / 1024
    return found


# ---------------------------------------------------------------- the traffic


class Soak:
    """Clients that ask until the time is over. counts: of what happened."""

    def __init__(self, url: str, cases: list[Case], clients: int = 10):
        self.url, self.cases, self.clients = url, cases, clients
        self.counts: Counter = Counter()
        self.wrong: list[str] = []

    async def run(self, seconds: float) -> None:
        """All clients, for so long."""
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, limits=limits, timeout=120) as client:

            async def one() -> None:
                kinds = [self.whole, self.stream, self.leave, self.mistake, self.too_long]
                while time.monotonic() < end:
                    (kind,) = random.choices(kinds, (5, 6, 4, 1, 1))
                    await kind(client)

            await asyncio.gather(*(one() for _ in range(self.clients)))

    async def whole(self, client: httpx.AsyncClient) -> None:
        """An answer in one piece."""
        case = random.choice(self.cases)
        answer = await client.post("/v1/completions", json=case.body)
        if self.is_served("whole", answer.status_code, answer.text):
            found = [choice["token_ids"] for choice in answer.json()["choices"]]
            self.compare("whole", case, found)

    async def stream(self, client: httpx.AsyncClient, leaves_after: int | None = None) -> None:
        """An answer as events. leaves_after: so many events; None: reads to the end."""
        case = random.choice(self.cases)
        found = [[] for _ in case.expected]
        events, is_late = 0, False
        async with client.stream(
            "POST", "/v1/completions", json=case.body | {"stream": True}
        ) as got:
            if got.status_code != 200:
                self.is_served("stream", got.status_code, (await got.aread()).decode())
                return
            async for line in got.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                data = json.loads(line.removeprefix("data: "))
                is_late |= "error" in data
                for choice in data.get("choices", ()):
                    found[choice["index"]] += choice["token_ids"]
                events += 1
                if events == leaves_after:
                    self.counts["left"] += 1
                    return
        if is_late:
            self.counts["too late"] += 1
        else:
            self.compare("stream", case, found)

    async def leave(self, client: httpx.AsyncClient) -> None:
        """Go after some events, or after some time, whatever has come."""
        if random.random() < 0.5:
            await self.stream(client, leaves_after=random.randint(1, 20))
            return
        with suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self.whole(client), random.expovariate(5))
            return
        self.counts["left"] += 1

    async def mistake(self, client: httpx.AsyncClient) -> None:
        """A request that is refused."""
        status, body = random.choice(MISTAKES)
        answer = await client.post("/v1/completions", json=body)
        self.counts["refused"] += 1
        if answer.status_code != status or "\n" in answer.json()["error"]["message"]:
            self.wrong.append(f"{answer.status_code}, not {status}: {answer.text[:200]}")

    async def too_long(self, client: httpx.AsyncClient) -> None:
        """A long answer, which may come later than the server's deadline."""
        body = LONG | dict(prompt=random.choice(PROMPTS))
        answer = await client.post("/v1/completions", json=body)
        if self.is_served("long", answer.status_code, answer.text):
            self.counts["long"] += 1

    def is_served(self, kind: str, status: int, text: str) -> bool:
        """Whether there is an answer. Late ones are counted, and those that would have been late;
        anything else is wrong.
        """
        if status == 504:
            self.counts["too late"] += 1
        elif status == 429 and "too long for the request's own timeout" in text:
            self.counts["turned away"] += 1
        elif status != 200:
            self.wrong.append(f"{kind}: {status} {text[:200]}")
        return status == 200

    def compare(self, kind: str, case: Case, found: list[list[int]]) -> None:
        """With what the engine answers offline."""
        self.counts[kind] += 1
        self.counts["tokens"] += sum(map(len, found))
        if found != case.expected:
            self.wrong.append(f"{kind}: {case.body} got {found}, not {case.expected}")


@dataclass
class Report:
    """What a soak found. memory_mb: of each process, at even times. growth_mb: of each, from the
    third quarter's median to the last's; the first half counts as warm-up. left: what the server's
    gauges show when every client has gone. at_the_end: how many of those who waited when the signal
    came got which status.
    """

    counts: Counter
    wrong: list[str]
    memory_mb: list[dict[int, float]]
    left: dict[str, float]
    exit_code: int
    at_the_end: Counter

    @property
    def growth_mb(self) -> dict[int, float]:
        quarter, found = max(1, len(self.memory_mb) // 4), {}
        for pid in self.memory_mb[-1]:
            sizes = [one.get(pid, 0.0) for one in self.memory_mb]
            found[pid] = median(sizes[-quarter:]) - median(sizes[2 * quarter : 3 * quarter])
        return found


def gauges(url: str) -> dict[str, float]:
    """Requests that run and wait, and the share of blocks that a sequence owns."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: float(re.search(rf"{name}\{{.*\}} (\S+)", text)[1]) for name in names}


def gauges_at_rest(url: str) -> dict[str, float]:
    """The gauges when every client has gone; after a minute, as they are."""
    end, found = time.monotonic() + 60, gauges(url)
    while any(found.values()) and time.monotonic() < end:
        time.sleep(0.1)  # who has left is heard within a step
        found = gauges(url)
    return found


def soak(seconds: float, num_cases: int = 36, samples: int = 40) -> Report:
    """Start a server, load it for so long, and end it by a signal while answers are under way."""
    cases, memory = new_cases(num_cases), []
    process, url = started_server()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(seconds / samples):
            memory.append(resident_mb(process.pid))

    watcher = threading.Thread(target=watch)
    try:
        traffic = Soak(url, cases)
        watcher.start()
        asyncio.run(traffic.run(seconds))
        over.set()
        left = gauges_at_rest(url)
        at_the_end = asyncio.run(ended_under_load(process, url))
        return Report(traffic.counts, traffic.wrong, memory, left, process.wait(60), at_the_end)
    finally:
        over.set()
        process.kill()
        process.wait()


async def ended_under_load(process: subprocess.Popen, url: str, count: int = 12) -> Counter:
    """SIGTERM while `count` answers are under way. Returns how many had which status; 0: none."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        body = dict(prompt="def f(", max_tokens=40, temperature=0, ignore_eos=True)
        posts = [
            asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(count)
        ]
        while (await asyncio.to_thread(gauges, url))["num_requests_running"] < count:
            if any(post.done() for post in posts):
                break
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        found = await asyncio.gather(*posts, return_exceptions=True)
    return Counter(getattr(one, "status_code", 0) for one in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    report = soak(parser.parse_args().seconds)
    print(dict(report.counts))
    print(f"wrong: {len(report.wrong)}", *report.wrong[:5], sep="\n")
    for pid in report.memory_mb[0]:
        print("MB:", *(f"{one.get(pid, 0):.1f}" for one in report.memory_mb))
    print(f"growth in MB {report.growth_mb}; left {report.left}; exit code {report.exit_code}; "
          f"statuses at the end: {dict(report.at_the_end)}")  # fmt: skip
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
