"""QLoRA: train a small correction in full precision on top of a matrix that stays in 4 bits.

    y = W₄ x + (α / r) · B (A x),        A: [r, K], B: [N, r]

Only A and B learn, so gradients and the optimizer's state exist for r · (N + K) numbers in place of
N · K. B starts at zero, so training starts from the quantized model.

To serve it without the two extra products, the correction is merged into the matrix. The sum is no
longer made of 4-bit codes. In 16 bits next to nothing is lost. Rounding the sum to 4 bits again
loses something, because most entries of B A are smaller than a step.

Sources: Hu et al. 2021, LoRA, section 4.1; Dettmers et al. 2023, QLoRA, section 3.
"""

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear, linear_of, with_linears
from lessons.toolbox.model.arguments import check_whole


class LoraLinear(nn.Module):
    """A quantized layer that never changes, and what is learned on top of it."""

    def __init__(self, base: QuantizedLinear, rank: int, alpha: float, dtype: torch.dtype):
        super().__init__()
        device = next(iter(base.quantized.tensors().values())).device
        like = {"dtype": dtype, "device": device}
        # as in peft: A as an nn.Linear starts, B zero
        start = base.in_features**-0.5
        self.lora_a = nn.Parameter(
            torch.empty(rank, base.in_features, **like).uniform_(-start, start)
        )
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, **like))
        self.base, self.scaling = base, alpha / rank

    def forward(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        return self.base(x) + self.scaling * (x @ self.lora_a.T @ self.lora_b.T)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """[N, K] float32: one matrix that does what both parts do."""
        return self.base.quantized.dequantize() + self.scaling * (
            self.lora_b.float() @ self.lora_a.float()
        )


def with_adapters(model: Decoder, rank: int = 8, alpha: float = 16) -> Decoder:
    """A twin of a quantized model with an adapter on every QuantizedLinear."""
    check_whole(rank=rank)

    def adapted(_: str, part: QuantizedLinear) -> LoraLinear:
        return LoraLinear(part, rank, alpha, model.dtype)

    return with_linears(model, QuantizedLinear, adapted)


def adapters(model: Decoder) -> list[nn.Parameter]:
    """What an optimizer has to hold."""
    parts = [part for part in model.modules() if isinstance(part, LoraLinear)]
    return [weight for part in parts for weight in (part.lora_a, part.lora_b)]


def merged(model: Decoder) -> Decoder:
    """A twin of plain linear layers in the model's dtype: adapters and dequantized matrices in
    one.
    """

    def replace(_: str, part: LoraLinear) -> nn.Linear:
        return linear_of(part.merged_weight().to(model.dtype), part.base.bias)

    return with_linears(model, LoraLinear, replace)
