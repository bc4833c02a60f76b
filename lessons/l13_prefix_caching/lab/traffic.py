"""Five kinds of traffic, and how much of each a prefix cache knows.

    python -m lessons.l13_prefix_caching.lab.traffic

A trace is a list of sessions. In each turn a session sends all that was said so far and something
new. So its prompts grow, and what they begin with stays. `replay` asks a cache alone, without a
model; `serve_trace` runs a model and measures.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from time import process_time

from lessons.l02_naive_attention.request import read_requests
from lessons.l13_prefix_caching.cache import CachingBlockManager, Hits
from lessons.l13_prefix_caching.generate import WaveRunner
from lessons.l13_prefix_caching.optimized import RadixTree

VOCAB_SIZE = 4096
Serve = Callable[[list[list[int]], list[int]], list[list[int]]]  # prompts, limits -> answers


@dataclass(frozen=True)
class Session:
    """opening: tokens before the first turn. turns: what is added in each. answer: tokens of each
    answer.
    """

    opening: list[int]
    turns: list[list[int]]
    answer: int


def tokens(draw: random.Random, count: int) -> list[int]:
    """Random token ids; 0 to 3 are left out, because they may be special."""
    return [draw.randrange(4, VOCAB_SIZE) for _ in range(count)]


def agent(draw: random.Random) -> list[Session]:
    """Four agents with the same tools, each with a task and eight observations."""
    tools = tokens(draw, 320)
    return [
        Session(tools + tokens(draw, 24), [tokens(draw, 40) for _ in range(8)], 16)
        for _ in range(4)
    ]


def few_shot(draw: random.Random) -> list[Session]:
    """24 questions after the same examples."""
    examples = tokens(draw, 400)
    return [Session(examples, [tokens(draw, 30)], 4) for _ in range(24)]


def multi_turn(draw: random.Random) -> list[Session]:
    """Six chats of four turns with a short system prompt."""
    system = tokens(draw, 40)
    return [Session(system, [tokens(draw, 30) for _ in range(4)], 40) for _ in range(6)]


def documents(draw: random.Random) -> list[Session]:
    """24 documents to be summarised, after one short instruction."""
    instruction = tokens(draw, 40)
    return [Session(instruction, [tokens(draw, 400)], 16) for _ in range(24)]


def unique(draw: random.Random) -> list[Session]:
    """24 prompts that have nothing in common."""
    return [Session([], [tokens(draw, 250)], 16) for _ in range(24)]


TRACES = {
    "agent": agent,
    "few-shot": few_shot,
    "multi-turn": multi_turn,
    "documents": documents,
    "random": unique,
}


def play(sessions: list[Session], serve: Serve, stamp_at: int | None = None) -> None:
    """Turn after turn, those of all sessions together. stamp_at: where every prompt has a token
    that no other prompt has there, as a timestamp would be.
    """
    histories, sent = [list(session.opening) for session in sessions], 0
    for turn in range(max(len(session.turns) for session in sessions)):
        going = [n for n, session in enumerate(sessions) if turn < len(session.turns)]
        prompts = []
        for n in going:
            histories[n] += sessions[n].turns[turn]
            prompt = list(histories[n])
            if stamp_at is not None:
                prompt.insert(stamp_at, sent % VOCAB_SIZE)
            prompts.append(prompt)
            sent += 1
        answers = serve(prompts, [sessions[n].answer for n in going])
        for n, answer in zip(going, answers):
            histories[n] += answer


def replay(
    sessions: list[Session],
    num_blocks: int = 4096,
    block_size: int = 16,
    new_cache: Callable = RadixTree,
    stamp_at: int | None = None,
) -> Hits:
    """How much of the prompts a cache knows, one request after the other, with random answers."""
    manager = CachingBlockManager(num_blocks, block_size, new_cache(block_size))
    hits, draw = Hits(), random.Random(0)

    def serve(prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
        answers = []
        for sequence, (prompt, limit) in enumerate(zip(prompts, limits)):
            held = manager.reuse(sequence, prompt)
            hits.count(len(prompt), held)
            answers.append(tokens(draw, limit))
            # - 1, because the last token is sampled and never runs
            computed = (prompt + answers[-1])[:-1]
            manager.grow(sequence, held, len(computed))
            manager.remember(sequence, computed)
            manager.free(sequence)
        return answers

    play(sessions, serve, stamp_at)
    return hits


@dataclass
class Served:
    """What a model's run over a trace took, in seconds of one processor, so that other work on the
    machine does not count. ttft_s: of each request, from its turn's arrival.
    """

    hits: Hits
    ttft_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    answers: list[list[int]] = field(default_factory=list)

    @property
    def mean_ttft_s(self) -> float:
        return fmean(self.ttft_s)


def serve_trace(runner: WaveRunner, sessions: list[Session], stamp_at: int | None = None) -> Served:
    """Run a trace on a model. A turn's requests arrive together."""
    served = Served(Hits())
    runner.hits = served.hits

    def serve(prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
        requests = read_requests(runner.model.config, prompts, limits)
        first, start = {}, process_time()
        runner.serve(requests, lambda row, _: first.setdefault(row, process_time() - start))
        served.total_s += process_time() - start
        served.ttft_s += [first[request.row] for request in requests]
        answers = [request.output for request in requests]
        served.answers += answers
        return answers

    play(sessions, serve, stamp_at)
    return served


def main() -> None:
    print("share of requests with a hit, and of prompt tokens that need no computing (%)")
    for name, trace in TRACES.items():
        rows = {"": {}, "stamp in front": {"stamp_at": 0}, "96 blocks": {"num_blocks": 96}}
        for label, options in rows.items():
            hits = replay(trace(random.Random(13)), **options)
            print(
                f"{name:11} {label:15} {100 * hits.rate_per_request:5.1f} "
                f"{100 * hits.rate_per_token:5.1f}   {hits.tokens} tokens"
            )


if __name__ == "__main__":
    main()
