"""Where the tensors of a decoder lie in a checkpoint of its family, and what else differs there."""

import re
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.families import FAMILIES
from lessons.toolbox.model.stored import Stored

OF_Q_AND_K = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
OF_Q_AND_K += ("q_norm.weight", "k_norm.weight")
OF_TEXT = "language_model."
OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


def moves_rows(config: ModelConfig) -> bool:
    """Whether the family's checkpoints hold the coordinates of q and k in another order."""
    in_pairs = FAMILIES[config.model_type].rope_in_pairs
    return config.mla is None and (in_pairs or config.rope_dim != config.head_dim)


def turning_last(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """tensor: [H · D, …]. What makes q or k (matrix, bias, norm of a head), with the heads' rotary
    coordinates last and in halves, as `attend` wants them.

    In checkpoints of Phi-3, Qwen3-Next and GLM-4 they come first, and GLM-4's lie in pairs (2i,
    2i + 1). That moves q and k alike, and no product of the two depends on their order.
    """
    if not name.endswith(OF_Q_AND_K) or not moves_rows(config):
        return tensor
    heads = tensor.unflatten(0, (-1, config.head_dim))  # [H, D, …]
    turning, rest = heads[:, : config.rope_dim], heads[:, config.rope_dim :]
    if FAMILIES[config.model_type].rope_in_pairs:
        turning = torch.cat([turning[:, 0::2], turning[:, 1::2]], dim=1)
    turned = torch.cat([rest, turning], dim=1)
    if len(heads) > config.num_attention_heads:
        # after each head of q its gate, whose coordinates are those of v
        turned[1::2] = heads[1::2]
    return turned.flatten(0, 1)


class Place(NamedTuple):
    """Where a tensor of the decoder lies: in the stored tensor `key`, from row `first` on."""

    key: str
    first: int  # of a stack's rows, one matrix below the other
    shape: list[int]  # of the decoder's tensor
    stack: int = 0  # how many matrices the stored tensor stacks, [E, rows, …]; 0: it is no stack
    from_right: bool = False  # the stack is [E, columns, rows]

    @property
    def stored_shape(self) -> list[int]:
        """Of the stored tensor, told by the last of those that share it."""
        rows = self.first + self.shape[0]
        if not self.stack:
            return [rows, *self.shape[1:]]
        matrix = [rows // self.stack, *self.shape[1:]]
        return [self.stack, *(reversed(matrix) if self.from_right else matrix)]


def places_of(model: nn.Module) -> dict[str, Place]:
    """Where each tensor of the decoder lies in a checkpoint of its family.

    Tensors that share a stored name (Phi-3's q_proj, k_proj and v_proj are its qkv_proj) lie in it
    one below the other, in the decoder's order. Granite 4's and Llama 4's keep the matrices of all
    experts in two stacks.
    """
    places: dict[str, Place] = {}
    from_right = FAMILIES[model.config.model_type].experts_from_right
    rows, moe = Counter(), model.config.moe
    for name, tensor in model.state_dict().items():
        key = stored_name(name, model.config)
        is_stacked = moe is not None and moe.are_stacked and OF_ONE_EXPERT.search(name)
        stack = moe.n_routed_experts if is_stacked else 0
        places[name] = Place(key, rows[key], list(tensor.shape), stack, from_right and stack > 0)
        rows[key] += tensor.shape[0]
    return places


def stored_name(name: str, config: ModelConfig) -> str:
    """What checkpoints of the model's family call a tensor of the decoder, without "model."."""
    # between dots, because a part of a name may be a part of another: v_proj, qkv_proj
    key = f".{name}."
    if config.moe is not None and config.moe.are_stacked:
        key = OF_ONE_EXPERT.sub(".experts.", key)
    for part, theirs in (FAMILIES[config.model_type].stored_as or {}).items():
        key = key.replace(f".{part}.", f".{theirs}.")
    return key[1:-1]


def of_the_decoder(stored: dict[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """The stored tensors that the decoder reads, by their names in it: without those of further
    layers and of eyes, beside which its own stand under "language_model.".
    """
    own = {key: entry for key, entry in stored.items() if not predicts_further(key, config)}
    return {key.removeprefix(OF_TEXT).removeprefix("model."): own[key] for key in own}


def predicts_further(key: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to a layer behind the last one, which predicts tokens further ahead
    (DeepSeek-V3, GLM-4.5, Qwen3-Next), or to another part that is left out.

    transformers leaves them out as well (it names layer 61). Other families may have no such layer.
    """
    family = FAMILIES[config.model_type]
    if any(f".{part}" in f".{key}" for part in family.left_out.split()):
        return True
    part, _, rest = key.partition(".")
    index = rest.partition(".")[0]
    if not family.predicts_further or part != "layers" or not index.isdecimal():
        return False
    return int(index) >= config.num_hidden_layers
