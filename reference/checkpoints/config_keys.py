"""The keys of a quantization_config, read one by one.

Every key is known by name. Some are read; some change nothing, because they say how the numbers
were found or how another library runs them; some must have the one value that changes nothing. A
key that is in none of these lists is refused, because it might change what the model computes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from lessons.toolbox.model.arguments import refuse, shown
from reference.checkpoints.inputs import Inputs
from reference.checkpoints.layouts import Layout

Config = dict[str, Any]
# The same in every method: who wrote it, which layers stay as they are (the tensors tell, too).
HARMLESS = """quant_method modules_to_not_convert ignored_layers llm_int8_skip_modules ignore
    backend version meta"""


def same_for_all(config: Config, name: str) -> Config | None:
    """The config of a layer where all layers have the same."""
    return config


def kept(config: Config) -> Inputs | None:
    """How inputs are rounded where a method says nothing of them."""
    return None


class Method(NamedTuple):
    """One quant_method. layouts(config): those that its matrices may have, told apart by their
    markers. reads, harmless: keys, between blanks. fixed: keys and the values that change nothing.
    of_layer(config, name): the config with what it says of this layer alone; None: that the layer
    is not quantized. inputs(config): how a layer's inputs are rounded; None: not at all.
    """

    layouts: Callable[[Config], list[Layout]]
    reads: str
    harmless: str = ""
    fixed: dict[str, tuple] | None = None
    of_layer: Callable[[Config, str], Config | None] = same_for_all
    inputs: Callable[[Config], Inputs | None] = kept


def check_keys(config: Config, method: Method, within: str) -> None:
    """Raise ValueError for a key whose value could change the result."""
    fixed = method.fixed or {}
    known = f"{HARMLESS} {method.harmless} {method.reads}".split()
    for key, value in config.items():
        if key in fixed:
            if value not in fixed[key]:
                raise ValueError(
                    f"'{within}.{key}' must be {shown(fixed[key][0])}, not {shown(value)}"
                )
        elif key not in known and value is not None:
            raise ValueError(
                f"{shown(f'{within}.{key}')} is {shown(value)}, and no reader knows this key; "
                "remove it if it changes nothing"
            )


def pick(config: Config, key: str, accepted: tuple, default=None):
    """The value of a key. Raises ValueError for one that is not accepted."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, str):
        value = value.lower()
    # the type, because True is 1 to Python
    if not any(type(value) is type(one) and value == one for one in accepted):
        refuse(f"quantization_config.{key}", config.get(key), " or ".join(map(str, accepted)))
    return value


def group_size_of(config: Config, key: str) -> int:
    """A positive whole number, or -1. Raises ValueError for another one, or for none."""
    size = config.get(key)
    if type(size) is not int or (size < 1 and size != -1) or size > 2**20:
        refuse(f"quantization_config.{key}", size, "a positive whole number, or -1 for whole rows")
    return size


def object_of(config: Config, key: str) -> Config:
    """An object of objects, {} where the key is missing. Raises ValueError."""
    found = config.get(key) or {}
    if not isinstance(found, dict) or not all(isinstance(x, dict) for x in found.values()):
        refuse(f"quantization_config.{key}", found, "an object: a layer's name to its keys")
    return found
