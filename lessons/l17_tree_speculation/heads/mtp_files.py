"""The MTP layer that a checkpoint of DeepSeek-V3's family has after its last layer.

    layers.61.enorm, hnorm, eh_proj       of MTPDraft, under the same names
    layers.61.shared_head.norm            MTPDraft.norm
    layers.61.self_attn.*, mlp.* …        MTPDraft.layer: one more layer of the target
    layers.61.embed_tokens, shared_head.head      copies of the target's, which is used instead

61 is num_hidden_layers, and config.json says in num_nextn_predict_layers how many such layers there
are. Ours reads the first one and applies it again for further tokens.

Sources: the tensors of deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md there); vLLM, deepseek_mtp.py.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l17_tree_speculation.heads.heads import MTPDraft
from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.checkpoint import (
    SMALL_FILES,
    WEIGHT_FILES,
    fill,
    find_folder,
    load_config,
    refuse_quantized,
)
from lessons.toolbox.model.config_json import CheckpointError, read_json
from lessons.toolbox.model.stored import STORED_DTYPES, Stored, catalog, open_file

OWN = {"enorm.": "enorm.", "hnorm.": "hnorm.", "eh_proj.": "eh_proj.", "shared_head.norm.": "norm."}
COPIES = {
    "embed_tokens.weight": "embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}


class StoredLayer(NamedTuple):
    """An MTP layer that is still in its files. draft: without weights. stored: its tensors, under
    the names that they have in `draft`.
    """

    draft: MTPDraft
    folder: Path
    stored: dict[str, Stored]


def load_mtp(name_or_path: str | os.PathLike, target: Decoder) -> MTPDraft:
    """The first MTP layer of a checkpoint, on the target's device and in its dtype.

    Raises CheckpointError, one line: no such layer, a checkpoint of another shape or of quantized
    weights (reference reads those), tensors that are missing or do not fit, copies that are none.
    """
    refuse_quantized(load_config(name_or_path))
    draft, folder, stored = find_mtp(name_or_path, target)
    check_complete(draft, stored, folder)
    fill(draft, folder, stored, {}, target.device, target.dtype)
    return draft.eval().requires_grad_(False)


def find_mtp(
    name_or_path: str | os.PathLike, target: Decoder, dtypes: tuple[str, ...] = STORED_DTYPES
) -> StoredLayer:
    """The layer as it is stored, in tensors of these dtypes. Raises CheckpointError."""
    config = replace(load_config(name_or_path), quantization_config=None)
    # a target may have other weights than its checkpoint: with more bits, or with fewer
    if config != replace(target.config, quantization_config=None):
        raise CheckpointError(
            f"{name_or_path}: got an MTP layer for another shape than the target's; accepted: that "
            "of the target's own checkpoint"
        )
    folder = find_folder(name_or_path, SMALL_FILES)
    count = read_json(folder / "config.json").get("num_nextn_predict_layers") or 0
    # as load_weights leaves such a layer out: only this family has any
    if config.mla is None or count == 0:
        raise CheckpointError(
            f"{name_or_path} has no MTP layer (num_nextn_predict_layers: got {shown(count)}, "
            f"model_type {config.model_type!r}); accepted: a deepseek_v3 with 1 or more, or a "
            "folder of heads of the kind 'mtp'"
        )
    folder = find_folder(name_or_path, SMALL_FILES + WEIGHT_FILES)
    stored = catalog(folder, dtypes)
    prefix = f"layers.{config.num_hidden_layers}."
    further = {
        key.removeprefix(prefix): entry for key, entry in stored.items() if key.startswith(prefix)
    }
    for name, original in COPIES.items():
        check_copy(further.pop(name, None), stored.get(original))
    with torch.device("meta"):  # no memory until the weights arrive
        layer = target.new_layer(config.num_hidden_layers)
        draft = MTPDraft(config, config.intermediate_size, layer)
    return StoredLayer(draft, folder, {our_name(name): entry for name, entry in further.items()})


def our_name(name: str) -> str:
    """What MTPDraft calls a tensor of the layer: what is not its own is its decoder layer's."""
    for theirs, ours in OWN.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return f"layer.{name}"


def check_complete(draft: MTPDraft, stored: dict[str, Stored], folder: Path) -> None:
    """Raise CheckpointError for a tensor that is missing, under the name that it should have."""
    theirs = {ours: them for them, ours in OWN.items()} | {"layer.": ""}
    for name in draft.state_dict():
        if name not in stored:
            part, dot, rest = name.partition(".")
            raise CheckpointError(
                f"tensor {theirs[part + dot]}{rest} of the MTP layer is missing from {folder}"
            )


def check_copy(copy: Stored | None, original: Stored | None) -> None:
    """Raise CheckpointError where an MTP layer has an embedding or a head of its own: drafts look
    tokens up in the target's, and end in its head.
    """
    if copy is None or original is None:  # shared in the file, too, or tied
        return
    found = [open_file(entry.file).get_tensor(entry.name) for entry in (copy, original)]
    if not torch.equal(*found):
        raise CheckpointError(
            f"tensor {copy.name} in {copy.file} differs from {original.name}; accepted: a copy of "
            "it, because an MTP layer shares the target's"
        )
