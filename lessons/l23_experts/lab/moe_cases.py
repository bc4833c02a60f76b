"""What the tests and the benchmark of the experts share: layers of random weights, and routes."""

import torch
from torch import Tensor, nn

from lessons.l06_mla.moe import MoE
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig, MoEConfig
from lessons.toolbox.proof.numerics import draw

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter


def layer_config(hidden_size: int, moe: MoEConfig) -> ModelConfig:
    """A model of which only the layer of experts matters."""
    return ModelConfig(
        model_type="mixtral",
        vocab_size=11,
        hidden_size=hidden_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=8,
        moe=moe,
    )


class GivenRoutes(nn.Module):
    """In the place of a router: what it would return."""

    def __init__(self, weights: Tensor, chosen: Tensor):
        super().__init__()
        self.routes = weights, chosen

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [T, hidden_size] -> two of [T, k]
        return self.routes


def lesson_6(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Lesson 6's loop over experts, as optimized.experts, all experts being here: [T, H] -> [T, H]."""
    layer = lesson_6_layer(gate_up, down, chosen.shape[1])
    layer.gate = GivenRoutes(weights, chosen)
    return layer(x)


def lesson_6_layer(gate_up: Tensor, down: Tensor, top_k: int) -> MoE:
    """Lesson 6's layer over these weights, which it shares. gate_up: [E, 2I, H]; down: [E, H, I]."""
    num_experts, size, inner = down.shape
    with torch.device("meta"):  # its random weights are replaced
        layer = MoE(layer_config(size, MoEConfig(num_experts, top_k, inner)))
    for index, expert in enumerate(layer.experts):
        gate, up = gate_up[index].chunk(2)
        linears = (expert.gate_proj, gate), (expert.up_proj, up), (expert.down_proj, down[index])
        for linear, weight in linears:
            linear.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def random_stacks(
    num_experts: int, size: int, inner: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor]:
    """gate_up: [E, 2I, H] and down: [E, H, I]; each expert of a size of its own, so that none can stand
    for another.
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
