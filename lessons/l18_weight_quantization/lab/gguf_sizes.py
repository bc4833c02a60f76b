"""How many bits llama.cpp's formats and mixtures really take, counted from shapes alone.

python -m lessons.l18_weight_quantization.lab.gguf_sizes    writes results/counted/l18_gguf.json
"""

import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.gguf.gguf_blocks import FORMATS
from lessons.l18_weight_quantization.gguf.gguf_mixture import MIXTURES, format_for, stored_name
from lessons.toolbox.measure.records import write_json
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config import ModelConfig

RECORD = Path(__file__).resolve().parents[3] / "results" / "counted" / "l18_gguf.json"
# Llama 3 8B's config.json
LLAMA_3_8B = ModelConfig("llama", 128256, 4096, 32, 32, 8, 128, 14336, 8192, rope_theta=5e5)


def count(mixture: str, config: ModelConfig) -> dict:
    """What a file of the mixture would hold of a model: bytes of all tensors, bits for each weight,
    and the share of the weights that each format has, in percent.
    """
    total_bytes, weights = 0, dict.fromkeys(FORMATS, 0)
    for name, tensor in tensors_of(config).items():
        format = format_for(mixture, stored_name(name), tensor, config)
        size = math.prod(tensor.shape)
        weights[format] += size
        total_bytes += size // FORMATS[format].values * FORMATS[format].bytes
    total = sum(weights.values())
    return {
        "bytes": total_bytes,
        "bits_per_weight": round(8 * total_bytes / total, 4),
        "percent": {name: round(100 * n / total, 2) for name, n in weights.items() if n},
    }


@cache
def tensors_of(config: ModelConfig) -> dict[str, Tensor]:
    """The decoder's tensors by name, shapes without memory."""
    with torch.device("meta"):
        tensors = Decoder(config).state_dict()
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    return tensors


def counted() -> dict:
    """All that the record holds."""
    models = {"llama-3-8b": LLAMA_3_8B, "models/tiny": load_config("models/tiny")}
    return {
        "formats": {name: round(kind.bits_per_weight, 4) for name, kind in FORMATS.items()},
        "mixtures": {
            model: {mixture: count(mixture, config) for mixture in MIXTURES}
            for model, config in models.items()
        },
    }


def main() -> None:
    write_json(RECORD, counted())
    print(RECORD)


if __name__ == "__main__":
    main()
