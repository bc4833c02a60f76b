"""Who chooses: windows by their definition, the oracle, DeepSeek's indexer as a layer, and the
three branches of native sparse attention.
"""

import math

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l28_sparse_attention.indexer import (
    V32,
    Indexer,
    IndexerShape,
    hadamard,
    in_fp8,
    rotated,
)
from lessons.l28_sparse_attention.naive import (
    index_scores,
    oracle_scores,
    sparse_attention,
    top_k,
    window_with_sinks,
)
from lessons.l28_sparse_attention.nsa import (
    NsaShape,
    compressed,
    compressed_weights,
    keys_of_blocks,
    nsa,
    selected_blocks,
)
from lessons.toolbox.proof.refusals import assert_message

SMALL = IndexerShape(24, 16, 3, 16, 8, 4)
BLOCKS = NsaShape(block=4, stride=2, selected=4, count=4, window=3)


def test_windows_by_their_definition():
    positions = torch.tensor([0, 1, 4, 9])
    for window, sinks in ((1, 0), (3, 0), (3, 2), (4, 4), (20, 3)):
        got = window_with_sinks(positions, window, sinks).tolist()
        for position, keys in zip(positions.tolist(), got):
            want = [k for k in range(position + 1) if k < sinks or k > position - window]
            assert keys == want + [-1] * (window + sinks - len(want))
    assert_message(window_with_sinks, dict(positions=positions, window=0), "window: got 0")


def test_a_window_of_everything_is_attention(seed):
    q, k, v = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    everything = window_with_sinks(torch.arange(9), 9)
    want = attention(q, k, v)
    assert torch.allclose(sparse_attention(q, k, v, everything), want, atol=1e-6)


def test_a_list_is_a_set(seed):
    """Order and empty places do not matter; a query without keys gives zeros."""
    q, k, v = torch.randn(2, 2, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 6)
    one = sparse_attention(q, k, v, torch.tensor([[3, 1, -1], [-1, -1, -1]]))
    two = sparse_attention(q, k, v, torch.tensor([[-1, 1, 3], [-1, -1, -1]]))
    assert torch.equal(one, two) and one[1].eq(0).all()
    wrong = dict(q=q, k=k, v=v, indices=torch.tensor([[5], [0]]))
    assert_message(sparse_attention, wrong, "indices: got '0 to 5'; accepted: -1 to 4")


def test_the_toy_of_step_4():
    q, weights = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[1.0, 2.0]])
    k = torch.tensor([[5.0], [0.0], [2.0], [-4.0], [0.0], [2.0]])
    scores = index_scores(q, weights, k, torch.tensor([5]))
    assert scores.tolist() == [[5.0, 0.0, 2.0, 8.0, 0.0, 2.0]]
    assert top_k(scores, 2).tolist() == [[0, 3]] and top_k(scores, 3).tolist() == [[0, 2, 3]]
    keys = torch.zeros(6, 1, 1)
    keys[3] = math.log(3)
    values = torch.full((6, 1, 1), 100.0)
    values[0], values[3] = 8.0, 4.0
    out = sparse_attention(torch.ones(1, 1, 1), keys, values, top_k(scores, 2), 1.0)
    assert out.item() == pytest.approx(5)


def test_the_oracle_is_the_sum_of_the_weights(seed):
    q, k, positions = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.tensor([4, 0, 2])
    scores = oracle_scores(q, k, 0.3, positions)
    assert scores.where(scores.isfinite(), 0.0).sum(-1).tolist() == pytest.approx([4, 4, 4])
    assert scores.isneginf().sum(-1).tolist() == [0, 4, 2]
    own = (q[0, 0] @ k[:, 0].T * 0.3).softmax(-1)
    others = sum((q[0, h] @ k[:, h // 2].T * 0.3).softmax(-1) for h in (1, 2, 3))
    assert torch.allclose(scores[0], own + others, atol=1e-6)


# ---------------------------------------------------------------- the indexer as a layer


def test_hadamard_changes_no_product(seed):
    x, y = torch.randn(2, 128), torch.randn(3, 128)
    assert torch.allclose(hadamard(x) @ hadamard(y).T, x @ y.T, atol=1e-4)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)
    four = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    assert torch.allclose(hadamard(torch.eye(4)), four)


def test_hadamard_helps_whole_numbers_and_not_fp8():
    """One channel of the keys ten times as large, that of the queries a tenth."""
    errors = {name: outlier_errors(name, 10.0) for name in ("fp8", "int8")}
    plain, turned = errors["int8"]
    assert turned < plain / 2
    plain, turned = errors["fp8"]
    assert turned > 1.2 * plain


def outlier_errors(name: str, factor: float) -> list[float]:
    """The relative error of scores by codes of a format, as they are and turned, in the mean of
    eight draws.
    """
    found = torch.zeros(2)
    for seed in range(8):
        torch.manual_seed(seed)
        q, k = torch.randn(1, 8, 128), torch.randn(200, 128)
        k[:, 17] *= factor
        q[..., 17] /= factor
        weights, positions = torch.ones(1, 8), torch.tensor([199])
        want = index_scores(q, weights, k, positions)
        for way, turn in enumerate((lambda x: x, hadamard)):
            format = FORMATS[name]
            again = [format.dequantize(*format.quantize(turn(x))) for x in (q, k)]
            got = index_scores(again[0], weights, again[1], positions)
            found[way] += (got - want).norm() / want.norm() / 8
    return found.tolist()


def test_only_the_distance_counts(seed):
    """A query and a key that are moved together have the same product; parts without a position do
    not turn.
    """
    x, y = torch.randn(1, 16), torch.randn(1, 16)

    def product(first, second):
        turned = (rotated(z, torch.tensor([p]), 8, 100.0) for z, p in ((x, first), (y, second)))
        return (next(turned) * next(turned)).sum()

    assert torch.allclose(product(7, 3), product(104, 100), atol=1e-4)
    assert not torch.allclose(product(7, 3), product(8, 3), atol=1e-4)
    assert torch.equal(rotated(x, torch.tensor([9]), 8, 100.0)[:, 8:], x[:, 8:])
    halves = rotated(torch.eye(16)[:1], torch.tensor([1]), 8, 100.0)
    assert halves.nonzero()[:, 1].tolist() == [0, 4], "in halves, not in pairs"


def test_a_layer_and_its_codes(seed):
    """Scores of codes are near those of numbers, and the scale of each is where it belongs."""
    torch.manual_seed(seed)
    indexer = Indexer(SMALL)
    x, q_latent, positions = torch.randn(30, 24), torch.randn(30, 16), torch.arange(30)
    with torch.no_grad():
        q, weights, k = indexer(x, q_latent, positions)
        want = index_scores(q, weights, k, positions)
        numbers, scaled, codes, scales = in_fp8(q, weights, k)
    assert numbers.dtype == torch.bfloat16 and numbers.abs().max() == 448
    again = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    got = index_scores(numbers, scaled, again, positions)
    seen = want.isfinite()
    assert (got - want)[seen].norm() < 0.06 * want[seen].norm()


def test_the_sizes_are_deepseeks():
    assert IndexerShape(7168, 1536, 64, 128, 64, 2048) == V32
    with torch.device("meta"):
        layer = Indexer()
    assert layer.wq_b.weight.shape == (64 * 128, 1536) and layer.wk.weight.shape == (128, 7168)
    assert layer.weights_proj.weight.shape == (64, 7168)


# ---------------------------------------------------------------- native sparse attention


def test_compressed_is_the_mean():
    x = torch.arange(9.0).view(9, 1, 1)
    assert compressed(x, BLOCKS).flatten().tolist() == [1.5, 3.5, 5.5]
    assert len(compressed(x[:3], BLOCKS)) == 0


def test_a_compressed_block_is_seen_when_it_has_ended(seed):
    q, k = torch.randn(4, 2, 8), torch.randn(9, 1, 8)
    weights = compressed_weights(q, k, torch.tensor([2, 3, 6, 7]), BLOCKS)
    assert (weights > 0).sum(-1)[:, 0].tolist() == [0, 1, 2, 3]
    assert weights.sum(-1)[:, 0].tolist() == pytest.approx([0, 1, 1, 1])


def test_selected_blocks():
    """Of five blocks of four keys: the first, the query's own and the one before are always taken;
    of the two others the one with more weight.
    """
    weights = torch.zeros(2, 1, 9)
    weights[0, 0, 2], weights[1, 0, 4] = 0.6, 0.6  # keys 4 to 7, keys 8 to 11
    shape = BLOCKS._replace(count=4)
    got = selected_blocks(weights, torch.tensor([19, 19]), 20, shape)
    assert got.tolist() == [[0, 1, 3, 4], [0, 2, 3, 4]]
    early = selected_blocks(weights, torch.tensor([5, 0]), 20, shape)
    assert early.tolist() == [[0, 1, -1, -1], [0, -1, -1, -1]]
    keys = keys_of_blocks(early, torch.tensor([5, 0]), 4).tolist()
    assert [[k for k in row if k >= 0] for row in keys] == [[0, 1, 2, 3, 4, 5], [0]]


def test_nsa_of_everything_is_attention(seed):
    """All blocks selected, and only that branch's gate open; likewise a window of everything."""
    q, k, v = (torch.randn(13, heads, 8) for heads in (4, 2, 2))
    shape = BLOCKS._replace(count=4, window=13)
    want = attention(q, k, v)
    for branch in (1, 2):
        gates = torch.zeros(13, 4, 3)
        gates[..., branch] = 1.0
        got = nsa(q, k, v, gates, torch.arange(13), shape)
        assert torch.allclose(got, want, atol=1e-5)
