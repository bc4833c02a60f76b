"""Models in GGUF files: loaded into the course's decoder, and written.

    model = load_gguf("model.gguf")                      its matrices stay quantized in memory
    save_gguf("model.gguf", model, tokenizer, "Q4_K_M")
    twin = quantized(model, quantizer("Q4_K_M", model.config), gguf_matmul)        without a file

Two things differ from a Hugging Face checkpoint, beside the names. A tied model stores one matrix,
token_embd.weight, and no output.weight. And in the llama architecture the rows of q and k lie in
another order: llama.cpp rotates the neighbouring coordinates (2i, 2i + 1) of a head, Hugging Face's
layout the pair (i, i + D / 2). Rows can be put in order without decoding them, because blocks lie
inside a row.

Source: convert_hf_to_gguf.py of llama.cpp (tensor names; LlamaModel.permute).
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.gguf.gguf_blocks import FLOATS, GgufWeight
from lessons.l18_weight_quantization.gguf.gguf_encode import to_gguf
from lessons.l18_weight_quantization.gguf.gguf_mixture import MIXTURES, format_for, stored_name
from lessons.l18_weight_quantization.linear import Multiply, QuantizedLinear, quantized
from lessons.l18_weight_quantization.weights import QuantizedWeight
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.placement import read_device, read_dtype
from reference.checkpoints.gguf.gguf_config import (
    ROPE_FACTORS,
    config_of,
    metadata_of,
    rope_factors,
)
from reference.checkpoints.gguf.gguf_file import GgufFile, read_gguf, write_gguf
from reference.checkpoints.gguf.gguf_linear import GgufEmbedding, gguf_matmul
from reference.checkpoints.gguf.gguf_tokenizer import tokenizer_metadata

QUANTIZATION_VERSION = 2  # of the blocks' layouts


def row_order(name: str, config: ModelConfig) -> Tensor | None:
    """Where the decoder's rows lie in a stored tensor: row r is stored row order[r]. [N] int64;
    None: as they are.

    In a head of D rows the decoder's (i, i + D / 2) are llama.cpp's (2i, 2i + 1). Example: D = 4
    gives 0, 2, 1, 3.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if config.model_type in ("qwen2", "qwen3") or part not in heads:
        return None
    stored = torch.arange(heads[part] * config.head_dim)
    return stored.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten()


# ---------------------------------------------------------------- reading


def load_gguf(
    path: str | os.PathLike,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    multiply: Multiply = gguf_matmul,
    prepare: Callable[[GgufWeight], QuantizedWeight] | None = None,
) -> Decoder:
    """The model in a file. dtype: of the activations, and of what the file holds unquantized.
    prepare: what a layer holds of its matrix, for a `multiply` that wants it otherwise than as
    blocks.

    The names and shapes in the header are checked before the first tensor is read. Raises
    CheckpointError in one line that names the file, ValueError for another device or dtype.
    """
    device, dtype = read_device(device), read_dtype(dtype)
    file = read_gguf(path)
    config = config_of(file)
    if config.num_hidden_layers > len(file.tensors):  # before a decoder of so many layers is built
        raise CheckpointError(
            f"{file.path} holds {len(file.tensors)} tensors, too few for "
            f"{config.num_hidden_layers} layers"
        )
    with torch.device("meta"):  # no memory until the weights arrive
        model = Decoder(config)
    names = _checked_names(model, file)
    dense: dict[str, Tensor] = {}
    packed: dict[str, GgufWeight] = {}
    for name, stored in names.items():
        weight = file.read(stored)
        order = row_order(name, config)
        if weight.format not in FLOATS:
            packed[name] = (weight if order is None else weight.rows(order)).to(device)
            continue
        numbers = weight.dequantize().reshape(file.tensors[stored].shape)
        numbers = numbers if order is None else numbers[order]
        dense[name] = numbers.to(device=device, dtype=dtype)
    model.load_state_dict(dense, strict=False, assign=True)

    def matrix_of(name: str, linear: nn.Linear) -> QuantizedWeight | None:
        weight = packed.get(f"{name}.weight")
        return weight if weight is None or prepare is None else prepare(weight)

    model = quantized(model, matrix_of, multiply)
    _set_ends(model, packed, dtype, multiply)
    return model.eval().requires_grad_(False)


def _set_ends(
    model: Decoder, packed: dict[str, GgufWeight], dtype: torch.dtype, multiply: Multiply
) -> None:
    """The embedding and the matrix that makes the logits, which may be the same."""
    tied = model.config.tie_word_embeddings
    embedding = packed.get("embed_tokens.weight")
    output = embedding if tied else packed.get("lm_head.weight")
    if embedding is not None:
        model.embed_tokens = GgufEmbedding(embedding, dtype)
    if output is not None:
        model.lm_head = QuantizedLinear(output, None, multiply)
    elif tied:
        model.lm_head.weight = model.embed_tokens.weight


def _checked_names(model: Decoder, file: GgufFile) -> dict[str, str]:
    """{the decoder's name: the stored one} of every tensor. Raises CheckpointError if the file's
    are others or have other shapes.
    """
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    names = {name: stored_name(name) for name in wanted}
    for name, stored in names.items():
        if stored not in file.tensors:
            raise CheckpointError(f"{file.path} lacks the tensor {stored} (shape {wanted[name]})")
        shape = file.tensors[stored].shape
        if shape != wanted[name]:
            raise CheckpointError(
                f"the tensor {stored} in {file.path} has shape {shape}, its metadata ask for "
                f"{wanted[name]}"
            )
    unexpected = set(file.tensors) - {*names.values(), ROPE_FACTORS}
    if unexpected:
        raise CheckpointError(
            f"the tensor {min(unexpected)} in {file.path} has no place in the decoder"
        )
    return names


# ---------------------------------------------------------------- writing


@torch.no_grad()
def save_gguf(path: str | os.PathLike, model: Decoder, tokenizer, mixture: str = "Q4_K_M") -> None:
    """Write a model, and its tokenizer unless that is None. mixture: a key of MIXTURES. Raises
    ValueError for a model that llama.cpp's architectures here do not cover, or that is quantized.
    """
    if mixture not in MIXTURES:
        refuse("mixture", mixture, ", ".join(MIXTURES))
    if any(isinstance(part, (QuantizedLinear, GgufEmbedding)) for part in model.modules()):
        raise ValueError("model: got a quantized one; accepted: one with floating-point matrices")
    config = model.config
    metadata = metadata_of(config) | {
        "general.file_type": MIXTURES[mixture].number,
        "general.quantization_version": QUANTIZATION_VERSION,
    }
    if tokenizer is not None:
        metadata |= tokenizer_metadata(tokenizer, config.vocab_size)
    elif config.eos_token_ids:
        metadata["tokenizer.ggml.eos_token_id"] = config.eos_token_ids[0]
    tensors: dict[str, tuple[GgufWeight, list[int]]] = {}
    factors = rope_factors(config)
    if factors is not None:
        tensors[ROPE_FACTORS] = to_gguf(factors[None], "F32"), list(factors.shape)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        order = row_order(name, config)
        if order is not None:
            # the inverse of what `load_gguf` does: stored row order[r] is the decoder's row r
            tensor = tensor[order.argsort().to(tensor.device)]
        stored = stored_name(name)
        format = format_for(mixture, stored, tensor, config)
        tensors[stored] = to_gguf(tensor.reshape(-1, tensor.shape[-1]), format), list(tensor.shape)
    write_gguf(path, metadata, tensors)


def quantizer(mixture: str, config: ModelConfig) -> Callable[[str, nn.Linear], GgufWeight]:
    """What `quantized` asks for: each linear layer in the format that a file of the mixture would
    have, without a file in between.
    """

    def quantize(name: str, linear: nn.Linear) -> GgufWeight:
        weight = linear.weight
        return to_gguf(weight, format_for(mixture, stored_name(f"{name}.weight"), weight, config))

    return quantize
