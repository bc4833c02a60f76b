"""Proves that a tree's attention, in one launch, is that of each of its paths alone; and that trees
are what they say.
"""

import itertools
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lessons.l03_kv_cache.lab.testing import far_apart
from lessons.l17_tree_speculation import stand_ins
from lessons.l17_tree_speculation.lab.testing import BRANCHES, DEVICE, TREES, tree_inputs
from lessons.l17_tree_speculation.naive import path_attention
from lessons.l17_tree_speculation.optimized import MOST_ROWS, sizes_of, tree_attention, tree_kernel
from lessons.l17_tree_speculation.trees.tree import (
    MOST_NODES,
    Tree,
    best_tree,
    chain,
    chances,
    expected_tokens,
    full_tree,
    ranks_of,
    tree_of_ranks,
)
from lessons.toolbox.proof.numerics import (
    ATTENTION_INPUTS,
    assert_same_bits,
    floor_for,
    prove,
)

# ---------------------------------------------------------------- the kernel


@pytest.mark.parametrize("options", [dict(num_splits=1), dict(num_splits=3), dict(split_size=20)])
@pytest.mark.sample(1, of="several tiles")
def test_tree_kernel(options, seed, proof):
    """Trees of all shapes behind contexts around a block's end; splits whose ends are no
    block's.
    """
    trees = list(TREES.values())
    lengths = [len(tree) + held for tree, held in zip(trees, (1, 10, 16, 23, 0))]
    inputs, table = tree_inputs(trees, [0] * len(trees), lengths, block_size=16, seed=seed)
    fast = partial(tree_attention, **options)
    proof.record(tree_kernel, prove(fast, path_attention, (*inputs, table)))


@pytest.mark.sample(1, of="several tiles")
def test_trees_beside_prompts(seed, proof):
    """Trees of different sizes, a fresh prompt, a chunk and a single token in one launch."""
    trees = [BRANCHES, None, full_tree([2, 2]), None, None, chain(2)]
    inputs, table = tree_inputs(
        trees, [0, 9, 0, 5, 1, 0], [20, 9, 7, 30, 18, 21], block_size=4, seed=seed
    )
    for window in (None, 6):
        fast, plain = (partial(f, window=window) for f in (tree_attention, path_attention))
        proof.record(tree_kernel, prove(fast, plain, (*inputs, table)))


@pytest.mark.parametrize(
    "heads, dtype",
    [
        ((2, 2, 64, 64), torch.float32),
        ((6, 1, 24, 40), torch.float32),
        ((4, 2, 80, 80), torch.bfloat16),
        ((8, 1, 128, 64), torch.float16),
    ],
)
@pytest.mark.sample(1)
def test_any_heads(heads, dtype, seed, proof):
    """K and V of different widths; with many query heads a KV head a tree takes several tiles."""
    inputs, table = tree_inputs(
        [full_tree([3, 3])] * 2,
        [0, 0],
        [17, 40],
        block_size=16,
        heads=heads,
        dtype=dtype,
        seed=seed,
    )
    fast = partial(tree_attention, num_splits=2)
    proof.record(tree_kernel, prove(fast, path_attention, (*inputs, table)))


@pytest.mark.parametrize("kind", ATTENTION_INPUTS)
@pytest.mark.sample(2)
def test_hard_inputs(kind, seed, proof):
    floor = floor_for(torch.float32, kind)
    inputs, table = tree_inputs(
        [BRANCHES, chain(0)], [0, 0], [30, 9], block_size=7, kind=kind, seed=seed
    )
    fast = partial(tree_attention, num_splits=2)
    proof.record(tree_kernel, prove(fast, path_attention, (*inputs, table), floor=floor))


@pytest.mark.sample(1, of="several tiles")
def test_the_largest_tree_takes_several_tiles(seed, proof):
    """64 nodes of 2 query heads are 128 rows, four tiles of 32."""
    tree = full_tree([3, 2, 3, 1, 1])
    tree = Tree((*tree.parents, *range(len(tree) - 1, MOST_NODES - 1))[:MOST_NODES])
    assert sizes_of(2 * len(tree), 16, 16, False)["BLOCK_M"] == MOST_ROWS < 2 * len(tree)
    inputs, table = tree_inputs([tree], [0], [len(tree) + 3], block_size=16, seed=seed)
    proof.record(tree_kernel, prove(tree_attention, path_attention, (*inputs, table)))


@pytest.mark.parametrize("window", [None, 1, 4, 9])
def test_stand_in(window, seed):
    trees = [BRANCHES, None, full_tree([2, 2])]
    inputs, table = tree_inputs(trees, [0, 9, 0], [20, 12, 7], block_size=4, seed=seed)
    names = ("block_table", "cu_seqlens_q", "context_lens")
    batch = SimpleNamespace(tree=table, lengths=None, **{n: getattr(inputs, n) for n in names})
    got = stand_ins.prefill(*inputs[:3], batch, 16**-0.5, window)
    torch.testing.assert_close(got, path_attention(*inputs, table, window=window))


def test_siblings_do_not_see_each_other(seed):
    """Another K and V at a node changes its descendants' output and nobody else's."""
    inputs, table = tree_inputs([BRANCHES], [0], [10], block_size=16, seed=seed)
    before = tree_attention(*inputs, table)
    slot = 10 - len(BRANCHES) + 1  # node 1
    for cache in (inputs.k_cache, inputs.v_cache):
        cache[int(inputs.block_table[0, 0]), slot] += 1.0
    changed = (tree_attention(*inputs, table) != before).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [1, 3, 4]


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="NOT RUN: needs a sparse file as memory, which no GPU reads"
)
def test_queries_beyond_two_to_the_31_elements(seed, tmp_path):
    """Three query heads so far apart that int32 cannot tell where the third is."""
    inputs, table = tree_inputs(
        [BRANCHES], [0], [10], block_size=16, heads=(3, 1, 16, 16), dtype=torch.float16, seed=seed
    )
    away = inputs._replace(q=far_apart(inputs.q, 1, tmp_path / "q"))
    assert_same_bits(tree_attention(*away, table), tree_attention(*inputs, table))


def test_what_is_refused():
    inputs, table = tree_inputs([BRANCHES], [0], [10], block_size=16)
    for wrong in (table.bool(), table[:-1], table.repeat(1, 12), table.repeat(1, 2)[:, ::2]):
        with pytest.raises(ValueError, match="tree: got"):
            tree_attention(*inputs, wrong)
    with pytest.raises(ValueError, match="window"):
        tree_attention(*inputs, table, window=0)
    nothing = inputs.cu_seqlens_q * 0
    no_row = inputs._replace(q=inputs.q[:0], cu_seqlens_q=nothing)
    assert tree_attention(*no_row, table[:0]).shape == (0, 4, 16)


# ---------------------------------------------------------------- trees


@pytest.mark.parametrize(
    "parents", [(), (0,), (-1, 1), (-1, 0, 2), (-1, -1), [-1, 0], (-1,) + (0,) * MOST_NODES]
)
def test_no_tree(parents):
    with pytest.raises(ValueError, match="parents: got"):
        Tree(parents)


def test_a_tree_by_hand():
    """The three branches of the README."""
    tree = Tree((-1, 0, 0, 0, 1, 1, 2))
    assert tree.depths == (0, 1, 1, 1, 2, 2, 2) and tree.depth == 2
    assert tree.paths == ((0, 3), (0, 1, 4), (0, 1, 5), (0, 2, 6))
    assert tree.table[5].tolist() == [3, 2, 0, 0, 0, 1, 0]
    assert int((tree.table > 0).sum()) == sum(depth + 1 for depth in tree.depths) == 16
    assert tree.cut(1).parents == (-1, 0, 0, 0) and tree.cut(0) == chain(0) and tree.cut(9) is tree
    assert full_tree([2, 2]).parents == (-1, 0, 0, 1, 1, 2, 2)


def test_trees_in_the_notation_of_ranks():
    """Medusa's and vLLM's: there and back, whatever the order in which the ways are given."""
    ways = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    tree = tree_of_ranks(ways)
    assert tree == Tree((-1, 0, 0, 1, 1, 2, 3)) and ranks_of(tree) == ways
    assert tree_of_ranks(ways[::-1]) == tree and tree_of_ranks([]) == chain(0)
    for found in all_trees(5):
        assert sorted(ranks_of(tree_of_ranks(ranks_of(found)))) == sorted(ranks_of(found))
    for wrong in ([(0,), (0,)], [(1,)], [(0, 0)], [()], [(0,), (0, 1)]):
        with pytest.raises(ValueError, match="ranks: got"):
            tree_of_ranks(wrong)


def test_the_first_nodes_of_the_best_tree_are_the_best_tree_of_so_many():
    acceptance = [[0.5, 0.3, 0.1], [0.4, 0.2], [0.4]]
    whole = best_tree(acceptance, 9)
    for nodes in range(1, 10):
        assert whole.first(nodes) == best_tree(acceptance, nodes)
    assert whole.first(99) is whole
    assert chain(3).is_chain and chain(0).is_chain and not full_tree([2]).is_chain


def test_chances_and_expected_tokens():
    acceptance = [[0.6, 0.2], [0.5]]
    tree = full_tree([2, 1])
    assert chances(tree, acceptance) == pytest.approx([1, 0.6, 0.2, 0.3, 0.1])
    assert expected_tokens(tree, acceptance) == pytest.approx(2.2)
    assert expected_tokens(full_tree([3, 2, 1]), acceptance) == pytest.approx(2.2)


def all_trees(nodes: int):
    """Every tree of so many nodes."""
    for behind in itertools.product(*(range(node) for node in range(1, nodes))):
        yield Tree((-1, *behind))


def test_no_tree_is_better_than_the_best(seed):
    """Against every tree of six nodes, for random acceptances."""
    draws = random.Random(seed)
    trees = list(all_trees(6))
    for _ in range(20):
        acceptance = []
        for _ in range(draws.randint(1, 4)):
            row = sorted((draws.random() for _ in range(draws.randint(1, 4))), reverse=True)
            total = sum(row) + draws.random()
            acceptance.append([share / total for share in row])
        best = best_tree(acceptance, 6)
        most = max(expected_tokens(tree, acceptance) for tree in trees)
        assert len(best) <= 6
        assert expected_tokens(best, acceptance) == pytest.approx(most, abs=1e-12)


def test_best_tree_refuses():
    for wrong in ([], [[]], [[0.2, 0.3]], [[0.8, 0.7]], [[-0.1]]):
        with pytest.raises(ValueError, match="acceptance"):
            best_tree(wrong, 4)
    for nodes in (0, 65, 2.5):
        with pytest.raises(ValueError, match="nodes: got"):
            best_tree([[0.5]], nodes)
    assert best_tree([[0.0]], 4) == chain(0)
