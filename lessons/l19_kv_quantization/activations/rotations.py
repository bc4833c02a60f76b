"""Rotations: spread outlier channels over all channels, in place of moving them into the weights.

For any rotation Q (Q Qᵀ = I) a product stays what it was, and its inputs are other numbers:

    x Wᵀ = (x Q) · (W Q)ᵀ

If Q is a Hadamard matrix / √n, every channel of x Q is a sum of all channels of x with signs. A
channel that was 100 times as large as n others is then 100 / √n times as large as all of them, and
none stands out. Where Q is paid for:

- **The residual stream** costs nothing. RMSNorm divides by a length, which a rotation does not
  change. So the norms' weights are folded into the matrices that read them, and Q into the
  embedding, into what reads the stream, and into what writes to it (`with_rotated_stream`).
- **The values of attention** cost nothing. Their weighted sum is linear, so V's rows and o_proj's
  columns are rotated head by head.
- **The input of down_proj** is SiLU(gate) · up. A rotation does not pass through this product of
  numbers, so it has to be applied to every token as the model runs: hadamard.py's kernel, and its
  inverse in down_proj's weight (`with_rotated_inputs`).

Random signs before H make it unlikely that a channel meets exactly the wrong signs.

Source: Ashkboos et al. 2024, QuaRot, sections 3 and 4. SpinQuant (Liu et al. 2024) trains Q.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.linear import linear_of
from lessons.l19_kv_quantization.activations.hadamard import hadamard, rotate_by_matrix
from lessons.l19_kv_quantization.activations.outliers import norms_of, with_layers
from lessons.toolbox.model.arguments import refuse

SEED = 35  # of the signs


def random_rotation(n: int, seed: int = SEED) -> Tensor:
    """[n, n] float64: a Hadamard matrix / √n whose columns have random signs."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (n,), generator=generator).double() * 2 - 1
    return hadamard(n).T * signs[:, None] / n**0.5


def with_rotated_stream(model: Decoder, seed: int = SEED) -> Decoder:
    """A twin with the same function whose residual stream is rotated, and whose values are, head by
    head. Raises ValueError for a model with other norms or parts than Llama's.
    """
    config = model.config
    if config.mla is not None or config.moe is not None or config.model_type not in FAMILIES:
        refuse("model", config.model_type, f"{' or '.join(FAMILIES)}, without experts")
    rotation = random_rotation(config.hidden_size, seed).to(model.device)
    heads = (hadamard(config.head_dim) / config.head_dim**0.5).to(model.device)

    def change(layer: nn.Module) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in norms_of(layer):
            for linear in readers:
                multiply(linear, lambda w, g=norm.weight: w * g.double() @ rotation)
            norm.weight.fill_(1)
        for writer in (attention.o_proj, mlp.down_proj):
            multiply(writer, lambda w: rotation.T @ w)
            if writer.bias is not None:
                writer.bias.copy_(rotation.T @ writer.bias.double())
        by_head = attention.v_proj.weight.double().unflatten(0, (-1, len(heads)))
        attention.v_proj.weight.copy_((heads @ by_head).flatten(0, 1))
        if attention.v_proj.bias is not None:
            bias = attention.v_proj.bias.double().unflatten(0, (-1, len(heads)))
            attention.v_proj.bias.copy_((bias @ heads.T).flatten())
        multiply(
            attention.o_proj,
            lambda w: (w.unflatten(1, (-1, len(heads))) @ heads.T).flatten(1),
        )

    twin = with_layers(model, change)
    numbers = model.embed_tokens.weight
    embedding = nn.Embedding.from_pretrained((numbers.double() @ rotation).to(numbers.dtype))
    head = model.lm_head.weight.double() * model.norm.weight.double() @ rotation
    norm = type(model.norm)(config.hidden_size, model.norm.eps).to(model.device, numbers.dtype)
    # its own matrix, because an embedding that is tied has no norm's weight in it
    twin._modules |= {"embed_tokens": embedding, "norm": norm.requires_grad_(False)}
    twin._modules["lm_head"] = linear_of(head.to(numbers.dtype), model.lm_head.bias)
    return twin


FAMILIES = ("llama", "qwen2", "mistral")  # whose norms multiply by a weight and add nothing


def multiply(linear: nn.Linear, change: Callable[[Tensor], Tensor]) -> None:
    """Change a matrix in place, [N, K] in float64 on its way."""
    linear.weight.copy_(change(linear.weight.double()))


class RotatedInput(nn.Module):
    """A layer whose inputs are rotated before it. rotate: x: [T, K] -> [T, K]."""

    has_own_product = True  # so it is not merged with its neighbours

    def __init__(self, linear: nn.Module, rotate: Callable[[Tensor], Tensor]):
        super().__init__()
        self.linear, self.rotate = linear, rotate
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def bias(self) -> Tensor | None:
        """The layer's: [N]. Ranks that add up their products take it out of them."""
        return self.linear.bias

    @bias.setter
    def bias(self, bias: Tensor | None) -> None:
        self.linear.bias = bias

    def forward(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        return self.linear(self.rotate(x))


class RotatedOutput(nn.Module):
    """A layer whose outputs are rotated after it. rotate: x: [T, N] -> [T, N]."""

    has_own_product = True

    def __init__(self, linear: nn.Module, rotate: Callable[[Tensor], Tensor]):
        super().__init__()
        self.linear, self.rotate = linear, rotate
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def bias(self) -> Tensor | None:
        """As it is in the outputs: [N]. Ranks that add up their products take it out of them."""
        bias = self.linear.bias
        return None if bias is None else self.rotate(bias[None])[0]

    @bias.setter
    def bias(self, bias: None) -> None:
        self.linear.bias = bias

    def forward(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        return self.rotate(self.linear(x))


def with_rotated_inputs(
    model: Decoder, rotate: Callable[[Tensor], Tensor] = rotate_by_matrix
) -> Decoder:
    """A twin with the same function whose down_proj gets rotated inputs. rotate: hadamard.py's
    `rotate`, or its naive twin.
    """

    def change(layer: nn.Module) -> None:
        linear = layer.mlp.down_proj
        matrix = hadamard(linear.in_features).to(linear.weight.device) / linear.in_features**0.5
        multiply(linear, lambda w: w @ matrix.T)
        layer.mlp.down_proj = RotatedInput(linear, rotate)

    return with_layers(model, change)
