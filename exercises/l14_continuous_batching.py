# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=14
# Generated from solutions/l14_continuous_batching.py, checksum 17fdb27530a0. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 14: places counted, a static wave with bugs, the continuous scheduler."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.sequence import Chunk, Sequence, Step
from lessons.toolbox.exercises.exercise import exercise


@exercise("14.1", "Predict: what is a place worth?", minutes=15, difficulty=1)
def count_places(lengths: list[int], num_places: int) -> tuple[int, int, float, float]:
    """For answers of these lengths, in the order of arrival and all there at the beginning: (static
    steps, continuous steps, busy share, most gain).

    Every running request gets one token a step. static: the first num_places requests start
    together, and the next ones when all of these have finished. continuous: in the step after a
    request's last token its place goes to the next in the queue. busy share: of all places in all
    static steps, those in which a request got a token. The last wave may be small; its empty places
    count. most gain: how much faster than static waves any schedule on these places could be, if no
    place were ever idle. Errors: none to raise; there is at least one request.

    Example: lengths = [6, 8, 5, 7, 3], 4 places
        static: 8 steps for the first four, 3 for the last  -> 11
        continuous: place 3 is free after step 5, and takes the 3 tokens in steps 6 to 8    -> 8
        busy: 29 of 44 places -> 0.659, and no schedule gains more than 44 / 29 = 1.517
    Write down your guess first: lengths = [9, 1, 1, 1, 1, 9] on 2 places.
    """
    raise NotImplementedError("Exercise 14.1: Predict: what is a place worth?")


Model = Callable[[Tensor, Tensor], Tensor]


@exercise("14.2", "Find the bugs: a padded wave", minutes=30, difficulty=2)
def padded_wave(
    model: Model,
    prompts: list[list[int]],
    limits: list[int],
    stop_token_ids: frozenset[int],
    pad_token: int,
) -> tuple[list[list[int]], float]:
    """One static wave, greedy, without a cache: (the answers, the share of the computed rows that
    gave a token that a request wanted).

    model(tokens: [B, W] int64, mask: [B, W] bool) -> logits: [B, W, V]. In row b, column j sees
    itself, and of the columns before it those where the mask is True. Its position is the number of
    the latter. All B prompts run in every call, padded with pad_token to one width. A row ends with
    a token of stop_token_ids, which belongs to its answer, or after limits[b] tokens (1 or more).
    The wave ends with its last row.

    share: tokens of all answers, over B times the number of calls. It is what a throughput counts,
    because tokens that no request asked for are not paid for. Call the model once a step, and not
    once more than the longest answer has tokens. Errors: none to raise. Your answer for a row may
    not depend on pad_token or on the other rows.

    Example, two prompts, limits [1, 3]: three calls. The answers have 1 and 3 tokens: share 4 / 6.

    The code below is right for a single prompt, if its EOS happens to be 2. It has four bugs.
    Delete the first line and find them.
    """
    raise NotImplementedError("Exercise 14.2: Find the bugs: a padded wave")
    answers = [[] for _ in prompts]
    calls = 0
    while calls < max(limits):
        rows = [prompt + answer for prompt, answer in zip(prompts, answers)]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [pad_token] * (width - len(row)) for row in rows])
        mask = torch.ones_like(tokens, dtype=torch.bool)
        logits = model(tokens, mask)
        calls += 1
        for answer, token in zip(answers, logits[:, -1].argmax(-1).tolist()):
            answer.append(token)
        if all(answer[-1] == 2 for answer in answers):
            break
    longest = max(map(len, answers))
    return answers, longest * len(prompts) / (len(prompts) * calls)


@exercise(
    "14.3",
    "The continuous scheduler",
    minutes=45,
    difficulty=3,
    replaces="lessons.l14_continuous_batching.optimized:ContinuousScheduler",
)
class ContinuousScheduler:
    """After every step finished requests leave, and waiting ones come in. A solved exercise
    schedules this lesson's rung of the ladder.

    The loop calls schedule, runs the step, calls finish, appends a token to each sequence, and
    calls leave. You write add, schedule and leave. What you need of others:
        sequence.row                    its number, by which `blocks` knows it
        sequence.to_compute             tokens to run before the next can be sampled: the whole
                                        prompt of a new one, 1 of one that decodes
        sequence.most_cached            tokens that it may have in the cache in the end
        sequence.finished
        blocks.blocks_for(tokens)       how many blocks hold so many tokens
        blocks.num_blocks               of the whole pool
        blocks.can_grow(row, 0, tokens) whether a new sequence can have blocks for so many tokens
        blocks.grow(row, 0, tokens)     gives them
        blocks.free(row)                takes them back

    Example: 2 places, requests with answers of 2, 5 and 2 tokens
        steps run [0, 1], [0, 1], [1, 2], [1, 2], [1]: request 2 takes the place in the very step
        after request 0 has its last token
    """

    def __init__(
        self, blocks: BlockManager, max_num_seqs: int = 32, max_num_batched_tokens: int = 4096
    ):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        """Put a request at the end of `waiting`. Raises ValueError, and queues nothing, for one
        whose most_cached tokens need more blocks than the whole pool has: it would wait for ever.
        """
        raise NotImplementedError("Exercise 14.3: The continuous scheduler")

    def schedule(self) -> Step:
        """What runs next: Step(chunks, []), one Chunk(sequence, count) a sequence.

        First all of `running`, one token each. Then those that wait, in the order of their arrival;
        no request overtakes another. A new one runs its whole prompt. It comes in if a place is
        free (max_num_seqs), if the blocks for its longest possible answer are, which it gets at
        once, and if the step has at most max_num_batched_tokens tokens with it. A prompt that is
        longer than that runs when nothing else does.
        """
        raise NotImplementedError("Exercise 14.3: The continuous scheduler")

    def finish(self, step: Step) -> list[Sequence]:
        """Count what the step has computed. Returns the sequences that get a token now."""
        for sequence, count in step.chunks:
            sequence.computed += count
        return [chunk.sequence for chunk in step.chunks]

    def leave(self) -> list[Sequence]:
        """Take finished requests out of `running`, and take back their blocks. Returns them."""
        raise NotImplementedError("Exercise 14.3: The continuous scheduler")
