"""Checks of exercise 3.1, a chunk of new tokens over caches of different lengths. test_l03.py
collects them.
"""

import torch

from lessons.l02_naive_attention import naive
from lessons.toolbox.proof.traps import poison_
from tests.exercises.checking import assert_same_work, call, check, compare, in_wider_memory


def chunk_inputs(
    seed, lengths=(9, 5, 12), queries=3, heads=2, kv_heads=2, dim=8, capacity=14, **options
):
    """Random q: [B, T, Hq, D]; caches: [B, capacity, Hkv, D] whose rows beyond `lengths` are zero;
    context_lens: [B].
    """
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(len(lengths), queries, heads, dim, generator=g)
    k, v = (torch.randn(len(lengths), capacity, kv_heads, dim, generator=g) for _ in range(2))
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = 0
    return dict(q=q, k_cache=k, v_cache=v, context_lens=torch.tensor(lengths), **options)


def one_by_one(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None):
    """Lesson 2's attention in float64 on the rows in use, sequence after sequence."""
    outs = []
    for b, n in enumerate(context_lens.tolist()):
        wide = (x.double() for x in (q[b], k_cache[b, :n], v_cache[b, :n]))
        outs.append(naive.attention(*wide, softmax_scale, window=window))
    return torch.stack(outs)


def very_negative(seed):
    """Scores near -30000, whole numbers, so that nothing is rounded before the softmax."""
    inputs = chunk_inputs(seed, softmax_scale=1.0)
    g = torch.Generator().manual_seed(seed)
    inputs["q"] = -torch.ones_like(inputs["q"])
    inputs["q"][:, :, -1] = 0  # the last head's scores are 0: each row has its own maximum
    shape = inputs["k_cache"].shape
    inputs["k_cache"] = 3750 + torch.randint(0, 2, shape, generator=g).float()
    return inputs


CHUNKS = {
    "one_sequence": (
        dict(lengths=(9,), capacity=9),
        "a chunk of 3 after 6 cached tokens, the buffer full",
    ),
    "spare_rows": (dict(lengths=(5,)), "9 rows of the buffer are not in use"),
    "different_lengths": (dict(), "each sequence has its own length"),
    "prefill": (
        dict(lengths=(4, 4), queries=4, capacity=6),
        "nothing was cached before: causal among the new tokens",
    ),
    "decode": (
        dict(lengths=(6, 1, 12), queries=1),
        "one query sees all that is in use, itself included",
    ),
    "shared_kv_heads": (dict(heads=6, kv_heads=2), "query heads 0, 1, 2 read KV head 0"),
    "window": (dict(window=4), "each query has its own window, and counts in it"),
    "given_scale": (dict(softmax_scale=0.4), "softmax_scale comes from the caller"),
    "scale_zero": (dict(softmax_scale=0.0), "0 is a scale: every row seen weighs the same"),
}


@check("3.1", {case: why for case, (_, why) in CHUNKS.items()})
def test_values(impl, case, seed):
    inputs = chunk_inputs(seed, **CHUNKS[case][0])
    compare(impl, inputs, want=one_by_one(**inputs), atol=1e-5, dtype=torch.float32)


@check("3.1")
def test_very_negative_scores(impl, seed):
    """Scores near -30000: a mask of -10000 would be the largest score of all."""
    inputs = very_negative(seed)
    compare(impl, inputs, want=one_by_one(**inputs), atol=1e-5, dtype=torch.float32)


UNUSED = {
    "k_cache": "a masked score hides any key",
    "v_cache": "a weight of 0 does not hide NaN: 0 · NaN is NaN",
    "infinite": "nor does it hide infinity: 0 · inf is NaN",
}


@check("3.1", UNUSED)
def test_unused_rows_hold_anything(impl, case, seed):
    inputs = chunk_inputs(seed)
    want = one_by_one(**inputs)
    for b, n in enumerate(inputs["context_lens"].tolist()):
        if case == "infinite":
            inputs["k_cache"][b, n:, :, 0] = inputs["v_cache"][b, n:] = torch.inf
        else:
            poison_(inputs[case][b, n:])
    compare(impl, inputs, want=want, atol=1e-5, dtype=torch.float32)


@check("3.1")
def test_slices(impl, seed):
    """Every argument is a slice of a wider tensor. Its strides say where its rows are."""
    inputs = {name: in_wider_memory(x) for name, x in chunk_inputs(seed).items()}
    compare(impl, inputs, want=one_by_one(**inputs), atol=1e-5, dtype=torch.float32)


@check("3.1")
def test_no_loop_over_sequences(impl, seed):
    few, many = (chunk_inputs(seed, lengths=(5,) * count) for count in (2, 8))
    assert_same_work(
        "for four times as many sequences", lambda: call(impl, few), lambda: call(impl, many)
    )


@check("3.1")
def test_keeps_bfloat16(impl, seed):
    """What models run in. The tolerance is that of its 8 bits."""
    inputs = chunk_inputs(seed)
    for name in ("q", "k_cache", "v_cache"):
        inputs[name] = inputs[name].bfloat16()
    compare(impl, inputs, want=one_by_one(**inputs), atol=6e-2, dtype=torch.bfloat16)


@check("3.1")
def test_example(impl, seed):
    v = torch.tensor([3, 6, 9, float("nan")], dtype=torch.float64).view(1, 4, 1, 1)
    inputs = dict(
        q=torch.zeros(1, 2, 1, 1, dtype=torch.float64),
        k_cache=torch.zeros_like(v),
        v_cache=v,
        context_lens=torch.tensor([3]),
        softmax_scale=1.0,
    )
    want = torch.tensor([4.5, 6.0], dtype=torch.float64).view(1, 2, 1, 1)
    compare(impl, inputs, want=want, atol=1e-9)
