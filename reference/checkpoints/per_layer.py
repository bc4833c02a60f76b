"""What a quantization_config says of single layers: GPTQModel's `dynamic`, AutoRound's
`extra_config`, and the targets of compressed-tensors' schemes.

A layer has the name that its tensors have in the file, "model.layers.0.mlp.down_proj".
"""

import re
from collections.abc import Sequence

from lessons.toolbox.model.arguments import shown
from reference.checkpoints.config_keys import Config, object_of

PLAIN_BITS = 16  # as many bits say that a layer is not quantized
OF_A_LAYER = ("bits", "group_size", "sym", "desc_act", "data_type")
SPECIAL = set(r"*+?^$()[]{}|\\")  # a name with one of these is a regular expression to AutoRound


def matches(pattern: str, name: str, anywhere: bool = False) -> bool:
    """Whether a regular expression fits the beginning of a name, or any part of it. Raises
    ValueError for one that is none.
    """
    try:
        return (re.search if anywhere else re.match)(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"{shown(pattern)} is no regular expression: {error}") from None


def changed(config: Config, key: str, changes: Config) -> Config:
    """config with the keys that one layer has otherwise. Raises ValueError for other keys."""
    known = (*OF_A_LAYER, "adapter")
    for name, value in changes.items():
        if name not in known and value is not None and not name.startswith("act_"):
            raise ValueError(f"'quantization_config.{key}' changes {shown(name)}; accepted: bits, "
                             "group_size, sym, desc_act")  # fmt: skip
    return config | {name: x for name, x in changes.items() if name in OF_A_LAYER}


def by_dynamic(config: Config, name: str) -> Config | None:
    """GPTQModel: the first pattern that fits decides. "-:" before it leaves the layer alone."""
    for pattern, changes in object_of(config, "dynamic").items():
        if pattern.startswith("-:"):
            if matches(pattern[2:], name):
                return None
        elif matches(pattern.removeprefix("+:"), name):
            return changed(config, "dynamic", changes)
    return config


def by_extra_config(config: Config, name: str) -> Config | None:
    """AutoRound: the layer's own name, or else the first regular expression that is in it."""
    rules = object_of(config, "extra_config")
    found = rules.get(name)
    if found is None:
        patterns = (key for key in rules if SPECIAL & set(key))
        fitting = (rules[key] for key in patterns if matches(key, name, anywhere=True))
        found = next(fitting, {})
    bits = found.get("bits", config.get("bits"))
    if isinstance(bits, int) and bits >= PLAIN_BITS:
        return None
    return changed(config, "extra_config", found)


def rank(target: str, name: str, kind: str = "Linear") -> int | None:
    """How closely a target of compressed-tensors means a module: 0 by its name, 1 by a regular
    expression ("re:" before it), 2 by its class; None: not at all. Raises ValueError.
    """
    if target == name:
        return 0
    if target.startswith("re:"):
        return 1 if matches(target[3:], name) else None
    return 2 if target == kind else None


def is_meant(
    name: str, targets: Sequence[str], ignore: Sequence[str], kind: str = "Linear"
) -> bool:
    """Whether some target means a module, and nothing of `ignore` does."""
    meant, ignored = (
        any(rank(target, name, kind) is not None for target in some) for some in (targets, ignore)
    )
    return meant and not ignored
