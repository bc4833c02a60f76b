"""The model that the engine runs: any supported checkpoint, in the class that its config asks for,
fused on a GPU.

    model = load_model("models/tiny")                      # the GPU if there is one, else the CPU
    model = load_model("Qwen/Qwen3-0.6B", dtype="bfloat16")
    # Reference.weights.quantization lists the methods.
    model = load_model("models/tiny", quantization="int4")
    model = load_model("model-Q4_K_M.gguf")                # its matrices stay quantized in memory
    tokenizer = load_tokenizer("model-Q4_K_M.gguf")        # a GGUF file carries its own
"""

import os
from collections.abc import Callable
from functools import partial

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.model.placement import read_device, read_dtype
from reference.checkpoints.any_checkpoint import load_any, load_any_tokenizer, stored_method
from reference.engine.packed import has_own_product


def load_model(
    name_or_path: str | os.PathLike,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    quantization: str | None = None,
) -> Decoder:
    """A checkpoint as a decoder, ready to generate, of a family of families.py in
    lessons/toolbox/model, by folder or hub name; Llama, Mistral, Qwen2 and Qwen3 also by .gguf
    file.

    device: default the GPU if there is one. dtype: a torch.dtype or its name; default the GPU's
    16-bit type, float32 on a CPU. quantization: weights in fewer bits; None: as the checkpoint has
    them, quantized or not. On a GPU the result is lesson 7's fused twin, its experts
    grouped as in lesson 23. Raises ValueError (CheckpointError for the checkpoint) in one line.
    """
    device, dtype = default_place(device, dtype)
    stored = stored_method(name_or_path)
    if stored is None and quantization is None:
        return finished(load_any(name_or_path, device, dtype), device)
    return finished(load_quantized(name_or_path, device, dtype, stored, quantization), device)


def load_quantized(
    name_or_path: str | os.PathLike,
    device: torch.device,
    dtype: torch.dtype,
    stored: str | None,
    quantization: str | None,
    rounded: Callable | None = None,
) -> Decoder:
    """A checkpoint of codes, or one of numbers that get fewer bits now. stored: its own method.
    rounded: what makes the products of inputs that are rounded; None: rounded_product.
    """
    # here, because a model of plain numbers needs none of lesson 18
    from reference.weights.activations import rounded_product
    from reference.weights.quantization import (
        check_method,
        check_stored,
        multiply_for,
        quantize_model,
    )

    check_method(quantization)
    if stored is None:
        model = load_any(name_or_path, device, dtype)
        return quantize_model(model, quantization, partial(load_tokenizer, name_or_path))
    check_stored(quantization, stored)
    products = multiply_for(device, dtype), gguf_products(device, dtype)
    return load_any(name_or_path, device, dtype, *products, rounded=rounded or rounded_product)


def finished(model: Decoder, device: torch.device) -> Decoder:
    """A loaded model as the engine runs it: on a GPU fused, its experts grouped, and few rows of
    4-bit matrices multiplied by tensor cores.
    """
    if device.type != "cuda":
        return model
    from lessons.l23_experts.grouped import grouped

    model = grouped(fused(model))
    if any(map(has_own_product, model.modules())):
        from lessons.l18_weight_quantization.kernels.few_rows import with_tensor_cores

        model = with_tensor_cores(model)
    if model.config.moe is None or model.config.quantization_config is None:
        return model
    from reference.weights.experts import with_grouped_codes, with_grouped_fp8

    if torch.cuda.get_device_capability(device) >= (8, 9):  # earlier ones have no FP8 products
        model = with_grouped_fp8(model)
    return with_grouped_codes(model)


def default_place(
    device: torch.device | str | None, dtype: torch.dtype | str | None
) -> tuple[torch.device, torch.dtype]:
    """Both as load_model takes them for what is None. Raises ValueError."""
    device = default_device() if device is None else read_device(device)
    if dtype is None:
        dtype = default_dtype() if device.type == "cuda" else torch.float32
    return device, read_dtype(dtype)


def gguf_products(device: torch.device, dtype: torch.dtype) -> dict[str, Callable]:
    """How load_gguf's layers multiply: on a GPU with the kernels, for the formats that they
    read.
    """
    if device.type == "cpu":
        return {}
    from reference.checkpoints.gguf.gguf_linear import as_grouped, with_kernels
    from reference.weights.quantization import multiply_for

    return dict(multiply=with_kernels(multiply_for(device, dtype)), prepare=as_grouped)


def load_tokenizer(name_or_path: str | os.PathLike):
    """The tokenizer of a checkpoint or of a .gguf file, as transformers' AutoTokenizer. Raises
    CheckpointError.
    """
    return load_any_tokenizer(name_or_path)
