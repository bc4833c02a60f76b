"""Proves that a quantized cache is decoded by lesson 12's list of splits: the kernel over the list,
a step of the pool, and that wrong versions are found.
"""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from lessons.l03_kv_cache.batch import new_batch
from lessons.l10_flash_decoding.splits import work_items
from lessons.l12_paged_kv.checks.test_plan import SLOTS, TILE
from lessons.l12_paged_kv.checks.test_plan_slips import WRONG_HOOKS, with_stale_items
from lessons.l12_paged_kv.kernels import hooks, plan
from lessons.l12_paged_kv.kernels import launch as lesson_12
from lessons.l12_paged_kv.lab.testing import CONFIG, DEVICE, paged
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l12_paged_kv.runner import by_length
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.kernels import decode, launch
from lessons.l19_kv_quantization.kernels.decode import codes_decode_kernel
from lessons.l19_kv_quantization.lab.testing import coded
from lessons.l19_kv_quantization.naive import dequantized_decode
from lessons.l19_kv_quantization.optimized import quantized_decode
from lessons.l19_kv_quantization.pool import KernelPool
from lessons.toolbox.proof.numerics import NotEquivalent, assert_same_bits, prove
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.traps import poisoned_empty

BATCHES = {
    "one of 64 times the others": [4, 256, 4, 5],  # as 32768 beside 512
    "lengths of 0, 1 and a page": [0, 1, 16, 150],
    "no key at all": [0, 0],
    "more sequences than slots": [90, *range(1, 14)],
}


def inputs_of(name, lengths, seed, **options):
    """The arguments of quantized_decode, pages in random order."""
    # 32 channels of 4 bits: test_equivalence.py says why.
    options = dict(heads=(4, 2, 32, 32) if name == "int4" else (4, 2, 16, 16)) | options
    pages = paged(lengths, block_size=options.pop("block_size", 16), seed=seed, **options)
    return (*coded(FORMATS[name], pages).decode, FORMATS[name])


def listed(window=None, slots=SLOTS, items_of=work_items):
    """quantized_decode by a list, as `prove` calls it, into results that hold NaN before."""

    def run(q, k_codes, v_codes, k_scales, v_scales, table, lens, format):
        items = items_of(lens, k_codes.shape[2], slots, TILE, window)
        pages = k_codes, v_codes, k_scales, v_scales, table
        with poisoned_empty():
            return quantized_decode(q, *pages, lens, format, window=window, items=items)

    return run


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sample(4)
def test_codes_by_a_list(name, batch, seed, proof):
    inputs = inputs_of(name, BATCHES[batch], seed)
    proof.record(codes_decode_kernel, prove(listed(), dequantized_decode, inputs))


@pytest.mark.parametrize("name, heads", [("int8", (6, 1, 24, 40)), ("int4", (3, 1, 24, 40))])
@pytest.mark.parametrize("window", [1, 33])
@pytest.mark.sample(2)
def test_hostile_heads_pages_and_windows_by_a_list(name, heads, window, seed, proof):
    """Widths that are no powers of two, pages of 5, tiles of keys that a window hides."""
    inputs = inputs_of(name, [3, 190, 0, 50], seed, heads=heads, block_size=5)
    plain = partial(dequantized_decode, window=window)
    proof.record(codes_decode_kernel, prove(listed(window), plain, inputs))


def test_lists_of_random_lengths(seed, proof):
    """Any number of slots, so that sequences have from one split to one for each tile."""
    draws = random.Random(seed)
    for name in FORMATS:
        lengths = [draws.choice((0, 1, 15, 16, 17, 40, 200)) for _ in range(draws.randint(1, 5))]
        inputs = inputs_of(name, lengths, seed, block_size=draws.choice((1, 7, 16)))
        fast = listed(slots=draws.choice((2, 9, 40)))
        proof.record(codes_decode_kernel, prove(fast, dequantized_decode, inputs))


# ---------------------------------------------------------------- a step


def test_a_step_of_the_pool_uses_one_list_for_all_layers(seed, monkeypatch):
    """Layers without a window share a list, and it has the tiles of this kernel."""
    made = []
    monkeypatch.setattr(plan, "work_items", lambda *x: made.append(x[1:]) or work_items(*x))
    config = replace(CONFIG, num_hidden_layers=2, sliding_windows=(None, 40))
    format, lengths, size = FORMATS["int8"], [9, 150, 33], 16
    counts = [-(-n // size) for n in lengths]
    pool = KernelPool(format, config, sum(counts), size, LESSON_12, torch.float32, DEVICE)
    blocks = iter(random.Random(seed).sample(range(sum(counts)), sum(counts)))
    tables = [[next(blocks) for _ in range(count)] for count in counts]
    heads, width = pool.k_slots.shape[-2], config.head_dim
    for codes, scales in ((pool.k_slots, pool.k_scales), (pool.v_slots, pool.v_scales)):
        some = format.quantize(torch.randn(*codes.shape[:3], width, device=DEVICE))
        for target, x in zip((codes, scales), some):
            target.copy_(x)
    batch = new_batch([([1], n - 1) for n in lengths], size, DEVICE, tables)
    q = torch.randn(len(lengths), config.num_attention_heads, width, device=DEVICE)
    stored = [
        ((pool.k_slots[i], pool.k_scales[i]), (pool.v_slots[i], pool.v_scales[i])) for i in (0, 1)
    ]
    by_list, equal = (pool.reading(replace(batch, plans=plans)) for plans in ({}, None))
    outs = [by_list(layer, q, *stored[layer]) for layer in (0, 1, 0)]
    programs, per_sm = pool.programs_of_split
    slots = per_sm * lesson_12.sms_of(DEVICE)
    assert [(x[0], x[1], x[3]) for x in made] == [(heads, slots, None), (heads, slots, 40)]
    assert programs == heads and made[0][2] == made[1][2] >= 16
    assert_same_bits(outs[0], outs[2])
    for layer in (0, 1):
        want = equal(layer, q, *stored[layer])
        torch.testing.assert_close(outs[layer], want, atol=1e-5, rtol=1e-5)


def test_four_programs_an_sm_are_twice_the_slots(seed):
    """An SM holds four programs of 4-bit codes, so batches are cut from fewer sequences on."""
    heads = dict(num_attention_heads=8, num_key_value_heads=8)
    config = replace(CONFIG, head_dim=128, v_head_dim=0, **heads)
    pools = {
        name: KernelPool(FORMATS[name], config, 1, 16, LESSON_12, torch.bfloat16, DEVICE)
        for name in FORMATS
    }
    if not launch.has_matrix_units(pools["int4"].k_scales):
        pytest.skip("NOT RUN: needs a chip that multiplies 16 bits on tensor cores")
    assert {name: pool.programs_of_split for name, pool in pools.items()} == {
        "fp8": (8, 2),
        "int8": (8, 2),
        "int4": (8, 4),
    }
    slots = lesson_12.sms_of(DEVICE)
    # More than a slot's share with four programs an SM, less than one with two.
    count = slots * 2 // 8
    lengths = [1000] + [715] * (2 * count)
    assert not by_length(pools["int8"], lengths)
    assert by_length(pools["int4"], lengths)


# ---------------------------------------------------------------- wrong versions

SLIPS = {
    "partial results of one head": ("place + head * tl.num_programs(1)", "place + head"),
    "every item from the first key": ("tl.range(begin, end,", "tl.range(0, end,"),
    "without the last key of a split": ("in_use = key < end", "in_use = key < end - 1"),
    "another sequence's query": ("q_ptr + sequence *", "q_ptr + tl.program_id(2) *"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_kernel_that_reads_its_list_wrongly_is_found(name, seed, tmp_path, monkeypatch):
    buggy = with_bug(decode, tmp_path, *SLIPS[name])
    monkeypatch.setattr(launch, "codes_decode_kernel", buggy.codes_decode_kernel)
    with pytest.raises(NotEquivalent):
        prove(listed(), dequantized_decode, inputs_of("int8", [9, 150, 33], seed))


def stale(lens, *_):
    return with_stale_items(lens)


def test_idle_items_are_not_run(seed):
    inputs = inputs_of("int8", [9, 33, 20], seed)
    prove(listed(items_of=stale), dequantized_decode, inputs)


@pytest.mark.parametrize("name", WRONG_HOOKS)
def test_a_wrong_hook_is_found(name, seed, tmp_path, monkeypatch):
    buggy = with_bug(hooks, tmp_path, *WRONG_HOOKS[name])
    monkeypatch.setattr(launch, "listed_split", buggy.listed_split)
    with pytest.raises(NotEquivalent):
        prove(listed(items_of=stale), dequantized_decode, inputs_of("int8", [9, 33, 20], seed))


# ---------------------------------------------------------------- bad input


def test_a_list_that_does_not_fit_is_refused(seed):
    inputs = inputs_of("int8", [9, 20], seed)
    items = work_items(inputs[6], 2, SLOTS, TILE)
    with pytest.raises(ValueError, match=r"items: got .*; accepted: what work_items gives for 2"):
        quantized_decode(*inputs, items=items._replace(starts=items.starts[:-1]))
    with pytest.raises(ValueError, match="items, num_splits, split_size: got a list, 2"):
        quantized_decode(*inputs, items=items, num_splits=2)
