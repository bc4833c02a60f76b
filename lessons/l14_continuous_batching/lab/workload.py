"""Traces: how long prompts and answers are, and when requests arrive. And a small set of tasks for
the embedded model.

Lengths and gaps come from Python's `random`, so that a seed gives the same trace on every machine.
"""

import math
import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean, pstdev

from lessons.l14_continuous_batching.clock import Arrival

Lengths = Callable[[random.Random], int]  # draws one answer's length in tokens

# Tokens, busy and idle alike, of the figure with which guides explain static batches: four rows of
# eight slots, and these are the rows' tokens until their END.
FIGURE = (6, 8, 5, 7)
# The three that the figure serves next, in the places that become free.
NEXT_IN_FIGURE = (3, 2, 1)


def uniform(low: int = 50, high: int = 500) -> Lengths:
    """Every length from low to high is as likely as every other."""
    return lambda rng: rng.randint(low, high)


def geometric(mean: float) -> Lengths:
    """Each token is the last with the probability 1 / mean: an answer that has no memory."""
    return lambda rng: 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean))


def bimodal(short: int, long: int, share_long: float) -> Lengths:
    """Most answers have `short` tokens, the share `share_long` of them `long`."""
    return lambda rng: long if rng.random() < share_long else short


def draw(lengths: Lengths, count: int, seed: int) -> list[int]:
    """`count` lengths in tokens."""
    rng = random.Random(seed)
    return [lengths(rng) for _ in range(count)]


def variation(lengths: Sequence[int]) -> float:
    """The coefficient of variation: standard deviation over mean. 0: all are equal."""
    return pstdev(lengths) / fmean(lengths)


def poisson(rate_per_s: float, count: int, seed: int) -> list[float]:
    """When `count` requests arrive, in seconds: independent of each other, rate_per_s on
    average.
    """
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate_per_s) for _ in range(count)))


def new_trace(
    arrivals_s: Sequence[float], prompt_lens: Sequence[int], output_lens: Sequence[int]
) -> list[Arrival]:
    """A trace of prompts made of one token: only their lengths count."""
    return [
        Arrival(arrival_s, [1] * prompt, output)
        for arrival_s, prompt, output in zip(arrivals_s, prompt_lens, output_lens)
    ]


def all_at_once(output_lens: Sequence[int], prompt_len: int = 1) -> list[Arrival]:
    """An offline job: all requests are there when it begins."""
    count = len(output_lens)
    return new_trace([0.0] * count, [prompt_len] * count, output_lens)


# ---------------------------------------------------------------- text to code

TEMPLATE = 'def {name}({args}):\n    """{task}"""\n'

# (name, arguments, what it does, tokens that its body may have)
TASKS = (
    ("read_lines", "path", "Return all lines of the file as a list.", 6),
    ("is_empty", "items", "Return True if there are no items.", 4),
    ("join_paths", "base, *parts", "Join the parts to the base path.", 4),
    ("merge_sorted", "left, right", "Merge two sorted lists into one sorted list.", 24),
    ("first", "items, default=None", "Return the first item, or the default.", 4),
    ("count_words", "text", "Count how often each word occurs in the text.", 12),
    ("parse_header", "line", "Split a header line into its name and its value.", 8),
    ("close_all", "files", "Close every file, and ignore errors.", 8),
    ("flatten", "lists", "Return one list with the items of all lists.", 6),
    ("clamp", "value, low, high", "Return the value, but not below low or above high.", 4),
    ("quote", "text", "Return the text in double quotes, with quotes escaped.", 6),
    ("binary_search", "items, wanted", "Return the position of wanted in sorted items.", 20),
    ("is_leap", "year", "Return True for a leap year.", 4),
    ("write_rows", "file, rows", "Write the rows as comma separated values.", 16),
    ("gcd", "a, b", "Return the greatest common divisor of a and b.", 6),
    ("fold", "text, width", "Wrap the text to lines of the given width.", 14),
)


def task_requests(tokenizer, count: int = len(TASKS)) -> tuple[list[list[int]], list[int]]:
    """(prompts as token ids, tokens that each answer may have) of `count` tasks; they repeat. The
    functions are in the middle of a module, so no special token begins them.
    """
    chosen = [TASKS[i % len(TASKS)] for i in range(count)]
    texts = [TEMPLATE.format(name=name, args=args, task=task) for name, args, task, _ in chosen]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return prompts, [limit for *_, limit in chosen]
