"""What the benchmarks run: the shape of models/tiny with random weights, eight requests that
decode, and a prompt or a chunk of it beside them.
"""

import torch

from lessons.l03_kv_cache.lab.workload import DTYPE, ON_GPU
from lessons.l11_cuda_graphs.lab.pictures import TINY
from lessons.l11_cuda_graphs.lab.workload import LLAMA_8B, model_of, shape_of, step_floor_s
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.loop import StepRunner
from lessons.l14_continuous_batching.sequence import Chunk, Step
from lessons.l15_chunked_prefill.lab.virtual import new_request

CONFIG = LLAMA_8B if ON_GPU else TINY
DECODES, CONTEXT, BLOCK_SIZE = 8, 256, 16  # tokens of context of each decode
CHUNKS = [128, 256, 512, 1024, 2048, 4096] if ON_GPU else [8, 32, 64, 128, 256]
PROMPTS = [1024, 2048, 4096, 8192] if ON_GPU else [64, 128, 256, 512, 1024]
BUDGET = 512 if ON_GPU else 72  # tokens of a step: the decodes' and a chunk's
SHAPE = shape_of(CONFIG, decodes=DECODES, context=CONTEXT)
DTYPE_NAME = str(DTYPE).removeprefix("torch.")


def mixed_step(chunk: int) -> tuple[StepRunner, Step, Step]:
    """(a runner over random K and V, a step of eight decodes, a step of a new prompt's chunk)."""
    model, longest = model_of(CONFIG), max(CONTEXT, chunk)
    blocks = BlockManager((DECODES + 1) * -(-longest // BLOCK_SIZE), BLOCK_SIZE)
    runner = StepRunner(model, blocks, longest)
    runner.pool.k_slots.normal_()
    runner.pool.v_slots.normal_()
    decodes = []
    for row in range(DECODES):
        sequence = new_request(row, torch.randint(CONFIG.vocab_size, (CONTEXT,)).tolist(), 2)
        sequence.computed = CONTEXT - 1
        blocks.grow(row, 0, CONTEXT)
        decodes.append(Chunk(sequence, 1))
    prompt = new_request(DECODES, torch.randint(CONFIG.vocab_size, (chunk,)).tolist(), 2)
    blocks.grow(DECODES, 0, chunk)
    return runner, Step(decodes, []), Step([Chunk(prompt, chunk)], [])


def arriving_prompt(tokens: int) -> tuple[StepRunner, Step, Step, Step]:
    """mixed_step of a whole prompt, and a step of its last chunk, which sees all tokens before
    it.
    """
    runner, decodes, whole = mixed_step(tokens)
    ((prompt, _),) = whole.chunks
    chunk = min(tokens, BUDGET - DECODES)
    last = new_request(DECODES, prompt.prompt, 2)
    last.computed = tokens - chunk
    return runner, decodes, whole, Step([Chunk(last, chunk)], [])


def floor_s(chunk: int) -> float:
    """Seconds to read the weights and the decodes' cache once."""
    return step_floor_s(CONFIG, DECODES, CONTEXT)
