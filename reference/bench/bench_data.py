"""What bench_serving sends: conversations of a ShareGPT file, random tokens, or small tasks as
text.

Source of the file's form and of what is left out of it: vLLM, vllm/benchmarks/datasets.py,
ShareGPTDataset and is_valid_sequence.
"""

import json
import random
from pathlib import Path

from lessons.l14_continuous_batching.lab.workload import TASKS, TEMPLATE, geometric
from lessons.toolbox.model.arguments import refuse
from reference.bench.bench_load import BenchRequest

LEAST_TOKENS, MOST_PROMPT, MOST_TOKENS = 4, 1024, 2048  # of a conversation that is used


def sharegpt_requests(
    path: str, count: int, seed: int, tokenizer, output_len: int | None = None
) -> list[BenchRequest]:
    """First turns of conversations and the lengths of their answers, in random order.

    path: of a JSON list of {"conversations": [{"value": prompt}, {"value": answer}, ...]}.
    output_len: tokens for each answer; None: as long as the file's. Raises ValueError.
    """
    conversations = read_conversations(path)
    random.Random(seed).shuffle(conversations)
    found = []
    for prompt, answer in conversations:
        tokens = len(tokenizer(prompt)["input_ids"])
        wanted = output_len or len(tokenizer(answer)["input_ids"])
        is_usable = tokens >= LEAST_TOKENS and (output_len or wanted >= LEAST_TOKENS)
        if is_usable and tokens <= MOST_PROMPT and tokens + wanted <= MOST_TOKENS:
            found.append(BenchRequest(prompt, tokens, wanted))
        if len(found) == count:
            return found
    if not found:
        refuse("--dataset-path", path, "a file with a conversation of 4 to 2048 tokens at least")
    return [found[index % len(found)] for index in range(count)]  # again from the beginning


def read_conversations(path: str) -> list[tuple[str, str]]:
    """(first turn, second turn) of each conversation that has both. Raises ValueError."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--dataset-path: {error}; accepted: a ShareGPT file in JSON") from None
    found = []
    for entry in entries if isinstance(entries, list) else ():
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        values = [turn.get("value") for turn in turns or () if isinstance(turn, dict)][:2]
        if len(values) == 2 and all(isinstance(value, str) for value in values):
            found.append(tuple(values))
    if not found:
        accepted = 'a list of {"conversations": [{"value": ...}, ...]}'
        refuse("--dataset-path", path, accepted)
    return found


def random_requests(
    count: int,
    seed: int,
    tokenizer,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
) -> list[BenchRequest]:
    """Random tokens. Lengths lie evenly within range_ratio of input_len and output_len, both ways;
    prefix_len: tokens that all prompts begin with, on top.
    """
    rng = random.Random(seed)
    special = set(tokenizer.all_special_ids)
    tokens = [token for token in range(len(tokenizer)) if token not in special]

    def length(middle: int) -> int:
        spread = int(middle * range_ratio)
        return max(1, rng.randint(middle - spread, middle + spread))

    prefix = rng.choices(tokens, k=prefix_len)
    prompts = [prefix + rng.choices(tokens, k=length(input_len)) for _ in range(count)]
    return [BenchRequest(prompt, len(prompt), length(output_len)) for prompt in prompts]


def synthetic_requests(count: int, seed: int, output_len: int) -> list[BenchRequest]:
    """Small programming tasks as text, with answers of geometric length, output_len on average.
    They need no tokenizer: the server counts their tokens.
    """
    rng = random.Random(seed)
    lengths = geometric(max(1.0001, output_len))
    texts = [TEMPLATE.format(name=name, args=args, task=task) for name, args, task, _ in TASKS]
    return [BenchRequest(rng.choice(texts), 0, lengths(rng)) for _ in range(count)]


def as_text(requests: list[BenchRequest], tokenizer) -> list[BenchRequest]:
    """The same requests as text, for an interface that takes no token ids. Their tokens may be
    others when they are read again, so the server counts them.
    """
    return [
        request
        if isinstance(request.prompt, str)
        else BenchRequest(tokenizer.decode(request.prompt), 0, request.max_tokens)
        for request in requests
    ]
