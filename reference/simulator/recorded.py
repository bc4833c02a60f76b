"""Traces by name, and recorded ones: JSON lines of ours, or in the format in which Mooncake's
traces were published and which Dynamo's generator writes, too.

    parse_trace("chats:rate=4")
    parse_trace("day.jsonl")
        {"arrival_s": 0.25, "prompt_tokens": 900, "output_tokens": 120, "prefix": "chat-7"}
        {"timestamp": 250, "input_length": 900, "output_length": 120, "hash_ids": [17]}

A published line counts milliseconds, and each name in it stands for 512 tokens and all before them.
"""

import json
import math
from pathlib import Path

from lessons.l26_kv_transfer.lab.traces import BLOCK_SIZE
from lessons.toolbox.model.arguments import is_whole, shown
from reference.simulator.traces import (
    MOST_REQUESTS,
    MOST_TOKENS,
    TracedRequest,
    bursty,
    poisson,
)
from reference.simulator.workloads import chats, mooncake

KINDS = {"poisson": poisson, "bursty": bursty, "chats": chats, "mooncake": mooncake}
MOST_NAMES = 2**50
PUBLISHED = {"timestamp", "input_length", "output_length", "hash_ids"}
FIELDS = (
    '{"arrival_s": seconds, "prompt_tokens": 1 or more, "output_tokens": 1 or more, and perhaps '
    '"prefix": a name, "prefix_tokens": at most prompt_tokens}'
)


def read_trace(path: Path) -> list[TracedRequest]:
    """A recorded trace, sorted by arrival. Raises ValueError, in one line, for anything else."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"--trace {path}: {error}; accepted: a file of JSON lines") from None
    if len(lines) > MOST_REQUESTS:
        raise ValueError(f"--trace {path}: {len(lines)} lines; accepted: at most {MOST_REQUESTS}")
    requests = [read_line(path, at, line) for at, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ValueError(f"--trace {path}: no request in it; accepted: lines of {FIELDS}")
    return sorted(requests, key=lambda request: request.arrival_s)


def read_line(path: Path, at: int, line: str) -> TracedRequest:
    """Line number `at` as a request. Raises ValueError that names the line."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = line
    published = mooncake_line(fields)
    if published is not None:
        return published
    if not is_request(fields):
        raise ValueError(f"--trace {path}, line {at}: got {shown(fields)}; accepted: {FIELDS}")
    lengths = fields["prompt_tokens"], fields["output_tokens"]
    prefix = fields.get("prefix")
    # without a length, the whole prompt: turns of one conversation, each longer than the one before
    shared = fields.get("prefix_tokens", lengths[0]) if prefix else 0
    return TracedRequest(float(fields["arrival_s"]), *lengths, prefix, shared)


def is_request(fields) -> bool:
    """Whether a line holds what FIELDS says, and nothing that it does not."""
    known = {*TracedRequest._fields} - {"hash_ids"}
    if not isinstance(fields, dict) or not fields.keys() <= known:
        return False
    arrival_s, prompt = fields.get("arrival_s"), fields.get("prompt_tokens")
    is_time = isinstance(arrival_s, (int, float)) and not isinstance(arrival_s, bool)
    if not is_time or not 0 <= arrival_s < math.inf:
        return False
    lengths = prompt, fields.get("output_tokens")
    if not all(is_whole(length, 1) and length <= MOST_TOKENS for length in lengths):
        return False
    if not isinstance(fields.get("prefix", ""), str):
        return False
    shared = fields.get("prefix_tokens", 0)
    return is_whole(shared, 0) and shared <= prompt


def mooncake_line(fields) -> TracedRequest | None:
    """A published line as a request; None for anything else."""
    if not isinstance(fields, dict) or fields.keys() != PUBLISHED:
        return None
    at_ms, names = fields["timestamp"], fields["hash_ids"]
    lengths = fields["input_length"], fields["output_length"]
    if not is_whole(at_ms, 0) or not isinstance(names, list):
        return None
    if not all(is_whole(length, 1) and length <= MOST_TOKENS for length in lengths):
        return None
    if not all(is_whole(name, 0) and name < MOST_NAMES for name in names):
        return None
    # The last name may be that of a block that is not full, which no prompt can share.
    whole = lengths[0] // BLOCK_SIZE
    return TracedRequest(at_ms / 1e3, *lengths, hash_ids=tuple(names[:whole]))


def parse_trace(text: str) -> list[TracedRequest]:
    """ "poisson:rate=8", "chats:rate=4,turns=8", or the path of a recorded trace."""
    kind, _, options = text.partition(":")
    if kind in KINDS:
        return KINDS[kind](options)
    return read_trace(Path(text).expanduser())
