"""Prompts in waves through a prefix cache: a prompt runs only from where no earlier one has
computed it.

    runner = WaveRunner(model, num_blocks=256)
    runner.serve(read_requests(model.config, prompts, 20))     # cold: nothing is known yet
    runner.serve(read_requests(model.config, prompts, 20))     # warm: the blocks are still there

Read `WaveRunner.run_wave`. The waves are lesson 11's, the blocks lesson 12's. The cache adds three
calls: `reuse` before a prompt runs, `remember` when a block is full, and `free`, which forgets
nothing.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.requests import sampling_batch, take_batch_tokens
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken, Request, check_call, read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.generate import Rung
from lessons.l11_cuda_graphs.naive import MAX_BATCH, MAX_PREFILL_TOKENS, unfinished
from lessons.l12_paged_kv.kernels.latents import PAGED_LATENTS
from lessons.l12_paged_kv.runner import PAGED, new_pool, step_batch
from lessons.l13_prefix_caching.cache import CachingBlockManager, Hits, PrefixCache
from lessons.l13_prefix_caching.cascade import LESSON_13_TORCH
from lessons.l13_prefix_caching.optimized import RadixTree

BLOCK_SIZE = 16  # tokens
WITH_PREFIXES = replace(PAGED, name="prefix cache", stand_ins=LESSON_13_TORCH)
LATENTS_WITH_PREFIXES = replace(PAGED_LATENTS, name="prefix cache")
NewCache = Callable[[int], PrefixCache]  # block_size -> an empty cache


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    new_cache: NewCache = RadixTree,
) -> list[list[int]]:
    """Up to MAX_BATCH prompts at a time, what they share computed once. Arguments, result and
    errors as in lesson 2's `generate`.
    """
    check_call(model, on_token)
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    if waiting := unfinished(requests):
        longest = max(request.most_cached for request in waiting)
        runner = WaveRunner(
            model, blocks_of_waves(waiting), new_cache=new_cache, max_context_len=longest
        )
        runner.serve(waiting, on_token)
    return [request.output for request in requests]


def prefix_rung_of(model: Decoder) -> Rung:
    """Which of the two serves this model. Cascade attention is for K and V of heads."""
    return WITH_PREFIXES if model.config.mla is None else LATENTS_WITH_PREFIXES


def blocks_of_waves(waiting: list[Request], block_size: int = BLOCK_SIZE) -> int:
    """The blocks that the largest wave of MAX_BATCH requests needs if it shares nothing."""
    needs = [-(-request.most_cached // block_size) for request in waiting]
    return max(sum(needs[start : start + MAX_BATCH]) for start in range(0, len(needs), MAX_BATCH))


class WaveRunner:
    """A model, a pool of blocks, and what these still hold from one call to the next.

    max_context_len: the longest that a sequence may become; None: as long as the model allows.
    hits: of all prompts so far. Raises ValueError for a request that the pool can never hold.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        new_cache: NewCache = RadixTree,
        max_context_len: int | None = None,
    ):
        rung = prefix_rung_of(model)
        self.model = rung.prepare(model)
        self.blocks = CachingBlockManager(num_blocks, block_size, new_cache(block_size))
        self.hits = Hits()
        longest = max_context_len or min(
            num_blocks * block_size, model.config.max_position_embeddings
        )
        self.pool = new_pool(self.model, num_blocks, block_size, longest, rung)

    @torch.inference_mode()
    def serve(self, requests: list[Request], on_token: OnToken | None = None) -> None:
        """Answer all requests, wave by wave, in their order."""
        waiting = list(requests)
        while waiting:
            size = self.wave_size(waiting)
            self.run_wave(waiting[:size], on_token)
            waiting = waiting[size:]

    def wave_size(self, waiting: list[Request]) -> int:
        """How many of the first requests fit together, even if they share nothing."""
        count, free = 0, self.blocks.num_blocks
        for request in waiting[:MAX_BATCH]:
            free -= self.blocks.blocks_for(request.most_cached)
            if free < 0:
                break
            count += 1
        if not count:
            raise ValueError(
                f"num_blocks: got {self.blocks.num_blocks}; accepted: at least "
                f"{self.blocks.blocks_for(waiting[0].most_cached)}, for request {waiting[0].row}"
            )
        return count

    def run_wave(self, wave: list[Request], on_token: OnToken | None = None) -> None:
        """Read all prompts, then decode all requests that are not finished, until none is left."""
        waiting = wave
        while waiting:
            group, waiting = self.next_pass(waiting)
            held = [self.reuse(request) for request in group]
            logits = self.run(group, held)
            take_batch_tokens(logits, sampling_batch(group, self.model.device), group, on_token)
        running = wave
        while running := self.leave(running):
            # made anew, because the requests that stay have other rows now
            batch = sampling_batch(running, self.model.device)
            while not any(request.finished for request in running):
                # - 1, because the newest token has not run yet
                logits = self.run(running, [len(request.tokens) - 1 for request in running])
                take_batch_tokens(logits, batch, running, on_token)

    def next_pass(self, waiting: list[Request]) -> tuple[list[Request], list[Request]]:
        """The requests whose prompts run now, and those that wait. A prompt whose next block
        another prompt of this pass computes would compute it once more, so it waits until that
        block is known.
        """
        size = self.blocks.block_size
        group, later, computed_now, tokens = [], [], set(), 0
        for request in waiting:
            known = len(self.blocks.cache.match(request.prompt)) * size
            next_block = tuple(request.prompt[: known + size])  # with all tokens before it
            new = len(request.prompt) - known
            # > size, because a prompt that ends with this block computes it in any case
            gains = new > size and next_block in computed_now
            if gains or (group and tokens + new > MAX_PREFILL_TOKENS):
                later.append(request)
            else:
                group.append(request)
                computed_now.add(next_block)
                tokens += new
        return group, later

    def reuse(self, request: Request) -> int:
        """Begin with the known blocks. Returns how many of the prompt's tokens they hold."""
        held = self.blocks.reuse(request.row, request.prompt)
        self.hits.count(len(request.prompt), held)
        return held

    def run(self, requests: list[Request], held: list[int]) -> Tensor:
        """One pass over all tokens after the first held[b] of request b. Returns logits: [B, V]."""
        chunks = []
        for request, computed in zip(requests, held):
            tokens = request.tokens
            # It returns no copies, because no sequence forks here and only whole blocks are shared.
            self.blocks.grow(request.row, computed, len(tokens))
            chunks.append((tokens[computed:], computed))
        tables = [self.blocks.tables[request.row] for request in requests]
        batch = step_batch(self.pool, chunks, tables)
        hidden = self.model(batch.tokens, self.pool.attending(batch))
        for request, (new, computed) in zip(requests, chunks):
            self.remember(request, computed, computed + len(new))
        return self.model.logits(hidden[batch.logits_at])

    def remember(self, request: Request, before: int, now: int) -> None:
        """Tell the cache about a request whose `before` computed tokens have become `now`."""
        size = self.blocks.block_size
        # only if a block became full, because each call walks the whole prefix
        if now // size > before // size:
            self.blocks.remember(request.row, request.tokens[:now])

    def leave(self, running: list[Request]) -> list[Request]:
        """The requests that go on. Finished ones return their blocks, which stay known."""
        for request in running:
            if request.finished:
                self.blocks.free(request.row)
        return [request for request in running if not request.finished]
