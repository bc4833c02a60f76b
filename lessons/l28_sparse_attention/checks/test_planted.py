"""Planted bugs of the three kernels: the proofs find each."""

import pytest
import torch

from lessons.l28_sparse_attention import index_scores as scoring
from lessons.l28_sparse_attention import naive, optimized
from lessons.l28_sparse_attention import top_k as selecting
from lessons.l28_sparse_attention.lab.testing import (
    SMALL_TILES,
    clean,
    hard_rows,
    index_inputs,
    paged,
    some_keys,
)
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.proof.numerics import NotEquivalent, prove
from lessons.toolbox.proof.planted import with_bug

INDEX_BUGS = {
    "no ReLU": ("tl.where(products < 0.0, 0.0, products)", "products"),
    "ReLU of the weighted": (
        "tl.where(products < 0.0, 0.0, products)",
        "tl.where(products * weight[:, None] < 0.0, 0.0, products)",
    ),
    "the query does not see its own key": ("key <= position", "key < position"),
    "the first heads alone": ("range(0, num_heads, BLOCK_H)", "range(0, BLOCK_H, BLOCK_H)"),
    "no scale of the key": ("scores * (scale * E4M3_IN_FLOAT16)", "scores * E4M3_IN_FLOAT16"),
    "256 forgotten": ("scale * E4M3_IN_FLOAT16", "scale"),
    "the sign of a code is lost": ("((bits & 0x80) << 8) | ", ""),
    "rows of the first page": ("block * stride_kblock + row", "block * 0 + row"),
    "another sequence's table": ("sequence * stride_table", "0 * stride_table"),
}


@pytest.mark.parametrize("bug", INDEX_BUGS)
def test_a_planted_bug_of_the_indexer_is_found(bug, seed, tmp_path):
    wrong = with_bug(scoring, tmp_path, *INDEX_BUGS[bug])
    case = paged([33, 20], index_heads=19, fp8=True)
    case = case._replace(scales=case.scales.nan_to_num(1.0))
    case = case._replace(block_table=case.block_table.clamp(max=len(case.keys) - 1))
    with pytest.raises(NotEquivalent):
        prove(wrong.index_scores, naive.paged_index_scores, index_inputs(case, 36))


TOP_K_BUGS = {
    "signs are not turned": ("bits ^ ((bits >> 31) | -2147483648)", "bits"),
    "negative numbers are not turned round": (
        "bits ^ ((bits >> 31) | -2147483648)",
        "bits ^ -2147483648",
    ),
    "two zeros": ("tl.where(scores == 0.0, 0.0, scores)", "scores * 1.0"),
    "-inf is chosen": ('tl.where(scores == float("-inf"), 0, order)', "order"),
    "NaN by its sign": (
        "tl.where(scores != scores, -1, order)",
        "tl.where(scores != scores, 0, order)",
    ),
    "three of four passes": ("tl.static_range(4)", "tl.static_range(3)"),
    "the bits before are not compared": ("mask=same & (order != 0)", "mask=order != 0"),
    "one too many above": ("(above < wanted)", "(above <= wanted)"),
    "the next tile is this one": ("tl.where(start + BLOCK < length, start + BLOCK, 0)", "start"),
    "a pass begins where the last one ended": (
        "tl.where(start + BLOCK < length, start + BLOCK, 0)",
        "tl.minimum(start + BLOCK, length - 1)",
    ),
    "ties that are not taken leave a place": ("tl.minimum(equal_before, ties)", "equal_before"),
    "ties of each tile": ("equal += both >> 16", "equal += 0"),
    "every tile writes to the front": ("above += both & 0xFFFF", "above = both & 0xFFFF"),
    "those above are counted with the equal ones": ("(before & 0xFFFF)", "before"),
    "the rest is not filled": ("(place >= taken) & (place < k)", "(place > taken) & (place < k)"),
}


@pytest.mark.parametrize("bug", TOP_K_BUGS)
def test_a_planted_bug_of_the_top_k_is_found(bug, seed, tmp_path):
    """A wrong count may write before its row, so that is stopped where it leaves the tensor."""
    wrong = with_bug(selecting, tmp_path, *TOP_K_BUGS[bug])
    wrong.BLOCK = 32
    scores = torch.stack(list(hard_rows(100).values()))
    with in_bounds(), pytest.raises(Exception) as found:
        prove(wrong.top_k, naive.top_k, [scores, 40])
        prove(wrong.top_k, naive.top_k, [scores, 120])
    assert isinstance(found.value, NotEquivalent) or "out of bounds" in str(found.value)


STORE = "tl.store(out_row + place, start + step, "
COUNT = "tl.atomic_add(out_row + place, 1, "


def stores_of(module, tmp_path, scores, k):
    """How often each place of a list is stored to, -1 where nothing is chosen: [T, k]."""
    counting = with_bug(module, tmp_path, STORE, COUNT)
    zeroed = with_bug(counting, tmp_path, "torch.empty(rows", "torch.zeros(rows")
    zeroed.BLOCK = 32
    return zeroed.top_k(scores, k)


def test_each_place_is_stored_once(seed, tmp_path):
    """A key that is not chosen, stored where another one belongs, would be a race: the interpreter
    and the lists that it makes do not show it.
    """
    scores = torch.stack(list(hard_rows(100).values()))
    for k in (40, 120):
        want = torch.where(naive.top_k(scores, k) < 0, -1, 1)
        assert torch.equal(stores_of(selecting, tmp_path, scores, k), want.int())


RACES = {
    "all ties": ("& (equal_before < ties)", ""),
    "one tie too many": ("(equal_before < ties)", "(equal_before <= ties)"),
}


@pytest.mark.parametrize("bug", RACES)
def test_a_planted_race_of_the_top_k_is_found(bug, seed, tmp_path):
    wrong = with_bug(selecting, tmp_path, *RACES[bug])
    scores = torch.stack(list(hard_rows(100).values()))
    with in_bounds():
        assert (stores_of(wrong, tmp_path, scores, 40) > 1).any()


SPARSE_BUGS = {
    "keys are counted, not looked up": (
        "tl.load(list_ptr + place, mask=place < end, other=-1)",
        "tl.where(place < end, place, -1)",
    ),
    "empty places are key 0": (
        "is_key = key >= 0",
        "is_key = place < end\n        key = tl.maximum(key, 0)",
    ),
    "another query's list": ("token * stride_indices", "0 * stride_indices"),
    "another sequence's table": ("sequence * stride_table", "0 * stride_table"),
    "no rotary part": (
        "tl.dot(q_pe, tl.trans(k_pe), scores, ",
        "tl.dot(q_pe * 0.0, tl.trans(k_pe), scores, ",
    ),
    "the sum is not rescaled": ("l_i * alpha + tl.sum", "l_i + tl.sum"),
    "every split reads the first": ("begin = split * split_size", "begin = 0"),
    "LSE in powers of two": ("* 0.6931471805599453", "* 1.0"),
}


@pytest.mark.parametrize("bug", SPARSE_BUGS)
def test_a_planted_bug_of_the_decode_kernel_is_found(bug, seed, tmp_path):
    """Each stays inside the tensors, so what it reads is only wrong."""
    wrong = with_bug(optimized, tmp_path, *SPARSE_BUGS[bug])
    case = paged([80, 30], block_size=4)
    table = case.block_table.clamp(max=len(case.latents) - 1)
    inputs = clean([case.q, case.latents, table, some_keys(case, 50), case.sequences, 0.2, 32])

    def kernel(*arguments):
        return wrong.sparse_mla(*arguments, num_splits=2, tiles=SMALL_TILES)

    with pytest.raises(NotEquivalent):
        prove(kernel, naive.sparse_mla, inputs)
