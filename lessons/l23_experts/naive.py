"""The experts of a layer one after the other: lesson 6's loop, over the stacks that the kernels
read.

    experts(x, weights, chosen, gate_up, down)     # as optimized.experts, one after the other

The loop is `MoE.forward` in lessons/l06_mla/moe.py. For each expert that some token chose it
gathers these tokens' rows, runs the expert's MLP and adds the results, times the router's weights,
to the tokens' outputs. It is right, and it has two costs that do not shrink with the batch. Python
has to know which experts were chosen, so it waits for the GPU once a layer. And each expert is
launched on its own, in about ten operations, however few rows it has.

Here the matrices come as two tensors, [E, 2I, H] and [E, H, I]. Lesson 6's layer gets slices of
them as its experts' weights, so nothing is copied.
"""

import torch
from torch import Tensor, nn

from lessons.l06_mla.moe import MoE
from lessons.toolbox.model.config import ModelConfig, MoEConfig


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """out[t] = Σ weights[t, j] · expert chosen[t, j] of x[t], expert by expert: [T, H] -> [T, H].

    Arguments as in optimized.experts, but all experts must be here; x may be float64.
    """
    layer = layer_of(gate_up, down, chosen.shape[1])
    layer.gate = GivenRoutes(weights, chosen)
    return layer(x)


def layer_of(gate_up: Tensor, down: Tensor, top_k: int) -> MoE:
    """Lesson 6's layer over these weights, which it shares. gate_up: [E, 2I, H]; down: [E, H,
    I].
    """
    num_experts, size, inner = down.shape
    with torch.device("meta"):  # its random weights are replaced
        layer = MoE(layer_config(size, MoEConfig(num_experts, top_k, inner)))
    for index, expert in enumerate(layer.experts):
        gate, up = gate_up[index].chunk(2)
        linears = (expert.gate_proj, gate), (expert.up_proj, up), (expert.down_proj, down[index])
        for linear, weight in linears:
            linear.weight = nn.Parameter(weight, requires_grad=False)
    return layer


class GivenRoutes(nn.Module):
    """In the place of a router: what it would return."""

    def __init__(self, weights: Tensor, chosen: Tensor):
        super().__init__()
        self.routes = weights, chosen

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [T, hidden_size] -> two of [T, k]
        return self.routes


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
