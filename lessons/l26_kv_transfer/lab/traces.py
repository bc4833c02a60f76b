"""Requests with the statistics that were published of Mooncake's trace, drawn anew.

    python -m lessons.l26_kv_transfer.lab.traces       the statistics, and hit rates over a cache

Published (Qin et al. 2024, arXiv 2407.00079, section 4.2 and table 1): 7,590 tokens of input and
182 of output in the mean; with LRU, 30 % of all blocks are hits in a cache of 1,000 blocks, 50 % in
one of 50,000, and hardly more beyond. A block has 512 tokens. The trace itself is not used: this
generator was fitted to those four numbers, and nothing else of it is Mooncake's. Dynamo's
`benchmarks/prefix_data_generator` draws new traces from a recorded one in the same format.
"""

import random
import sys
from collections import OrderedDict
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

BLOCK_SIZE = 512  # tokens
PUBLISHED = {"input": 7590, "output": 182, "hits at 1000": 0.30, "hits at 50000": 0.50}
REQUESTS = 6000
# What was fitted.
CONTINUED = 0.42  # of the requests are the next turn of a chat
RECENT = 0.40  # of those are of one of the last RECENT_CHATS
RECENT_CHATS = 40
SHARED = ((0.15, 8), (0.20, 2))  # (share of the chats, blocks of the prompt that they begin with)
LONG = (8.47, 0.80)  # mean and deviation of the logarithm of a new chat's tokens
TURN = (6.3, 1.0)  # of a later turn's own tokens
ANSWER = (4.75, 0.95)


class TraceRequest(NamedTuple):
    """As a line of such a trace: lengths in tokens, and the names of the input's whole blocks."""

    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class Chat:
    """The blocks of one conversation, and how long it is."""

    def __init__(self, blocks: list[int], tokens: int):
        self.blocks, self.tokens = blocks, tokens


def drawn(seed: int, requests: int = REQUESTS) -> Iterable[TraceRequest]:
    """Requests in the order of their arrival."""
    draw = random.Random(seed)
    names = count()
    shared = [[next(names) for _ in range(blocks)] for _, blocks in SHARED]
    chats: list[Chat] = []
    for _ in range(requests):
        if chats and draw.random() < CONTINUED:
            is_recent = draw.random() < RECENT
            chat = draw.choice(chats[-RECENT_CHATS:] if is_recent else chats)
            chats.remove(chat)
            chat.tokens += round(draw.lognormvariate(*TURN))
        else:
            chat = new_chat(draw, shared)
        chats.append(chat)
        while len(chat.blocks) < chat.tokens // BLOCK_SIZE:
            chat.blocks.append(next(names))
        answer = max(1, round(draw.lognormvariate(*ANSWER)))
        yield TraceRequest(chat.tokens, answer, tuple(chat.blocks))
        chat.tokens += answer  # the next turn's input holds this answer


def new_chat(draw: random.Random, shared: list[list[int]]) -> Chat:
    """A chat that begins with one of the shared prompts, or with none."""
    tokens = round(draw.lognormvariate(*LONG))
    at = draw.random()
    for (share, blocks), names in zip(SHARED, shared):
        if at < share:
            return Chat(list(names), max(tokens, blocks * BLOCK_SIZE))
        at -= share
    return Chat([], tokens)


def hit_rate(requests: Iterable[TraceRequest], capacity: int) -> float:
    """Blocks that an LRU cache of `capacity` blocks has, of all. A prefix ends at the first block
    that it lacks.
    """
    kept: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for request in requests:
        total += len(request.hash_ids)
        known = 0
        while known < len(request.hash_ids) and request.hash_ids[known] in kept:
            known += 1
        hits += known
        for name in reversed(request.hash_ids):  # so that the end of a prompt leaves first
            kept[name] = None
            kept.move_to_end(name)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return hits / total


def statistics(requests: list[TraceRequest]) -> dict[str, float]:
    """The four numbers that were published."""
    return {
        "input": sum(request.input_length for request in requests) / len(requests),
        "output": sum(request.output_length for request in requests) / len(requests),
        "hits at 1000": hit_rate(requests, 1000),
        "hits at 50000": hit_rate(requests, 50000),
    }


def main() -> int:
    requests = list(drawn(0))
    for name, value in statistics(requests).items():
        print(f"{name:14} {value:8.2f}   published {PUBLISHED[name]:g}")
    for capacity in (100, 1000, 10_000, 50_000, 200_000):
        print(f"{capacity:8} blocks: {hit_rate(requests, capacity):.0%} of the blocks are hits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
