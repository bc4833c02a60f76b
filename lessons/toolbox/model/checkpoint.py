"""Hugging Face checkpoints of the families that the course reads, into its decoders.

    config = load_config("models/tiny")            # a folder, an embedded model, or a hub name
    load_weights(model, "models/tiny", device="cuda", dtype=torch.bfloat16)
    tokenizer = load_tokenizer("models/tiny")

Weights are safetensors, in one file or in shards. Tensors stream one at a time, so loading needs
the memory of the model and of one tensor. Strict: a tensor that is missing, unexpected or misshapen
is an error that names it. Nothing is unpickled, because a pickle may run any code while it is read.

Source of the format: huggingface.co/docs/safetensors.
"""

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError, read_config
from lessons.toolbox.model.placement import read_device, read_dtype
from lessons.toolbox.model.places import Place, of_the_decoder, places_of, turning_last
from lessons.toolbox.model.stored import Stored, catalog, open_file

EMBEDDED_MODELS = ("models/tiny", "models/tiny-draft")
EMBEDDED_EYES = "models/tiny-vision"  # in front of models/tiny; reference.vision reads it
# added to scores that lie close together: rounded to 16 bits it would choose other experts
KEPT_WIDE = "e_score_correction_bias"
HUB_TIMEOUT_S = 5
REPOSITORY = Path(__file__).resolve().parents[3]

SMALL_FILES = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"]
SMALL_FILES += ["vocab.json", "merges.txt", "added_tokens.json", "chat_template*"]
SMALL_FILES += ["hf_quant_config.json", "quantize_config.json"]  # ModelOpt's and AutoGPTQ's
# not *.safetensors: Mistral's hub repositories hold every weight again, in consolidated*
WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]


# ---------------------------------------------------------------- where it lies


def find_folder(name_or_path: str | os.PathLike, hub_patterns: list[str]) -> Path:
    """Folder of a checkpoint: a path, an embedded model (from any working directory), or a hub
    name.

    hub_patterns: the files to fetch if it is a hub name; those in the local hub cache are not
    fetched again. Raises CheckpointError if it is none of these, or if the hub cannot be reached
    (HF_HUB_OFFLINE is respected).
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        got = shown(name_or_path)
        raise CheckpointError(f"name_or_path: got {got}; accepted: a folder, or a hub name")
    name = os.fspath(name_or_path).rstrip("/") or os.fspath(name_or_path)
    if name and os.path.isdir(os.path.expanduser(name)):
        return Path(name).expanduser()
    if name in (*EMBEDDED_MODELS, EMBEDDED_EYES) and (REPOSITORY / name).is_dir():
        return REPOSITORY / name
    if os.path.isfile(name):
        raise CheckpointError(
            f"model {name!r} is a file; give the folder that holds config.json, model.safetensors "
            "(a .gguf file: give it to load_model or LLM of reference)"
        )
    return _fetch(name, hub_patterns)


def _fetch(name: str, patterns: list[str]) -> Path:
    """Folder in the hub's local cache with the files of a hub model, fetched if the hub answers."""
    # here, because a local folder needs none of it
    from huggingface_hub import HfApi, snapshot_download

    unreachable = None
    try:
        # first, because snapshot_download waits for a silent hub for ever
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:
        # because the client lets the exceptions of its HTTP library through, and has changed
        # library
        unreachable = error
    try:
        offline = unreachable is not None
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=offline))
    except Exception as error:
        reason = next(iter(str(unreachable or error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"unknown model {shown(name)}: no such folder, and no hub name that can be reached "
            f"({reason}); embedded models: {', '.join(EMBEDDED_MODELS)}"
        ) from error


def load_config(name_or_path: str | os.PathLike) -> ModelConfig:
    """Shape of a checkpoint, read from its config.json (`config_json.read_config` lists what it
    refuses).

    Raises CheckpointError. Of a hub name only the small files are fetched, so that a refusal comes
    before the weights do.
    """
    return read_config(find_folder(name_or_path, SMALL_FILES))


def find_weights(name_or_path: str | os.PathLike, config: ModelConfig) -> Path:
    """Folder of a checkpoint, its weights fetched, that may hold as many layers and experts as
    `config` names.

    Call it before a decoder is built: each layer takes time and memory even on the meta device, and
    a wrong config may name thousands. Reads only the files' headers. Raises CheckpointError.
    """
    refuse_quantized(config)
    folder = find_folder(name_or_path, SMALL_FILES + WEIGHT_FILES)
    check_room(folder, len(catalog(folder)), config)
    return folder


def check_room(folder: Path, num_tensors: int, config: ModelConfig) -> None:
    """Raise CheckpointError where fewer tensors are stored than the config has layers and
    experts.
    """
    moe, num_layers = config.moe, config.num_hidden_layers
    expert_layers = sum(moe.has_experts(layer) for layer in range(num_layers)) if moe else 0
    num_experts = expert_layers * moe.n_routed_experts if moe and not moe.are_stacked else 0
    if num_layers + num_experts > num_tensors:  # each has at least one
        raise CheckpointError(
            f"{folder} holds {num_tensors} tensors, too few for the {num_layers} layers "
            f"(num_hidden_layers) and {num_experts} experts (n_routed_experts) of its config.json"
        )


def refuse_quantized(config: ModelConfig) -> None:
    """Raise CheckpointError for a checkpoint whose matrices are quantized."""
    if config.quantization_config is not None:
        method = shown(config.quantization_config["quant_method"])
        raise CheckpointError(
            f"the weights are quantized ('quantization_config', quant_method {method}): load them "
            f"with load_model (reference), or give a checkpoint in 16 bits"
        )


# ---------------------------------------------------------------- safetensors


def load_weights(
    model: nn.Module,
    name_or_path: str | os.PathLike,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fill a decoder, usually one built on the meta device, with the tensors of a checkpoint, on
    `device` in `dtype`.

    The names, shapes and dtypes in the files' headers are checked before the first tensor is read:
    an error leaves the model as it was. Raises CheckpointError that names the file or the tensor
    (with both shapes), ValueError for another device or dtype.
    """
    device, dtype = read_device(device), read_dtype(dtype)
    refuse_quantized(model.config)
    folder = find_folder(name_or_path, SMALL_FILES + WEIGHT_FILES)
    fill(model, folder, catalog(folder), {}, device, dtype)


def fill(
    model: nn.Module,
    folder: Path,
    stored: dict[str, Stored],
    given: dict[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """As load_weights, from the tensors of a catalog. given: tensors of the decoder that the
    caller has read, by their names in it and of its shapes, [N, K] for a matrix.
    """
    model.load_state_dict(read_tensors(model, folder, stored, given, device, dtype), assign=True)
    if model.config.tie_word_embeddings:
        # because assigning made two parameters of the one tensor
        model.lm_head.weight = model.embed_tokens.weight


def read_tensors(
    model: nn.Module,
    folder: Path,
    stored: dict[str, Stored],
    given: dict[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    parts: dict[str, tuple[slice, ...]] | None = None,
) -> dict[str, Tensor]:
    """The tensors of a decoder by their names in it; arguments as in `fill`.

    parts: the tensors to read, and what of each, one slice a dimension (lesson 20); None: all of
    all. What a slice leaves out is not read. Raises CheckpointError.
    """
    tied, stored = model.config.tie_word_embeddings, of_the_decoder(stored, model.config)
    if tied and "embed_tokens.weight" not in stored and "lm_head.weight" in stored:
        # of two tensors that share memory a writer keeps one
        stored["embed_tokens.weight"] = stored.pop("lm_head.weight")
    places = {name: place for name, place in places_of(model).items() if name not in given}
    _check(stored, places, tied, folder)
    if parts is not None:
        if tied and "embed_tokens.weight" not in parts:
            places["lm_head.weight"] = places["embed_tokens.weight"]
        places = {name: places[name] for name in parts}
    weights = dict(given)
    for file in dict.fromkeys(entry.file for entry in stored.values()):
        with open_file(file) as tensors:
            for name, place in places.items():
                if place.key in stored and stored[place.key].file == file:
                    wide = name.endswith(KEPT_WIDE)
                    kept = torch.promote_types(dtype, torch.float32) if wide else dtype
                    part = None if parts is None else parts[name]
                    tensor = _cut(tensors, stored[place.key].name, place, part)
                    # copy, because an uncast tensor would stay a view of the file, and change or
                    # crash with it
                    tensor = tensor.to(device=device, dtype=kept, copy=True)
                    weights[name] = turning_last(name, tensor, model.config)
    embedding = weights.get("embed_tokens.weight")
    has_head = parts is None or "lm_head.weight" in parts  # not the first of several stages
    if tied and embedding is not None and has_head:
        if not torch.equal(weights.get("lm_head.weight", embedding), embedding):
            raise CheckpointError(
                f"{folder}: config.json says tie_word_embeddings, but lm_head.weight and "
                f"embed_tokens.weight differ; set it to false"
            )
        weights["lm_head.weight"] = embedding
    return weights


def _cut(tensors, name: str, place: Place, part: tuple[slice, ...] | None) -> Tensor:
    """A tensor of the decoder, or a part of it, out of the stored one. tensors: an open file."""
    if part is None and not place.stack:
        return tensors.get_tensor(name)[place.first : place.first + place.shape[0]]
    stored, first, which = tensors.get_slice(name), place.first, ()
    if place.stack:
        matrix, first = divmod(first, stored.get_shape()[2 if place.from_right else 1])
        which = (matrix,)
    rows, *columns = part or tuple(slice(0, size) for size in place.shape)
    rows = slice(first + rows.start, first + rows.stop)
    if place.from_right:
        return stored[(*which, *columns, rows)].T.contiguous()
    return stored[(*which, rows, *columns)]


def _check(stored: dict[str, Stored], places: dict[str, Place], tied: bool, folder: Path) -> None:
    """Stored and expected tensors must be the same, but for a tied lm_head, which may be absent."""
    # of the tensors that share a stored one, the last names all of its rows
    expected = {place.key: place.stored_shape for place in places.values()}
    optional = {"lm_head.weight"} if tied else set()
    missing = [name for name in expected if name not in stored and name not in optional]
    unexpected = [entry.name for name, entry in stored.items() if name not in expected]
    if missing:
        name = missing[0] if missing[0].startswith("lm_head") else f"model.{missing[0]}"
        shape = expected[missing[0]]
        raise CheckpointError(
            f"tensor {name} (shape {shape}) is missing from {folder}{_and_more(missing)}"
        )
    if unexpected:
        raise CheckpointError(
            f"tensor {unexpected[0]} in {folder} has no place in the decoder{_and_more(unexpected)}"
        )
    for name, entry in stored.items():
        if entry.shape != expected[name]:
            raise CheckpointError(
                f"tensor {entry.name} in {entry.file} has shape {entry.shape}, "
                f"its config.json asks for {expected[name]}"
            )


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


# ---------------------------------------------------------------- tokenizer


def load_tokenizer(name_or_path: str | os.PathLike):
    """The checkpoint's tokenizer, as transformers' AutoTokenizer. Raises CheckpointError if the
    files are missing or broken.
    """
    folder = find_folder(name_or_path, SMALL_FILES)
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in files):
        raise CheckpointError(f"{folder} holds no tokenizer ({', '.join(files)})")
    from transformers import AutoTokenizer  # here, because importing transformers takes seconds

    try:
        local = dict(local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        # Some wrong values show only in use, and some only on characters that are rare.
        tokenizer.decode(tokenizer("def f(a):\n\treturn 0  # é 中 😀")["input_ids"])
        return tokenizer
    except BaseException as error:  # a panic of the library's Rust code is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {error}") from error
