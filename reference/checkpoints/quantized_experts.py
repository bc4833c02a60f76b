"""gpt-oss' experts over matrices that stay quantized."""

import torch
from torch import Tensor, nn

from lessons.l06_mla.gpt_oss import StackedExperts, gated
from lessons.l18_weight_quantization.linear import Multiply
from lessons.l18_weight_quantization.weights import QuantizedWeight


class QuantizedExperts(nn.Module):
    """A StackedExperts whose matrices are quantized, one for each expert.

    gate_up: of each expert [2 · inner, hidden_size]; down: [hidden_size, inner], as a
    QuantizedLinear would hold them. The biases are those of `experts`.
    """

    def __init__(
        self,
        experts: StackedExperts,
        gate_up: list[QuantizedWeight],
        down: list[QuantizedWeight],
        multiply: Multiply,
    ):
        super().__init__()
        self.gate_up, self.down, self.multiply = gate_up, down, multiply
        self.gate_up_proj_bias = experts.gate_up_proj_bias
        self.down_proj_bias = experts.down_proj_bias

    def forward(self, x: Tensor, expert: int) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        gate_up = self.multiply(x, self.gate_up[expert], self.gate_up_proj_bias[expert])
        return self.multiply(gated(gate_up), self.down[expert], self.down_proj_bias[expert])

    def numbers(self) -> dict[str, Tensor]:
        """The matrices as StackedExperts has them: [E, in, out]."""
        return {
            "gate_up_proj": torch.stack([weight.dequantize().T for weight in self.gate_up]),
            "down_proj": torch.stack([weight.dequantize().T for weight in self.down]),
        }
