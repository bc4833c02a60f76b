"""Lesson 21: proves that the pictures fit, that excerpts are in the sources, and that the README
quotes what the code says.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.planner.models import find_model
from lessons.l21_multi_lora import naive
from lessons.l21_multi_lora.batch import AdapterBatch
from lessons.l21_multi_lora.kernels import stand_ins
from lessons.l21_multi_lora.lab import pictures, sizes
from lessons.l21_multi_lora.lab.testing import linears_of, random_adapter, slots_of, tiny_model
from lessons.l21_multi_lora.layers import plus
from lessons.l21_multi_lora.peft.adapters import LayerAdapter
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.measure.hardware import CHIPS
from tests.excerpts import plain_readme, stray_excerpts
from tests.exercises.checking import Operations
from tests.test_pages import guide

ROOM = Path(__file__).parents[1] / "lessons/l21_multi_lora"
README = plain_readme(ROOM)
LLAMA = find_model("llama-3-8b")
SIZES = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
]
PCIE_BYTES_PER_S = 64e9  # lesson 15


@pytest.mark.parametrize("name", ["bytes", "batch", "loses"])
@pytest.mark.sample(4, of="pictures")
def test_the_pictures_fit(name):
    figure = getattr(pictures, f"draw_{name}")()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_excerpts_stand_in_the_sources():
    assert not stray_excerpts(ROOM)


def test_the_sizes_are_those_of_a_model():
    """Shapes of a block, and the bytes of an adapter of every linear layer of a small model."""
    model = tiny_model()
    shape = replace(LLAMA, **{name: getattr(model.config, name) for name in SIZES})
    linears = linears_of(model)
    block = {name.rpartition(".")[2]: size for name, size in linears.items()}
    assert sizes.linear_shapes(shape) == block
    assert 2 * sizes.adapter_bytes(shape, 3) == random_adapter(linears, rank=3).num_bytes


def test_the_readme_quotes_the_sizes():
    """Steps 3, 4, 8 and 9, the bottleneck, the museum and the quiz."""
    base, memory = sizes.base_bytes(LLAMA), CHIPS["h100"].memory_bytes
    adapter = sizes.adapter_bytes(LLAMA, 16)
    pair = ("q_proj", "v_proj")
    assert f"has {base / 1e9:.1f} GB in 16 bits" in README
    assert f"{memory / 1e9:.0f} GB holds {memory // base} of them" in README
    assert f"read {4 * base / 1e9:.1f} GB for four tokens" in README
    assert f"is {adapter / 1e6:.1f} MB, or {adapter / base:.2%} of the model" in README
    assert f"which takes {sizes.adapter_bytes(LLAMA, 16, pair) / 1e6:.1f} MB" in README
    assert f"holds {sizes.adapters_that_fit(LLAMA, 16, memory)} adapters of rank 16" in README
    assert f"only {sizes.adapters_that_fit(LLAMA, 256, memory)} fit" in README
    shapes = sizes.linear_shapes(LLAMA).values()
    matrices = sizes.VALUE_BYTES * LLAMA.num_hidden_layers * sum(n * k for n, k in shapes)
    merge_ms = 2e3 * matrices / CHIPS["h100"].memory_bytes_per_s  # read and written
    steps = f"{2 * matrices / base:.1f} decode steps"
    assert f"at least {merge_ms:.1f} ms, as long as {steps}" in README
    assert f"are read and written, as long as {steps}" in guide("merge the adapter")
    launches = 2 * 4  # two for each of: q, k and v; o; gate and up; down
    assert f"every block: {launches * LLAMA.num_hidden_layers} a step" in README
    copied_ms = 1e3 * adapter / PCIE_BYTES_PER_S
    assert f"{adapter / 1e6:.1f} MB at 64 GB/s are {copied_ms:.1f} ms" in README
    added = {
        (rank, count): 100 * (sizes.step_factor(LLAMA, rank, count) - 1)
        for rank in (16, 64)
        for count in (1, 16, 64)
    }
    assert f"16 adapters add {added[16, 16]:.1f}%,   64 add {added[16, 64]:.0f}%" in README
    assert f"{added[64, 16]:.0f}% and {added[64, 64]:.0f}%" in README
    assert f"adds only `{added[16, 1]:.2f} %`" in README
    few, most = (sizes.adapter_bytes(LLAMA, *which) / base for which in ((8, pair), (256,)))
    assert f"{few:.2%} for q and v at rank 8, {adapter / base:.2%} for all seven at 16" in README
    assert f"and {most:.2%} at 256" in README
    assert f"{sizes.adapter_bytes(LLAMA, 8, pair) / 1e6:.1f} MB.</details>" in README


def test_the_readme_quotes_the_examples():
    """Steps 1, 2 and 4 by the lesson's own code."""
    x, w = torch.tensor([[1.0, 2.0]]), torch.nn.Linear(2, 2, bias=False)
    w.weight.data = torch.eye(2)
    layer = LayerAdapter(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0], [0.0]]), 3.0)
    weights = slots_of([1], 1, 2, 2)
    weights.put(0, *layer)
    out = naive.add_lora(x @ w.weight.T, x, weights, AdapterBatch.of([0]))
    both = plus(w, layer, 1.0, torch.float32)
    assert out.tolist() == both(x).tolist() == [[19, 2]] and "= (19, 2)" in README
    assert both.weight.tolist() == [[7, 6], [0, 1]] and "((7, 6), (0, 1))" in README
    assert f"α / r = {16 / 64}      α / √r = {16 / 64**0.5:.0f}" in README
    numbers, full = 16 * (4096 + 4096), 4096**2
    assert f"{numbers:,} beside {full:,} numbers, {full // numbers} times fewer" in README


def test_the_readme_quotes_the_counts():
    """Step 4: what merging and unmerging in bfloat16 changes. Measured: operations of a layer."""
    g = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
    linear.weight.data = torch.randn(512, 512, generator=g).bfloat16()
    pair = (torch.randn(n, m, generator=g) * 0.2 for n, m in ((8, 512), (512, 8)))
    layer = LayerAdapter(*pair, 1.0)
    there = plus(linear, layer, 1.0, torch.bfloat16)
    back = plus(there, layer, -1.0, torch.bfloat16)
    changed = float((back.weight != linear.weight).float().mean())
    assert f"in our test {changed:.1%} of the numbers" in README
    rows = torch.randn(16, 32, generator=g)
    weights = slots_of([8] * 16, 8, 32, 32, padding=0.0)
    batch, out = AdapterBatch.of(range(16)), torch.zeros(16, 32)
    for form in (naive, stand_ins):
        with Operations() as operations:
            form.add_lora(out, rows, weights, batch)
        assert f"runs `{operations.count}`" in README, operations.count
