"""How many drafted tokens stay in a pass, n-grams beside suffix decoding: for requests that are
new, that were asked before, and that are an edit of what was asked before. Nothing is timed.

    python -m lessons.l16_speculative_sampling.lab.repeats

counts all of it again and writes results/counted/l16_suffixes.json, which MORE.md quotes.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lessons.l16_speculative_sampling.drafts import Drafter, NgramDrafter
from lessons.l16_speculative_sampling.generate import Counts, generate
from lessons.l16_speculative_sampling.lab.experiments import REQUESTS, WAYS
from lessons.l16_speculative_sampling.lab.workload import (
    TIMED_TOKENS,
    embedded_pair,
    ends_of,
    held_out_texts,
)
from lessons.l16_speculative_sampling.more.suffixes import SuffixDrafter

FILE = Path(__file__).parents[3] / "results" / "counted" / "l16_suffixes.json"
AT_ONCE = 4  # requests; an answer serves those that come after it


def renamed(text: str) -> str:
    """An edit: code whose `self` has another name."""
    return re.sub(r"\bself\b", "this", text)


class Workload(NamedTuple):
    """way: of sampling. before: whether the requests were asked once before, as they are in the
    ladder. edit: of the requests that are counted.
    """

    way: str = "greedy"
    before: bool = True
    edit: Callable[[str], str] = str


WORKLOADS = {
    "new": Workload(before=False),
    "again": Workload(),
    "edited": Workload(edit=renamed),
    "sampled": Workload("temperature 0.8, top-p 0.95"),
}
# name -> who drafts, and at most how many tokens
DRAFTERS = {
    "ngram_4": (NgramDrafter, 4),
    "ngram_16": (NgramDrafter, 16),
    "suffix": (SuffixDrafter, 16),
}


def served(texts: list[str], way: str, drafter: Drafter, most: int, first_seed: int = 0) -> Counts:
    """What happens to the tokens that are drafted for these requests."""
    counts = Counts()
    generate(
        embedded_pair()[0],
        ends_of(texts),
        TIMED_TOKENS,
        [replace(WAYS[way], seed=first_seed + row) for row in range(len(texts))],
        draft=drafter,
        num_speculative_tokens=most,
        max_num_seqs=AT_ONCE,
        counts=counts,
    )
    return counts


def counted(workload: Workload, name: str, requests: int = REQUESTS) -> dict[str, float]:
    """drafted, kept: tokens of a request in a pass of the target, on average."""
    (new_drafter, most), texts = DRAFTERS[name], held_out_texts()[:requests]
    drafter = new_drafter()
    if workload.before and new_drafter is SuffixDrafter:  # n-grams remember nothing
        served(texts, workload.way, drafter, most, first_seed=requests)
    counts = served([workload.edit(text) for text in texts], workload.way, drafter, most)
    passes = counts.emitted - counts.kept  # each gives one token that was not drafted
    return dict(
        drafted=round(counts.drafted / passes, 3),
        kept=round(counts.kept / passes, 3),
    )


def main() -> None:
    """Count, print, write."""
    found = dict(requests=REQUESTS, new_tokens=TIMED_TOKENS, at_once=AT_ONCE)
    for title, workload in WORKLOADS.items():
        found[title] = {}
        for name in DRAFTERS:
            found[title][name] = counted(workload, name)
            print(title, name, found[title][name], flush=True)
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
