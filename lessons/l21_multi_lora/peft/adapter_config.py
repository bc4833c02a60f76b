"""PEFT's adapter_config.json: what changes the result is read, or refused by name.

A key that this file does not know may change the result too, so it is refused unless it is empty.

Source: peft 0.21, LoraConfig and `check_target_module_exists`.
"""

import re
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from lessons.toolbox.model.arguments import is_number, is_whole, shown
from lessons.toolbox.model.config_json import CheckpointError, read_json

# key -> the values that leave the result as `y = x Wᵀ + scaling · (x Aᵀ) Bᵀ`
PLAIN_VALUES: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    # pissa, olora, corda, loftq, mica and lora_ga also change the base matrix, which is not in the
    # file
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# what only training, other layers or the place of the base model need
WITHOUT_EFFECT = [
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "peft_version",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
    "layers_pattern",
]
READ = [
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
]
WHY = {
    "use_dora": "DoRA also scales each output of the base matrix",
    "modules_to_save": "whole layers beside the adapter are not read",
    "trainable_token_indices": "rows of the embedding are not read",
    "lora_bias": "a bias beside B is not read",
    "fan_in_fan_out": "matrices are stored as nn.Linear stores them",
}


@dataclass(frozen=True)
class AdapterConfig:
    """Which layers an adapter changes, and by how much. Names of layers are those of the decoder,
    "layers.0.self_attn.q_proj"; patterns see them as PEFT does, with "model." in front.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str  # names' ends, or a regular expression of the whole name
    exclude_modules: tuple[str, ...] | str
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    layers_to_transform: tuple[int, ...]

    def targets(self, name: str) -> bool:
        """Whether the adapter changes the linear layer of this name."""
        name = f"model.{name}"
        if self.exclude_modules and matches(self.exclude_modules, name):
            return False
        if self.target_modules == "all-linear":
            found = True  # lm_head is not asked for
        else:
            found = matches(self.target_modules, name)
        if isinstance(self.target_modules, str) or not self.layers_to_transform:
            return found
        layer = re.match(r".*?\.[^.]*\.(\d+)\.", name)
        return found and layer is not None and int(layer[1]) in self.layers_to_transform

    def rank_of(self, name: str) -> int:
        """r, or what rank_pattern says for this layer."""
        return self.rank_pattern.get(pattern_of(self.rank_pattern, name), self.r)

    def scaling_of(self, name: str) -> float:
        """alpha / r, with rsLoRA alpha / √r, by the layer's own alpha and r."""
        alpha = self.alpha_pattern.get(pattern_of(self.alpha_pattern, name), self.lora_alpha)
        rank = self.rank_of(name)
        return alpha / (sqrt(rank) if self.use_rslora else rank)


def matches(wanted: tuple[str, ...] | str, name: str) -> bool:
    """A regular expression must match the whole name, an entry of a list its last parts."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in wanted)


def pattern_of(patterns: dict, name: str) -> str | None:
    """The first key that matches the end of a name."""
    found = (key for key in patterns if re.match(rf"(.*\.)?({key})$", f"model.{name}"))
    return next(found, None)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The config of an adapter's folder. Raises CheckpointError, in one line that names the key."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no adapter_config.json, so it is no PEFT adapter")
    stored = read_json(file)
    for key, accepted in PLAIN_VALUES.items():
        value = stored.get(key, accepted[0])
        # == alone takes 1 for True
        if not any(type(value) is type(plain) and value == plain for plain in accepted):
            said = ", ".join(repr(plain) for plain in accepted)
            raise CheckpointError(f"{file}: {key}: got {shown(value)}; accepted: {said}")
    for key, value in stored.items():
        if key not in (*PLAIN_VALUES, *WITHOUT_EFFECT, *READ) and value:
            why = WHY.get(key, "it may change the result")
            raise CheckpointError(
                f"{file}: {key}: got {shown(value)}; accepted: none, because {why}"
            )
    if stored.get("layers_to_transform") is not None and stored.get("layers_pattern"):
        got = shown(stored["layers_pattern"])
        raise CheckpointError(f"{file}: layers_pattern: got {got}; accepted: none")
    return AdapterConfig(
        r=rank_in(file, "r", stored.get("r")),
        lora_alpha=alpha_in(file, "lora_alpha", stored.get("lora_alpha")),
        use_rslora=switch_in(file, "use_rslora", stored.get("use_rslora", False)),
        target_modules=names_in(file, "target_modules", stored.get("target_modules")),
        exclude_modules=names_in(file, "exclude_modules", stored.get("exclude_modules") or []),
        rank_pattern=patterns_in(file, "rank_pattern", stored, rank_in),
        alpha_pattern=patterns_in(file, "alpha_pattern", stored, alpha_in),
        layers_to_transform=layers_in(file, stored.get("layers_to_transform")),
    )


# ---------------------------------------------------------------- values


def refuse_in(file: Path, key: str, value, accepted: str) -> None:
    raise CheckpointError(f"{file}: {key}: got {shown(value)}; accepted: {accepted}")


def rank_in(file: Path, key: str, value) -> int:
    if not is_whole(value):
        refuse_in(file, key, value, "a whole number, 1 or more")
    return value


def alpha_in(file: Path, key: str, value) -> float:
    if not is_number(value):
        refuse_in(file, key, value, "a finite number")
    return float(value)


def switch_in(file: Path, key: str, value) -> bool:
    if not isinstance(value, bool):
        refuse_in(file, key, value, "true or false")
    return value


def names_in(file: Path, key: str, value) -> tuple[str, ...] | str:
    """A regular expression, or a list of names."""
    if isinstance(value, str):
        check_pattern(file, key, value)
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        refuse_in(file, key, value, "a list of names, or a regular expression")
    return tuple(value)


def patterns_in(file: Path, key: str, stored: dict, read) -> dict:
    """{regular expression: a rank or an alpha}."""
    patterns = stored.get(key) or {}
    if not isinstance(patterns, dict):
        refuse_in(file, key, patterns, "an object: the end of a name to a number")
    for pattern in patterns:
        check_pattern(file, key, pattern)
    return {pattern: read(file, f"{key}[{pattern!r}]", x) for pattern, x in patterns.items()}


def check_pattern(file: Path, key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        refuse_in(file, key, pattern, f"a regular expression ({error})")


def layers_in(file: Path, value) -> tuple[int, ...]:
    layers = [value] if is_whole(value, 0) else value or []
    if not isinstance(layers, list) or not all(is_whole(layer, 0) for layer in layers):
        refuse_in(file, "layers_to_transform", value, "a layer's number, or a list of them")
    return tuple(layers)
