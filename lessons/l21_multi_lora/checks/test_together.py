"""Proves the adapters of q, k and v in two launches."""

import json
from collections import Counter
from functools import partial

import pytest
import torch

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l21_multi_lora import naive, optimized, together
from lessons.l21_multi_lora.batch import AdapterBatch, AdapterContext
from lessons.l21_multi_lora.kernels import slices as kernels
from lessons.l21_multi_lora.kernels.slices import expand_slices_kernel, shrink_slices_kernel
from lessons.l21_multi_lora.lab import together as record
from lessons.l21_multi_lora.lab.testing import DEVICE, linears_of, random_adapter, tiny_model
from lessons.l21_multi_lora.layers import adapter_layers, with_adapter_slots
from lessons.l21_multi_lora.optimized import Tiles
from lessons.l21_multi_lora.slots import AdapterSlots
from lessons.l21_multi_lora.together import SliceWeights, add_lora_together
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.kernels.launches import watching_launches
from lessons.toolbox.proof.inputs import apart, draw
from lessons.toolbox.proof.numerics import assert_same_bits, prove
from lessons.toolbox.proof.planted import with_bug

SMALL = Tiles(block_k=16, split_k=32, block_n=16, num_warps=4, num_stages=2)
ROWS = [2, 0, -1, 3, 0, 1, 2, -1, 3, 3]
# of each slot, by slice: a slice may have no adapter where another one has
RANKS = [[5, 0, 20, 16], [16, 3, 0, 20], [0, 1, 8, 20]]
OUTPUTS = (35, 16, 19)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """So that 20 ranks are two blocks."""
    monkeypatch.setattr(optimized, "MOST_RANKS", 16)


def problem(dtype=torch.float32, outputs=OUTPUTS, size=40, seed=0):
    """outs, x, weights, batch. What is beyond a slot's rank is NaN; outs and x are `apart`."""
    weights = SliceWeights.empty(4, 20, size, outputs, dtype, DEVICE)
    for layer, (slots, ranks) in enumerate(zip(weights.layers(), RANKS)):
        for slot, rank in enumerate(ranks):
            a = draw("normal", (rank, size), seed=seed + 10 * layer + slot) * (slot + layer + 1)
            b = draw("normal", (slots.b.shape[2], rank), seed=seed + 100 + 10 * layer + slot)
            slots.put(slot, a, b, scaling=(layer + 2) / (rank + 1))
            slots.a[slot, rank:] = slots.b[slot, rank:] = float("nan")
    outs = [
        draw("normal", (len(ROWS), count), dtype=dtype, seed=seed + count, device=DEVICE)
        for count in outputs
    ]
    x = draw("normal", (len(ROWS), size), dtype=dtype, seed=seed + 8, device=DEVICE)
    x, *outs = apart(x, *outs)
    return outs, x, weights, AdapterBatch.of(ROWS, DEVICE)


def one_by_one(q, k, v, x, weights, batch):
    """The definition: each slice a layer of its own, adapter by adapter."""
    for out, layer in zip((q, k, v), weights.layers()):
        naive.add_lora(out, x, layer, batch)
    return q, k, v


def together_of(q, k, v, x, weights, batch):
    add_lora_together([q, k, v], x, weights, batch, SMALL)
    return q, k, v


def proved(outs, *others):
    return prove(together_of, one_by_one, (*outs, *others), mutates=[0, 1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_slice_gets_its_own_adapters(dtype, seed, proof):
    """Other ranks in each slice, outputs that end within a tile, rows without an adapter."""
    for errors in proved(*problem(dtype, seed=seed)):
        proof.record(shrink_slices_kernel, errors)
        proof.record(expand_slices_kernel, errors)


@pytest.mark.parametrize("outputs", [(19, 35), (16,)])
def test_fewer_slices(outputs, seed):
    """gate and up; one layer alone."""
    outs, x, weights, batch = problem(torch.float16, outputs, seed=seed)
    found = add_lora_together([out.clone() for out in outs], x, weights, batch, SMALL)
    for out, layer, mine in zip(outs, weights.layers(), found):
        assert_same_bits(mine, optimized.add_lora(out, x, layer, batch, SMALL))


def test_slices_of_one_wide_product(seed):
    """q, k and v as columns of one tensor: their rows are further apart than they are long."""
    outs, x, weights, batch = problem(seed=seed)
    wide = torch.cat(outs, dim=1)
    views = list(wide.split(list(OUTPUTS), dim=1))
    add_lora_together(views, x, weights, batch, SMALL)
    for view, out in zip(views, add_lora_together(outs, x, weights, batch, SMALL)):
        assert_same_bits(view.contiguous(), out)


def test_padding_tiles_and_a_batch_without_adapters(seed):
    outs, x, weights, batch = problem(seed=seed)
    padded = AdapterBatch.of(ROWS, DEVICE, num_tiles=len(batch.tiles) + 3)
    nobody = AdapterBatch.of([-1] * len(ROWS), DEVICE)
    with_padding, without = (
        add_lora_together([out.clone() for out in outs], x, weights, given, SMALL)
        for given in (padded, batch)
    )
    unchanged = add_lora_together([out.clone() for out in outs], x, weights, nobody, SMALL)
    for a, b, kept, out in zip(with_padding, without, unchanged, outs):
        assert_same_bits(a, b)
        assert_same_bits(kept, out)


def test_operands_that_are_refused():
    outs, x, weights, batch = problem()
    for wrong, message in (
        ((outs[:2], x, weights, batch), "outs: got 2; accepted: 3, one a slice"),
        ((outs[::-1], x, weights, batch), "out: got"),
        ((outs, x[:-1], weights, batch), "x: got"),
    ):
        with pytest.raises(ValueError, match=message):
            add_lora_together(*wrong)
    with pytest.raises(ValueError, match="outputs: got 4 slices; accepted: 1 to 3"):
        SliceWeights.empty(1, 1, 1, (1,) * 4, torch.float32, "cpu")


CAUGHT = "out of bounds|E[0-4]"  # an access beyond a tensor, or one of the rules of `prove`
BUGS = {
    "the ranks of the first slice": (
        "rank = tl.load(ranks_ptr + adapter)\n    first_rank",
        "rank = tl.load(ranks_ptr + slot)\n    first_rank",
    ),
    "the first slice's A": ("(adapter * max_rank + r) * size", "(slot * max_rank + r) * size"),
    "partials of slices over each other": (
        "(layer * tl.num_programs(1) + split)",
        "(layer + split)",
    ),
    "q's outputs for k": ("elif n_tile >= q_tiles:", "elif n_tile > q_tiles:"),
    "k's tiles are counted as v's": ("before += q_outputs + k_outputs", "before += k_outputs"),
    "v's B begins with k's": (
        "before += q_outputs + k_outputs",
        "before += q_outputs",
    ),
    "the scaling of the first slice": (
        "tl.load(scaling_ptr + adapter)",
        "tl.load(scaling_ptr + slot)",
    ),
    "the partials of the first slice": ("tl.cast(layer * num_splits", "tl.cast(0 * num_splits"),
    "the stride of q": ("v_ptr, v_outputs, stride_v", "v_ptr, v_outputs, stride_q"),
    "the next block of ranks": (
        "% RANK_BLOCKS * BLOCK_R",
        "* BLOCK_R",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path, monkeypatch, seed):
    buggy = with_bug(kernels, tmp_path, *BUGS[bug])
    for name in ("shrink_slices_kernel", "expand_slices_kernel"):
        monkeypatch.setattr(together, name, getattr(buggy, name))
    with in_bounds(), pytest.raises(Exception, match=CAUGHT):
        proved(*problem(seed=seed))


def test_two_launches_instead_of_six(seed):
    outs, x, weights, batch = problem(seed=seed)
    one_by_one, both = [], []
    with watching_launches(lambda name, tensors: one_by_one.append(name)):
        for out, layer in zip(outs, weights.layers()):
            optimized.add_lora(out.clone(), x, layer, batch, SMALL)
    with watching_launches(lambda name, tensors: both.append(name)):
        add_lora_together(outs, x, weights, batch, SMALL)
    assert len(one_by_one) == 6 and both == ["shrink_slices_kernel", "expand_slices_kernel"]


# ---------------------------------------------------------------- in a model


# Each launched twice a block: for q, k, v and for gate, up; for o and for down.
KERNELS = ("shrink_slices_kernel", "expand_slices_kernel", "shrink_kernel", "expand_kernel")


def note(names: Counter, name: str, tensors: dict) -> None:
    names[name] += 1


def twins_of(add_lora):
    """(twin of a small model, its context, its slots, a batch of two adapters and none)."""
    model, context = tiny_model(), AdapterContext()
    twin = with_adapter_slots(model, context, 2, 4, add_lora)
    slots = AdapterSlots(adapter_layers(twin))
    first, second = (
        slots.acquire(random_adapter(linears_of(model), seed=seed, rank=2 + seed))
        for seed in range(2)
    )
    rows = AdapterBatch.of([first, -1, second, first], DEVICE)
    return twin, context, rows


def test_a_model_launches_for_neighbours_together():
    """8 launches a block where there were 14, and the same logits as adapter by adapter."""
    tokens, found = torch.tensor([5, 17, 3, 88], device=DEVICE), []
    for add_lora in (naive.add_lora, optimized.add_lora):
        twin, context, rows = twins_of(add_lora)
        attend, names = whole_sequence(twin, len(tokens)), Counter()
        with context.over(rows), watching_launches(partial(note, names)):
            found.append(twin.logits(twin(tokens, attend)))
        each = 2 * len(twin.layers) if add_lora is optimized.add_lora else 0
        assert names == Counter(dict.fromkeys(KERNELS, each) if each else {})
    assert torch.allclose(*found, atol=2e-5)


def test_a_layer_called_with_another_x_computes_its_own():
    """Also without the first layer's call, in a later step, and when it is called twice."""
    twin, context, rows = twins_of(optimized.add_lora)
    expected, _, _ = twins_of(naive.add_lora)
    attention, definition = (model.layers[0].self_attn for model in (twin, expected))
    x, y = torch.randn(2, 4, 32, device=DEVICE)
    later = AdapterBatch.of([-1, 0, 1, 1], DEVICE)
    for layer, given, batch in (
        ("k_proj", x, rows),
        ("q_proj", x, rows),
        ("k_proj", y, rows),
        ("v_proj", x, rows),
        ("v_proj", x, rows),
        ("q_proj", x, rows),
        ("v_proj", x, later),
        ("q_proj", y, later),
        ("k_proj", y, later),
    ):
        with context.over(batch):
            got = getattr(attention, layer)(given)
        plain = getattr(definition, layer)
        want = naive.add_lora(plain.base(given), given, plain.weights, batch)
        assert torch.allclose(got, want, atol=1e-5), layer


@pytest.mark.compiler
@pytest.mark.sample(0)
def test_the_record_is_predicted_again():
    """Within 5 %, because another compiler moves it a little. And fewer launches are what it
    saves.
    """
    recorded = json.loads(record.RECORD.read_text(encoding="utf-8"))["16"]
    found = call("lessons.l21_multi_lora.lab.together:predicted", 16, chip=90)
    for way, kept in recorded.items():
        assert found[way]["launches"] == kept["launches"]
        assert found[way]["predicted_s"] == pytest.approx(kept["predicted_s"], rel=0.05)
    assert recorded["together"]["predicted_s"] < 0.4 * recorded["one_by_one"]["predicted_s"]
    assert round(1e6 * record.LEAST_BYTES / 4.8e12) == 2
