"""This lesson's rung of the ladder: lesson 14's loop with a ChunkedScheduler.

generate(model, prompts, max_new_tokens)
"""

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken, check_call
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.loop import (
    BLOCK_SIZE,
    ModelExecutor,
    StepRunner,
    blocks_of,
    new_sequences,
    run_until_idle,
)
from lessons.l14_continuous_batching.sequence import Step
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.preemption import PreemptiveScheduler

MAX_NUM_SEQS = 32
MAX_NUM_BATCHED_TOKENS = 512  # of a step


class ChunkExecutor(ModelExecutor):
    """Lesson 14's executor, for steps too in which nothing is sampled: a chunk that ends inside its
    prompt only fills the cache.
    """

    def __call__(self, step: Step) -> list[int]:
        if any(chunk.is_sampled for chunk in step.chunks):
            return super().__call__(step)
        self.run(step)
        return []


def new_scheduler(
    blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int
) -> PreemptiveScheduler:
    """What the rung asks what runs next. A solved exercise 15.3 takes its place."""
    return ChunkedScheduler(blocks, max_num_seqs, max_num_batched_tokens)


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    *,
    max_num_seqs: int = MAX_NUM_SEQS,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    num_blocks: int | None = None,
    block_size: int = BLOCK_SIZE,
    kind: type[PreemptiveScheduler] | None = None,
) -> list[list[int]]:
    """Prompts in chunks beside the decodes, on blocks that are taken back when they run out.

    num_blocks: None takes what the max_num_seqs longest requests may need. kind: the scheduler;
    None: a ChunkedScheduler.
    Other arguments, result and errors as in lesson 2's `generate`; also the scheduler's ValueError.
    """
    check_call(model, on_token)
    sequences = new_sequences(model.config, prompts, max_new_tokens, sampling)
    waiting = [sequence for sequence in sequences if not sequence.finished]
    if waiting:
        if num_blocks is None:
            num_blocks = blocks_of(waiting, max_num_seqs, block_size)
        blocks = BlockManager(num_blocks, block_size)
        scheduler = (kind or new_scheduler)(blocks, max_num_seqs, max_num_batched_tokens)
        for sequence in waiting:
            scheduler.add(sequence)
        runner = StepRunner(model, blocks, max(s.most_cached for s in waiting))
        run_until_idle(scheduler, ChunkExecutor(runner), on_token)
    return [sequence.output for sequence in sequences]
