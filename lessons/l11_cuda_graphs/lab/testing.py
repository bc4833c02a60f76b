"""What the tests of this lesson share: a small model, its requests, and two pools held against
each other.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import Request, read_requests
from lessons.l03_kv_cache.cache import KVPool
from lessons.l11_cuda_graphs.naive import LOCKSTEP, NewStep, eager_step, prefill, step_inputs
from lessons.l11_cuda_graphs.optimized import GraphRunner
from lessons.l11_cuda_graphs.simulator import SimulatedGraph, SimulatedGraphs
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
CONFIG = ModelConfig(
    "llama",
    vocab_size=53,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=32,
    max_position_embeddings=64,
    sliding_windows=(None, 5),
)


def new_model(dtype: torch.dtype = torch.float64, **changes) -> Decoder:
    """Weights under which attention is sharp, so that a wrong row, position or length changes the
    tokens.
    """
    # 0: as wide as the others, because CONFIG has its own width filled in
    changes = {"v_head_dim": 0} | changes
    model = Decoder(replace(CONFIG, **changes)).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            sharp = 4 if "q_proj" in name else 1.5
            weight.normal_(std=sharp * weight.shape[-1] ** -0.5)
    return model.to(dtype)


def new_prompts(*lengths: int) -> list[list[int]]:
    return [random.choices(range(CONFIG.vocab_size), k=length) for length in lengths]


def new_pool(num_blocks: int, block_size: int, dtype: torch.dtype = torch.float64) -> KVPool:
    """An empty pool on the CPU, with PyTorch's operations."""
    return KVPool(CONFIG, num_blocks, block_size, LOCKSTEP.stand_ins, dtype)


def simulated(model: Decoder, pool: KVPool) -> GraphRunner:
    return GraphRunner(model, pool, SimulatedGraphs())


STEPS = {"eager": eager_step, "captured": simulated}


def captured(function: Callable) -> tuple[SimulatedGraph, torch.Tensor]:
    """A simulated graph of function(), and its output."""
    graph = SimulatedGraph()
    return graph, graph.record(function)


def admit(model: Decoder, pool: KVPool, row: int, prompt: list[int]) -> Request:
    """A request whose prompt is prefilled into block `row` of the pool, with its first token."""
    (request,) = read_requests(model.config, [prompt], 20)
    prefill(model, pool, row, [request])
    return request


def admit_to_all(model, pools: Sequence[KVPool], row: int, prompt: list[int]) -> Request:
    """The same in each of the pools."""
    requests = [admit(model, pool, row, prompt) for pool in pools]
    return requests[0]


def check_runner(
    new_runner: NewStep,
    seed: int,
    batches: Sequence[int] = (3, 3, 4, 2, 2, 1, 4),
    newcomer: int = 4,
) -> None:
    """Steps of these batch sizes, with tokens chosen at random: all logits, looked at in the end,
    and the pools must be equal to those of an eager step.

    Before step `newcomer` the last block gets another request, while it takes no part in the steps.
    """
    random.seed(seed)
    model, prompts = new_model(), new_prompts(3, 5, 2, 4)
    pools = new_pool(4, 12), new_pool(4, 12)
    steps = eager_step(model, pools[0]), new_runner(model, pools[1])
    results = [], []
    with torch.inference_mode():
        requests = [admit_to_all(model, pools, row, prompt) for row, prompt in enumerate(prompts)]
        for index, batch in enumerate(batches):
            if index == newcomer:
                (prompt,) = new_prompts(10)
                requests[3] = admit_to_all(model, pools, 3, prompt)
            inputs = step_inputs(requests[:batch], 12)
            for result, step in zip(results, steps):
                result.append(step(inputs.clone()))
            for request in requests[:batch]:
                request.output.append(random.randrange(CONFIG.vocab_size))
    for expected, got in zip(*results):
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)
    for name in ("k_slots", "v_slots"):
        expected, got = (
            getattr(pool, name)[:, :-1] for pool in pools
        )  # the last belongs to no sequence
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)
