"""A rank's part of a checkpoint, read without the rest.

    part = load_sharded("models/tiny", links, dtype=torch.bfloat16)

A model that needs eight GPUs fits into the memory of none of them, and often not into the host's.
So no rank may read it whole and then cut. A safetensors file says in its header where each tensor
is. Rows of a matrix follow each other, so a strip of rows is one read. Columns are a few
bytes of every row. They are copied one by one from the mapped file, and the disk's pages between
them may be read with them, but they never become a tensor.

Source of the format: huggingface.co/docs/safetensors, "get_slice".
"""

import os

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import decoder_class
from lessons.l20_parallelism.optimized import finish, new_part, own_slices
from lessons.l20_parallelism.processes.mesh import Links
from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.checkpoint import find_weights, load_config, read_tensors
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.placement import read_device, read_dtype
from lessons.toolbox.model.stored import catalog


def load_sharded(
    name_or_path: str | os.PathLike,
    links: Links,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    expert_parallel: bool = False,
) -> Decoder:
    """What `shard` would make of the whole checkpoint, of which only this part is read.

    The memory that it takes is that of the part and of one tensor of it. Strict as load_weights:
    every rank checks the names and shapes of all tensors. Raises ValueError (CheckpointError for
    the checkpoint), one line.
    """
    device, dtype = read_device(device), read_dtype(dtype)
    config = load_config(name_or_path)
    refuse_quantized_parts(config)
    part = new_part(config, links, expert_parallel)
    folder = find_weights(name_or_path, config)
    with torch.device("meta"):  # only for the names and shapes of all tensors
        whole = decoder_class(config)(config)
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    parts = {
        name: own_slices(config, name, shapes[name], links, expert_parallel)
        for name in part.state_dict()
    }
    weights = read_tensors(whole, folder, catalog(folder), {}, device, dtype, parts)
    return finish(part, weights, config, links, expert_parallel)


def refuse_quantized_parts(config: ModelConfig) -> None:
    """Raise CheckpointError for quantized matrices, whose scales would have to be cut with them."""
    if config.quantization_config is not None:
        method = shown(config.quantization_config["quant_method"])
        raise CheckpointError(
            f"quantization_config: got quant_method {method}; accepted over several ranks: none, "
            f"so give a checkpoint in 16 or 32 bits"
        )
