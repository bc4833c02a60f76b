"""What the tests of this lesson share: slots of mixed ranks, and a small model with adapters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l21_multi_lora.kernels.weights import SlotWeights
from lessons.l21_multi_lora.peft.adapters import Adapter, LayerAdapter
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.numerics import draw

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter


def slots_of(
    ranks: Sequence[int],
    max_rank: int,
    size: int,
    outputs: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    padding: float = float("nan"),
) -> SlotWeights:
    """One adapter a slot, each with its own size, so that none can pass for a neighbour. padding:
    what is beyond the ranks; the kernels must not read it.
    """
    weights = SlotWeights.empty(len(ranks), max_rank, size, outputs, dtype, DEVICE)
    for slot, rank in enumerate(ranks):
        if rank:
            a = draw("normal", (rank, size), seed=seed + slot) * (slot + 1)
            b = draw("normal", (outputs, rank), seed=seed + 100 + slot)
            weights.put(slot, a, b, scaling=16 / rank)
        weights.a[slot, rank:] = padding
        weights.b[slot, rank:] = padding
    return weights


def tiny_config(**changes) -> ModelConfig:
    """Two layers of width 32."""
    shape = dict(
        model_type="llama",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    return ModelConfig(**(shape | changes))


def tiny_model(seed: int = 0, **changes) -> Decoder:
    """A decoder of random weights."""
    torch.manual_seed(seed)
    model = Decoder(tiny_config(**changes)).eval().requires_grad_(False)
    return model.to(DEVICE)


def random_adapter(
    linears: dict[str, tuple[int, int]],
    name: str = "random",
    rank: int = 4,
    scaling: float = 2.0,
    seed: int = 0,
    size: float = 0.2,
) -> Adapter:
    """An adapter of every given layer, large enough to change what is sampled."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return size * torch.randn(*shape, generator=generator)

    layers = {
        layer: LayerAdapter(normal(rank, inputs), normal(outputs, rank), scaling)
        for layer, (outputs, inputs) in linears.items()
    }
    return Adapter(name, layers)


def linears_of(model: Decoder) -> dict[str, tuple[int, int]]:
    """{name: (N, K)} of the linear layers of attention and MLP."""
    return {
        name: (part.out_features, part.in_features)
        for name, part in model.named_modules()
        if hasattr(part, "in_features") and name.startswith("layers.") and ".base" not in name
    }
