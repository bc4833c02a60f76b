"""A small model and an engine on it, for the tests of the engine."""

import asyncio
import random
from collections.abc import Callable, Coroutine

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l12_paged_kv.more.swap import HostSwap
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.swap import Host, Lender
from lessons.l22_serving.fair import FairQueue
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig
from reference.engine.engine import Engine
from reference.engine.model_runner import ModelRunner
from reference.engine.request import by_user
from reference.engine.sampling_params import SamplingParams

CONFIG = ModelConfig("llama", 61, 48, 2, 6, 2, 8, 64, 96, eos_token_ids=(60,))
LONGEST = 64


def new_model(config: ModelConfig = CONFIG) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config).to(default_device()).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)
    for layer in model.layers:
        layer.input_layernorm.weight.add_(1)
    return model


def new_engine(model, num_blocks, block_size, cache=None, host_blocks=None, **how) -> Engine:
    """host_blocks: how many the host holds of requests that are swapped out; None: none are."""
    if cache is None:
        blocks = BlockManager(num_blocks, block_size)
    else:
        blocks = CachingBlockManager(num_blocks, block_size, cache(block_size))
    runner = ModelRunner(fused(model), num_blocks, block_size, LONGEST)
    for slots in (runner.pool.k_slots, runner.pool.v_slots):
        slots.fill_(torch.nan)  # no row may be read that was not written
    if host_blocks is not None:
        how["host"] = Host(HostSwap(Lender(runner.pool, blocks)), host_blocks)
    engine = Engine(runner, ChunkedScheduler(blocks, **how), None, LONGEST)
    if how.get("order") is by_user:
        engine.fair = FairQueue()
    return engine


def run(engine: Engine, prompts, params, arrivals=None) -> dict[str, list]:
    """All requests, each added before the step that `arrivals` names: {id: its answers}."""
    arrivals = arrivals or [0] * len(prompts)
    answers, step = {}, 0
    while len(answers) < len(prompts):
        for at, when in enumerate(arrivals):
            if when == step:
                engine.add_request(str(at), prompts[at], params[at])
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = [answer.token_ids for answer in output.outputs]
        step += 1
        assert step < 10_000, "the engine makes no progress"
    assert_clean(engine)
    return answers


def settle(engine: Engine) -> None:
    """Wait until no block is being copied."""
    host = engine.scheduler.host
    while getattr(engine.scheduler.blocks, "copying", None):
        host.wait()
        host.settle()


def assert_clean(engine: Engine) -> None:
    settle(engine)
    blocks = engine.scheduler.blocks
    assert not engine.requests and engine.scheduler.is_idle
    assert not blocks.tables and blocks.num_free == blocks.num_blocks
    assert not any(blocks.pool.owners)
    if isinstance(engine.scheduler.host, Host):
        swap = engine.scheduler.host.swap
        assert not swap.away and not swap.runner.held, "left on the host"


def random_prompts(count: int, shared: int = 0) -> list[list[int]]:
    head = random.choices(range(60), k=shared)
    return [head + random.choices(range(60), k=random.randint(1, 20)) for _ in range(count)]


def greedy(limit: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=limit, detokenize=False)


async def leave_at_random(read: Callable[[int], Coroutine], count: int = 150) -> list:
    """Begin `count` readers, read(0) and so on, most of whom are cancelled at random moments.
    Returns what each returned or raised.
    """
    tasks = []
    for at in range(count):
        tasks.append(asyncio.create_task(read(at)))
        for _ in range(random.choice([0, 0, 1, 3])):
            await asyncio.sleep(0)
        if random.random() < 0.9:
            random.choice(tasks).cancel()
    for task in tasks:
        if random.random() < 0.5:
            task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
