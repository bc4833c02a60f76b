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
    loop: type = OneStepAhead,
) -> list[list[int]]:
    """Each step scheduled while the one before it runs.

    blocks: None takes what the max_num_seqs longest requests may need. loop: OneStepAhead or
    Serial. Other arguments, result and errors as in lesson 15's `generate`.
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
        run_until_idle(loop(scheduler, ModelDevice(runner), on_token))
    return [sequence.output for sequence in sequences]
