"""Families whose layers differ in the keys that they see: what the config says of each layer."""

from typing import Any

from lessons.toolbox.model.arguments import shown


def same_windows(config) -> tuple[int | None, ...]:
    """As `layer_windows`, for a family whose window is that of every layer."""
    window = config.sliding_window
    return () if window is None else (window,) * config.num_hidden_layers


def layer_windows(config) -> tuple[int | None, ...]:
    """Per layer, how many keys a query sees (itself included), or None for all of them. Empty: all
    of them in every layer.
    """
    of_kind = {"full_attention": None, "sliding_attention": config.sliding_window}
    kinds = set(config.layer_types)
    if not kinds <= set(of_kind):
        raise ValueError(
            f"'layer_types' must list {' or '.join(of_kind)}, not {shown(sorted(kinds))}"
        )
    if "sliding_attention" not in kinds:
        return ()
    if config.sliding_window is None:
        raise ValueError("'layer_types' has sliding_attention, but 'sliding_window' is null")
    if config.sliding_window == 0:  # transformers' word for one that is not in use
        raise ValueError("'layer_types' has sliding_attention, but 'use_sliding_window' is false")
    return tuple(of_kind[kind] for kind in config.layer_types)


def local_rope(config) -> dict[str, Any]:
    """What the layers with a window rotate by. Raises ValueError for a stretched one."""
    rope = config.rope_parameters["sliding_attention"]
    if rope["rope_type"] != "default":
        given = shown(rope["rope_type"])
        raise ValueError(f"'rope_parameters.sliding_attention' must be default, not {given}")
    return rope
