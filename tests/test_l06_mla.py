"""Lesson 6's counts against what transformers caches and the lesson computes; its pictures; the
shapes that it compares.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DeepseekV2Config

from lessons.l01_roofline import calculators
from lessons.l02_naive_attention.optimized import attention_torch
from lessons.l06_mla.lab import benchmark, counts, workload
from lessons.l06_mla.lab import pictures as picture
from lessons.l06_mla.lab.counts import (
    V3,
    absorbed_flops,
    crossover_limit,
    crossover_tokens,
    expanded_flops,
)
from lessons.l06_mla.naive import EXPANDED
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.model.config import MLAConfig
from lessons.toolbox.proof.pages import pages


def as_transformers(shape, layers: int) -> DeepseekV2Config:
    return DeepseekV2Config(
        hidden_size=shape.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_attention_heads,
        vocab_size=128,
        intermediate_size=shape.intermediate_size,
        moe_intermediate_size=shape.moe_intermediate_size,
        n_routed_experts=shape.num_experts,
        n_shared_experts=shape.num_shared_experts,
        first_k_dense_replace=shape.num_dense_layers,
        num_experts_per_tok=shape.num_experts_per_tok,
        q_lora_rank=shape.q_lora_rank or None,
        kv_lora_rank=shape.kv_lora_rank,
        qk_rope_head_dim=shape.qk_rope_head_dim,
        qk_nope_head_dim=shape.head_dim - shape.qk_rope_head_dim,
        v_head_dim=shape.v_head_dim,
    )


@pytest.mark.parametrize("shape", [counts.V2_LITE, counts.V2])
def test_bytes_equal_the_cache_that_transformers_builds(shape):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(as_transformers(shape, 2)).bfloat16()
    cache = model(
        input_ids=torch.zeros(1, 5, dtype=torch.long, device="meta"), use_cache=True
    ).past_key_values
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert (
        stored / 5 / 2
        == calculators.kv_bytes_per_token(shape) / shape.num_hidden_layers
        == (512 + 64) * 2
    )


@pytest.mark.parametrize("shape", [counts.V2_LITE, counts.V2])
def test_parameters_match_the_published_count(shape):
    """Of V2-Lite lesson 1's formula leaves out the projection of q, which has no low rank there."""
    q = (
        shape.num_hidden_layers
        * shape.hidden_size
        * shape.num_attention_heads
        * shape.head_dim
        * (not shape.q_lora_rank)
    )
    assert (shape.params + q) / 1e9 == pytest.approx(
        float(shape.published.removesuffix("B")), rel=0.005
    )


def test_kib_by_hand():
    kib = {shape.name: counts.cached_kib_per_token(shape) for shape in counts.COMPARED}
    assert kib == {
        "deepseek-v2-lite": 30.375,
        "deepseek-v2": 67.5,
        "deepseek-v3": 68.625,
        "llama-3-8b": 128,
        "llama-3-70b": 320,
        "llama-3-405b": 504,
    }
    assert counts.expanded_kib_per_token(counts.V2_LITE) == 270


@pytest.mark.parametrize("new, context", [(1, 40), (5, 40), (40, 40)])
def test_flops_are_those_that_pytorch_counts(new, context):
    """Causal attention counted in pairs; PyTorch multiplies the masked ones too, so its share is
    taken out.
    """
    layer, heads = workload.one_layer().attention, 16
    on = dict(dtype=workload.DTYPE, device=layer.o_proj.weight.device)
    q = torch.randn(new, heads, 192, **on)
    c_kv, k_pe = torch.randn(context, 1, 512, **on), torch.randn(context, 1, 64, **on)
    masked = new * context - counts.pairs(new, context)
    with FlopCounterMode(display=False) as counter:
        attention_torch(q, *layer.expand(c_kv, k_pe))
    assert counter.get_total_flops() == expanded_flops(new, context, heads) + 2 * heads * masked * (
        192 + 128
    )
    with FlopCounterMode(display=False) as counter:
        layer.project_values(attention_torch(layer.absorb(q), torch.cat([c_kv, k_pe], -1), c_kv))
    assert counter.get_total_flops() == absorbed_flops(new, context, heads) + 2 * heads * masked * (
        576 + 512
    )


def test_the_library_takes_the_same_step(seed):
    """A time of another result would be the time of another model: transformers' step and ours
    agree over the same cached latents, rotary coordinates in our order included.
    """
    inputs = workload.layer_inputs(1, 40, torch.device("cpu"))
    expected = benchmark.step_with(EXPANDED)(*inputs)()
    torch.testing.assert_close(benchmark.library(*inputs)(), expected, rtol=1e-4, atol=1e-4)


def test_where_the_forms_cross():
    assert crossover_limit() == pytest.approx(512 * 256 / 768)
    # alone, one token gains nothing
    assert crossover_tokens(10**6) == 171 and crossover_tokens(1) == 1
    for context in (64, 1024, 8192):
        new = crossover_tokens(context)
        for heads in (1, 16):
            assert absorbed_flops(new, context, heads) > expanded_flops(new, context, heads)
            assert absorbed_flops(new - 1, context, heads) <= expanded_flops(
                new - 1, context, heads
            )


def test_sixteen_heads_wait_for_memory_and_128_for_the_matrix_units():
    ridge = picture.CHIPS["h200"].bf16_flops_per_s / picture.CHIPS["h200"].memory_bytes_per_s
    intensity = {
        heads: counts.decode_flops(3, 7, heads) / counts.decode_bytes(3, 7) for heads in (16, 128)
    }
    assert (
        intensity[16] == pytest.approx(16 * 2 * 1088 / 1152)
        and intensity[16] < ridge < intensity[128] < 1.2 * ridge
    )
    assert V3.latent_dim == 576


@pytest.mark.parametrize("name", picture.PICTURES)
def test_each_picture_can_be_read(name):
    draw, alt = picture.PICTURES[name]
    figure = draw()
    assert (
        not texts_outside(figure)
        and not overlapping_texts(figure)
        and "CHECK" not in figure._supxlabel.get_text()
    )
    svg = picture.HERE / f"{name}.svg"
    assert svg.exists() and alt in svg.read_text(encoding="utf-8")


def test_the_counted_numbers_of_the_readme():
    """Each is computed here and must be in the text, so that neither can change alone."""
    text = " ".join(pages(picture.HERE.parent).split())
    chip, v3 = picture.CHIPS["h200"], counts.COMPARED[2]
    behind = next(
        new
        for new in range(1, 999)
        if absorbed_flops(new, 2048 + new, 1) > expanded_flops(new, 2048 + new, 1)
    )
    moved, products = counts.decode_bytes(128, 8192), counts.decode_flops(128, 8192, 128)
    small, quiz = counts.decode_bytes(64, 4096), MLAConfig(None, 256, 64, 32, 64)
    for quoted in (
        f"it keeps **{counts.cached_kib_per_token(v3):.1f}**",
        f"would keep {counts.expanded_kib_per_token(v3):.0f} KiB",
        f"they meet at {crossover_limit():.1f} new tokens",
        f"= {2 * 128 * 4096 * 512 * 256 / 1e9:.0f} GFLOP for one token of one layer",
        f"`{(576 / 192) ** 0.5:.2f}` times too small",
        f"1536 · 128 + 128 · 512 = `{1536 * 128 + 128 * 512:,}` weights",
        f"1536 · 512 = `{1536 * 512:,}`, {1536 * 512 // (1536 * 128 + 128 * 512)} times as many",
        f"61 · 576 · 2 = `{v3.num_hidden_layers * 576 * 2:,}` bytes",
        f"not `{2 * v3.num_hidden_layers * 512 * 2:,}`",
        f"the crossing is at `{behind}` tokens",
        f"read {small / 1e6:.0f} MB",
        f"{small / chip.memory_bytes_per_s * 1e6:.0f} µs",
        f"{products / chip.bf16_flops_per_s * 1e6:.0f} µs",
        f"{moved / chip.memory_bytes_per_s * 1e6:.0f} µs",
        f"27 · 576 · 2 = {27 * 576 * 2}, {counts.cached_kib_per_token(counts.V2_LITE):.1f} KiB",
        f"= {crossover_limit(quiz):.1f}: from {int(crossover_limit(quiz)) + 1} on",
        f"= {counts.decode_flops(10, 8192, 128) / 1e9:.1f} GFLOP, over "
        f"{counts.decode_bytes(10, 8192) / 1e6:.0f} MB",
        f"16 heads: {16 * 2176 / 1152:.0f}; 128 heads: {128 * 2176 / 1152:.0f}",
    ):
        assert quoted in text, quoted
    meet = {
        context: next(
            new
            for new in range(1, 400)
            if absorbed_flops(new, context + new, 128) > expanded_flops(new, context + new, 128)
        )
        for context in (8192, 2048)
    }
    assert f"after 8192 cached ones at {meet[8192]}, after 2048 at {meet[2048]}" in text
    mla = MLAConfig(None, 6, 2, 2, 2)
    assert (
        f"= {expanded_flops(1, 10, 2, mla)} FLOPs," in text
        and f"= {absorbed_flops(1, 10, 2, mla)} With" in text
    )
    kept, as_heads = 10 * (6 + 2), 10 * 2 * (4 + 2)
    assert f"10 · 8 = {kept} values" in text and f"10 · 2 · 6 = {as_heads}" in text
    assert "= 1.2, and (1.2, 0.4) · (1, 0) = 1.2" in text


def test_the_excerpts_stand_in_the_sources():
    room = picture.HERE.parent
    sources = ["".join((room / name).read_text().split()) for name in ("naive.py", "optimized.py")]
    excerpts = pages(room).split("```python\n")[1:]
    assert len(excerpts) == 4
    for excerpt in excerpts:
        assert any("".join(excerpt.split("```")[0].split()) in source for source in sources)


@pytest.mark.parametrize("new, context", [(1, 8192), (168, 8192), (169, 8192), (2048, 256)])
def test_the_slider_says_which_form_is_cheaper(new, context):
    figure = picture.draw_choice(new, context)
    assert not texts_outside(figure) and not overlapping_texts(figure)
    costs = {
        "expanded": expanded_flops(new, context + new, 128),
        "absorbed": absorbed_flops(new, context + new, 128),
    }
    cheaper, dearer = sorted(costs, key=costs.get)
    title = figure._suptitle.get_text()
    assert f"{cheaper} takes {costs[dearer] / costs[cheaper]:.3g} times fewer" in title
    assert (cheaper == "absorbed") == (new < 169)
