"""What the experiments and the benchmark serve: lesson 16's prompts, and the heads that belong to
the embedded target.
"""

from functools import lru_cache

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l16_speculative_sampling.lab.workload import (
    MODELS,
    NEW_TOKENS,
    TIMED_TOKENS,
    embedded_pair,
    held_out_prompts,
)
from lessons.l17_tree_speculation.heads.heads import Heads
from lessons.l17_tree_speculation.heads.heads_files import load_heads

__all__ = [
    "MODELS",
    "NEW_TOKENS",
    "TIMED_TOKENS",
    "embedded_heads",
    "embedded_pair",
    "held_out_prompts",
    "is_there",
]

KINDS = ("medusa", "eagle", "mtp", "eagle3")


def is_there(kind: str) -> bool:
    """Whether the target and these heads are in this checkout."""
    folders = (MODELS / "tiny", MODELS / f"tiny-{kind}")
    return all((folder / "model.safetensors").exists() for folder in folders)


@lru_cache
def embedded_heads(kind: str) -> tuple[Decoder, Heads, object]:
    """(target, heads, tokenizer) in float32 on the default device."""
    target, _, tokenizer = embedded_pair()
    # held against the weights as they are stored: a rehearsed benchmark keeps no numbers
    stored = Decoder.from_pretrained(str(MODELS / "tiny"))
    heads = load_heads(MODELS / f"tiny-{kind}", stored)
    return target, heads.to(target.device), tokenizer
