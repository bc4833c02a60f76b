"""The number of drafts by the size of the batch, as vLLM's `num_speculative_tokens_per_batch_size`
says it: [[1, 16, 4], [17, 64, 2], [65, 512, 0]].

Each entry is (first, last, K), both sizes included. Sizes between two entries, and those after the
last one, keep the K of the entry before them. The size of a batch is how many sequences decode.

Source: vLLM 0.32, vllm/v1/spec_decode/dynamic/utils.py. It lowers a K above num_speculative_tokens
without a word; here such a K is refused.
"""

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from lessons.toolbox.model.arguments import is_whole, refuse

if TYPE_CHECKING:
    from reference.speculation.speculative_config import SpeculativeConfig

KEY = "speculative_config num_speculative_tokens_per_batch_size"
Schedule = tuple[tuple[int, int, int], ...]  # sorted


class Chooser(Protocol):
    """Decides how many tokens a step drafts for each sequence."""

    def count_for(self, batch: int) -> int:
        """K of the step that is scheduled now. batch: how many sequences decode in it. Called once
        a step.
        """


class BySchedule:
    """A Chooser that looks the size up."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def count_for(self, batch: int) -> int:
        """K of the last entry that begins at `batch` or before."""
        count = 0  # of a step in which no sequence decodes yet
        for first, _, entry_count in self.schedule:
            if first <= batch:
                count = entry_count
        return count


def with_schedule(config: "SpeculativeConfig") -> "SpeculativeConfig":
    """The config with its schedule sorted, if it has one. Raises ValueError for two ways to choose
    the number of drafts, or for one beside a tree, whose shape stays as it is.
    """
    schedule, adapts = config.num_speculative_tokens_per_batch_size, "enable_adaptive_verification"
    is_adaptive = getattr(config, adapts)
    if not isinstance(is_adaptive, bool):
        refuse(f"speculative_config {adapts}", is_adaptive, "True or False")
    if is_adaptive and schedule is not None:
        refuse(KEY, schedule, f"None with {adapts}, which chooses by itself")
    if config.speculative_token_tree is not None:
        accepted = "with speculative_token_tree, because a tree keeps its shape"
        if is_adaptive:
            refuse(f"speculative_config {adapts}", True, f"False {accepted}")
        if schedule is not None:
            refuse(KEY, schedule, f"None {accepted}")
    if schedule is None:
        return config
    sorted_schedule = read_schedule(schedule, config.num_speculative_tokens)
    return replace(config, num_speculative_tokens_per_batch_size=sorted_schedule)


def read_schedule(given, most: int) -> Schedule:
    """A schedule, sorted. most: num_speculative_tokens. Raises ValueError, in one line, for one
    that does not say the K of every size, or says it twice.
    """
    if not isinstance(given, (list, tuple)) or not given:
        refuse(KEY, given, "a list such as [[1, 16, 4], [17, 64, 0]], of (first, last, K)")
    schedule = tuple(sorted(read_entry(entry, most) for entry in given))
    if schedule[0][0] != 1:
        refuse(KEY, given, "ranges of which the first begins at 1")
    for (_, last, _), (first, *_) in pairwise(schedule):
        if first <= last:
            refuse(KEY, given, f"ranges that do not overlap, as they do at {first}")
    return schedule


def read_entry(entry, most: int) -> tuple[int, int, int]:
    """One range and its K. Raises ValueError."""
    is_triple = isinstance(entry, (list, tuple)) and len(entry) == 3
    if not is_triple or not all(is_whole(number, 0) for number in entry):
        refuse(KEY, entry, "entries of three whole numbers, (first, last, K)")
    first, last, count = entry
    if not 1 <= first <= last:
        refuse(KEY, entry, "entries with 1 <= first <= last")
    if count > most:
        refuse(KEY, entry, f"entries with K at most {most}, num_speculative_tokens")
    return first, last, count
