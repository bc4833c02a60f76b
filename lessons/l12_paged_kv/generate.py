"""Lesson 11's waves over blocks that are given as sequences grow, so more requests fit at once.

    generate(model, prompts, max_new_tokens)

A wave takes in as many prompts as there are blocks for. It does not count the answers, because most
end long before they might. If all blocks are taken, the newest request waits on the host until
others have ended (more/swap.py). What stays from lesson 11: no new request comes in before the wave
has ended. Lesson 14 changes that.

Sources: Kwon et al. 2023, PagedAttention, sections 4.3 and 4.5.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch

from lessons.l02_naive_attention.batched.requests import sampling_batch, take_batch_tokens
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken, Request, check_call, read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l11_cuda_graphs.naive import MAX_BATCH, prompt_groups, unfinished
from lessons.l12_paged_kv.more.swap import HostSwap
from lessons.l12_paged_kv.runner import PagedRunner

BLOCK_SIZE = 16  # tokens
MAX_NUM_SEQS = 256  # requests of a wave


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    *,
    num_blocks: int | None = None,
    block_size: int = BLOCK_SIZE,
    max_num_seqs: int = MAX_NUM_SEQS,
    new_runner: Callable[[Decoder, int, int, int], PagedRunner] | None = None,
) -> list[list[int]]:
    """Waves of at most max_num_seqs requests over num_blocks blocks of block_size tokens.

    num_blocks: None takes the memory that lesson 11 takes for these requests, MAX_BATCH times the
    longest. new_runner: with the arguments of PagedRunner.for_model; None: that one. Other
    arguments, result and errors as in lesson 2's `generate`; also ValueError for a request that is
    longer than all blocks together.
    """
    check_call(model, on_token)
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    if waiting := unfinished(requests):
        longest = max(request.most_cached for request in waiting)
        if num_blocks is None:
            num_blocks = blocks_of_lesson_11(waiting, block_size)
        new_runner = new_runner or PagedRunner.for_model
        runner = new_runner(model, num_blocks, block_size, longest)
        if longest > num_blocks * block_size:
            raise ValueError(
                f"num_blocks: got {num_blocks} of {block_size} tokens; accepted: enough for the "
                f"longest request, {longest} tokens"
            )
        waves = Waves(runner, on_token)
        waves.run(deque(waiting), max_num_seqs)
    return [request.output for request in requests]


def blocks_of_lesson_11(waiting: list[Request], block_size: int) -> int:
    """As many blocks as lesson 11's reservations for these requests would give."""
    longest = max(request.most_cached for request in waiting)
    return -(-min(MAX_BATCH, len(waiting)) * longest // block_size)


class Waves:
    """Requests on a runner's blocks. `running` and `swap.away` together are the wave."""

    def __init__(self, runner: PagedRunner, on_token: OnToken | None = None):
        self.runner = runner
        self.swap = HostSwap(runner)
        self.on_token = on_token
        self.running: list[Request] = []
        self.most_running = 0

    def run(self, waiting: deque[Request], max_num_seqs: int = MAX_NUM_SEQS) -> None:
        """Serve all requests that wait, wave by wave."""
        while waiting:
            wave = list(self.admitted(waiting, max_num_seqs))
            for _, group in prompt_groups(wave):
                self.step({request.row: request.prompt for request in group}, group)
            self.decode(self.staying(wave))

    def admitted(self, waiting: deque[Request], max_num_seqs: int) -> Iterator[Request]:
        """The requests whose prompts fit into the free blocks, in the order of their arrival."""
        free, blocks = self.runner.blocks.num_free, self.runner.blocks
        for _ in range(min(max_num_seqs, len(waiting))):
            free -= blocks.blocks_for(len(waiting[0].prompt))
            if free < 0:
                return
            yield waiting.popleft()

    def decode(self, wave: list[Request]) -> None:
        """Step until all of a wave have finished, also those that waited on the host meanwhile."""
        self.running, away = wave, deque()
        batch, members = None, None
        while self.running or away:
            self.bring_back(away)
            self.make_room(away)
            self.most_running = max(self.most_running, len(self.running))
            if members != [request.row for request in self.running]:
                members = [request.row for request in self.running]
                batch = sampling_batch(self.running, self.runner.model.device)
            new = {request.row: request.output[-1:] for request in self.running}
            self.step(new, self.running, batch)
            self.running = self.staying(self.running)

    def step(self, new: dict[int, list[int]], requests: list[Request], batch=None) -> None:
        """Run new tokens of these requests and sample one more of each."""
        logits = self.runner.step(new)
        if batch is None:
            batch = sampling_batch(requests, self.runner.model.device)
        take_batch_tokens(logits, batch, requests, self.on_token)

    def staying(self, requests: list[Request]) -> list[Request]:
        """The requests that have not finished. The others give back their blocks."""
        for request in requests:
            if request.finished:
                self.runner.free(request.row)
        return [request for request in requests if not request.finished]

    def bring_back(self, away: deque[Request]) -> None:
        """The request that has waited longest comes back while there is room."""
        while away:
            # And a block for each that runs, or it would soon be sent away again.
            needed = self.swap.blocks_of(away[0].row) + len(self.running) + 1
            if self.running and needed > self.runner.blocks.num_free:
                return
            self.swap.swap_in(away[0].row)
            self.running.append(away.popleft())

    def make_room(self, away: deque[Request]) -> None:
        """Send the newest away until the next token of each that stays has a slot."""
        while not self.runner.can_step({request.row: [0] for request in self.running}):
            newest = self.running.pop()
            self.swap.swap_out(newest.row)
            away.appendleft(newest)
