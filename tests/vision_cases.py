"""A small model that sees, engines on it, and what it says without any engine."""

import random
from functools import cache

import numpy as np
import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.toolbox.model.config import ModelConfig
from reference.engine.assembly import engine_over
from reference.engine.engine import Engine
from reference.engine.engine_args import EngineArgs
from reference.features.states.generate import whole_sequence
from reference.vision.config import VisionConfig
from reference.vision.pictures import Picture, normalized
from reference.vision.tower import Eyes
from tests.engine_cases import CONFIG, new_model

IMAGE = 59  # the image token of the small model
SMALL = VisionConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    layer_norm_eps=1e-5,
    image_size=12,
    patch_size=4,
    hidden_act="quick_gelu",
    feature_layer=1,
    keeps_class=False,
    projector_bias=True,
    text_size=CONFIG.hidden_size,
    image_token_id=IMAGE,
)
ROWS = SMALL.tokens_per_image  # 9


@cache
def small_model(config: ModelConfig = CONFIG) -> tuple[Decoder, Eyes]:
    """The decoder of the engine's tests, and eyes of random weights."""
    model = new_model(config)
    torch.manual_seed(1)
    eyes = Eyes(SMALL).to(model.device).eval().requires_grad_(False)
    for weight in eyes.parameters():
        weight.normal_(std=1.5 * weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.5)
    return model, eyes


def new_seeing_engine(num_blocks: int = 64, block_size: int = 4, **how) -> Engine:
    """An engine on the small model, its pool full of NaN: no unwritten row may be read."""
    args = EngineArgs(
        num_gpu_blocks_override=num_blocks, block_size=block_size, max_num_seqs=8, **how
    )
    model, eyes = small_model()
    engine = engine_over(model, None, args, eyes=eyes)
    for slots in engine.runner.pool.tensors:
        slots.fill_(torch.nan)
    return engine


def a_picture(edge: int = 12) -> Picture:
    """Noise, by Python's random."""
    return Picture.of(
        np.frombuffer(random.randbytes(edge * edge * 3), np.uint8).reshape(edge, edge, 3)
    )


def seen(ids: list[int], *pictures: Picture) -> dict:
    """A prompt as vLLM takes it."""
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": list(pictures)}}


def a_prompt(*pictures: Picture) -> dict:
    """The pictures between random tokens."""
    ids = []
    for _ in pictures:
        ids += [*random.choices(range(58), k=random.randint(0, 5)), IMAGE]
    return seen([*ids, *random.choices(range(58), k=random.randint(1, 6))], *pictures)


@torch.inference_mode()
def plain_logits(model: Decoder, eyes: Eyes, ids: list[int], pictures=(), answer=()):
    """Of every token, without cache or engine: [T, V]. ids: a prompt with a token for each row."""
    tokens = torch.tensor([*ids, *answer], device=model.device)
    x = model.embed_tokens(tokens)
    if pictures:
        pixels = torch.stack([normalized(one.pixels, eyes.config) for one in pictures])
        rows = eyes(pixels.to(eyes.device, eyes.dtype)).flatten(0, 1)
        is_row = tokens == eyes.config.image_token_id
        is_row[len(ids) :] = False  # a token that the answer says is no picture
        x[is_row] = rows
    hidden = model.norm(model.run_layers(x, whole_sequence(model, len(tokens))))
    return model.logits(hidden)


def whole_ids(eyes: Eyes, prompt: dict | list[int]) -> tuple[list[int], list[Picture]]:
    """The ids of a prompt with a token for each row, and its pictures."""
    if isinstance(prompt, list):
        return prompt, []
    ids = []
    for id in prompt["prompt_token_ids"]:
        ids += [id] * (eyes.config.tokens_per_image if id == eyes.config.image_token_id else 1)
    return ids, prompt["multi_modal_data"]["image"]


def plain_answer(model: Decoder, eyes: Eyes, prompt, count: int, stop=()) -> list[int]:
    """The likeliest tokens, each found by running everything from the start. stop: tokens."""
    ids, pictures = whole_ids(eyes, prompt)
    answer = []
    while len(answer) < count and not (answer and answer[-1] in stop):
        answer.append(int(plain_logits(model, eyes, ids, pictures, answer)[-1].argmax()))
    return answer
