"""The long prompt among decodes on the real model and this machine: measured seconds move lesson
14's virtual clock.
"""

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.clock import Arrival, Log, Timed, VirtualClock, serve
from lessons.l14_continuous_batching.loop import StepRunner
from lessons.l15_chunked_prefill.generate import ChunkExecutor
from lessons.l15_chunked_prefill.preemption import PreemptiveScheduler

BLOCK_SIZE, DECODES, OUTPUTS = 16, 8, 40


def long_prompt_here(
    model: Decoder,
    tokens: list[int],
    kind: type[PreemptiveScheduler],
    max_num_batched_tokens: int,
    arrives_s: float,
) -> Log:
    """Eight requests that begin with 32 of the tokens and decode, and one with all of the tokens
    that arrives later. Its row is 8.
    """
    short = [Arrival(0.0, tokens[8 * row : 8 * row + 32], OUTPUTS) for row in range(DECODES)]
    trace = [*short, Arrival(arrives_s, tokens, 2)]
    total = sum(len(arrival.prompt) + arrival.output_len for arrival in trace)
    blocks = BlockManager(total // BLOCK_SIZE + len(trace), BLOCK_SIZE)
    scheduler = kind(blocks, max_num_seqs=len(trace), max_num_batched_tokens=max_num_batched_tokens)
    clock = VirtualClock()
    runner = StepRunner(model, blocks, len(tokens) + OUTPUTS)
    return serve(scheduler, trace, Timed(clock, ChunkExecutor(runner)), clock)
