"""An adapter in memory, read from the folder that PEFT's `save_pretrained` writes.

    adapter = load_adapter("models/tiny-lora-sql")
    adapter.layers["layers.0.self_attn.q_proj"]     # A: [r, K], B: [N, r], scaling

Only safetensors are read. An adapter_model.bin is a pickle, which may run any code, and stays
closed.
"""

import json
import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from lessons.l21_multi_lora.peft.adapter_config import AdapterConfig, read_adapter_config
from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.checkpoint import REPOSITORY
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.places import moves_rows, turning_last
from lessons.toolbox.model.stored import STORED_DTYPES, open_file

PREFIX = "base_model.model."  # PEFT's wrappers; after it comes the checkpoint's own name
WEIGHTS = "adapter_model.safetensors"
PARTS = ("lora_A", "lora_B")


class LayerAdapter(NamedTuple):
    """What an adapter does to one linear layer: y += scaling · (x Aᵀ) Bᵀ. a: [r, K], b: [N, r]."""

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return len(self.a)

    def delta(self) -> Tensor:
        """The same as one matrix, [N, K] float32 at least."""
        wide = torch.promote_types(self.a.dtype, torch.float32)
        return self.scaling * (self.b.to(wide) @ self.a.to(wide))


@dataclass(eq=False)
class Adapter:
    """A whole adapter, on the host. Two are one only if they are the same object, because a folder
    may hold other numbers the next time that it is read.
    """

    name: str
    layers: dict[str, LayerAdapter]  # by the decoder's names
    serial: int = field(default_factory=count(1).__next__)  # no other one has it

    @property
    def rank(self) -> int:
        """The largest of its layers."""
        return max(layer.rank for layer in self.layers.values())

    @property
    def num_bytes(self) -> int:
        """Of A and B of all layers."""
        tensors = [part for layer in self.layers.values() for part in (layer.a, layer.b)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def load_adapter(folder: str | os.PathLike, name: str | None = None) -> Adapter:
    """An adapter by its folder. name: default the folder's. Raises CheckpointError, in one line,
    for one that cannot be read, or that does more than A and B.
    """
    folder = find_adapter(folder)
    config = read_adapter_config(folder)
    pairs = read_pairs(folder)
    layers = {layer: read_layer(folder, layer, pair, config) for layer, pair in pairs.items()}
    return Adapter(name or folder.name, layers)


def in_order_of(adapter: Adapter, config: ModelConfig) -> Adapter:
    """The adapter with the rows of q and k where a model of this config has them, because the
    checkpoints of some families hold them in another order. Its layers must fit the model.
    """
    if not moves_rows(config):
        return adapter
    layers = {
        name: layer._replace(b=turning_last(f"{name}.weight", layer.b, config))
        for name, layer in adapter.layers.items()
    }
    return Adapter(adapter.name, layers, adapter.serial)


def find_adapter(name_or_path: str | os.PathLike) -> Path:
    """An adapter's folder; one of this repository's, "models/tiny-lora-sql", from any working
    directory. Raises CheckpointError.
    """
    if isinstance(name_or_path, (str, os.PathLike)) and os.fspath(name_or_path):
        for folder in (Path(name_or_path).expanduser(), REPOSITORY / name_or_path):
            if folder.is_dir():
                return folder
    raise CheckpointError(f"lora_path: got {shown(name_or_path)}; accepted: an adapter's folder")


def read_pairs(folder: Path) -> dict[str, dict[str, Tensor]]:
    """{layer: {"lora_A": [r, K], "lora_B": [N, r]}}, as stored. Raises CheckpointError."""
    file = folder / WEIGHTS
    if not file.is_file():
        why = ""
        if (folder / "adapter_model.bin").is_file():
            why = "; adapter_model.bin is a pickle, which may run any code when read"
        raise CheckpointError(f"{folder} holds no {WEIGHTS}{why}")
    pairs: dict[str, dict[str, Tensor]] = {}
    with open_file(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
            layer, _, part = name.removesuffix(".weight").rpartition(".")
            is_known = name.startswith(PREFIX) and name.endswith(".weight") and part in PARTS
            if not is_known:
                raise CheckpointError(
                    f"tensor {name} in {file}: accepted: lora_A and lora_B of linear layers"
                )
            if (dtype := tensors.get_slice(name).get_dtype()) not in STORED_DTYPES:
                accepted = ", ".join(STORED_DTYPES)
                raise CheckpointError(f"tensor {name} in {file} is {dtype}; supported: {accepted}")
            tensor = tensors.get_tensor(name)
            # Because an infinity beside a mask of zeros would be a NaN in every row.
            if not tensor.isfinite().all():
                raise CheckpointError(f"tensor {name} in {file} holds NaN or infinity")
            layer = layer.removeprefix(PREFIX).removeprefix("model.")
            pairs.setdefault(layer, {})[part] = tensor
    if not pairs:
        raise CheckpointError(f"{file} holds no tensor")
    return pairs


def read_layer(
    folder: Path, layer: str, pair: dict[str, Tensor], config: AdapterConfig
) -> LayerAdapter:
    """One layer's A and B. Raises CheckpointError where they do not fit each other or the
    config.
    """
    missing = [part for part in PARTS if part not in pair]
    if missing:
        raise CheckpointError(f"{folder}: {layer} has no {missing[0]}")
    a, b = (pair[part] for part in PARTS)
    rank = config.rank_of(layer)
    if a.ndim != 2 or b.ndim != 2 or len(a) != rank or b.shape[1] != rank:
        raise CheckpointError(
            f"{folder}: {layer}: lora_A {list(a.shape)}, lora_B {list(b.shape)}; accepted: "
            f"[{rank}, K] and [N, {rank}], the rank of adapter_config.json"
        )
    if not config.targets(layer):
        raise CheckpointError(
            f"{folder}: {layer} has an adapter, but target_modules and its exceptions in "
            f"adapter_config.json leave it out"
        )
    return LayerAdapter(a, b, config.scaling_of(layer))


def check_complete(
    folder: str | os.PathLike, adapter: Adapter, linears: dict[str, tuple[int, int]]
) -> None:
    """Raise CheckpointError unless the adapter fits a model: each of its layers is there, in that
    shape, and no layer that its config targets lacks its pair. linears: {layer: (N, K)}.
    """
    for name, layer in adapter.layers.items():
        if name not in linears:
            raise CheckpointError(
                f"adapter {adapter.name!r} changes {name}; accepted: the linear layers of the "
                f"model's attention and MLP, without routed experts and kv_b_proj"
            )
        got = (len(layer.b), layer.a.shape[1])
        if got != linears[name]:
            raise CheckpointError(
                f"adapter {adapter.name!r}: {name} is {list(got)}; accepted: "
                f"{list(linears[name])}, as in the base model"
            )
    config = read_adapter_config(find_adapter(folder))
    for name in linears:
        if config.targets(name) and name not in adapter.layers:
            raise CheckpointError(
                f"adapter {adapter.name!r}: adapter_config.json targets {name}, but {WEIGHTS} "
                f"holds nothing for it"
            )


def save_adapter(
    folder: str | os.PathLike,
    pairs: dict[str, tuple[Tensor, Tensor]],
    lora_alpha: float,
    base_model: str | None = None,
    **config,
) -> None:
    """Write an adapter as PEFT does. pairs: {decoder's layer: (A [r, K], B [N, r])}, all of one
    rank unless `config` has a rank_pattern; other keys of `config` go into adapter_config.json.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer, pair in pairs.items():
        for part, tensor in zip(PARTS, pair):
            tensors[f"{PREFIX}model.{layer}.{part}.weight"] = tensor.detach().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    stored = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": len(next(iter(pairs.values()))[0]),
        "lora_alpha": lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in pairs}),
        "bias": "none",
        "inference_mode": True,
    }
    text = json.dumps(stored | config, indent=2) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
