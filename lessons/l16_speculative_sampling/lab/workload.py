"""What the experiments and the benchmark serve: functions of modules that neither model was trained
on, completed by the embedded pair.
"""

import json
from functools import lru_cache
from pathlib import Path

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.lab.workload import ON_GPU
from lessons.l16_speculative_sampling.drafts import load_pair
from lessons.toolbox.measure.device import default_device

MODELS = Path(__file__).parents[3] / "models"
MOST_PROMPT, NEW_TOKENS = 96, 32
# What is timed is longer than what is counted, because a batch of one has one prompt alone: in a
# few tokens of it nothing is repeated yet, and whether a draft is right is chance.
TIMED_TOKENS = 128
SHAPE = "models/tiny, models/tiny-draft" + (
    "" if ON_GPU else f" · threads {torch.get_num_threads()}"
)


@lru_cache
def embedded_pair() -> tuple[Decoder, Decoder, object]:
    """(target, draft, tokenizer) in float32 on the default device."""
    target, draft, tokenizer = load_pair(str(MODELS / "tiny"), str(MODELS / "tiny-draft"))
    return target.to(default_device()), draft.to(default_device()), tokenizer


def held_out_texts() -> list[str]:
    """The ladder's prompts."""
    return [request["prompt"] for request in json.loads((MODELS / "prompts.json").read_text())]


def ends_of(texts: list[str]) -> list[list[int]]:
    """The last tokens of each text, at most 96."""
    encoded = embedded_pair()[2](texts, add_special_tokens=False)["input_ids"]
    return [ids[-MOST_PROMPT:] for ids in encoded]


def held_out_prompts(count: int) -> list[list[int]]:
    """The ends of the ladder's prompts, over again if they are too few."""
    encoded = ends_of(held_out_texts())
    return [encoded[index % len(encoded)] for index in range(count)]
