"""Where the tensors of a decoder lie in a checkpoint of its family, and what else differs there."""

from collections import Counter
from typing import NamedTuple

from torch import Tensor, nn

from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.families import FAMILIES


def turning_last(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """tensor: [H · D, K]. A matrix of q or k whose heads' rotary coordinates come last, as `attend`
    wants them.

    In Phi-3's checkpoints they come first. That moves q and k alike, and no product of the two
    depends on their order.
    """
    turns = name.endswith(("q_proj.weight", "k_proj.weight"))
    if not turns or config.mla is not None or config.rope_dim == config.head_dim:
        return tensor
    heads = tensor.unflatten(0, (-1, config.head_dim))  # [H, D, hidden_size]
    return heads.roll(-config.rope_dim, dims=1).flatten(0, 1)


class Place(NamedTuple):
    """Where a tensor of the decoder lies: in the stored tensor `key`, from row `first` on."""

    key: str
    first: int
    shape: list[int]  # of the decoder's tensor


def places_of(model: nn.Module) -> dict[str, Place]:
    """Where each tensor of the decoder lies in a checkpoint of its family.

    Tensors that share a stored name (Phi-3's q_proj, k_proj and v_proj are its qkv_proj) lie in it
    one below the other, in the decoder's order.
    """
    places: dict[str, Place] = {}
    rows = Counter()
    for name, tensor in model.state_dict().items():
        key = stored_name(name, model.config)
        places[name] = Place(key, rows[key], list(tensor.shape))
        rows[key] += tensor.shape[0]
    return places


def stored_name(name: str, config: ModelConfig) -> str:
    """What checkpoints of the model's family call a tensor of the decoder, without "model."."""
    # between dots, because a part of a name may be a part of another: v_proj, qkv_proj
    key = f".{name}."
    for part, theirs in (FAMILIES[config.model_type].stored_as or {}).items():
        key = key.replace(f".{part}.", f".{theirs}.")
    return key[1:-1]


def predicts_further(key: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to DeepSeek-V3's layers behind the last one, which predict tokens
    further ahead.

    transformers leaves them out as well (it names layer 61). No other model may have such a layer.
    """
    part, _, rest = key.partition(".")
    index = rest.partition(".")[0]
    if config.mla is None or part != "layers" or not index.isdecimal():
        return False
    return int(index) >= config.num_hidden_layers
