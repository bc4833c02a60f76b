"""Proves that the kernel, and the PyTorch that stands in for it, decide as the paper's rule in
float64 does: the same tokens, from the same random numbers.
"""

from itertools import pairwise

import pytest
import torch

from lessons.l16_speculative_sampling import naive, optimized
from lessons.l16_speculative_sampling.lab.testing import (
    COUNTS,
    KINDS,
    Rows,
    assert_decides,
    expected,
    rows_of,
    sure,
)
from lessons.l16_speculative_sampling.optimized import verify, verify_kernel
from lessons.l16_speculative_sampling.stand_ins import verify_torch
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.refusals import assert_message, assert_refused


@pytest.mark.parametrize("vocab_size", [1, 5, 97, 1000, 4099])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(5)
def test_kernel(kind, vocab_size, seed, proof):
    """Tiles that the vocabulary fills and does not fill; NaN in all that nobody may read."""
    rows = rows_of(COUNTS if vocab_size < 1000 else [3, 0, -1, 2], vocab_size, kind)
    assert_decides(verify, rows, block_v=1024 if vocab_size == 4099 else 32)
    assert_decides(verify, sure(rows), q=None, block_v=512)
    proof.record(verify_kernel)


@pytest.mark.parametrize("vocab_size", [1, 97, 1000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(4)
def test_stand_in(kind, vocab_size, seed):
    rows = rows_of(COUNTS, vocab_size, kind)
    assert_decides(verify_torch, rows)
    assert_decides(verify_torch, sure(rows), q=None)


@pytest.mark.parametrize("count", range(9))
@pytest.mark.sample(3)
def test_any_number_of_drafted_tokens(count, seed, proof):
    rows = rows_of([count] * 5, 40)
    for function in (verify, verify_torch):
        assert_decides(function, rows)
    proof.record(verify_kernel)


@pytest.mark.parametrize("vocab_size", [50, 700])
@pytest.mark.sample(1)
def test_probabilities_of_a_softmax(vocab_size, seed, proof):
    """Sums that are not exact: where a random number lies 2e-6 from a boundary either side
    counts.
    """
    rows = rows_of([3] * 40, vocab_size)
    device, cu_rows = rows.p.device, rows.cu_rows.cpu()
    p, q = (torch.randn(2, len(rows.p), vocab_size) * 2).softmax(-1)
    u = torch.rand(len(p), 2).clamp(1e-5, 1 - 1e-5)
    bonus = cu_rows[1:].long() - 1
    rows = Rows(p, q, torch.multinomial(q, 1).squeeze(1), u, cu_rows)
    rows.q[bonus] = torch.nan
    low, high = (expected(rows._replace(u=u + shift))[0].view(-1, 4) for shift in (-2e-6, 2e-6))
    is_clear = (low == high).all(1)
    assert is_clear.sum() >= 30
    for function in (verify, verify_torch):
        tokens, _ = function(*(x.to(device) for x in rows), 4)
        assert torch.equal(tokens.cpu().view(-1, 4)[is_clear], low[is_clear])
    proof.record(verify_kernel)


def test_the_batch_changes_nothing(seed, proof):
    rows = rows_of([3, 5, 0, 2], 97)
    tokens, accepted = verify(*rows, rows.max_rows)
    bounds = rows.cu_rows.tolist()
    for b, (first, end) in enumerate(pairwise(bounds)):
        cu_rows = torch.tensor([0, end - first], dtype=torch.int32, device=rows.p.device)
        alone = Rows(*(x[first:end] for x in rows[:4]), cu_rows)
        got = verify(*alone, alone.max_rows)
        assert torch.equal(got[0], tokens[first:end]) and int(got[1]) == int(accepted[b])
    proof.record(verify_kernel)


def test_logits_that_are_not_finite_are_told(seed):
    """The distribution of such logits is NaN, and the host must not take a token for it."""
    rows = rows_of([2, 2], 40)
    rows.p[:3] = torch.nan
    for function in (verify, verify_torch):
        tokens, accepted = function(*rows, 3)
        assert accepted[0] == 0 and tokens[0] == -1 and tokens[3] >= 0


# ---------------------------------------------------------------- wrong versions

BUGS = {
    "the residual is not clipped": ("tl.maximum(p - q, 0.0)", "p - q"),
    "resampled at the last position": ("p_ptr + stop.to(tl.int64)", "p_ptr + last.to(tl.int64)"),
    "a residual for the bonus row": ("has_draft = stop < last", "has_draft = stop <= last"),
    "u = 0 accepts what cannot be": ("u_accept * q_there < p", "u_accept * q_there <= p"),
    "accepted ones are counted, not followed": (
        "tl.min(tl.where(is_drafted & passes, last, rows), axis=0)",
        "tl.min(rows, axis=0) + tl.sum((is_drafted & passes).to(tl.int32), axis=0)",
    ),
    "each tile begins at 0": ("        running += tl.sum(rest, axis=0)\n", ""),
    "the token before": ("reached > mass", "reached >= mass"),
    "one number decides and draws": ("u_ptr + 2 * stop + 1", "u_ptr + 2 * stop"),
}


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.sample(2)
def test_a_planted_bug_is_found(name, seed, tmp_path):
    buggy = with_bug(optimized, tmp_path, *BUGS[name])
    with pytest.raises(AssertionError):
        for kind in KINDS * 3:
            rows = rows_of([3, 5, 2, 4, 1] + 10 * [0], 97, kind)
            rows.drafted.clamp_(min=0)  # so that no bug reads outside
            assert_decides(buggy.verify, rows, block_v=32)


def test_what_is_refused(seed):
    rows = rows_of([2, 1], 40)
    arguments = dict(zip(Rows._fields, rows), max_rows=3)
    for function in (verify, verify_torch):
        for name in ("p", "q", "u", "cu_rows"):
            kinds = (
                ("dtype", "device") if name in ("p", "cu_rows") else ("dtype", "device", "shape")
            )
            kinds = ("dtype",) if name == "p" else kinds
            assert_refused(function, arguments, name, kinds)
        assert_message(function, {**arguments, "max_rows": 0}, "max_rows: got 0")


def test_a_residual_is_never_empty():
    p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert torch.equal(naive.residual(p, p), p)
