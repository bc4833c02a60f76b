"""Proves that attention in splits equals attention in one piece, and that splits of a fixed size
keep a sequence's bits.
"""

import dataclasses
import itertools
import random
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l10_flash_decoding import mla, naive, optimized
from lessons.l10_flash_decoding.lab import occupancy
from lessons.l10_flash_decoding.lab import pictures as picture
from lessons.l10_flash_decoding.lab.occupancy import (
    Decode,
    busy_share,
    predicted_s,
    slots,
    split_pieces,
)
from lessons.l10_flash_decoding.lab.specs import KERNELS
from lessons.l10_flash_decoding.mla import mla_flash_decode, mla_split_kernel
from lessons.l10_flash_decoding.optimized import (
    BLOCK_S,
    combine,
    combine_kernel,
    flash_decode,
    split_decode_kernel,
)
from lessons.l10_flash_decoding.splits import choose_num_splits, split_bounds, wave_efficiency
from lessons.toolbox.draw.plotting import overlapping_texts, texts_outside
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.proof.numerics import (
    ATTENTION_INPUTS,
    NotEquivalent,
    attention_inputs,
    floor_for,
    poison_,
    poisoned,
    poisoned_empty,
    prove,
)
from lessons.toolbox.proof.pages import pages
from lessons.toolbox.proof.refusals import KINDS, assert_refused
from lessons.toolbox.proof.traps import guarded_empty

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter


def by_slicing(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None):
    """The definition of flash_decode: lesson 2's attention on the rows in use, one sequence at a
    time.
    """
    return torch.stack(
        [
            attention(q[b : b + 1], k_cache[b, :n], v_cache[b, :n], softmax_scale, window=window)[0]
            for b, n in enumerate(context_lens.tolist())
        ]
    )


def decode_inputs(
    name, lengths, capacity, num_heads, num_kv_heads, head_dim, seed, dtype=torch.float32
):
    """q: [B, Hq, D], caches: [B, capacity, Hkv, D] whose unused rows are NaN, context_lens: [B]
    int32.
    """
    q = torch.empty(len(lengths), num_heads, head_dim, dtype=dtype, device=DEVICE)
    k_cache, v_cache = (
        poisoned((len(lengths), capacity, num_kv_heads, head_dim), dtype, DEVICE) for _ in range(2)
    )
    for b, n in enumerate(lengths):
        one, k, v = attention_inputs(
            name, 1, max(n, 1), num_heads, num_kv_heads, head_dim, dtype=dtype, seed=seed + b
        )
        q[b], k_cache[b, :n], v_cache[b, :n] = one[0], k[:n], v[:n]
    return q, k_cache, v_cache, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def in_splits(*inputs, num_splits, split_size=0, block_n=16, **options):
    """flash_decode with small tiles, so that short sequences have several."""
    partials = optimized.split_decode(
        *inputs, num_splits=num_splits, split_size=split_size, block_n=block_n, **options
    )
    return combine(*partials, inputs[0].dtype)[0]


# ----------------------------------------------------------- where splits begin, how many to launch


@pytest.mark.parametrize("block_n", [1, 16])
def test_every_key_lies_in_one_split(block_n):
    for _ in range(300):
        length, num_splits, split_size = (
            random.randint(0, 400),
            random.randint(1, 40),
            random.choice((0, 1, 7, 64)),
        )
        window = random.choice((None, 1, 50, 1000))
        bounds = split_bounds(length, num_splits, split_size, window, block_n)
        first = 0 if window is None else max(length - window, 0)
        assert len(bounds) == num_splits
        assert [key for start, end in bounds for key in range(start, end)] == list(
            range(first, length)
        )
        sizes = [end - start for start, end in bounds if end > start]
        # all the same, the last one shorter
        assert not sizes or (len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0])
        if split_size * num_splits >= length - first:
            assert all(size == split_size for size in sizes[:-1])
        else:
            assert len(sizes) < 2 or sizes[0] % block_n == 0


def test_bounds_on_paper():
    assert split_bounds(10, 3) == [(0, 4), (4, 8), (8, 10)]
    assert split_bounds(10, 3, block_n=4) == [(0, 4), (4, 8), (8, 10)]
    assert split_bounds(10, 4, split_size=5, block_n=4) == [(0, 5), (5, 10), (10, 10), (10, 10)]
    # two splits of 2 would lose 6 keys
    assert split_bounds(10, 2, split_size=2) == [(0, 5), (5, 10)]
    assert split_bounds(10, 2, window=4) == [(6, 8), (8, 10)]
    assert split_bounds(0, 2) == [(0, 0), (0, 0)]


def test_number_of_splits():
    # FlashAttention's own example: 0.89 beats the 0.67 of three
    assert choose_num_splits(48, 1000, 108) == 2
    # almost full from 0.8 on
    assert choose_num_splits(87, 1000, 108) == 1 and choose_num_splits(86, 1000, 108) > 1
    assert choose_num_splits(8, 4, 264) == 4  # never more splits than tiles
    assert choose_num_splits(1, 10_000, 264) <= 128
    # 5 tiles in 4 splits are 2 each, as in 3, and one would be empty
    assert choose_num_splits(1, 5, 4) == 3
    assert choose_num_splits(8, 0, 264) == 1  # nothing to split
    for _ in range(200):
        programs, tiles, machine = (
            random.randint(1, 300),
            random.randint(1, 2000),
            random.choice((40, 132, 264)),
        )
        chosen = choose_num_splits(programs, tiles, machine)
        assert 1 <= chosen <= max(1, min(128, machine, tiles))
        assert all(start < end for start, end in split_bounds(64 * tiles, chosen, block_n=64))
        assert chosen == 1 or wave_efficiency(programs * chosen, machine) >= wave_efficiency(
            programs, machine
        )


# ---------------------------------------------------------------- the kernels


@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim, dtype",
    [
        (2, 2, 64, torch.float32),
        (6, 1, 16, torch.float32),
        (4, 2, 80, torch.float32),
        (2, 1, 96, torch.bfloat16),
        (8, 1, 128, torch.float16),
        (3, 1, 192, torch.bfloat16),
        (2, 1, 256, torch.float32),
    ],
)
@pytest.mark.sample(3)
def test_split_decode_kernel(num_heads, num_kv_heads, head_dim, dtype, seed, proof):
    """A ragged batch with an empty sequence, lengths around tiles and splits; with and without a
    window.
    """
    inputs = decode_inputs(
        "normal", [0, 17, 50], 50, num_heads, num_kv_heads, head_dim, seed, dtype
    )
    for window in (None, 20):
        proof.record(
            split_decode_kernel,
            prove(
                partial(in_splits, num_splits=3, window=window),
                partial(by_slicing, window=window),
                inputs,
            ),
        )


@pytest.mark.parametrize("name", ATTENTION_INPUTS)
@pytest.mark.sample(3)
def test_hard_inputs(name, seed, proof):
    inputs = decode_inputs(name, [2, 40, 65], 70, 4, 2, 16, seed)
    floor = floor_for(torch.float32, name)
    for num_splits in (1, 4):
        proof.record(
            split_decode_kernel,
            prove(
                partial(in_splits, num_splits=num_splits, softmax_scale=0.4),
                partial(by_slicing, softmax_scale=0.4),
                inputs,
                floor=floor,
            ),
        )


@pytest.mark.parametrize(
    "num_splits, split_size", [(1, 0), (2, 0), (5, 0), (5, 16), (7, 10), (2, 1)]
)
@pytest.mark.sample(3)
def test_any_splits_give_the_same(num_splits, split_size, seed, proof):
    """Lengths at which a split ends, begins, or stays empty: k·size − 1, k·size, k·size + 1, for
    sizes of 16 and 32.
    """
    inputs = decode_inputs("ascending", [1, 16, 17, 32, 33, 64, 65], 70, 2, 1, 16, seed)
    proof.record(
        split_decode_kernel,
        prove(partial(in_splits, num_splits=num_splits, split_size=split_size), by_slicing, inputs),
    )


def test_many_splits_and_one_agree(seed):
    """More splits than a step of the combine kernel merges, most of them empty in one sequence and
    none in the other.
    """
    inputs = decode_inputs("normal", [20, 300], 300, 2, 1, 16, seed)
    one = in_splits(*inputs, num_splits=1)
    torch.testing.assert_close(in_splits(*inputs, num_splits=19), one, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(num_splits=3),
        dict(split_size=16),
        dict(window=20),
        dict(max_context_len=66),
        dict(num_splits=2, window=3),
        dict(split_size=16, window=33),
    ],
)
@pytest.mark.sample(2)
def test_the_wrapper(options, seed, proof):
    """As it chooses tiles and splits itself, against the naive version with the same splits and
    against the definition.
    """
    inputs = decode_inputs("normal", [0, 5, 66], 90, 6, 2, 16, seed)
    plain = {name: value for name, value in options.items() if name == "window"}
    proof.record(
        split_decode_kernel,
        prove(partial(flash_decode, **options), partial(by_slicing, **plain), inputs),
    )
    options.pop("max_context_len", None)
    prove(partial(flash_decode, **options), partial(naive.flash_decode, **options), inputs)


def test_a_length_beyond_the_announced_one_is_still_right(seed):
    """max_context_len only sizes the grid: understated, splits grow, and no key is lost."""
    inputs = decode_inputs("normal", [3, 66], 90, 2, 1, 16, seed)
    for options in (dict(), dict(split_size=16)):
        out = flash_decode(*inputs, max_context_len=20, **options)
        torch.testing.assert_close(out, by_slicing(*inputs), atol=1e-5, rtol=1e-5)


def test_probes_with_known_answers(seed):
    q, k_cache, v_cache, lens = decode_inputs("normal", [7, 33], 40, 4, 2, 16, seed)
    decode = partial(in_splits, num_splits=3)
    torch.testing.assert_close(
        decode(q, k_cache, torch.ones_like(v_cache), lens), torch.ones_like(q), atol=1e-6, rtol=0
    )
    mean = torch.stack(
        [v_cache[b, :n].mean(0) for b, n in enumerate(lens.tolist())]
    ).repeat_interleave(2, dim=1)
    torch.testing.assert_close(
        decode(q, torch.zeros_like(k_cache), v_cache, lens), mean, atol=1e-6, rtol=1e-5
    )
    q[1, 2] = float("nan")
    for splits in (1, 3):
        assert flash_decode(q, k_cache, v_cache, lens, num_splits=splits).isnan().any(
            -1
        ).nonzero().tolist() == [[1, 2]]
    # in the last split, and seen by the two heads that read KV head 0
    q[1, 2], v_cache[0, 6, 0, 3] = 0, float("nan")
    assert decode(q, k_cache, v_cache, lens).isnan().nonzero().tolist() == [[0, 0, 3], [0, 1, 3]]


def test_lse_is_the_natural_logarithm(seed):
    q, k_cache, v_cache, lens = decode_inputs("large_logits", [0, 7, 60], 60, 4, 2, 16, seed)
    _, lse = combine(*optimized.split_decode(q, k_cache, v_cache, lens, num_splits=3, block_n=16))
    for b, n in enumerate(lens.tolist()):
        keys = k_cache[b, :n].repeat_interleave(2, dim=1).double()
        want = torch.logsumexp(torch.einsum("hd,nhd->hn", q[b].double(), keys) * 16**-0.5, -1)
        assert ((lse[b] - want).abs() <= 1e-5 * want.abs().clamp(min=1)).all() or (
            n == 0 and (lse[b] == -torch.inf).all()
        )


@pytest.mark.parametrize("num_splits, split_size, window", [(4, 0, None), (3, 0, 40), (5, 20, 70)])
def test_each_split_finds_what_its_keys_hold(num_splits, split_size, window, seed, proof):
    """Not only the sum is right: the bounds on the GPU are split_bounds, so no split is empty while
    another has more to do.
    """
    inputs = decode_inputs("normal", [0, 30, 90], 96, 4, 2, 16, seed)
    cut = dict(num_splits=num_splits, split_size=split_size, window=window, block_n=16)
    proof.record(
        split_decode_kernel,
        prove(partial(optimized.split_decode, **cut), partial(naive.split_decode, **cut), inputs),
    )


def test_nothing_is_written_beside_the_results(seed):
    """The rows that pad a group to 16 belong to nobody."""
    q, k_cache, v_cache, lens = decode_inputs("normal", [20, 33], 64, 6, 2, 20, seed)
    latents = k_cache[..., :16].flatten(2).repeat(1, 1, 2)[..., :48]
    queries = q[:, :5, :16].repeat(1, 1, 3)
    with guarded_empty() as checks:
        results = [flash_decode(q, k_cache, v_cache, lens, num_splits=splits) for splits in (1, 3)]
        results += mla_flash_decode(queries, latents, lens, **LATENT, num_splits=2)
    assert len(checks) == 2 + 4 + 4 and all(x.isfinite().all() for x in results)


def test_no_row_of_the_workspace_stays_unwritten(seed):
    """An empty split says so: 0 and −inf. What the workspace held before, here NaN, reaches
    nobody.
    """
    inputs = decode_inputs("normal", [0, 1, 20], 64, 4, 2, 16, seed)
    with poisoned_empty():
        partial_out, partial_lse = optimized.split_decode(*inputs, num_splits=5, block_n=16)
    assert not partial_out.isnan().any() and not partial_lse.isnan().any()
    empty = partial_lse == -torch.inf
    assert empty.sum(-1).tolist() == [[5] * 4, [4] * 4, [3] * 4] and (partial_out[empty] == 0).all()


# ---------------------------------------------------------------- the combine kernel alone


def partials(num_splits, empty, seed, head_dim=16):
    """partial_out: [2, 2, S, D] and partial_lse: [2, 2, S]; `empty` of each row's splits, at
    random, −inf with NaN beside it.
    """
    g = torch.Generator().manual_seed(seed)
    out, lse = (
        torch.randn(2, 2, num_splits, head_dim, generator=g),
        20 * torch.randn(2, 2, num_splits, generator=g),
    )
    order = torch.rand(2, 2, num_splits, generator=g).argsort(-1)
    lse[order < empty] = -torch.inf
    return poison_where(out, lse).to(DEVICE), lse.to(DEVICE)


def poison_where(out, lse):
    out[lse == -torch.inf] = poison_(torch.empty(1)).item()
    return out


def by_softmax(partial_out, partial_lse):
    """The definition of combine: weights that are a softmax over the splits."""
    seen = partial_lse > -torch.inf
    weights = torch.softmax(partial_lse.double(), -1).nan_to_num(0.0)
    out = torch.einsum(
        "bhs,bhsd->bhd", weights, torch.where(seen[..., None], partial_out.double(), 0.0)
    )
    return out.to(partial_out.dtype), torch.logsumexp(partial_lse.double(), -1).to(
        partial_out.dtype
    )


@pytest.mark.parametrize("empty", ["none", "some", "all but one", "all"])
def test_combine_kernel(empty, seed, proof):
    for num_splits, version in zip(
        (1, 2, 15, BLOCK_S, BLOCK_S + 1, 33, 133), itertools.cycle((naive.combine, by_softmax))
    ):
        count = {
            "none": 0,
            "some": num_splits // 2,
            "all but one": num_splits - 1,
            "all": num_splits,
        }[empty]
        proof.record(
            combine_kernel, prove(combine, version, partials(num_splits, count, seed, head_dim=20))
        )


def test_one_split_combined_is_itself(seed):
    """So the wrapper may leave the combine kernel out, and empty splits change nothing. Up to 2
    units in the last place, within which a GPU divides by 1 (PTX, div.full).
    """
    out, lse = partials(1, 0, seed)
    close = partial(torch.testing.assert_close, rtol=2**-22, atol=0)
    close(combine(out, lse)[0], out[:, :, 0])
    close(combine(out, lse)[1], lse[:, :, 0], atol=2**-22)
    for more in (1, 15, 16, 100):
        nothing = torch.full((2, 2, more), -torch.inf, device=DEVICE)
        padded = (
            torch.cat([out, torch.zeros(2, 2, more, 16, device=DEVICE)], dim=2),
            torch.cat([lse, nothing], dim=2),
        )
        close(combine(*padded)[0], out[:, :, 0])


def test_nan_is_not_hidden(seed):
    out, lse = partials(20, 5, seed)
    lse[1, 1, 3] = float("nan")
    assert combine(out, lse)[0].isnan().any(-1).nonzero().tolist() == [[1, 1]]
    assert combine(out[1:, 1:, 3:4].contiguous(), lse[1:, 1:, 3:4].contiguous())[0].isnan().all()


# ---------------------------------------------------------------- determinism and the batch


def test_the_same_call_gives_the_same_bits(seed):
    inputs = decode_inputs("normal", [9, 40], 50, 2, 1, 16, seed)
    first = flash_decode(*inputs, num_splits=4)
    for _ in range(100 if DEVICE.type == "cuda" else 5):
        assert torch.equal(flash_decode(*inputs, num_splits=4), first)


@pytest.mark.parametrize("window", [None, 40])
def test_fixed_split_size_is_batch_invariant(window, seed):
    """Alone, with shorter and longer neighbours, in a shorter cache: the same bits. 10 keys are no
    whole tile.
    """
    size = random.choice((10, 16))
    q, k_cache, v_cache, lens = decode_inputs("normal", [50, 3, 64, 100], 100, 2, 1, 16, seed)
    together = flash_decode(q, k_cache, v_cache, lens, window=window, split_size=size)
    for k in (1, 3):
        assert torch.equal(
            together[:k],
            flash_decode(q[:k], k_cache[:k], v_cache[:k], lens[:k], window=window, split_size=size),
        )
    alone = flash_decode(
        q[:1],
        k_cache[:1, :50],
        v_cache[:1, :50],
        lens[:1],
        window=window,
        split_size=size,
        max_context_len=50,
    )
    assert torch.equal(together[:1], alone)
    out, lse = optimized.split_decode(
        q, k_cache, v_cache, lens, window=window, num_splits=10, split_size=size
    )
    assert torch.equal(together, combine(out, lse)[0])
    lens = lens.clamp(max=window or 100)
    # and it really was in splits
    assert (lse != -torch.inf).sum(-1)[:, 0].tolist() == [-(-n // size) for n in lens.tolist()]


def test_no_tile_depends_on_the_batch(monkeypatch):
    """What NumPy's sums would not show: launched with other tiles, a compiled kernel adds in
    another order.
    """
    launched = {"split_decode_kernel": [], "combine_kernel": []}

    class Recorder:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **tiles: launched[self.name].append(tiles)

    for name in launched:
        monkeypatch.setattr(optimized, name, Recorder(name))
    for batch, capacity in ((1, 40), (3, 40), (3, 9000)):
        caches = [torch.zeros(batch, capacity, 2, 16) for _ in range(2)]
        flash_decode(
            torch.zeros(batch, 6, 16), *caches, torch.ones(batch, dtype=torch.int32), split_size=16
        )
    assert all(len(tiles) == 3 and tiles[0] == tiles[1] == tiles[2] for tiles in launched.values())


def test_the_number_of_splits_is_not(seed, monkeypatch):
    """What fixed sizes are for: by the heuristic, a sequence's neighbours change how it is cut, and
    so its bits.
    """
    # four slots: full with four sequences, empty with one
    monkeypatch.setattr(optimized, "sms_of", lambda device: 2)
    q, k_cache, v_cache, lens = decode_inputs("normal", [250] * 4, 250, 2, 1, 16, seed)
    together, alone = (
        flash_decode(q, k_cache, v_cache, lens),
        flash_decode(q[:1], k_cache[:1], v_cache[:1], lens[:1]),
    )
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-5)
    assert not torch.equal(together[:1], alone)


# ---------------------------------------------------------------- wrong versions


def slipped_decode(q, k_cache, v_cache, lens, slip):
    """Decoding in 3 splits with one slip. q: [B, Hq, D] -> [B, Hq, D]."""
    window = 40 if slip == "window per split" else None
    rows = []
    for one, k, v, n in zip(q, k_cache, v_cache, lens.tolist()):
        if slip == "heads packed across KV heads":
            one = one.view(-1, k.shape[1], one.shape[-1]).transpose(0, 1).reshape(one.shape)
        cut = len(k) if slip == "splits from the capacity" else n
        bounds = split_bounds(cut, 3, block_n=16)
        if slip == "a key dropped":
            bounds = [
                (start, max(start, end - 1)) if end < cut else (start, end) for start, end in bounds
            ]
        if slip == "a key doubled":
            bounds = [(max(start - 1, 0), end) for start, end in bounds]
        if slip == "last key lost":
            bounds = [(start, min(end, n - 1)) for start, end in bounds]
        if slip == "window per split":
            bounds = [(max(start, end - window), end) for start, end in bounds]
        if slip == "splits from the capacity":  # reads on behind the rows in use
            k, v = (torch.where(x.isnan(), 0.0, x) for x in (k, v))
        parts = [
            naive.attend_to_split(one, k[start:end], v[start:end], 16**-0.5)
            for start, end in bounds
        ]
        if slip == "l without m":
            rows.append(sum(p.acc for p in parts) / sum(p.l for p in parts)[:, None])
            continue
        out, lse = (torch.stack(x, 1) for x in zip(*(naive.finish(part) for part in parts)))
        if slip == "averaged":
            rows.append(out.mean(1))
        elif slip == "empty split counted":
            rows.append(
                (out * torch.exp(lse.clamp(min=0))[..., None]).sum(1)
                / torch.exp(lse.clamp(min=0)).sum(1, keepdim=True)
            )
        elif slip == "base 2 as base e":
            rows.append(naive.combine(out, lse / 0.6931471805599453)[0])
        elif slip == "unwritten rows read":
            rows.append((poison_where(out, lse) * torch.softmax(lse, -1)[..., None]).sum(1))
        else:
            rows.append(naive.combine(out, lse)[0])
    return torch.stack(rows)


@pytest.mark.parametrize(
    "slip",
    [
        "averaged",
        "empty split counted",
        "l without m",
        "a key dropped",
        "a key doubled",
        "last key lost",
        "splits from the capacity",
        "base 2 as base e",
        "window per split",
        "unwritten rows read",
        "heads packed across KV heads",
    ],
)
def test_a_wrong_split_is_rejected(slip, seed):
    window = 40 if slip == "window per split" else None
    inputs = decode_inputs("normal", [17, 90, 64], 96, 4, 2, 16, seed)
    prove(partial(slipped_decode, slip="none"), by_slicing, inputs)
    with pytest.raises(NotEquivalent):
        prove(partial(slipped_decode, slip=slip), partial(by_slicing, window=window), inputs)


# ---------------------------------------------------------------- MLA

LATENT = dict(softmax_scale=0.2, kv_lora_rank=32, tiles=mla.Tiles(16, 16, 4, 1))


def latent_by_slicing(q, kv_cache, lens):
    """One KV head, whose value is the first 32 coordinates of its key."""
    keys, values = kv_cache[:, :, None], kv_cache[:, :, None, :32]
    parts = [
        naive.attend_to_split(one, k[:n], v[:n], 0.2)
        for one, k, v, n in zip(q, keys, values, lens.tolist())
    ]
    out, lse = (torch.stack(x) for x in zip(*map(naive.finish, parts)))
    return out.to(q.dtype), lse


@pytest.mark.parametrize(
    "num_heads, dtype, options",
    [
        (5, torch.float32, dict()),
        (20, torch.float32, dict(num_splits=3)),
        (16, torch.bfloat16, dict(num_splits=1)),
        (16, torch.bfloat16, dict(split_size=16)),
        (5, torch.float32, dict(split_size=10)),
    ],
)
@pytest.mark.sample(2)
def test_mla_split_kernel(num_heads, dtype, options, seed, proof):
    q, _, _, lens = decode_inputs("normal", [0, 16, 50], 60, num_heads, 1, 48, seed, dtype)
    kv_cache = decode_inputs("normal", lens.tolist(), 60, num_heads, 1, 48, seed + 9, dtype)[1][
        :, :, 0
    ]
    proof.record(
        mla_split_kernel,
        prove(
            lambda *x: mla_flash_decode(*x, **LATENT, **options),
            latent_by_slicing,
            (q, kv_cache, lens),
        ),
    )


def test_mla_with_fixed_split_size_is_batch_invariant(seed):
    q, _, _, lens = decode_inputs("normal", [50, 3, 60], 60, 5, 1, 48, seed)
    kv_cache = decode_inputs("normal", [50, 3, 60], 60, 5, 1, 48, seed + 9)[1][:, :, 0]
    together = mla_flash_decode(q, kv_cache, lens, **LATENT, split_size=10)[0]
    assert torch.equal(
        together[:1],
        mla_flash_decode(q[:1], kv_cache[:1, :50], lens[:1], **LATENT, split_size=10)[0],
    )


# ----------------------------------------------------------- the model of the machine, the pictures


def test_the_memory_is_never_faster_than_its_bandwidth():
    for work in (Decode(1000), Decode(65536), Decode(4096, batch=40), Decode(300, num_kv_heads=1)):
        for splits in (1, 3, 36):
            pieces = split_pieces(work, splits)
            end = max(piece.end_s for piece in pieces)
            assert end >= work.kv_bytes / CHIPS["h200"].memory_bytes_per_s * (1 - 1e-9)
            assert len(pieces) == work.batch * work.num_kv_heads * splits
            for slot in {piece.slot for piece in pieces}:  # one program at a time in a slot
                times = sorted(
                    (piece.start_s, piece.end_s) for piece in pieces if piece.slot == slot
                )
                assert all(a[1] <= b[0] for a, b in itertools.pairwise(times)) and slot < slots(
                    CHIPS["h200"]
                )
            assert 0 < busy_share(pieces, slots(CHIPS["h200"])) <= 1


def test_a_wave_model_by_hand():
    """8 programs alone are bound by what each has on its way; 264 by the memory; a second wave of
    24 again by each.
    """
    work, rate = Decode(65536), occupancy.IN_FLIGHT_BYTES / occupancy.LATENCY_S
    assert predicted_s(work, 1) == pytest.approx(work.kv_bytes / 8 / rate)
    pieces = split_pieces(work, 36)
    assert sum(piece.start_s > 0 for piece in pieces) == 24
    one = 29 * 64 * work.key_bytes  # 1024 tiles of 64 keys in 36 splits: 29 tiles each
    assert max(p.end_s for p in pieces) == pytest.approx(
        264 * one / CHIPS["h200"].memory_bytes_per_s + one / rate, rel=0.02
    )


def test_the_readme_quotes_the_model():
    text = pages(Path(__file__).parent)
    text = text[: text.index("## The prediction and a measurement")]  # then come measured ones
    rows = [
        [float(cell) for cell in row.split("|")[1:-1]]
        for row in re.findall(r"^\| \d{4,}.*$", text, re.MULTILINE)
    ]
    assert len(rows) == 4
    for context, num_splits, *microseconds in rows:
        work = Decode(int(context))
        model = [
            predicted_s(work, 1),
            predicted_s(work),
            predicted_s(work, split_size=512),
            work.kv_bytes / 4.8e12,
        ]
        assert work.num_splits() == num_splits
        assert microseconds == [round(1e6 * s, 1 if s < 1e-4 else None) for s in model]
    assert (
        "stops splitting at 27 sequences" in text
        and Decode(8192, 27).num_splits() == 1 < Decode(8192, 26).num_splits()
    )
    assert "`1.6 %`" in text and 2 * Decode(65536).partial_bytes(128) / Decode(
        65536
    ).kv_bytes == pytest.approx(0.016, rel=0.02)


@pytest.mark.parametrize("draw", [picture.draw, picture.draw_predicted, picture.draw_waves])
@pytest.mark.sample(4, of="pictures")
def test_the_pictures(draw):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


# ---------------------------------------------------------------- what the compiler says


@pytest.mark.compiler
def test_the_compiler_spills_nothing_and_uses_matrix_units():
    for report in check_all(KERNELS):
        if not report.was_run:
            pytest.skip(report.error)
        # its 128 registers a thread are all that it may have; Triton 3.6 spills 12 bytes there
        spilled = 16 if report.name == "mla_split_bf16_128_sm89" else 0
        assert report.spill_bytes <= spilled and report.loads_128bit, report
        assert dataclasses.replace(report, spill_bytes=0).fits, report
        matrix = "bf16" in report.name and "combine" not in report.name and report.chip >= 80
        assert bool(report.matrix_instruction) == matrix, report


def test_twice_the_keys_on_hopper_alone():
    """Of many heads, in 16 bits, where 216 KiB are there for a program."""
    wide = {chip: mla.split_tiles(128, 2, 227 * 1024, chip) for chip in (None, 80, 90, 100)}
    assert [tiles.block_n for tiles in wide.values()] == [32, 32, 64, 32]
    for heads, itemsize in ((16, 2), (128, 4)):
        assert mla.split_tiles(heads, itemsize, 227 * 1024, 90) == mla.tiles_for(heads, itemsize)


@pytest.mark.compiler
@pytest.mark.sample(1, of="compiler")
def test_twice_the_keys_take_two_more_products():
    """What `split_tiles` and README.md say of 128 heads on compute capability 9.0: 36 products of
    16 values for the scores of each half of a tile, because both warpgroups compute all of them,
    and one for each 16 keys of the output.
    """
    (wide,) = [spec for spec in KERNELS if spec.name == "mla_split_bf16_128_sm90"]
    assert wide.constexprs["BLOCK_N"] == 64
    half = dataclasses.replace(wide, constexprs=wide.constexprs | {"BLOCK_N": 32})
    reports = check_all([wide, half])
    if not all(report.was_run for report in reports):
        pytest.skip(reports[0].error)
    assert [report.census["HGMMA"] for report in reports] == [2 * 36 + 4, 2 * 36 + 2]
    assert [report.shared_bytes for report in reports] == [221184, 147456]
    assert not any(report.spill_bytes or report.serialized_wgmma for report in reports)


@pytest.mark.compiler
def test_two_programs_of_a_split_fit_beside_each_other():
    """What PROGRAMS_PER_SM counts on, and what README.md says of registers and shared memory."""
    splits = [spec for spec in KERNELS if spec.name.startswith("split_")]
    reports = [report for report in check_all(splits) if report.chip in (80, 90, 100)]
    for report in reports:
        if not report.was_run:
            pytest.skip(report.error)
        # each block takes 1 KiB more
        assert 2 * (report.shared_bytes + 1024) <= report.shared_limit_bytes + 1024, report
    (llama,) = [r for r in reports if r.name.startswith("split_bf16_4x128") and r.chip == 90]
    # two programs of 4 warps leave 256 for a thread; how many are taken moves with the compiler
    assert abs(llama.registers - 139) <= 40 and round(llama.shared_bytes / 1024) == 70, llama


# ---------------------------------------------------------------- bad input


def arguments(**changes):
    return (
        dict(
            q=torch.zeros(2, 4, 8),
            k_cache=torch.zeros(2, 9, 2, 8),
            v_cache=torch.zeros(2, 9, 2, 8),
            context_lens=torch.ones(2, dtype=torch.int32),
        )
        | changes
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(num_splits=2, split_size=16),
            "num_splits, split_size: got 2 and 16; accepted: one of the two",
        ),
        (dict(num_splits=0), "num_splits: got 0; accepted: None, or 1 to 65535"),
        (dict(num_splits=65536), "num_splits: got 65536"),
        (dict(split_size=0), "split_size: got 0; accepted: None, or 1 or more keys"),
        (
            dict(max_context_len=10),
            "max_context_len: got 10; accepted: None, or 0 to 9, the capacity",
        ),
        (dict(window=0), "window: got 0; accepted: None, or 1 or more"),
        (dict(q=torch.zeros(2, 3, 8)), "3 query heads and 2 KV heads"),
        (
            dict(
                q=torch.zeros(2, 4, 300),
                k_cache=torch.zeros(2, 9, 2, 300),
                v_cache=torch.zeros(2, 9, 2, 300),
            ),
            "got head_dim 300",
        ),
    ],
)
def test_flash_decode_refuses(change, message):
    with pytest.raises(ValueError, match=message) as error:
        flash_decode(**arguments(**change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "context_lens"])
def test_flash_decode_refuses_every_kind_of_wrong_tensor(name):
    assert_refused(
        flash_decode,
        arguments(),
        name,
        KINDS if name != "context_lens" else ("dtype", "device", "shape"),
    )


@pytest.mark.parametrize("name", ["q", "kv_cache", "context_lens"])
def test_mla_refuses_every_kind_of_wrong_tensor(name):
    given = dict(
        q=torch.zeros(2, 4, 48),
        kv_cache=torch.zeros(2, 9, 48),
        context_lens=torch.ones(2, dtype=torch.int32),
    )
    assert_refused(
        partial(mla_flash_decode, softmax_scale=1.0, kv_lora_rank=32),
        given,
        name,
        KINDS if name != "context_lens" else ("dtype", "device", "shape"),
    )


@pytest.mark.parametrize("name", ["partial_out", "partial_lse"])
def test_combine_refuses_every_kind_of_wrong_tensor(name):
    given = dict(partial_out=torch.zeros(2, 4, 3, 8), partial_lse=torch.zeros(2, 4, 3))
    # any head_dim is merged
    kinds = [kind for kind in KINDS if (name, kind) != ("partial_out", "shape")]
    assert_refused(combine, given, name, kinds)
    with pytest.raises(ValueError, match="partial_out, partial_lse: got"):
        combine(given["partial_out"][:, :3], given["partial_lse"])
    with pytest.raises(ValueError, match="S and D at least 1"):
        combine(torch.zeros(2, 4, 0, 8), torch.zeros(2, 4, 0))


def test_no_sequence_is_no_work():
    empty = arguments(
        q=torch.zeros(0, 4, 8),
        k_cache=torch.zeros(0, 9, 2, 8),
        v_cache=torch.zeros(0, 9, 2, 8),
        context_lens=torch.zeros(0, dtype=torch.int32),
    )
    assert flash_decode(**empty).shape == (0, 4, 8)
