"""A linear layer with room for adapters, and a model made of such layers.

    context = AdapterContext()
    twin = with_adapter_slots(model, context, max_loras=4, max_lora_rank=16)
    with context.over(AdapterBatch.of([0, -1, 2])):
        hidden = twin(tokens, attend)

Merging is the other way to serve an adapter: its matrices are added to the base's once, and then it
costs nothing. But a merged matrix serves one adapter only.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear, linear_of, with_linears
from lessons.l19_kv_quantization.activations.rotations import RotatedInput, RotatedOutput
from lessons.l21_multi_lora import optimized
from lessons.l21_multi_lora.batch import AdapterBatch, AdapterContext
from lessons.l21_multi_lora.kernels import stand_ins
from lessons.l21_multi_lora.kernels.weights import SlotWeights
from lessons.l21_multi_lora.peft.adapters import Adapter, LayerAdapter, in_order_of
from lessons.l21_multi_lora.together import Together
from lessons.toolbox.model.arguments import check_whole, refuse

AddLora = Callable[[Tensor, Tensor, SlotWeights, AdapterBatch], Tensor]
KINDS = (nn.Linear, QuantizedLinear)
ROTATED = (RotatedInput, RotatedOutput)  # adapters read and write what is outside of a rotation
# Layers of one parent that are called one after the other with the same x.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Layers that get no adapter: a routed expert sees some rows of a step in an order of its own, and
# absorption multiplies by the rows of kv_b_proj (lesson 6).
NOT_ALONE = (".experts.", "kv_b_proj")


class LoRALinear(nn.Module):
    """A linear layer, plain or quantized, and the adapters of S slots on top of it.

    context: shared by the layers of a model; without a batch in it this is the base layer.
    """

    has_own_product = True  # so it is not merged with its neighbours

    def __init__(
        self, base: nn.Module, weights: SlotWeights, context: AdapterContext, add_lora: AddLora
    ):
        super().__init__()
        self.base, self.weights = base, weights
        self.context, self.add_lora = context, add_lora
        self.in_features, self.out_features = base.in_features, base.out_features
        self.together: Together | None = None  # with its neighbours, on a GPU

    def forward(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        batch = self.context.batch
        if batch is None:
            return self.base(x)
        out = self.together.output_of(self, x, batch) if self.together else None
        return self.add_lora(self.base(x), x, self.weights, batch) if out is None else out

    def with_base(self, base: nn.Module) -> "LoRALinear":
        """The same adapters on top of another form of the same layer."""
        return LoRALinear(base, self.weights, self.context, self.add_lora)


def add_lora_for(device: torch.device) -> AddLora:
    """The kernels on a GPU, their stand-ins on a CPU."""
    return optimized.add_lora if device.type == "cuda" else stand_ins.add_lora


def with_adapter_slots(
    model: Decoder,
    context: AdapterContext,
    max_loras: int,
    max_lora_rank: int,
    add_lora: AddLora | None = None,
) -> Decoder:
    """A twin of `model` with a LoRALinear for each linear layer of attention and MLP but NOT_ALONE;
    everything else is shared. max_loras: slots. add_lora: None for what fits the device. Raises
    ValueError.
    """
    check_whole(max_loras=max_loras, max_lora_rank=max_lora_rank)
    add_lora = add_lora or add_lora_for(model.device)

    def adaptable(name: str, linear: nn.Module) -> nn.Module:
        parent = model.get_submodule(name.rpartition(".")[0])
        # By its parent and not by a name, because what talks to other ranks wraps a layer, too.
        if any(part in name for part in NOT_ALONE) or isinstance(parent, ROTATED):
            return linear
        weights = SlotWeights.empty(
            max_loras,
            max_lora_rank,
            linear.in_features,
            linear.out_features,
            model.dtype,
            model.device,
        )
        return LoRALinear(linear, weights, context, add_lora)

    for kind in (*ROTATED, *KINDS):
        model = with_linears(model, kind, adaptable)
    if add_lora is optimized.add_lora:
        share_launches(adapter_layers(model))
    return model


def share_launches(layers: dict[str, LoRALinear]) -> None:
    """q, k and v of each attention, and gate and up of each MLP, in two launches."""
    for name in layers:
        for first, *others in SAME_INPUT:
            neighbours = [layers.get(name.removesuffix(first) + other) for other in others]
            if name.endswith(f".{first}") and all(neighbours):
                Together([layers[name], *neighbours])


def adapter_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """{name: layer}, by the names that checkpoints have."""
    parts = model.named_modules()
    return {name: part for name, part in parts if isinstance(part, LoRALinear)}


# ---------------------------------------------------------------- merging


def merged(model: Decoder, adapter: Adapter) -> Decoder:
    """A twin of `model` with W + scaling · B A in place of W, and as fast as the model itself. A
    quantized matrix becomes numbers in the model's dtype first. The model keeps its own matrices,
    so going back to it is exact. Raises ValueError for an adapter of another model.
    """
    return with_deltas(model, adapter, 1.0)


def unmerged(model: Decoder, adapter: Adapter) -> Decoder:
    """A twin of a merged model with the adapter subtracted again. Not the same bits as before it
    was merged, because each sum was rounded: keep the base where there is room for it.
    """
    return with_deltas(model, adapter, -1.0)


def with_deltas(model: Decoder, adapter: Adapter, factor: float) -> Decoder:
    waiting = dict(in_order_of(adapter, model.config).layers)

    def replace(name: str, linear: nn.Module) -> nn.Module:
        layer = waiting.pop(name, None)
        return linear if layer is None else plus(linear, layer, factor, model.dtype)

    for kind in KINDS:
        model = with_linears(model, kind, replace)
    if waiting:
        refuse("adapter", next(iter(waiting)), "layers of the model's attention and MLP")
    return model


def plus(linear: nn.Module, layer: LayerAdapter, factor: float, dtype: torch.dtype) -> nn.Linear:
    """A linear layer with its matrix and a multiple of an adapter's in one: added in float32."""
    if isinstance(linear, QuantizedLinear):
        matrix = linear.quantized.dequantize()
    else:
        matrix = linear.weight
    delta = layer.delta().to(matrix.device)
    wide = torch.promote_types(matrix.dtype, delta.dtype)
    return linear_of((matrix.to(wide) + factor * delta.to(wide)).to(dtype), linear.bias)
