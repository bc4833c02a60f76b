"""This lesson's rung: lesson 15's scheduler and blocks, in the loop that is one step ahead.

generate(model, prompts, max_new_tokens)
"""

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken, check_call
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.loop import BLOCK_SIZE, StepRunner, blocks_of, new_sequences
from lessons.l15_chunked_prefill.generate import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l25_one_step_ahead.model_device import ModelDevice
from lessons.l25_one_step_ahead.naive import run_until_idle
from lessons.l25_one_step_ahead.optimized import OneStepAhead


def run_ahead(scheduler: ChunkedScheduler, device: ModelDevice, on_token: OnToken | None) -> None:
    """Serve all that wait, one step ahead. A solved exercise 25.2 takes its place."""
    run_until_idle(OneStepAhead(scheduler, device, on_token))


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
    blocks: BlockManager | None = None,
    loop: type | None = None,
) -> list[list[int]]:
    """Each step scheduled while the one before it runs.

    blocks: None takes what the max_num_seqs longest requests may need. loop: Serial, or
    None for OneStepAhead. Other arguments, result and errors as in lesson 15's `generate`.
    """
    check_call(model, on_token)
    sequences = new_sequences(model.config, prompts, max_new_tokens, sampling)
    waiting = [sequence for sequence in sequences if not sequence.finished]
    if waiting:
        if blocks is None:
            blocks = BlockManager(blocks_of(waiting, max_num_seqs, BLOCK_SIZE), BLOCK_SIZE)
        scheduler = ChunkedScheduler(
            blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        for sequence in waiting:
            scheduler.add(sequence)
        runner = StepRunner(model, blocks, max(s.most_cached for s in waiting))
        device = ModelDevice(runner)
        if loop is None:
            run_ahead(scheduler, device, on_token)
        else:
            run_until_idle(loop(scheduler, device, on_token))
    return [sequence.output for sequence in sequences]
