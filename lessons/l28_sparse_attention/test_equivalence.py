"""Proves that scores over pages, the exact top k and attention over chosen rows equal the plain
versions, ties and faults included, and that rows which were not chosen are never read.
"""

import math

import pytest
import torch

from lessons.l12_paged_kv.kernels.latents import paged_mla_decode
from lessons.l28_sparse_attention import naive
from lessons.l28_sparse_attention import top_k as selecting
from lessons.l28_sparse_attention.index_scores import index_kernel, index_scores
from lessons.l28_sparse_attention.lab.testing import (
    DEVICE,
    SMALL_TILES,
    clean,
    hard_rows,
    index_inputs,
    paged,
    some_keys,
)
from lessons.l28_sparse_attention.optimized import (
    choose_and_attend,
    one_token_pages,
    sparse_decode,
    sparse_mla,
    sparse_mla_kernel,
)
from lessons.l28_sparse_attention.top_k import top_k, top_k_kernel
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.proof.numerics import assert_same_bits, prove
from lessons.toolbox.proof.traps import guarded_empty

BFLOAT16 = dict(dtype=torch.bfloat16)

# ---------------------------------------------------------------- the indexer

# lengths, more arguments of `paged`
INDEXED = {
    # eight of them, because the heads of a single score may cancel to next to nothing
    "one key": ([1] * 8, {}),
    "ends of pages": ([3, 4, 5], {}),
    "more than a tile": ([33, 64, 65], dict(block_size=16)),
    "pages of one token": ([5, 2], dict(block_size=1)),
    "several queries of a sequence": ([9, 7], dict(new=[4, 7])),
    "a sequence without queries": ([6, 5], dict(new=[0, 2])),
    "more heads than a tile": ([21], dict(index_heads=19)),
    "bfloat16": ([19, 7], BFLOAT16),
    "FP8": ([33, 5, 8], dict(fp8=True)),
    "FP8, queries of 16 bits": ([130, 5], dict(fp8=True, block_size=16, **BFLOAT16)),
    "DeepSeek's sizes": ([70], dict(fp8=True, block_size=64, index_heads=64, index_dim=128)),
}


@pytest.mark.parametrize("name", INDEXED)
def test_index_scores(name, seed, proof):
    lengths, options = INDEXED[name]
    case = paged(lengths, **options)
    inputs = index_inputs(case, max(lengths) + 3)
    proof.record(index_kernel, prove(index_scores, naive.paged_index_scores, inputs))


def test_a_fault_is_not_hidden_by_relu(seed):
    """NaN in a query or a key is NaN in the scores, as in PyTorch's relu."""
    case = paged([9, 6])
    case.q_index[0, 2, 1] = math.nan
    block = case.block_table[1, 0]
    case.keys[block, 2] = math.nan
    inputs = index_inputs(case, 9)
    got, want = index_scores(*inputs), naive.paged_index_scores(*inputs)
    assert got[0].isnan().all() and got[1].isnan().tolist() == [False, False, True] + 6 * [False]
    assert torch.equal(got.isnan(), want.isnan())


def test_scores_without_the_pages_are_the_same(seed):
    """One sequence in order, beside `index_scores` of the whole text."""
    case = paged([13], new=[13])
    length, table = 13, case.block_table[0, :4].long()
    k = case.keys[table].flatten(0, 1)[:length]
    want = naive.index_scores(case.q_index, case.weights, k, case.positions)
    got = naive.paged_index_scores(*index_inputs(case, length))
    assert torch.allclose(got, want, atol=1e-5)
    assert want.isneginf().sum() == length * (length - 1) / 2


# ---------------------------------------------------------------- the top k


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 32 scores, so that short rows have many."""
    monkeypatch.setattr(selecting, "BLOCK", 32)


@pytest.mark.parametrize("width, k", [(1, 1), (31, 4), (70, 8), (96, 95), (70, 70), (33, 100)])
def test_top_k_is_exact(width, k, seed, small_tiles, proof):
    """Every kind of row, ties included: exactly the plain version's positions, in order."""
    scores = torch.stack(list(hard_rows(width).values()))
    proof.record(top_k_kernel, prove(top_k, naive.top_k, [scores, k]))


def test_top_k_in_whole_tiles(seed, proof):
    """As it is launched."""
    scores = torch.stack([torch.randn(2500, device=DEVICE), torch.zeros(2500, device=DEVICE)])
    proof.record(top_k_kernel, prove(top_k, naive.top_k, [scores, 600]))


def test_the_rule_for_ties_by_hand():
    for way in (naive.top_k, top_k):
        scores = torch.tensor([[0.5, 2.0, 0.5, 0.5, -1.0, 2.0]], device=DEVICE)
        assert way(scores, 2).tolist() == [[1, 5]]
        assert way(scores, 3).tolist() == [[0, 1, 5]], "the lowest position"
        assert way(scores, 4).tolist() == [[0, 1, 2, 5]]
        assert way(scores, 7).tolist() == [[0, 1, 2, 3, 4, 5, -1]]
        zeros = torch.tensor([[-0.0, 0.0, -0.0]], device=DEVICE)
        assert way(zeros, 1).tolist() == [[0]], "-0.0 equals 0.0"
        broken = torch.tensor([[9.0, math.nan, math.inf, -math.inf]], device=DEVICE)
        assert way(broken, 1).tolist() == [[1]], "NaN is the highest"
        assert way(broken, 4).tolist() == [[0, 1, 2, -1]], "-inf is not there"


def test_top_k_beside_torch(seed, small_tiles):
    """Without ties it is torch.topk; with them the values still are."""
    scores = torch.randn(4, 300, device=DEVICE)
    want = scores.topk(40).indices.sort().values
    assert torch.equal(top_k(scores, 40).long(), want)
    few = torch.randint(0, 9, (4, 300), device=DEVICE).float()
    got = few.gather(1, top_k(few, 40).long()).sort(descending=True).values
    assert torch.equal(got, few.topk(40).values)


def test_what_follows_a_rows_length_is_not_read(seed, small_tiles):
    scores = torch.randn(4, 100, device=DEVICE)
    lengths = torch.tensor([0, 1, 33, 100], dtype=torch.int32, device=DEVICE)
    beyond = torch.arange(100, device=DEVICE) >= lengths[:, None]
    want = naive.top_k(scores.masked_fill(beyond, -math.inf), 20)
    poisoned = scores.masked_fill(beyond, math.nan)
    with in_bounds(), guarded_empty() as checks:
        assert torch.equal(top_k(poisoned, 20, lengths), want)
        for check in checks:
            check()
    wide = torch.full((4, 130), math.nan, device=DEVICE)
    wide[:, :100] = scores  # rows with a gap after them
    assert torch.equal(top_k(wide[:, :100], 20), naive.top_k(scores, 20))


# ---------------------------------------------------------------- the chosen rows

# lengths, keys of a list, splits, more arguments of `paged`
CHOSEN = {
    "one key": ([1], 1, 1, {}),
    "fewer keys than the list": ([3, 40], 36, 1, {}),
    "two splits": ([80, 50], 40, 2, {}),
    "a split without keys": ([80, 9], 64, 4, {}),
    "more splits than tiles": ([80], 20, 7, {}),
    "more heads than a tile": ([50], 17, 2, dict(heads=19)),
    "several queries of a sequence": ([30, 21], 16, 1, dict(new=[3, 5])),
    "pages of one token": ([30], 9, 1, dict(block_size=1)),
    "pages of 64": ([130, 65], 33, 2, dict(block_size=64)),
    "bfloat16": ([80, 50], 40, 2, BFLOAT16),
    "float16": ([80, 50], 40, 2, dict(dtype=torch.float16)),
    "DeepSeek's sizes": ([90], 40, 2, dict(heads=16, rank=512, rope=64, block_size=64)),
}


def gathered_case(name):
    lengths, k, splits, options = CHOSEN[name]
    case = paged(lengths, **options)
    rank = options.get("rank", 32)
    indices = some_keys(case, k)
    return (
        case,
        [case.q, case.latents, case.block_table, indices, case.sequences, 0.2, rank],
        splits,
    )


@pytest.mark.parametrize("name", CHOSEN)
def test_attention_over_chosen_rows(name, seed, proof):
    _, inputs, splits = gathered_case(name)

    def kernel(*arguments):
        return sparse_mla(*arguments, num_splits=splits, tiles=SMALL_TILES)

    proof.record(sparse_mla_kernel, prove(kernel, naive.sparse_mla, clean(inputs)))


def test_the_tiles_that_are_launched(seed, proof):
    """And as many splits as an H200 would have."""
    _, inputs, _ = gathered_case("two splits")
    proof.record(sparse_mla_kernel, prove(sparse_mla, naive.sparse_mla, clean(inputs)))


def test_rows_that_were_not_chosen_are_not_read(seed):
    """They are NaN, and so is every block of other sequences; addresses stay within tensors."""
    case, inputs, splits = gathered_case("two splits")
    want = sparse_mla(*clean(inputs), num_splits=splits, tiles=SMALL_TILES)
    poisoned = torch.full_like(case.latents, math.nan)
    for t, sequence in enumerate(case.sequences.tolist()):
        for key in inputs[3][t].tolist():
            if key >= 0:
                block = case.block_table[sequence, key // 4]
                poisoned[block, key % 4] = case.latents[block, key % 4]
    inputs[1] = poisoned
    with in_bounds(), guarded_empty() as checks:
        assert_same_bits(sparse_mla(*inputs, num_splits=splits, tiles=SMALL_TILES), want)
        for check in checks:
            check()


def test_the_order_of_a_list_does_not_matter(seed):
    """Nor where its empty places are."""
    _, inputs, _ = gathered_case("fewer keys than the list")
    shuffled = inputs[3][:, torch.randperm(inputs[3].shape[1])]
    want = naive.sparse_mla(*clean(inputs))
    inputs[3] = shuffled
    got = sparse_mla(*inputs, num_splits=3, tiles=SMALL_TILES)
    assert (got - want).abs().max() < 1e-5


def test_no_keys_give_zeros_and_a_chosen_fault_is_seen(seed):
    case, inputs, _ = gathered_case("two splits")
    inputs = clean(inputs)
    inputs[3][0] = -1
    key = int(inputs[3][1, 0])
    inputs[1][case.block_table[1, key // 4], key % 4] = math.nan
    out = sparse_mla(*inputs, num_splits=2, tiles=SMALL_TILES)
    assert out[0].eq(0).all() and out[1].isnan().all()


def test_all_keys_are_full_attention(seed):
    """A list of all keys, beside lesson 12's kernel that needs no list."""
    case = paged([37, 21], block_size=8)
    scores = torch.zeros(2, 37, device=DEVICE)
    indices = naive.top_k(naive.unseen_to_minus_infinity(scores, case.positions), 40)
    latents = case.latents.nan_to_num(0.0)
    got = sparse_mla(case.q, latents, case.block_table, indices, case.sequences, 0.2, 32)
    want = paged_mla_decode(case.q, latents, case.block_table, case.positions + 1, 0.2, 32)
    assert (got - want).abs().max() < 1e-5


def test_ordinary_heads_are_pages_of_one_token(seed):
    """GQA: lesson 12's kernel, with the list as its table. Rows that were not chosen are NaN."""
    case = paged([30, 9], block_size=4)
    indices = some_keys(case, 12)
    blocks = len(case.latents)
    k, v = (torch.randn(blocks, 4, 2, width, device=DEVICE) for width in (16, 16))
    q = torch.randn(2, 6, 16, device=DEVICE)
    table, counts = one_token_pages(case.block_table, indices, case.sequences, 4)
    assert counts.tolist() == [12, 9]
    rows = [table[t, : counts[t]].long() for t in range(2)]
    want = [
        naive.sparse_attention(
            q[t, None],
            k.flatten(0, 1)[rows[t]],
            v.flatten(0, 1)[rows[t]],
            torch.arange(len(rows[t]), device=DEVICE)[None],
        )
        for t in range(2)
    ]
    is_read = torch.zeros(blocks * 4, dtype=torch.bool, device=DEVICE)
    is_read[torch.cat(rows)] = True
    for x in (k, v):
        x.flatten(0, 1)[~is_read] = math.nan
    got = sparse_decode(q, k, v, case.block_table, indices, case.sequences)
    assert (got - torch.cat(want)).abs().max() < 1e-5


def test_a_whole_step(seed):
    """Scores, list and attention after each other, beside the plain ones. Of 40 keys 6 are read."""
    for fp8 in (False, True):
        case = paged([40, 4, 17], fp8=fp8)
        out, indices = choose_and_attend(
            case.q,
            case.latents,
            case.q_index,
            case.weights,
            case.keys,
            case.scales,
            case.block_table,
            case.positions + 1,
            6,
            0.2,
            32,
        )
        scores = naive.paged_index_scores(*index_inputs(case, 40))
        assert torch.equal(indices, naive.top_k(scores, 6))
        assert (indices >= 0).sum(1).tolist() == [6, 4, 6]
        latents = case.latents.nan_to_num(0.0)
        arguments = case.block_table, indices, case.sequences, 0.2, 32
        assert (out - naive.sparse_mla(case.q, latents, *arguments)).abs().max() < 1e-5
