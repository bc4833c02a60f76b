"""Checks of lesson 10's exercises. Each exists because it rejects a named wrong answer
(wrong/l10.py).
"""

import math
import random

import torch

from lessons.l02_naive_attention.naive import attention
from lessons.toolbox.proof.traps import poison_
from tests.exercises.checking import (
    assert_equal,
    assert_largest_tensor,
    assert_same_work,
    call,
    check,
    compare,
    in_wider_memory,
)
from tests.exercises.kernel_work import kernel_does_it

# ---------------------------------------------------------------- 10.1 merge partial results


def partials(
    seed,
    num_splits=5,
    empty=(),
    heads=3,
    dim=8,
    spread=2.0,
    centre=0.0,
    slope=0.0,
    dtype=torch.float64,
):
    """partial_out: [2, heads, S, dim], NaN and inf in the splits `empty` of sequence 0, and
    partial_lse: [2, heads, S], there −inf.
    """
    g = torch.Generator().manual_seed(seed)
    out = torch.randn(2, heads, num_splits, dim, generator=g, dtype=torch.float64).to(dtype)
    lse = centre + spread * torch.randn(2, heads, num_splits, generator=g, dtype=torch.float64)
    lse = (lse + slope * torch.arange(num_splits)).to(dtype)
    for split in empty:
        lse[0, :, split] = -torch.inf
        poison_(out[0, :, split])
        out[0, :, split, 1::2] = torch.inf
    return dict(partial_out=out, partial_lse=lse)


def merged(partial_out, partial_lse):
    """The definition, in float64, split by split in plain numbers: Σ exp(lse) · out / Σ exp(lse)
    relative to the largest lse.
    """
    out, lse = (
        torch.zeros_like(partial_out[:, :, 0], dtype=torch.float64),
        torch.zeros_like(partial_lse[:, :, 0]).double(),
    )
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            pairs = [
                (float(x), partial_out[b, h, s].double())
                for s, x in enumerate(partial_lse[b, h])
                if x != -math.inf
            ]
            top = max((x for x, _ in pairs), default=0.0)
            total = sum(math.exp(x - top) for x, _ in pairs)
            lse[b, h] = top + math.log(total) if pairs else -math.inf
            for x, row in pairs:
                out[b, h] += math.exp(x - top) / total * row
    return out, lse


MERGE_CASES = {
    "two_splits": (dict(num_splits=2), "the splits weigh as much as their keys do together"),
    "one_split": (dict(num_splits=1), "nothing to merge: it comes back as it is"),
    "many_splits": (dict(num_splits=40), "more than fit one step of a kernel"),
    "unequal": (dict(spread=8.0), "one split may hold nearly all of the weight"),
    "large": (dict(centre=1000.0), "exp(1000) overflows: subtract the largest lse first"),
    "very_negative": (dict(centre=-20000.0), "exp(-20000) is 0, and 0 / 0 is NaN"),
    "far_apart": (
        dict(centre=torch.tensor([1000.0, -1000.0, 0.0]).view(3, 1)),
        "each head has a maximum of its own",
    ),
    "empty_split": (
        dict(empty=(1, 4)),
        "a split without keys weighs 0, not exp(0), and its NaN does not show",
    ),
    "first_is_empty": (dict(empty=(0, 1)), "the first split may be the empty one"),
    "one_empty": (dict(num_splits=1, empty=(0,)), "one split, and a sequence without keys"),
    "all_empty": (dict(empty=range(5)), "a sequence without keys: zeros and -inf"),
}


@check("10.1", {case: why for case, (_, why) in MERGE_CASES.items()})
def test_merged(impl, case, seed):
    inputs = partials(seed, **MERGE_CASES[case][0])
    compare(impl, inputs, want=merged(**inputs), atol=1e-9)


@check("10.1")
def test_keeps_float32(impl, seed):
    inputs = partials(seed, dtype=torch.float32, empty=(2,))
    compare(impl, inputs, want=merged(**inputs), atol=1e-5, dtype=torch.float32)


@check("10.1")
def test_slices(impl, seed):
    """Both tensors are slices of wider ones, as a workspace with room for more splits gives
    them.
    """
    inputs = partials(seed, empty=(2,))
    want = merged(**inputs)
    inputs = {name: in_wider_memory(x) for name, x in inputs.items()}
    compare(impl, inputs, want=want, atol=1e-9)


@check("10.1")
def test_no_loop(impl, seed):
    few, many = partials(seed, heads=1), partials(seed, heads=9)
    few = {name: x[:1] for name, x in few.items()}
    because = "for 18 times as many sequences and heads"
    assert_same_work(because, lambda: impl(**few), lambda: impl(**many))


@check("10.1")
def test_merging_example(impl, seed):
    inputs = dict(
        partial_out=torch.tensor([4.0, 8.0, math.nan]).view(1, 1, 3, 1).double(),
        partial_lse=torch.tensor([0.0, math.log(3), -math.inf], dtype=torch.float64).view(1, 1, 3),
    )
    want = (
        torch.tensor([[[7.0]]], dtype=torch.float64),
        torch.tensor([[math.log(4)]], dtype=torch.float64),
    )
    compare(impl, inputs, want=want, atol=1e-9)


# ---------------------------------------------------------------- 10.2 predict

PLAN_NAMES = (
    "batch",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "context_len",
    "num_splits",
    "num_slots",
    "itemsize",
)
PLAN_CASES = {  # name: (arguments, the answer, why)
    "example": ((2, 8, 4, 64, 1000, 16, 100, 2), (128, 2, 0.64, 0.065), "the docstring's"),
    "llama_3_8b": (
        (1, 32, 8, 128, 65536, 33, 264, 2),
        (264, 1, 1.0, 1089792 / 268435456),
        "a full wave, 0.4 % of extra bytes",
    ),
    "one_too_many": (
        (1, 32, 8, 128, 65536, 34, 264, 2),
        (272, 2, 272 / 528, 1122816 / 268435456),
        "8 programs make a 2nd wave",
    ),
    "one_split": (
        (3, 4, 4, 128, 100, 1, 132, 4),
        (12, 1, 12 / 132, 0.0),
        "no partial results at all",
    ),
    "short_context": (
        (1, 64, 1, 128, 256, 128, 132, 4),
        (128, 1, 128 / 132, 8454144 / 262144),
        "32 times the bytes of K and V",
    ),
}


@check("10.2", {case: why for case, (*_, why) in PLAN_CASES.items()}, seconds=5)
def test_plan(impl, case, seed):
    numbers, want, _ = PLAN_CASES[case]
    got = call(impl, dict(zip(PLAN_NAMES, numbers)))
    assert isinstance(got, tuple) and len(got) == 4, (
        f"your result is {got!r}, expected a tuple of four numbers"
    )
    for what, mine, right in zip(
        ("programs", "waves", "efficiency", "partial traffic over KV traffic"), got, want
    ):
        assert_equal(mine, right, atol=1e-9, rtol=1e-9, label=f"your {what}")


@check("10.2", seconds=5)
def test_the_tensors_themselves(impl, seed):
    """A random plan, its tensors made and their bytes counted."""
    draw = random.Random(seed)
    batch, num_kv_heads, group, splits = (draw.randint(2, 5) for _ in range(4))
    head_dim, context_len, slots = 8 * draw.randint(1, 4), draw.randint(10, 50), draw.randint(3, 9)
    kv = torch.empty(2, batch, context_len, num_kv_heads, head_dim, dtype=torch.bfloat16)
    out = torch.empty(batch, num_kv_heads * group, splits, head_dim)
    lse = torch.empty(batch, num_kv_heads * group, splits)
    programs = len([0 for _ in range(batch) for _ in range(num_kv_heads) for _ in range(splits)])
    waves = len(range(0, programs, slots))
    want = programs, waves, programs / (waves * slots), 2 * (out.nbytes + lse.nbytes) / kv.nbytes
    got = call(
        impl,
        dict(
            zip(
                PLAN_NAMES,
                (
                    batch,
                    num_kv_heads * group,
                    num_kv_heads,
                    head_dim,
                    context_len,
                    splits,
                    slots,
                    2,
                ),
            )
        ),
    )
    assert_equal(got, want, atol=1e-9, label="your plan")


# ---------------------------------------------------------------- 10.3 the kernel

KERNEL_CASES = {
    name: MERGE_CASES[name]
    for name in ("one_split", "unequal", "very_negative", "large", "empty_split", "all_empty")
}
KERNEL_CASES |= {
    "a_full_step": (dict(num_splits=16), "exactly one step of the loop"),
    "one_more": (dict(num_splits=17), "the second step has one split; the others are masked"),
    "three_steps": (dict(num_splits=40), "the loop has to go on"),
    "rising": (
        dict(num_splits=40, slope=10.0),
        "every step has a larger maximum: what was summed before shrinks, all of it",
    ),
    "empty_first_step": (
        dict(num_splits=20, empty=range(16)),
        "the first step sees nothing: −inf − −inf",
    ),
    "odd_head": (dict(dim=5), "head_dim is no power of two"),
}


def rows_of(inputs):
    """The inputs of 10.1 in float32 as rows: [2 · heads, S, D] and [2 · heads, S]."""
    return dict(
        partial_out=inputs["partial_out"].float().flatten(0, 1),
        partial_lse=inputs["partial_lse"].float().flatten(0, 1),
    )


@check("10.3", {case: why for case, (_, why) in KERNEL_CASES.items()})
def test_kernel(impl, case, seed):
    inputs = rows_of(partials(seed, heads=1, **KERNEL_CASES[case][0]))
    want = merged(**{name: x.unflatten(0, (2, 1)) for name, x in inputs.items()})[0].flatten(0, 1)
    atol = 5e-3 if case == "very_negative" else 1e-5  # float32 rounds log2(e) · lse by 1e-3
    compare(impl, inputs, want=want, atol=atol, dtype=torch.float32)


@check("10.3")
def test_empty_splits_change_no_bit(impl, seed):
    """The workspace has room for the longest sequence of the batch, so a short one finds empty
    splits after its own.
    """
    inputs = rows_of(partials(seed, num_splits=7))
    alone = call(impl, inputs)
    for more in (1, 12, 30):
        padded = dict(
            partial_out=torch.cat([inputs["partial_out"], torch.zeros(6, more, 8)], 1),
            partial_lse=torch.cat([inputs["partial_lse"], torch.full((6, more), -torch.inf)], 1),
        )
        together = call(impl, padded)
        assert_equal(
            together, alone, atol=1e-5, label=f"with {more} empty splits after it, your result"
        )
        assert torch.equal(together, alone), (
            f"{more} empty splits after the others changed the last bits of your result"
        )


test_the_kernel_does_it = kernel_does_it("10.3", lambda seed: rows_of(partials(seed)))


# ---------------------------------------------------------------- 10.4 the batch must not show


def decode_inputs(
    seed,
    lengths=(13, 40, 22),
    heads=4,
    kv_heads=2,
    dim=8,
    split_size=8,
    window=None,
    sharp=1.0,
    far=False,
):
    """Random q: [B, Hq, D] and caches: [B, 40, Hkv, D] whose rows after `lengths` are NaN. far:
    scores near -20000 in the first 8 rows, and 256 lower in the others.
    """
    g = torch.Generator().manual_seed(seed)
    q = sharp * torch.randn(len(lengths), heads, dim, generator=g)
    k, v = (torch.randn(len(lengths), 40, kv_heads, dim, generator=g) for _ in range(2))
    if far:
        q[..., 0], k[:, :8, :, 0], k[:, 8:, :, 0] = 128 * dim**0.5, -158, -160
    for b, n in enumerate(lengths):
        poison_(k[b, n:])
        poison_(v[b, n:])
    return dict(
        q=q,
        k_cache=k,
        v_cache=v,
        context_lens=torch.tensor(lengths),
        split_size=split_size,
        window=window,
    )


def one_by_one(q, k_cache, v_cache, context_lens, split_size, window):
    """Lesson 2's attention in float64 on the rows in use, sequence after sequence."""
    return torch.stack(
        [
            attention(
                q[b : b + 1].double(),
                k_cache[b, :n].double(),
                v_cache[b, :n].double(),
                window=window,
            )[0]
            for b, n in enumerate(context_lens.tolist())
        ]
    )


DECODE_CASES = {
    "one_head": (dict(heads=1, kv_heads=1, lengths=(30,)), "one sequence, one head"),
    "sharp": (
        dict(heads=1, kv_heads=1, lengths=(30,), sharp=6.0),
        "splits whose largest scores differ: m matters as much as l",
    ),
    "far_below": (
        dict(heads=1, kv_heads=1, lengths=(30,), far=True),
        "scores near -20000, lower still after the first split: exp of their distance overflows",
    ),
    "no_sharing": (dict(heads=2, kv_heads=2), "a KV head for each query head"),
    "shared_kv_heads": (dict(heads=6, kv_heads=2), "query heads 0, 1, 2 read KV head 0"),
    "lengths": (
        dict(heads=1, kv_heads=1, lengths=(1, 7, 8, 9, 16, 17)),
        "a split ends exactly, one key early, one late",
    ),
    "empty_sequence": (dict(heads=1, kv_heads=1, lengths=(0, 5)), "no key: zeros"),
    "window": (
        dict(heads=1, kv_heads=1, lengths=(11, 12, 40), window=11),
        "the window counts from the sequence's end, across its splits",
    ),
    "short_window": (dict(heads=1, kv_heads=1, window=3), "a window within one split"),
    "wide_window": (dict(heads=1, kv_heads=1, window=100), "wider than any sequence"),
}


@check("10.4", {case: why for case, (_, why) in DECODE_CASES.items()})
def test_decode(impl, case, seed):
    inputs = decode_inputs(seed, **DECODE_CASES[case][0])
    atol = 2e-2 if case == "far_below" else 2e-5  # one float32 rounding of such a score
    compare(impl, inputs, want=one_by_one(**inputs), atol=atol, dtype=torch.float32)


@check("10.4")
def test_decode_example(impl, seed):
    k = torch.tensor([0, 0, math.log(2)]).view(1, 3, 1, 1)
    v = torch.tensor([2.0, 4.0, 9.0]).view(1, 3, 1, 1)
    inputs = dict(
        q=torch.ones(1, 1, 1), k_cache=k, v_cache=v, context_lens=torch.tensor([3]), split_size=2
    )
    compare(impl, inputs, want=torch.tensor([[[6.0]]]), atol=1e-5)


BATCHES = {
    "alone": "the first sequence without the others",
    "longer_cache": "the same rows in a cache with more room",
    "windowed": "alone, with a window",
}


@check("10.4", BATCHES)
def test_the_batch_does_not_show(impl, case, seed):
    inputs = decode_inputs(
        seed, lengths=(33, 40, 22, 5), split_size=4, window=30 if case == "windowed" else None
    )
    together = call(impl, inputs)
    if case == "longer_cache":
        room = torch.full((4, 39, 2, 8), torch.nan)
        other = inputs | {
            name: torch.cat([inputs[name], room], 1) for name in ("k_cache", "v_cache")
        }
    else:
        other = inputs | {
            name: inputs[name][:1] for name in ("q", "k_cache", "v_cache", "context_lens")
        }
    again = call(impl, other)[:1]
    assert_equal(again, together[:1], atol=2e-5, label=f"sequence 0, {BATCHES[case]},")
    differ = int((again != together[:1]).sum())
    assert not differ, (
        f"sequence 0, {BATCHES[case]}: {differ} of {again.numel()} values differ in their last bits"
    )


@check("10.4")
def test_splits_begin_where_the_window_begins(impl, seed):
    """A window of split_size keys is one split, also from key 4 on."""
    first, later = (
        decode_inputs(seed, lengths=(n,), heads=1, kv_heads=1, window=8) for n in (8, 12)
    )
    assert_same_work(
        "for a window of one split that begins at key 4, not at key 0",
        lambda: impl(**first),
        lambda: impl(**later),
    )


@check("10.4")
def test_no_more_than_a_split_at_once(impl, seed):
    """One sequence of 40 keys, 2 heads of size 4, split_size 8: the scores of a split are 2 · 8,
    those of all keys 2 · 40.
    """
    inputs = decode_inputs(seed, lengths=(40,), heads=2, kv_heads=1, dim=4)
    assert_largest_tensor(2 * 40, "the scores of one split at a time", impl, **inputs)
