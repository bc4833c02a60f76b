"""Proves the pools whose prompts attend by products of E4M3: prompts, chunks and single tokens
beside the definition, by PyTorch and by the kernels.
"""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l12_paged_kv.lab.testing import DEVICE, new_deepseek, new_model, new_prompts
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l12_paged_kv.runner import PagedRunner
from lessons.l19_kv_quantization.activations.attention import pool as pools
from lessons.l19_kv_quantization.activations.attention.naive import FP8, Coded, products
from lessons.l19_kv_quantization.activations.attention.pool import (
    ProductsKernelPool,
    ProductsPool,
    products_rung_of,
)
from lessons.l19_kv_quantization.lab.testing import skip_where
from lessons.l19_kv_quantization.optimized import has_e4m3
from lessons.l19_kv_quantization.runner import quantized_runner
from lessons.toolbox.proof.numerics import assert_same_bits
from lessons.toolbox.proof.planted import with_bug


@pytest.fixture(autouse=True)
def on_a_chip_with_e4m3():
    skip_where("fp8", has_e4m3)


def by_products(q, k, v, softmax_scale=None, causal=True, window=None):
    """Lesson 2's attention, by products of codes of all three."""
    return products(*(Coded(*FP8.quantize(x)) for x in (q, k, v)), softmax_scale, window)


def runner_over(pool, model) -> PagedRunner:
    rung = replace(products_rung_of(model), cache=pool)
    ops = rung.ops(model.device)
    if pool is ProductsKernelPool:  # also where its kernels are interpreted
        ops = LESSON_12._replace(write=ops.write)
    slots = pool(model.config, 6, 16, ops, model.dtype, model.device, max_context_len=64)
    for scales in slots.tensors[2:]:
        scales.fill_(torch.nan)  # nothing may be seen that was not written
    return PagedRunner(rung.prepare(model), slots)


@torch.inference_mode()
def steps_of(pool, model, a: list[int], b: list[int]) -> torch.Tensor:
    """Logits of a prompt in two chunks, the second beside another prompt, then of a token each."""
    runner = runner_over(pool, model)
    steps = runner.step({0: a[:20]}), runner.step({0: a[20:], 1: b}), runner.step({0: [5], 1: [7]})
    return torch.cat(steps)


def test_a_pool_attends_by_products(seed):
    """Against the definition, in float64."""
    model = new_model(head_dim=32)
    a, b = new_prompts(23, 18)
    want = []
    for tokens, row in ((a[:20], -1), (a, -1), (b, -1)):
        attend = whole_sequence(model, len(tokens), by_products)
        want.append(model.logits(model(torch.tensor(tokens), attend))[row])
    got = steps_of(ProductsPool, model, a, b)
    torch.testing.assert_close(got[:3], torch.stack(want), rtol=1e-9, atol=1e-9)
    plain = quantized_runner(model, "fp8", 6, 16, 64)
    plain.step({0: a[:20]})
    apart = float((plain.step({0: a[20:], 1: b}) - got[1:3]).norm() / got[1:3].norm())
    assert 1e-4 < apart < 0.2


def test_the_kernels_pool_is_the_same(seed):
    model = new_model(torch.float32, head_dim=32).to(DEVICE)
    prompts, kinds = new_prompts(23, 18), (ProductsPool, ProductsKernelPool)
    want, got = (steps_of(pool, model, *prompts) for pool in kinds)
    # In float32 one value in about 10^5 lands on the other side of a code's border.
    assert float((got - want).norm() / want.norm()) < 2e-2


@pytest.mark.parametrize(
    "old, new",
    [
        ("starts[front:] - starts[front]", "starts[front:]"),
        ("table[front:]", "table[: len(table) - front]"),
        ("out[:tokens] = dequantized_attention(q[:tokens], *pages, *single, self.format, **how)",
         "out[:tokens] = fp8_attention(q[:tokens], *pages, *single, **how)"),
    ],
)  # fmt: skip
def test_a_wrong_pool_is_found(old, new, seed, tmp_path):
    """In a step of a token and a prompt."""
    buggy = with_bug(pools, tmp_path, old, new)
    model, (a, b) = new_model(head_dim=32), new_prompts(23, 18)
    steps = []
    for pool in (ProductsPool, ProductsPool, buggy.ProductsPool):
        runner = runner_over(pool, model)
        runner.step({0: a})
        with suppress(RuntimeError):  # a slip may also fail
            steps.append(runner.step({0: [5], 1: b}))
    assert_same_bits(*steps[:2])
    assert len(steps) == 2 or not torch.equal(steps[1], steps[2])


def test_what_has_no_products_is_refused():
    with pytest.raises(ValueError, match="False with a soft cap or sinks"):
        products_rung_of(new_model(attn_logit_softcapping=5.0))
    with pytest.raises(ValueError, match="False with latent attention"):
        products_rung_of(new_deepseek())
