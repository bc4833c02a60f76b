"""The libraries on the same weights, as reference lines of the ladder: transformers in its six
ways of generating, and vLLM and llama.cpp where they are installed.

Each peer: run(model, prompts: list[list[int]], max_new_tokens: list[int], on_token) ->
list[list[int]], greedy, and counts only what a request asked for: what a static batch generates
beyond that is its own waste.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from lessons.toolbox.model.checkpoint import load_tokenizer
from reference.bench.peers.contenders import LIBRARIES, installed

DRAFTED = 4  # tokens of assisted generation in a step
PLACES = 32  # requests side by side, as many as the rungs from lesson 11 on have


def load_peer_model(path: str, device: torch.device, dtype: torch.dtype):
    """The same checkpoint as a transformers model, with its fused attention (SDPA)."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        .to(device)
        .eval()
    )


def _greedy(model, max_new_tokens: int) -> GenerationConfig:
    eos = model.generation_config.eos_token_id
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos[0] if isinstance(eos, list) else eos or 0,
    )


def _until_stop(tokens: list[int], limit: int, eos) -> list[int]:
    """Cut to what was asked for: at most `limit` tokens, none after the first stop token."""
    stops = set(eos if isinstance(eos, list) else [eos])
    end = next((i + 1 for i, t in enumerate(tokens[:limit]) if t in stops), limit)
    return tokens[:end]


@torch.inference_mode()
def one_by_one(model, prompts, max_new_tokens, on_token=None):
    """generate(), one request after the other, with its KV cache."""
    return [
        row
        for prompt, limit in zip(prompts, max_new_tokens)
        for row in left_padded_batch(model, [prompt], [limit], on_token)
    ]


@torch.inference_mode()
def with_prompt_lookup(model, prompts, max_new_tokens, on_token=None):
    """generate(prompt_lookup_num_tokens=...): n-grams of the text draft, one request after the
    other.
    """
    return _speculative(model, prompts, max_new_tokens, on_token, prompt_lookup_num_tokens=DRAFTED)


@torch.inference_mode()
def with_assistant(model, prompts, max_new_tokens, on_token=None):
    """generate(assistant_model=...): the draft that is shipped beside the model, in the folder of
    its name and "-draft", one request after the other.
    """
    folder = f"{model.config._name_or_path}-draft"
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no draft beside this model: {folder}")
    draft = _assistant(folder, model.device, model.dtype)
    return _speculative(model, prompts, max_new_tokens, on_token, assistant_model=draft)


@lru_cache(maxsize=1)
def _assistant(folder: str, device: torch.device, dtype: torch.dtype):
    """The draft, loaded once, because its loading is no part of a pass. It always drafts as
    much.
    """
    draft = load_peer_model(folder, device, dtype)
    draft.generation_config.num_assistant_tokens = DRAFTED
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return draft


def _speculative(model, prompts, max_new_tokens, on_token, **how):
    """transformers' assisted generation, which serves one request at a time."""
    rows = []
    for row, (prompt, limit) in enumerate(zip(prompts, max_new_tokens)):
        config = _greedy(model, limit)
        ids = torch.tensor([prompt], device=model.device)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, generation_config=config, **how)
        rows.append(_until_stop(out[0, len(prompt) :].tolist(), limit, config.eos_token_id))
        for token in rows[-1] if on_token else ():
            on_token(row, token)
    return rows


@torch.inference_mode()
def left_padded_batch(model, prompts, max_new_tokens, on_token=None):
    """generate() on all requests at once, padded on the left, for as long as the longest answer
    takes.
    """
    config = _greedy(model, max(max_new_tokens))
    width = max(map(len, prompts))
    ids = torch.tensor(
        [[config.pad_token_id] * (width - len(p)) + p for p in prompts], device=model.device
    )
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )
    out = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
    rows = [_until_stop(row, limit, config.eos_token_id) for row, limit in zip(out, max_new_tokens)]
    for row, tokens in enumerate(rows):
        for token in tokens if on_token else ():
            on_token(row, token)
    return rows


def continuous_batching(model, prompts, max_new_tokens, on_token=None, slots=PLACES):
    """transformers' own continuous batching over a paged cache. Each request ends at its own
    limit. slots: requests side by side.
    """
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    tokens = sum(map(len, prompts)) + sum(max_new_tokens)
    block_size = 32
    paged = ContinuousBatchingConfig(
        block_size=block_size,
        num_blocks=tokens // block_size + 2 * len(prompts) + 1,
        max_batch_tokens=512,
        max_requests_per_batch=slots,
        use_cuda_graph=model.device.type == "cuda",
    )
    config = _greedy(model, max(max_new_tokens))
    before = model.config._attn_implementation
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    rows, manager = {}, None
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            manager = model.init_continuous_batching(
                generation_config=config, continuous_batching_config=paged
            )
            manager.start()
            names = {
                manager.add_request(p, max_new_tokens=n): i
                for i, (p, n) in enumerate(zip(prompts, max_new_tokens))
            }
            while len(rows) < len(prompts):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise TimeoutError("no result for 60 seconds")
                rows[names[result.request_id]] = result.generated_tokens
                for token in result.generated_tokens if on_token else ():
                    on_token(names[result.request_id], token)
    finally:
        if manager is not None:
            manager.stop(block=True)  # its thread would keep an interrupted process alive
        # continuous batching switches the model to its paged variant
        model.set_attn_implementation(before)
    return [rows[i] for i in range(len(prompts))]


@torch.inference_mode()
def text_pipeline(model, prompts, max_new_tokens, on_token=None):
    """transformers' pipeline("text-generation"), from text to text, one request after the other."""
    from transformers import pipeline

    tokenizer = load_tokenizer(model.config._name_or_path)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    rows = []
    for row, (prompt, limit) in enumerate(zip(prompts, max_new_tokens)):
        # the pipeline's tokenizer puts special tokens around the text again
        text = tokenizer.decode(prompt, skip_special_tokens=True)
        if pipe.preprocess(text)["input_ids"][0].tolist() != prompt:
            raise ValueError(f"its tokens of prompt {row} are not the request's")
        config = _greedy(model, limit)
        (answer,) = pipe(text, generation_config=config, return_tensors=True)
        rows.append(answer["generated_token_ids"][len(prompt) :])
        for token in rows[-1] if on_token else ():
            on_token(row, token)
    return rows


def in_another_process(name: str, model, prompts, max_new_tokens, on_token=None):
    """vLLM or llama.cpp on the same checkpoint, all requests at once."""
    eos = model.generation_config.eos_token_id
    dtype = str(model.dtype).removeprefix("torch.")
    told = model.config._name_or_path, dtype, tuple(eos) if isinstance(eos, list) else (eos,)
    return LIBRARIES[name](*told)(prompts, max_new_tokens, on_token)


@dataclass(frozen=True)
class Peer:
    """A library's way of generating. in_batches: requests side by side, not one by one."""

    name: str
    run: Callable
    in_batches: bool = True


PEERS = (
    Peer("transformers pipeline, one by one", text_pipeline, in_batches=False),
    Peer("transformers generate, one by one", one_by_one, in_batches=False),
    Peer("transformers prompt lookup, one by one", with_prompt_lookup, in_batches=False),
    Peer("transformers with a draft, one by one", with_assistant, in_batches=False),
    Peer("transformers generate, padded batch", left_padded_batch),
    Peer("transformers continuous batching", continuous_batching),
)


def all_peers() -> tuple[Peer, ...]:
    """PEERS, and what `make peers` has installed."""
    return PEERS + tuple(Peer(name, partial(in_another_process, name)) for name in installed())
