"""The libraries' ways of serving an offline job: transformers' `generate` on waves that are padded
on the left, and its `pipeline`, which makes such waves from texts.
"""

import warnings
from itertools import chain

import torch
from transformers import GenerationConfig, pipeline
from transformers.utils import logging

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.lab.peers import peer_of


def configured(model: Decoder, max_new_tokens: int) -> GenerationConfig:
    """Greedy, for so many tokens, with the model's own stop tokens."""
    stops = list(model.config.eos_token_ids)
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stops,
        pad_token_id=stops[0],
    )


def until_stop(tokens: list[int], limit: int, stops: tuple[int, ...]) -> list[int]:
    """What was asked for: at most `limit` tokens, and none after the first stop token."""
    end = next((i + 1 for i, token in enumerate(tokens[:limit]) if token in stops), limit)
    return tokens[:end]


@torch.inference_mode()
def generate_in_waves(
    model: Decoder, prompts: list[list[int]], limits: list[int], batch_size: int
) -> list[list[int]]:
    """transformers' generate() on static waves; each runs as long as the largest limit in it."""
    return list(
        chain.from_iterable(
            generate_wave(model, prompts[at : at + batch_size], limits[at : at + batch_size])
            for at in range(0, len(prompts), batch_size)
        )
    )


def generate_wave(model: Decoder, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
    """One call of generate(). Padded on the left, because it takes the logits of the last
    column.
    """
    config, width = configured(model, max(limits)), max(map(len, prompts))
    padding = [[config.pad_token_id] * (width - len(prompt)) for prompt in prompts]
    ids = [pad + prompt for pad, prompt in zip(padding, prompts)]
    mask = [[0] * len(pad) + [1] * len(prompt) for pad, prompt in zip(padding, prompts)]
    out = peer_of(model).generate(
        torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=config,
    )
    stops = model.config.eos_token_ids
    return [until_stop(row[width:], n, stops) for row, n in zip(out.tolist(), limits)]


def generate_by_pipeline(
    model: Decoder, tokenizer, texts: list[str], limits: list[int], batch_size: int
) -> list[list[int]]:
    """pipeline("text-generation"): one limit for the whole job, the largest."""
    bare = dict(add_special_tokens=False)  # as task_requests reads the texts
    logging.set_verbosity_error()
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = pipeline("text-generation", model=peer_of(model), tokenizer=tokenizer)
        config = configured(model, max(limits))
        options = dict(batch_size=batch_size, generation_config=config, return_tensors=True)
        found = pipe(texts, **options, **bare)
    rows = []
    for (answer,), text, limit in zip(found, texts, limits):
        # the tokens of a short prompt come back with their padding in front
        tokens, prompt = answer["generated_token_ids"], tokenizer(text, **bare)["input_ids"]
        tokens = list(tokens)
        start = first_match(tokens, prompt)
        rows.append(until_stop(tokens[start + len(prompt) :], limit, model.config.eos_token_ids))
    return rows


def first_match(tokens: list[int], prompt: list[int]) -> int:
    """Where `prompt` begins in `tokens`. Raises ValueError if it is not there."""
    for start in range(len(tokens) - len(prompt) + 1):
        if tokens[start : start + len(prompt)] == prompt:
            return start
    raise ValueError(f"prompt: got {prompt[:5]}...; accepted: one that the answer begins with")
