"""This lesson's rung: draft K tokens of each request, verify all in one pass of the target.

generate(model, prompts, max_new_tokens, draft=small)      # a small model drafts
generate(model, prompts, max_new_tokens)                   # the request's own text drafts
generate(model, prompts, max_new_tokens, draft=SuffixDrafter())        # and so do earlier answers

Read `Speculation.step`. A prompt needs no step of its own: the pass that reads it also verifies the
first draft.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import (
    OnToken,
    Request,
    check_call,
    hand_out,
    read_requests,
)
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l11_cuda_graphs.naive import unfinished
from lessons.l14_continuous_batching.loop import BLOCK_SIZE, MAX_NUM_SEQS, blocks_of
from lessons.l16_speculative_sampling.drafts import (
    Drafter,
    ModelDrafter,
    check_count,
    check_draft,
    distributions,
    drafter_of,
    numbers,
    row_starts,
)
from lessons.l16_speculative_sampling.more.adaptive import AdaptiveCount, FixedCount
from lessons.l16_speculative_sampling.naive import ACCEPTS, DRAWS
from lessons.l16_speculative_sampling.runner import RewindingRunner
from lessons.l16_speculative_sampling.stand_ins import verify_for
from lessons.toolbox.model.arguments import check_whole


@dataclass
class Counts:
    """What a run has done. tested: drafted tokens up to a request's first rejection."""

    steps: int = 0
    drafted: int = 0
    tested: int = 0
    kept: int = 0
    emitted: int = 0

    @property
    def alpha(self) -> float:
        """The share of tested tokens that stayed."""
        return self.kept / max(1, self.tested)


class Speculation:
    """One pass of the target over a batch, and the draft before it."""

    def __init__(
        self,
        runner: RewindingRunner,
        drafter: Drafter,
        choice: FixedCount | AdaptiveCount,
        on_token: OnToken | None = None,
    ):
        self.runner = runner
        self.drafter = drafter
        self.choice = choice
        self.on_token = on_token
        self.verify = verify_for(runner.model.device)
        self.counts = Counts()

    @torch.inference_mode()
    def step(self, requests: list[Request]) -> None:
        """Emit one token or more of each request. Raises ValueError for logits that are not
        finite.
        """
        drafts = self.drafter.propose(requests, [self.count_for(r) for r in requests])
        p = self.target_rows(requests, drafts.tokens)
        starts = row_starts([len(tokens) for tokens in drafts.tokens])
        drafted = [token for tokens in drafts.tokens for token in (*tokens, -1)]
        device = p.device
        tokens, accepted = self.verify(
            p,
            drafts.q,
            torch.tensor(drafted, device=device),
            self.random_rows(requests, drafts.tokens),
            torch.tensor(starts, dtype=torch.int32, device=device),
            max(len(tokens) for tokens in drafts.tokens) + 1,
        )
        tokens, accepted = tokens.tolist(), accepted.tolist()  # the only wait for the device
        for request, first, kept, draft in zip(requests, starts, accepted, drafts.tokens):
            self.take(request, tokens[first : first + kept + 1], len(draft))
        self.counts.steps += 1

    def count_for(self, request: Request) -> int:
        """How many tokens to draft: a step may emit one more, and that must not be too many."""
        left = request.max_new_tokens - len(request.output)
        return min(self.choice.count_for(request), left - 1)

    def target_rows(self, requests: list[Request], drafted: list[list[int]]) -> Tensor:
        """What the target samples from at each drafted token, and after the last: [R, V]
        float32.
        """
        new, counts, owners, after = {}, {}, [], []
        for request, tokens in zip(requests, drafted):
            held = self.runner.held.get(request.row, 0)
            new[request.row] = request.tokens[held:] + tokens
            counts[request.row] = len(tokens) + 1
            owners += [request] * (len(tokens) + 1)
            after += [tokens[:seen] for seen in range(len(tokens) + 1)]
        return distributions(self.runner.run_rows(new, counts), owners, after)

    def random_rows(self, requests: list[Request], drafted: list[list[int]]) -> Tensor:
        """The two numbers of each row: [R, 2]. They depend on seed and position alone."""
        owners, places = [], []
        for request, tokens in zip(requests, drafted):
            begin = len(request.output)
            owners += [request] * (len(tokens) + 1)
            places += range(begin, begin + len(tokens) + 1)
        device = self.runner.model.device
        return torch.stack([numbers(owners, places, kind, device) for kind in (ACCEPTS, DRAWS)], 1)

    def take(self, request: Request, emitted: list[int], drafted: int) -> None:
        """Hand out what a request emits, up to a stop token, and rewind its cache."""
        if emitted[-1] < 0:
            raise ValueError(f"logits: those of request {request.row} are not finite")
        kept = len(emitted) - 1
        self.choice.note(request, drafted, kept)
        self.counts.drafted += drafted
        self.counts.tested += min(drafted, kept + 1)
        self.counts.kept += kept
        for token in emitted:
            if not request.finished:
                hand_out([token], [request], self.on_token)
                self.counts.emitted += 1
        # The newest token has not run. Everything before it has, with this very text.
        self.runner.rewind(request.row, len(request.tokens) - 1)

    def run(self, waiting: deque[Request], max_num_seqs: int) -> None:
        """Serve all waiting requests. A finished one makes room after each step (lesson 14)."""
        running: list[Request] = []
        while waiting or running:
            while waiting and len(running) < max_num_seqs:
                running.append(waiting.popleft())
            self.step(running)
            for request in running:
                if request.finished:
                    self.runner.free(request.row)
                    self.drafter.forget(request)
                    self.choice.forget(request)
            running = [request for request in running if not request.finished]


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    *,
    draft: Decoder | Drafter | None = None,
    new_drafter: Callable[..., Drafter] = ModelDrafter,
    num_speculative_tokens: int | AdaptiveCount = 4,
    max_num_seqs: int = MAX_NUM_SEQS,
    block_size: int = BLOCK_SIZE,
    counts: Counts | None = None,
) -> list[list[int]]:
    """Draft and verify. draft: a smaller model with the same tokens, or a drafter, such as
    `SuffixDrafter()`; None looks n-grams up in the request's own text. new_drafter: from a model
    and its memory to what drafts. num_speculative_tokens: K, or what chooses it. counts: filled in,
    if given.

    Other arguments, result and errors as in lesson 2's `generate`. Greedy tokens are the same as
    there. A seeded request gets the same tokens in any batch, but not those of plain decoding: it
    follows the same distribution with other random numbers. Where the draft depends on other
    requests, as `SuffixDrafter`'s does, so do the tokens of a seed, but not their distribution.
    """
    check_call(model, on_token)
    check_draft(model, draft)
    check_whole(max_num_seqs=max_num_seqs)
    choice = num_speculative_tokens
    if not isinstance(choice, AdaptiveCount):
        check_count(choice)
        choice = FixedCount(choice)
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    if waiting := unfinished(requests):
        # Room for any max_num_seqs of them, because a draft never goes beyond a request's limit.
        num_blocks = blocks_of(waiting, max_num_seqs, block_size)
        memory = num_blocks, block_size, max(request.most_cached for request in waiting)
        runner = RewindingRunner.for_model(model, *memory)
        drafter = drafter_of(draft, *memory, new_drafter=new_drafter)
        speculation = Speculation(runner, drafter, choice, on_token)
        if counts is not None:
            speculation.counts = counts
        speculation.run(deque(waiting), max_num_seqs)
    return [request.output for request in requests]
