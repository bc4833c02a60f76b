"""Heads on the disk. They belong to one set of target weights: `load_heads` refuses another
target's.
"""

import hashlib
import json
import os
from pathlib import Path

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l17_tree_speculation.heads.heads import KINDS, Heads
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.checkpoint import REPOSITORY
from lessons.toolbox.model.config_json import CheckpointError, read_json

SAMPLED_VALUES = 4096  # of each tensor, for the fingerprint


def fingerprint(model: Decoder) -> str:
    """Sixteen hex digits that change with the target's weights, but not with the dtype that they
    are loaded in, if it is bfloat16 or wider.

    Of each tensor name, shape and at most 4096 values count, so a large model takes no longer.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(f"{name}{list(tensor.shape)}".encode())
        values = tensor.detach().flatten()
        values = values[:: -(-len(values) // SAMPLED_VALUES)].to(torch.bfloat16).cpu()
        digest.update(values.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def find_heads(name_or_path: str | os.PathLike) -> str:
    """The folder of shipped heads, from any working directory. Raises CheckpointError."""
    for folder in (os.fspath(name_or_path), str(REPOSITORY / name_or_path)):
        if os.path.isfile(os.path.join(folder, "config.json")):
            return folder
    raise CheckpointError(f"heads: got {name_or_path!r}; accepted: a folder with config.json")


def load_heads(name_or_path: str | os.PathLike, target: Decoder) -> Heads:
    """Heads from a folder, on the target's device and in its dtype.

    Raises CheckpointError, one line, for files that cannot be read, heads of another kind, of
    another target, or whose sizes or tensors do not fit.
    """
    from lessons.toolbox.model.stored import open_file  # here, because training alone needs no file

    folder = find_heads(name_or_path)
    config = read_json(Path(folder, "config.json"))
    if config.get("kind") not in tuple(KINDS):
        raise CheckpointError(
            f"kind in {folder}/config.json: got {config.get('kind')!r}; accepted: "
            f"{', '.join(KINDS)}"
        )
    ours = fingerprint(target)
    if config.get("target_fingerprint") != ours:
        raise CheckpointError(
            f"heads: {folder} was trained for the target {config.get('target_fingerprint')}, and "
            f"this target is {ours}; accepted: heads of these very weights"
        )
    try:
        heads = KINDS[config["kind"]].for_target(target.config, config.get("sizes"))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"sizes in {folder}/config.json: {error}") from error
    with open_file(Path(folder, "model.safetensors")) as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    wanted = {name: tensor.shape for name, tensor in heads.state_dict().items()}
    if {name: tensor.shape for name, tensor in stored.items()} != wanted:
        raise CheckpointError(f"{folder}/model.safetensors: its tensors are not those of its sizes")
    heads.load_state_dict(stored)
    if heads.lm_head is not None and not heads.lm_head.is_part_of_a_vocabulary:
        raise CheckpointError(
            f"{folder}/model.safetensors: lm_head.ids are not tokens of the target"
        )
    heads.acceptance = config.get("acceptance")
    return heads.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)


def save_heads(folder: str | os.PathLike, heads: Heads, facts: dict) -> None:
    """Write config.json (the kind, the sizes and `facts`) and the weights in bfloat16."""
    from safetensors.torch import save_file

    if "target_fingerprint" not in facts:
        refuse("facts", sorted(facts), "target_fingerprint among them")
    os.makedirs(folder, exist_ok=True)
    tensors = {
        name: (x.to(torch.bfloat16) if x.is_floating_point() else x).contiguous()
        for name, x in heads.state_dict().items()
    }
    save_file(tensors, os.path.join(folder, "model.safetensors"))
    config = dict(kind=heads.kind, sizes=heads.sizes, **facts)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps(config, indent=2) + "\n")
