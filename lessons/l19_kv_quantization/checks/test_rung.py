"""Proves the pools: steps of every kind over codes, by the kernels and by PyTorch, for heads,
latents, and scores with rules; blocks that are shared, copied and swapped.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l12_paged_kv.lab.testing import CONFIG, DEVICE, MODELS, new_model, new_prompts
from lessons.l12_paged_kv.more.swap import HostSwap
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l12_paged_kv.runner import PagedRunner, new_pool, paged_rung_of
from lessons.l19_kv_quantization import pool as pools
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.lab import quality
from lessons.l19_kv_quantization.lab.testing import attention_over, naive_answers
from lessons.l19_kv_quantization.pool import KernelPool, QuantizedLatentPool, QuantizedPool
from lessons.l19_kv_quantization.runner import quantized_rung_of, quantized_runner
from lessons.toolbox.proof.numerics import assert_same_bits

pytestmark = pytest.mark.usefixtures("seed")


def whole(model, tokens, format):
    """The logits behind every token, by the definition. tokens: a list -> [T, V]."""
    attend = whole_sequence(model, len(tokens), lambda *a, **k: attention_over(format, *a, **k))
    return model.logits(model(torch.tensor(tokens, device=model.device), attend))


def kernel_runner(model, name, num_blocks, block_size) -> PagedRunner:
    """A runner whose pool the kernels write and read, also where they are interpreted."""
    rung = quantized_rung_of(model, name)
    ops = LESSON_12._replace(write=rung.ops(model.device).write)
    pool = KernelPool(
        FORMATS[name],
        model.config,
        num_blocks,
        block_size,
        ops,
        model.dtype,
        model.device,
        max_context_len=64,
    )
    return PagedRunner(rung.prepare(model), pool)


def poison(runner: PagedRunner) -> None:
    """Nobody may see what nobody wrote."""
    for scales in runner.pool.tensors[2:]:
        scales.fill_(torch.nan)


@pytest.mark.parametrize("by_kernel", [False, True], ids=["PyTorch", "the kernels"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_mixed_step_and_single_tokens(name, by_kernel):
    """A decode, a chunk and a fresh prompt together, then two decodes; pages of 3."""
    dtype, device = (torch.float32, DEVICE) if by_kernel else (torch.float64, "cpu")
    model = new_model(dtype, num_hidden_layers=1, sliding_windows=()).to(device)
    make = kernel_runner if by_kernel else lambda *a: quantized_runner(*a, 64)
    runner = make(model, name, 12, 3)
    poison(runner)
    a, b, c = new_prompts(7, 9, 4)
    want = {row: whole(model, x, FORMATS[name]) for row, x in enumerate((a, b, c))}
    runner.step({0: a[:6], 1: b[:4]})
    mixed = runner.step({0: a[6:], 1: b[4:8], 2: c[:3]})
    single = runner.step({1: b[8:], 2: c[3:]})
    got = torch.cat([mixed, single])
    rows = torch.stack([want[0][6], want[1][7], want[2][2], want[1][8], want[2][3]])
    # In float32 one value in about 10^5 lands on the other side of a code's border.
    bound = 2e-2 if by_kernel else 1e-10
    assert float((got - rows).norm() / rows.norm()) < bound


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", FORMATS)
def test_forks_copies_and_swaps_carry_scales(kind, name):
    model = MODELS[kind]()
    runner = quantized_runner(model, name, 16, 4, 64)
    poison(runner)
    (prompt,) = new_prompts(6)
    first = runner.step({0: prompt})
    runner.fork(0, 1)
    swap = HostSwap(runner)
    swap.swap_out(0)
    for scales in runner.pool.tensors[2:]:
        runner.pool.blocks(scales)[:, list(runner.blocks.pool.free)] = torch.nan
    swap.swap_in(0)
    before = runner.copied_blocks
    runner.fork(0, 2)
    logits = runner.step({0: [5], 1: [5], 2: [5]})
    assert runner.copied_blocks == before + 1 and torch.isfinite(first).all()
    assert_same_bits(logits[0], logits[2])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", FORMATS)
def test_latents_in_codes(name):
    """A latent has one scale for what all heads share. Chunks of a prompt give what it gives
    whole.
    """
    model, (prompt,) = MODELS["latents"](), new_prompts(11)
    at_once, in_chunks = (quantized_runner(model, name, 8, 4, 64) for _ in range(2))
    assert isinstance(at_once.pool, QuantizedLatentPool)
    poison(in_chunks)
    want = at_once.step({0: prompt})
    for start, end in ((0, 5), (5, 6), (6, 11)):
        got = in_chunks.step({0: prompt[start:end]})
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
    plain = PagedRunner.for_model(model, 8, 4, 64).step({0: prompt})
    assert 0 < float((got - plain).norm() / plain.norm()) < (0.6 if name == "int4" else 0.2)


def test_scores_with_rules_read_numbers():
    """Gemma 2's cap: `attend_ruled` gets what the codes mean."""
    config = replace(CONFIG, attn_logit_softcapping=5.0)
    model = new_model(attn_logit_softcapping=5.0)
    runner = quantized_runner(model, "int8", 8, 4, 64)
    assert runner.pool.config.has_score_rules and config.has_score_rules
    assert type(runner.pool) is QuantizedPool
    (prompt,) = new_prompts(9)
    got = [runner.step({0: prompt[:6]}), runner.step({0: prompt[6:]})][-1]
    plain = PagedRunner.for_model(model, 8, 4, 64).step({0: prompt})
    assert 0 < float((got - plain).norm() / plain.norm()) < 0.1


def test_one_request_at_a_time_over_pages(seed):
    """Greedy tokens of the runner are those of the definition."""
    model, prompts = new_model(), new_prompts(5, 12)
    for name, format in FORMATS.items():
        runner = quantized_runner(model, name, 30, 4, 64)
        for row, prompt in enumerate(prompts):
            (want,) = naive_answers(model, [prompt], [8], format)
            got, logits = [], runner.step({row: prompt})
            while len(got) < len(want):
                got.append(int(logits.argmax()))
                logits = runner.step({row: got[-1:]})
            assert got == want


def test_auto_is_lesson_12(seed):
    model = new_model()
    assert quantized_rung_of(model, "auto") == paged_rung_of(model)
    assert type(new_pool(model, 2, 4, 8, quantized_rung_of(model, "int8"))) is QuantizedPool


def test_what_is_counted_is_the_format_s_own_error():
    """lab/quality.py's decoder over a cache, beside the definition; and its groups, by their
    scales.
    """
    model, (prompt,) = new_model(), new_prompts(12)
    row = partial(quality.by_row, "int8")
    attend = whole_sequence(model, len(prompt))
    got = quality.WithCache(model, row, row)(torch.tensor(prompt), attend)
    torch.testing.assert_close(model.logits(got), whole(model, prompt, FORMATS["int8"]))
    x = torch.randn(70, 2, 32)
    for over, dims in quality.SHARED.items():
        y = quality.by_group(4, over, x)
        one = (y[:32] if over.endswith("page") else y).movedim(dims, tuple(range(len(dims))))
        groups = one.reshape(math.prod(one.shape[: len(dims)]), -1).T
        assert all(len(set(group.tolist())) <= 16 for group in groups) and not torch.equal(x, y)
        assert torch.equal(y[64:], x[64:]) == over.endswith("page")


# ---------------------------------------------------------------- wrong versions


def stores_before_it_rotates(ops, q, k, v, batch, cos_sin_cache):
    kept = k.clone()
    q, _, v = rotated(ops, q, k, v, batch, cos_sin_cache)
    return q, kept, v


def scales_of_another_slot(codes, scales, x, slot_mapping, format):
    new_codes, new_scales = format.quantize(x)
    codes.index_put_((slot_mapping,), new_codes)
    scales.index_put_((slot_mapping.roll(1),), new_scales)


rotated = pools.rotated


@pytest.mark.parametrize("wrong", ["rotation", "scales", "tables"])
def test_a_wrong_pool_is_found(wrong, monkeypatch):
    """K as it was before its rotation; scales in the wrong slots; tables that still name blocks of
    the whole pool.
    """
    if wrong == "rotation":
        monkeypatch.setattr(pools, "rotated", stores_before_it_rotates)
    elif wrong == "scales":
        monkeypatch.setattr(
            QuantizedPool, "store", lambda self, *a: scales_of_another_slot(*a, self.format)
        )
    else:
        monkeypatch.setattr(
            pools,
            "blocks_read",
            lambda batch, size, right=pools.blocks_read: (
                right(batch, size)[0].flip(0),
                right(batch, size)[1],
            ),
        )
    model, (prompt,) = new_model(), new_prompts(10)
    runner = quantized_runner(model, "int8", 8, 4, 64)
    got, want = runner.step({0: prompt})[0], whole(model, prompt, FORMATS["int8"])[-1]
    assert not float((got - want).norm() / want.norm()) < 1e-3
