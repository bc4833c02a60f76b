"""What the tests and the benchmark of the experts share: layers of random weights, and routes."""

import torch
from torch import Tensor

from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.numerics import draw, poison_, poisoned

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
UNEVEN = [[1, 0], [1, 3], [3, 1], [1, 0], [3, 1], [0, 1], [1, 3]]  # no token wants expert 2


def random_stacks(
    num_experts: int, size: int, inner: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor]:
    """gate_up: [E, 2I, H] and down: [E, H, I]; each expert's values have their own scale, so that
    none can be taken for another.
    """
    scale = 1 + torch.arange(num_experts)[:, None, None] / num_experts
    gate_up = draw("normal", (num_experts, 2 * inner, size), seed=seed) * size**-0.5
    down = draw("normal", (num_experts, size, inner), seed=seed + 1) * inner**-0.5 * scale
    return gate_up.to(DEVICE, dtype), down.to(DEVICE, dtype)


def random_routes(num_tokens: int, top_k: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """weights and chosen: [T, k], k different experts for each token."""
    chosen = torch.rand(num_tokens, num_experts).topk(top_k).indices
    return routes(chosen.tolist())


def routes(chosen: list[list[int]]) -> tuple[Tensor, Tensor]:
    """weights that sum to one, and chosen, both [T, k]."""
    chosen = torch.tensor(chosen, dtype=torch.int64)
    weights = torch.rand(chosen.shape) + 0.5
    return (weights / weights.sum(-1, keepdim=True)).to(DEVICE), chosen.to(DEVICE)


def problem(given, num_experts, size=40, inner=19, dtype=torch.float32, seed=0, kind="normal"):
    """x, weights, chosen, gate_up, down. given: (weights, chosen). Experts that no token chose are
    NaN, and so are the weights' neighbours in memory.
    """
    weights, chosen = given
    x = draw(kind, (len(chosen), size), dtype=dtype, seed=seed + 8, device=DEVICE)
    stacks = random_stacks(num_experts, size, inner, dtype, seed)
    for expert in set(range(num_experts)) - set(chosen.flatten().tolist()):
        for stack in stacks:
            poison_(stack[expert])
    return x, weights, chosen, *(beside_nan(stack) for stack in stacks)


def beside_nan(stack):
    """The same numbers in a larger tensor of NaN: [E, N, K] with a gap after each row and each
    expert.
    """
    num_experts, rows, columns = stack.shape
    larger = poisoned((num_experts, rows + 1, columns + 8), stack.dtype, stack.device)
    larger[:, :rows, :columns] = stack
    return larger[:, :rows, :columns]
