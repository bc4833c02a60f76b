"""Proves that chunks, preemption and swapping change no token: a real model gives every request
the tokens that it gets alone.
"""

import json
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l12_paged_kv.more.swap import HostSwap
from lessons.l14_continuous_batching.loop import StepRunner, new_sequences, run_until_idle
from lessons.l15_chunked_prefill import generate as rung
from lessons.l15_chunked_prefill.generate import ChunkExecutor, generate
from lessons.l15_chunked_prefill.lab.testing import ForgetsOutput
from lessons.l15_chunked_prefill.naive import PrefillFirstScheduler
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.swap import Host, Lender
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig

CONFIG = ModelConfig("llama", 61, 48, 2, 6, 2, 8, 64, 96, eos_token_ids=(60,))
LIMITS = [6, 11, 1, 0, 4, 20]
WAYS = {
    "roomy": dict(),
    "chunks of one token": dict(max_num_seqs=1, max_num_batched_tokens=1),
    "small chunks": dict(max_num_seqs=3, max_num_batched_tokens=5),
    "blocks of one": dict(max_num_batched_tokens=32, block_size=1),
    "few blocks": dict(num_blocks=11, block_size=3, max_num_seqs=4, max_num_batched_tokens=9),
    "prompts first": dict(kind=PrefillFirstScheduler),
    "prompts first, few blocks": dict(kind=PrefillFirstScheduler, num_blocks=11, block_size=3),
}


def new_model() -> Decoder:
    model = Decoder(CONFIG).to(default_device()).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)
    for layer in model.layers:
        layer.input_layernorm.weight.add_(1)
    return model


def new_prompts() -> list[list[int]]:
    return [torch.randint(60, (length,)).tolist() for length in (3, 1, 12, 7, 5, 13)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(3)
def test_the_tokens_of_one_at_a_time(way, seed):
    """Greedy and in float32; told as they come, in each answer's order."""
    model, prompts = new_model(), new_prompts()
    seen = [[] for _ in prompts]
    got = generate(model, prompts, LIMITS, None, lambda row, t: seen[row].append(t), **WAYS[way])
    assert got == seen == one_at_a_time.generate(model, prompts, LIMITS)


@pytest.mark.parametrize("way", ["small chunks", "few blocks"])
def test_a_seeded_request_draws_the_same(way, seed):
    model, prompts = new_model(), new_prompts()
    params = [SamplingParams(temperature=0.9, top_p=0.9, seed=at) for at in range(len(prompts))]
    expected = one_at_a_time.generate(model, prompts, LIMITS, params)
    assert generate(model, prompts, LIMITS, params, **WAYS[way]) == expected


def test_swapped_requests_go_on_with_the_same_tokens(seed):
    """K and V of a real model leave for the host and come back into other blocks."""
    model, prompts, limits = new_model(), new_prompts(), [20] * 6
    blocks = BlockManager(14, 3)
    runner = StepRunner(model, blocks, 40)
    for slots in (runner.pool.k_slots, runner.pool.v_slots):
        slots.fill_(torch.nan)  # no query may see what was never written
    swap = HostSwap(Lender(runner.pool, blocks))
    scheduler = ChunkedScheduler(blocks, host=Host(swap), max_num_seqs=5, max_num_batched_tokens=16)
    sequences = new_sequences(model.config, prompts, limits)
    for sequence in sequences:
        scheduler.add(sequence)
    run_until_idle(scheduler, ChunkExecutor(runner))
    assert [s.output for s in sequences] == one_at_a_time.generate(model, prompts, limits)
    assert swap.swapped_bytes > 0 and not swap.away and blocks.num_free == 14


def test_the_embedded_model_in_float32():
    """Real prompts, real weights: the requests that all rungs of the ladder serve."""
    root = Path(__file__).resolve().parents[2] / "models"
    if not (root / "tiny" / "model.safetensors").exists():
        pytest.skip("NOT RUN: models/tiny is not there")
    from lessons.toolbox.model.checkpoint import load_tokenizer

    model = Decoder.from_pretrained(str(root / "tiny"))
    tokenizer = load_tokenizer(str(root / "tiny"))
    requests = json.loads((root / "prompts.json").read_text())[:4]
    prompts = [tokenizer(request["prompt"])["input_ids"][:70] for request in requests]
    limits = [8, 3, 6, 1]
    expected = one_at_a_time.generate(model, prompts, limits)
    assert generate(model, prompts, limits, max_num_seqs=3, max_num_batched_tokens=48) == expected


def test_refuses_what_lesson_2_refuses(seed):
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(new_model(), [[1]], -1)
    with pytest.raises(ValueError, match="the whole pool"):
        generate(new_model(), [[1] * 9], 9, num_blocks=2, block_size=4)
    assert generate(new_model(), [[1], [2]], 0) == [[], []]


class ShiftsTokens(ChunkExecutor):
    """Gives each sequence the token of its neighbour."""

    def __call__(self, step):
        tokens = super().__call__(step)
        return tokens[1:] + tokens[:1]


def test_a_wrong_pass_is_found(seed, monkeypatch):
    model, prompts = new_model(), new_prompts()
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    monkeypatch.setattr(rung, "ChunkExecutor", ShiftsTokens)
    assert generate(model, prompts, LIMITS, **WAYS["small chunks"]) != expected


def test_a_wrong_preemption_is_found(seed):
    model, prompts = new_model(), new_prompts()
    expected = one_at_a_time.generate(model, prompts, [20] * 6)
    got = generate(model, prompts, [20] * 6, kind=ForgetsOutput, **WAYS["few blocks"])
    assert got != expected
