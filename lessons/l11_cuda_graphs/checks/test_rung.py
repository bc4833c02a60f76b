"""Proves that a batch in lockstep answers as one request at a time, and what it refuses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.batched.batch_sampling import SamplingBatch
from lessons.l02_naive_attention.batched.requests import sampling_batch
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l06_mla.deepseek import DeepseekDecoder
from lessons.l11_cuda_graphs import naive, optimized
from lessons.l11_cuda_graphs.lab.testing import (
    CONFIG,
    STEPS,
    new_model,
    new_pool,
    new_prompts,
)
from lessons.l11_cuda_graphs.naive import batch_loop, generate, leave, prompt_groups
from lessons.l11_cuda_graphs.optimized import (
    GraphRunner,
    batch_buckets,
    bucket_for,
    padded,
)
from lessons.l11_cuda_graphs.simulator import CaptureError, SimulatedGraphs
from lessons.toolbox.model.config import MLAConfig, MoEConfig

# ---------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_lockstep_gives_the_tokens_of_one_at_a_time(name, max_batch, seed):
    """In float64, where nothing ties: requests that end at different steps, in one wave or several,
    with a window.
    """
    model, prompts, limits = new_model(), new_prompts(3, 1, 12, 7, 5), [6, 11, 1, 0, 4]
    expected = one_at_a_time.generate(model, prompts, limits)
    seen = [[] for _ in prompts]

    def on_token(row, token):
        seen[row].append(token)

    got = batch_loop(STEPS[name], model, prompts, limits, None, on_token, max_batch)
    assert got == seen == expected


def test_a_request_that_stops_early_leaves_its_neighbours_alone(seed):
    model, prompts = new_model(), new_prompts(4, 2, 6)
    free = one_at_a_time.generate(model, prompts, 9)
    model.config = replace(model.config, eos_token_ids=(free[0][2],))
    expected = one_at_a_time.generate(model, prompts, 9)
    assert len(expected[0]) <= 3
    for step in STEPS.values():
        assert batch_loop(step, model, prompts, 9) == expected


def sampled(seed: int, **changes) -> SamplingParams:
    """A request that is drawn, cut and penalized, unless `changes` says otherwise."""
    default = dict(temperature=0.8, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3)
    return SamplingParams(**default | dict(seed=seed) | changes)


SAMPLED = [
    sampled(17),
    sampled(3, temperature=0, frequency_penalty=0.0),
    sampled(0, top_p=1.0, repetition_penalty=1.0, frequency_penalty=0.0),
    sampled(99, top_k=7, min_p=0.01, presence_penalty=0.4),
    sampled(17),
]
LIMITS = [12, 3, 9, 1, 11]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_sampled_in_lockstep_as_one_at_a_time(name, max_batch, seed):
    """A batch of several settings draws, for each request, what it would draw alone, and goes on
    when requests leave it.
    """
    model, prompts = new_model(), new_prompts(3, 1, 12, 7, 5)
    expected = one_at_a_time.generate(model, prompts, LIMITS, SAMPLED)
    got = batch_loop(STEPS[name], model, prompts, LIMITS, SAMPLED, max_batch=max_batch)
    assert got == expected


def never_advances(batch: SamplingBatch, tokens: torch.Tensor) -> None:
    """In the place of `append`: neither the number of the next draw nor the seen tokens change."""


def in_the_order_of_prompts(requests, device) -> SamplingBatch:
    """In the place of `sampling_batch`: as if nobody had changed places when others left."""
    return sampling_batch(sorted(requests, key=lambda request: request.row), device)


@pytest.mark.parametrize(
    "owner, name, wrong",
    [
        (SamplingBatch, "append", never_advances),
        (naive, "sampling_batch", in_the_order_of_prompts),
    ],
)
def test_a_wrong_batch_of_samplings_is_found(owner, name, wrong, seed, monkeypatch):
    model, prompts = new_model(), new_prompts(3, 1, 12, 7, 5)
    expected = one_at_a_time.generate(model, prompts, LIMITS, SAMPLED)
    monkeypatch.setattr(owner, name, wrong)
    assert generate(model, prompts, LIMITS, SAMPLED) != expected


EXPERTS = MoEConfig(4, 2, 24, 1, first_k_dense_replace=1)


def new_deepseek(moe: MoEConfig | None) -> DeepseekDecoder:
    config = replace(
        CONFIG,
        model_type="deepseek_v2",
        num_key_value_heads=4,
        head_dim=24,
        v_head_dim=12,
        sliding_windows=None,
        mla=MLAConfig(20, 32, 8, 16, 12),
        moe=moe,
    )
    model = DeepseekDecoder(config).eval().requires_grad_(False).double()
    for weight in model.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize("name, moe", [("eager", None), ("eager", EXPERTS), ("captured", None)])
def test_a_model_with_latents(name, moe, seed):
    """DeepSeek's layers, absorbed over a pool of latents, serve a batch as they serve one."""
    model, prompts, limits = new_deepseek(moe), new_prompts(3, 1, 9), [4, 6, 2]
    expected = one_at_a_time.generate(model, prompts, limits)
    assert batch_loop(STEPS[name], model, prompts, limits) == expected


def test_a_mixture_of_experts_is_not_captured(seed):
    """Its router's values decide in Python what runs, so its step stays eager on a GPU as well."""
    model, prompts = new_deepseek(EXPERTS), new_prompts(3, 1)
    with pytest.raises(CaptureError, match="waits for the GPU"):
        batch_loop(STEPS["captured"], model, prompts, 3)
    on_a_gpu = SimpleNamespace(
        device=torch.device("cuda"), config=model.config, modules=model.modules
    )
    assert not isinstance(optimized.graph_step(on_a_gpu, None), GraphRunner)


def test_generate_of_both_files(seed):
    model, prompts = new_model(), new_prompts(4, 9)
    expected = one_at_a_time.generate(model, prompts, 5)
    assert generate(model, prompts, 5) == optimized.generate(model, prompts, 5) == expected


def test_nobody_asks_for_a_token(seed):
    model, prompts = new_model(), new_prompts(4, 9)
    assert generate(model, prompts, 0) == optimized.generate(model, prompts, 0) == [[], []]


# ---------------------------------------------------------------- waves


def test_prompts_are_packed_into_passes(seed, monkeypatch):
    """Each pass as full as MAX_PREFILL_TOKENS allows, one prompt at least, nobody twice."""
    monkeypatch.setattr(naive, "MAX_PREFILL_TOKENS", 8)
    wave = read_requests(CONFIG, new_prompts(5, 3, 1, 12, 4, 4), 2)
    groups = [(first, [r.row for r in group]) for first, group in prompt_groups(wave)]
    assert groups == [(0, [0, 1]), (2, [2]), (3, [3]), (4, [4, 5])]
    model, prompts = new_model(), [request.prompt for request in wave]
    assert generate(model, prompts, 4) == one_at_a_time.generate(model, prompts, 4)


def test_who_has_finished_leaves_and_the_last_takes_the_place(seed):
    """Request b stands in block b again, with all that it had stored."""
    pool, wave = new_pool(4, 6), read_requests(CONFIG, new_prompts(2, 3, 2, 3), [1, 3, 1, 3])
    for request in wave:
        request.output.append(7)
    blocks = pool.blocks(pool.k_slots)
    for block in range(4):
        blocks[:, block] = block + 1
    running = leave(pool, wave)
    assert [request.row for request in running] == [3, 1]
    assert blocks[0, 0, :, 0, 0].tolist() == [4, 4, 4, 1, 1, 1]  # 3 tokens were stored
    assert (blocks[:, 1] == 2).all()


# ---------------------------------------------------------------- buckets, bad input


def test_buckets():
    assert batch_buckets(1) == [1]
    assert batch_buckets(2) == [1, 2]
    assert batch_buckets(3) == [1, 2, 3]
    assert batch_buckets(8) == [1, 2, 4, 8]
    assert batch_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert [bucket_for(n, [1, 2, 4, 8]) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    columns = padded(torch.tensor([[7], [3], [3], [4]]), 3)
    assert columns.tolist() == [[7, 0, 0], [3, 0, 0], [3, -1, -1], [4, 0, 0]]


def runner_of(num_blocks: int, buckets: list[int], model: Decoder | None = None) -> GraphRunner:
    return GraphRunner(model or new_model(), new_pool(num_blocks, 4), SimulatedGraphs(0), buckets)


INPUTS = torch.zeros(4, 3, dtype=torch.int64)
REFUSED = [
    (lambda: bucket_for(9, [1, 8]), "batch: got 9; accepted: 1 to 8, the largest bucket"),
    (lambda: bucket_for(0, [1, 8]), "batch: got 0; accepted: 1 to 8"),
    (lambda: batch_buckets(0), "max_batch: got 0; accepted: 1 or more"),
    (lambda: padded(INPUTS, 2), "bucket: got 2; accepted: 3, the batch, or more"),
    (lambda: new_pool(0, 5), "num_blocks: got 0; accepted: 1 or more"),
    (lambda: new_pool(5, 0), "block_size: got 0; accepted: 1 or more"),
    (lambda: runner_of(2, [1, 4]), r"buckets: got \[1, 4\]; accepted: .* from 1 to 2"),
    (lambda: runner_of(2, [0, 2]), r"buckets: got \[0, 2\]; accepted"),
    (lambda: runner_of(4, [1, 2])(INPUTS), "batch: got 3; accepted: 1 to 2, the largest bucket"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- for real


@pytest.mark.gpu
def test_the_tokens_of_a_gpu(seed):
    model = new_model(torch.float32, head_dim=16, hidden_size=64).cuda()
    prompts, limits = new_prompts(3, 1, 12, 7, 5), [6, 11, 1, 9, 4]
    expected = one_at_a_time.generate(model, prompts, limits)
    assert generate(model, prompts, limits) == expected
    for _ in range(2):  # the second time with the graphs of the first
        assert optimized.generate(model, prompts, limits) == expected
    assert batch_loop(optimized.graph_step, model, prompts, limits, max_batch=2) == expected
