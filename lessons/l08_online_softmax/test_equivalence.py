"""Proves that a softmax may be cut anywhere, and that every kernel equals the three passes. That
the three values are a monoid is in test_monoid.py.
"""

import math
from unittest.mock import patch

import pytest
import torch

from lessons.l08_online_softmax import cuda_softmax, naive, optimized, partials, warp
from lessons.l08_online_softmax.lab import traffic
from lessons.l08_online_softmax.lab.specs import KERNELS
from lessons.l08_online_softmax.naive import (
    Partial,
    finish,
    from_scores,
    merge,
)
from lessons.l08_online_softmax.optimized import (
    block_softmax_kernel,
    empty_results,
    online_softmax_kernel,
)
from lessons.l08_online_softmax.partials import (
    merge_kernel,
    merge_states,
    partial_attention,
    partial_kernel,
)
from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.kernels.compile_check import CHIPS, check_all, check_cuda
from lessons.toolbox.measure.device import default_device, interpreting
from lessons.toolbox.proof.numerics import (
    DISTRIBUTIONS,
    NotEquivalent,
    draw,
    edge_lengths,
    floor_for,
    poisoned,
    prove,
    with_canaries,
)
from lessons.toolbox.proof.refusals import assert_refused

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
INF = torch.inf


def three_passes(scores):
    """The definition of every softmax here, with its log-sum-exp. scores: [R, N] -> [R, N], [R]."""
    return naive.softmax_three_passes(scores), naive.log_sum_exp(scores)


def online(scores, block_n=16):
    """online_softmax_kernel on rows of any length; the wrapper takes it for long ones alone.
    scores: [R, N] -> [R, N], [R].
    """
    probs, lse = empty_results(scores)
    online_softmax_kernel[len(scores),](
        scores, probs, lse, scores.shape[1], scores.stride(0), BLOCK_N=block_n, STAGES=2
    )
    return probs, lse


# ---------------------------------------------------------------- passes


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("block", [1, 7, 64, 1024])
def test_passes_are_the_same_mathematics(name, block, seed):
    scores = draw(name, (3, 5, 130), dtype=torch.float64, seed=seed)
    scores[0, 0, :100], scores[1, 1] = -INF, -INF
    want = torch.softmax(scores, -1).nan_to_num(0)
    for softmax in (naive.softmax_three_passes, naive.softmax_online):
        torch.testing.assert_close(softmax(scores, block), want, atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(
        naive.log_sum_exp(scores, block), torch.logsumexp(scores, -1), atol=1e-12, rtol=1e-13
    )
    v = draw("normal", (130, 6), dtype=torch.float64, seed=seed + 1)
    for out, lse in (
        naive.attention_one_pass(scores, v, block),
        naive.attention_split(scores, v, 1 + block % 9),
    ):
        torch.testing.assert_close(out, want @ v, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(lse, torch.logsumexp(scores, -1), atol=1e-12, rtol=1e-13)


def test_example_of_the_readme():
    """Scores log 1, log 2 | log 4, log 1 with values 8, 5 | 2, 0."""
    scores, v = (
        torch.tensor([1.0, 2.0, 4.0, 1.0]).double().log(),
        torch.tensor([8.0, 5.0, 2.0, 0.0]).double()[:, None],
    )
    a, b = from_scores(scores[:2], v[:2]), from_scores(scores[2:], v[2:])
    for part, want in (
        (a, (math.log(2), 1.5, 9.0)),
        (b, (math.log(4), 1.25, 2.0)),
        (merge(a, b), (math.log(4), 2.0, 6.5)),
    ):
        assert [float(x) for x in part] == pytest.approx(want, abs=1e-15)
    out, lse = finish(merge(a, b))
    assert float(out) == pytest.approx(3.25) and float(lse) == pytest.approx(math.log(8))


def test_where_exp_overflows():
    """float16 after 11, bfloat16 and float32 after 88; the shifted sum is exact at any size."""
    for dtype, limit in ((torch.float16, 11.09), (torch.bfloat16, 88.72), (torch.float32, 88.72)):
        assert traffic.largest_exponent(dtype) == pytest.approx(limit, abs=0.01)
        x = torch.tensor([limit - 0.1, limit + 0.1], dtype=torch.float64).exp().to(dtype)
        assert x.isfinite().tolist() == [True, False]
        low = traffic.smallest_exponent(dtype)
        assert (
            torch.tensor([low + 0.1, low - 0.1], dtype=torch.float64).exp().to(dtype) > 0
        ).tolist() == [True, False]
    scores = torch.tensor([[1000.0, 1000.0], [-1000.0, -1000.0]])
    assert scores.exp().div(scores.exp().sum(-1, keepdim=True)).isnan().all()  # inf / inf and 0 / 0
    assert torch.equal(naive.softmax_online(scores), torch.full((2, 2), 0.5))


# ---------------------------------------------------------------- the softmax kernels


@pytest.mark.parametrize("num_columns", [*edge_lengths(16), 1000])
def test_block_softmax(num_columns, seed, proof):
    """Row lengths around powers of two, where BLOCK_N jumps."""
    for dtype in (torch.float32, torch.bfloat16):
        scores = draw("normal", (4, num_columns), dtype=dtype, seed=seed, device=DEVICE)
        proof.record(block_softmax_kernel, prove(optimized.softmax, three_passes, [scores]))


@pytest.mark.parametrize("num_columns", [*edge_lengths(16), 32 * 16])
@pytest.mark.parametrize("block_n", [16, 64])
def test_online_softmax(num_columns, block_n, seed, proof):
    """No whole tile, one, several; a tail of none, one and all but one column."""
    for dtype in (torch.float32, torch.float16):
        scores = draw("normal", (3, num_columns), dtype=dtype, seed=seed, device=DEVICE)
        proof.record(
            online_softmax_kernel, prove(lambda x: online(x, block_n), three_passes, [scores])
        )


@pytest.mark.parametrize("num_columns", [32000, 32768, 32769, 128256, 151936])
def test_softmax_of_a_vocabulary(num_columns, seed, proof):
    """The wrapper, at the lengths of Llama 2, Llama 3 and Qwen, and where it changes the kernel."""
    scores = draw("normal", (2, num_columns), dtype=torch.bfloat16, seed=seed, device=DEVICE) * 8
    kernel = block_softmax_kernel if num_columns <= 32768 else online_softmax_kernel
    proof.record(kernel, prove(optimized.softmax, three_passes, [scores]))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_softmax_on_hard_inputs(name, seed, proof):
    for dtype in (torch.float32, torch.bfloat16):
        scores, floor = (
            draw(name, (5, 75), dtype=dtype, seed=seed, device=DEVICE),
            floor_for(dtype, "large_logits"),
        )
        scores[1], scores[2, :40] = -INF, -INF
        proof.record(
            block_softmax_kernel, prove(optimized.softmax, three_passes, [scores], floor=floor)
        )
        proof.record(online_softmax_kernel, prove(online, three_passes, [scores], floor=floor))
        prove(optimized.softmax_torch, three_passes, [scores], floor=floor)


@pytest.mark.parametrize("softmax", [optimized.softmax, online, optimized.softmax_torch])
def test_probes_with_known_answers(softmax):
    scores = torch.zeros(5, 37, device=DEVICE)
    scores[1], scores[2, 3:], scores[3, 7], scores[4, 7] = -INF, -INF, float("nan"), 1e5
    probs, lse = softmax(scores)
    torch.testing.assert_close(probs[0], torch.full_like(probs[0], 1 / 37))
    torch.testing.assert_close(
        lse.cpu(), torch.tensor([math.log(37), -INF, math.log(3), math.nan, 1e5]), equal_nan=True
    )
    assert (probs[1] == 0).all() and (probs[2, 3:] == 0).all() and probs[3].isnan().all()
    # not exactly 1: a GPU divides float32 to within 2 units in the last place (PTX, div.full)
    torch.testing.assert_close(probs[4, 7].cpu(), torch.tensor(1.0), rtol=2**-22, atol=0)
    assert (probs[4].cpu() == 0).sum() == 36
    for shift in (50, -2000):  # far below 0 a max that starts at 0 would never be left
        torch.testing.assert_close(softmax(scores + shift)[0], probs, equal_nan=True)
    assert not len(softmax(scores[:0])[0])


def test_rows_without_columns():
    for softmax in (optimized.softmax, optimized.softmax_torch):
        probs, lse = softmax(torch.zeros(3, 0, device=DEVICE))
        assert probs.shape == (3, 0) and (lse == -INF).all()


def test_a_row_does_not_depend_on_the_batch(seed):
    for num_columns in (100, 40000):
        scores = draw("normal", (4, num_columns), seed=seed, device=DEVICE)
        together = optimized.softmax(scores)
        for rows in (slice(0, 1), slice(1, 4)):
            for all_rows, some in zip(together, optimized.softmax(scores[rows])):
                assert torch.equal(all_rows[rows], some)


def test_rows_far_apart(seed, proof):
    """Rows of a wider matrix: dense themselves, any stride between them."""
    scores = draw("normal", (3, 90), seed=seed, device=DEVICE)[:, 5:70]
    proof.record(block_softmax_kernel, prove(optimized.softmax, three_passes, [scores]))
    proof.record(online_softmax_kernel, prove(online, three_passes, [scores]))


@pytest.mark.parametrize("num_columns", [19, 48])
def test_softmax_stays_in_bounds(num_columns, seed):
    scores = draw("normal", (3, num_columns), seed=seed, device=DEVICE)
    for launch in (
        lambda *x: block_softmax_kernel[3,](*x, BLOCK_N=64),
        lambda *x: online_softmax_kernel[3,](*x, BLOCK_N=16, STAGES=2),
    ):
        probs, check_probs = with_canaries((3, num_columns), device=DEVICE)
        lse, check_lse = with_canaries((3,), device=DEVICE)
        launch(scores, probs, lse, num_columns, num_columns)
        check_probs()
        check_lse()
        torch.testing.assert_close((probs, lse), three_passes(scores))


# ---------------------------------------------------------------- bytes


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: elements are counted in the interpreter")
@pytest.mark.parametrize("num_columns", [1000, 32768, 40000, 40960])
def test_bytes_that_the_kernels_move(num_columns, seed):
    """A short row is read once; of a long one everything but the last, partial tile is read
    twice.
    """
    scores = draw("normal", (2, num_columns), seed=seed)
    with Accesses() as accesses:
        optimized.softmax(scores)
    # stays in registers
    kept = num_columns % (optimized.TILE_BYTES // 4) if num_columns > optimized.MAX_BLOCK else 0
    moved = traffic.softmax_bytes(2, num_columns, 4, traffic.way_of(num_columns)) - 4 * 2 * kept
    assert 4 * (accesses.loaded + accesses.stored - 2) == moved  # 2: the log-sum-exps
    assert accesses.stored == 2 * num_columns + 2


def test_bytes_that_the_passes_read(seed):
    """naive.py reads a row through `tiles` alone: three times, twice, once."""
    scores, v = torch.randn(2, 100), torch.randn(100, 3)
    for way, function in (
        ("three passes", naive.softmax_three_passes),
        ("online, two passes", naive.softmax_online),
        ("softmax · V in one pass", lambda x, block: naive.attention_one_pass(x, v, block)),
    ):
        with patch.object(naive, "tiles", side_effect=naive.tiles) as passes:
            function(scores, 32)
        assert len(passes.mock_calls) == traffic.PASSES[way][0], way


# ---------------------------------------------------------------- parts and their merge


def whole(scores, v, split_size=None):
    return naive.attention_one_pass(scores, v)


def in_parts(scores, v, split_size):
    return merge_states(*partial_attention(scores, v, split_size), dtype=torch.float32)


@pytest.mark.parametrize("num_keys", edge_lengths(32, at_most=140))
@pytest.mark.parametrize(
    "split_size, head_dim, dtype",
    [(32, 16, torch.float32), (50, 20, torch.bfloat16), (500, 80, torch.float32)],
)
def test_parts_merged_are_the_whole(num_keys, split_size, head_dim, dtype, seed, proof):
    """Splits that end inside a tile, one split alone, a head_dim that is no power of two."""
    scores = draw("large", (3, num_keys), dtype=dtype, seed=seed, device=DEVICE)
    scores[1] = -INF
    v = draw("normal", (num_keys, head_dim), dtype=dtype, seed=seed + 1, device=DEVICE)
    errors = prove(
        in_parts, whole, [scores, v, split_size], floor=floor_for(torch.float32, "large_logits")
    )
    proof.record(partial_kernel, errors)
    proof.record(merge_kernel, errors)


def states(num_splits, shape, head_dim, seed, dtype=torch.float32):
    """outs: [S, *shape, D] and lses: [S, *shape]; a third of the states has seen nothing, and its
    out holds NaN.
    """
    outs = draw("normal", (num_splits, *shape, head_dim), dtype=dtype, seed=seed, device=DEVICE)
    lses = draw("normal", (num_splits, *shape), seed=seed + 1, device=DEVICE) * 10
    empty = draw("normal", (num_splits, *shape), seed=seed + 2, device=DEVICE) > 0.4
    return outs.masked_fill(empty[..., None], float("nan")), lses.masked_fill(empty, -INF)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 31, 32, 33, 133])
@pytest.mark.sample(3)
def test_merge_states(num_splits, seed, proof):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = states(num_splits, (2, 3), 20, seed, dtype)
        proof.record(merge_kernel, prove(merge_states, naive.merge_states, inputs))
        prove(partials.merge_states_torch, naive.merge_states, inputs)


def test_merge_probes_with_known_answers(seed):
    outs, lses = states(5, (4,), 16, seed)
    # nothing seen; one state alone; all the same weight
    lses[:, 0], lses[1:, 1], lses[:, 2] = -INF, -INF, 3.0
    lses[0, 1] = 2.0
    outs[:, 2], outs[0, 1] = torch.randn(5, 16, device=DEVICE), torch.randn(16, device=DEVICE)
    for function in (merge_states, partials.merge_states_torch, naive.merge_states):
        out, lse = function(outs, lses)
        assert (out[0] == 0).all() and lse[0] == -INF
        # not bit by bit: a GPU divides by 1 to within 2 units in the last place (PTX, div.full)
        torch.testing.assert_close(out[1], outs[0, 1], rtol=2**-22, atol=0)
        torch.testing.assert_close(lse[1].cpu(), torch.tensor(2.0), rtol=2**-22, atol=0)
        torch.testing.assert_close(out[2], outs[:, 2].mean(0))
        torch.testing.assert_close(lse[2].cpu(), torch.tensor(3 + math.log(5)))
    order = torch.randperm(5, device=DEVICE)
    torch.testing.assert_close(
        merge_states(outs[order].contiguous(), lses[order].contiguous()), merge_states(outs, lses)
    )
    empty_out, empty_lse = merge_states(
        poisoned((0, 4, 16), device=DEVICE), poisoned((0, 4), device=DEVICE)
    )
    assert (empty_out == 0).all() and (empty_lse == -INF).all()


def test_parts_do_not_depend_on_the_batch(seed):
    scores, v = (
        draw("normal", (5, 130), seed=seed, device=DEVICE),
        draw("normal", (130, 16), seed=seed + 1, device=DEVICE),
    )
    together = in_parts(scores, v, 40)
    assert all(torch.equal(a[1:3], b) for a, b in zip(together, in_parts(scores[1:3], v, 40)))
    ones, lse = in_parts(scores, torch.ones_like(v), 40)
    torch.testing.assert_close(ones, torch.ones_like(ones), atol=1e-6, rtol=0)
    torch.testing.assert_close(lse, naive.log_sum_exp(scores))


def test_merge_stays_in_bounds(seed):
    outs, lses = states(3, (5,), 20, seed)
    (out, check_out), (lse, check_lse) = (
        with_canaries((5, 20), device=DEVICE),
        with_canaries((5,), device=DEVICE),
    )
    merge_kernel[5,](outs, lses, out, lse, 3, 5, HEAD_DIM=20, BLOCK_D=32, BLOCK_N=4, STAGES=2)
    check_out()
    check_lse()
    torch.testing.assert_close((out, lse), naive.merge_states(outs, lses))


# ---------------------------------------------------------------- wrong answers

SLIPS = {
    "a tile is dropped": lambda s: (
        [x[:, : s.shape[1]] for x in [torch.nn.functional.pad(online(s[:, 16:])[0], (16, 0))]]
        + [online(s)[1]]
    ),
    "no max": lambda s: [s.exp() / s.exp().sum(-1, keepdim=True), online(s)[1]],
    "exp2 without log2e": lambda s: [
        torch.exp2(s - s.amax(-1, keepdim=True))
        / torch.exp2(s - s.amax(-1, keepdim=True)).sum(-1, keepdim=True),
        online(s)[1],
    ],
    "log-sum-exp without the max": lambda s: [online(s)[0], online(s)[1] - s.amax(-1)],
    "1 % too much": lambda s: [online(s)[0] * 1.01, online(s)[1]],
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_wrong_softmax_is_rejected(slip, seed):
    scores = draw("large", (8, 75), seed=seed, device=DEVICE)
    scores[0, 0] = 400
    with pytest.raises(NotEquivalent):
        prove(SLIPS[slip], three_passes, [scores], floor=floor_for(torch.float32, "large_logits"))


WRONG_STATES = {
    "averaged": lambda outs, lses: (outs.nan_to_num().mean(0), lses.logsumexp(0)),
    "the largest alone": lambda outs, lses: (
        outs.gather(0, lses.argmax(0)[None, :, None].expand(1, -1, outs.shape[2]))[0],
        lses.amax(0),
    ),
    "an empty state counts": lambda outs, lses: merge_states(
        outs.nan_to_num(), lses.masked_fill(lses == -INF, 0.0)
    ),
    "an empty state is read": lambda outs, lses: (
        torch.einsum("sr,srd->rd", torch.softmax(lses, 0), outs),
        lses.logsumexp(0),
    ),
    "weights in base 2": lambda outs, lses: (
        merge_states(outs, lses * math.log(2))[0],
        merge_states(outs, lses)[1],
    ),
    "lse of the largest": lambda outs, lses: (merge_states(outs, lses)[0], lses.amax(0)),
}


@pytest.mark.parametrize("slip", WRONG_STATES)
def test_a_wrong_merge_of_states_is_rejected(slip, seed):
    outs, lses = states(6, (30,), 16, seed)
    with pytest.raises(NotEquivalent):
        prove(WRONG_STATES[slip], naive.merge_states, [outs, lses / 10])


# ---------------------------------------------------------------- the compiler


@pytest.mark.compiler
def test_the_compiler_gives_wide_loads_without_spills():
    for report in check_all(KERNELS):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        # 72 leave room for 28 warps on an SM. A merge has one warp for 128 columns, so it may have
        # as many registers as two such warps.
        most = 2 * 84 if report.name.startswith("merge") else 72
        assert report.fits and report.registers <= most, (
            f"{report.name} on sm_{report.chip}: {report}"
        )
        assert bool(report.loads_128bit) == ("odd" not in report.name), (
            f"{report.name} on sm_{report.chip}"
        )
        # cp.async: tiles are on their way meanwhile
        if report.name in ("online_bf16", "online_fp32") and report.chip >= 80:
            assert (
                report.census["LDGSTS"]
                and report.shared_bytes >= (optimized.TILE_STAGES - 1) * optimized.TILE_BYTES
            )


@pytest.mark.compiler
def test_the_compiler_on_cuda():
    """One SHFL for each of two registers, five rounds, two levels, four kernels; no local memory;
    16 bytes at once.
    """
    for report in check_cuda(
        cuda_softmax.SOURCE.read_text(encoding="utf-8"), CHIPS, "optimized.cu"
    ):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error.replace("not run", "NOT RUN"))
        # of 65536 for 1024 threads
        assert report.fits and report.stack_bytes == 0 and report.registers <= 64, report
        assert (
            report.census["SHFL"] == 2 * 5 * 2 * 4
            and report.loads_128bit >= 4
            and report.shared_bytes == 32 * 8
        )


# ---------------------------------------------------------------- CUDA C++


@pytest.mark.cuda_cpp
@pytest.mark.parametrize("num_columns", [1, 7, 8, 1000, 1024, 8191, 8192, 32000, 128256, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.sample(6)
def test_cuda_softmax(num_columns, dtype, seed, proof):
    """optimized.cu: fewer columns than threads, rows that start anywhere, vocabularies; a masked
    row; bits free of the batch.
    """
    scores = draw("normal", (5, num_columns), dtype=dtype, seed=seed, device=DEVICE) * 8
    scores[1], scores[2, num_columns // 2 + 1 :] = -INF, -INF
    proof.record(cuda_softmax.SOURCE, prove(cuda_softmax.softmax, three_passes, [scores]))
    apart = scores.repeat(1, 2)[
        :, num_columns - num_columns // 2 : 2 * num_columns - num_columns // 2
    ]
    proof.record(cuda_softmax.SOURCE, prove(cuda_softmax.softmax, three_passes, [apart]))
    assert all(
        torch.equal(a[3:], b)
        for a, b in zip(cuda_softmax.softmax(scores), cuda_softmax.softmax(scores[3:]))
    )


def test_which_width_a_thread_loads():
    def width(rows, columns, dtype, first=0, wide=None):
        x = torch.zeros(rows, (wide or columns) + first, dtype=dtype)[:, first : first + columns]
        return cuda_softmax.numbers_at_once(x, torch.empty(rows, columns, dtype=dtype))

    assert width(2, 128256, torch.bfloat16) == 8 and width(2, 32000, torch.float32) == 4
    # rows start anywhere
    assert width(2, 1001, torch.bfloat16) == width(2, 1000, torch.bfloat16, wide=1001) == 1
    assert (
        width(2, 1000, torch.float32, first=1, wide=1003) == 1
        and width(1, 1000, torch.float32, wide=1001) == 4
    )


def lanes(seed):
    return draw("normal", (32,), seed=seed) * 30, draw("normal", (32,), seed=seed + 1).abs() + 1


def test_the_butterfly_merges_all_lanes_to_the_same_bits(seed):
    m, l = lanes(seed)
    last_m, last_l = warp.butterfly(m, l)[-1]
    assert (last_m == m.max()).all() and (last_l == last_l[0]).all()  # every lane, to the bit
    want = naive.merge_tree([Partial(a, b, b[None]) for a, b in zip(m.double(), l.double())])
    torch.testing.assert_close(last_l[0].double(), want.l, atol=0, rtol=1e-6)
    assert [len(warp.heard_of(5, rounds)) for rounds in range(6)] == [1, 2, 4, 8, 16, 32]


def test_a_butterfly_cut_short_leaves_halves(seed):
    """The last step skipped: neighbours disagree, because each has heard of 16 lanes alone."""
    for rounds, groups in ((4, 2), (3, 4)):
        m, l = warp.butterfly(*lanes(seed))[rounds]
        assert len(set((m + l.log()).tolist())) == groups


def test_a_fused_multiply_add_makes_the_lanes_disagree():
    """Why optimized.cu rounds each product: an FMA rounds one of the two, another one in the
    partner lane.
    """

    def fused(a_m, a_l, b_m, b_l):
        m = torch.maximum(a_m, b_m)
        exact = a_l.double() * torch.exp(a_m - m).double() + (b_l * torch.exp(b_m - m)).double()
        return m, exact.float()

    different = 0
    for seed in range(20):
        m, l = lanes(seed)
        m = m / 100  # scores near each other, so that both products count
        assert len(set(warp.butterfly(m, l)[-1][1].tolist())) == 1
        for distance in warp.DISTANCES:
            m, l = fused(m, l, warp.shfl_xor(m, distance), warp.shfl_xor(l, distance))
        different += len(set(l.tolist())) > 1
    assert different >= 10


# ---------------------------------------------------------------- bad input


def test_softmax_refuses():
    for softmax in (optimized.softmax, optimized.softmax_torch, cuda_softmax.softmax):
        assert_refused(
            softmax,
            dict(scores=torch.zeros(3, 8, device=DEVICE)),
            "scores",
            ("dtype", "device", "stride"),
        )
        with pytest.raises(
            ValueError, match=r"scores: got torch.float32 \(3,\) on .*accepted: \[R, N\]"
        ):
            softmax(torch.zeros(3, device=DEVICE))


def test_more_splits_than_a_second_axis_holds(monkeypatch):
    """Rows and splits share the grid's first axis."""
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(partials, "partial_kernel", Recorder())
    partial_attention(torch.zeros(2, 70_000), torch.zeros(70_000, 4), 1)
    assert grids == [(140_000,)]


def test_parts_refuse():
    good = dict(
        scores=torch.zeros(3, 8, device=DEVICE), v=torch.zeros(8, 4, device=DEVICE), split_size=4
    )
    assert_refused(partial_attention, good, "v", ("dtype", "device", "stride"))
    with pytest.raises(ValueError, match=r"v: got .*accepted: torch.float32 \[8, D\]"):
        partial_attention(**good | {"v": good["v"][:7]})
    with pytest.raises(ValueError, match="split_size: got 0; accepted: 1 or more"):
        partial_attention(**good | {"split_size": 0})
    with pytest.raises(ValueError, match="with D at least 1"):
        partial_attention(**good | {"v": good["v"][:, :0]})
    with pytest.raises(ValueError, match=r"scores: got .* on meta"):
        partial_attention(good["scores"].to("meta"), good["v"].to("meta"), 4)
    for function in (merge_states, partials.merge_states_torch):
        states = dict(
            outs=torch.zeros(3, 8, 4, device=DEVICE), lses=torch.zeros(3, 8, device=DEVICE)
        )
        assert_refused(function, states, "outs", ("dtype", "device", "stride"))
        assert_refused(function, states, "lses")
        for wrong in (lambda x: x.to("meta"), lambda x: x[..., :0] if x.ndim == 3 else x):
            with pytest.raises(ValueError, match=r"outs, lses: got .* with data"):
                function(*map(wrong, states.values()))
