"""Proves that the verification in several programs a sequence decides as the paper's rule in
float64 does, from the same random numbers.
"""

from itertools import pairwise

import pytest
import torch

from lessons.l16_speculative_sampling.lab.testing import (
    COUNTS,
    KINDS,
    Rows,
    assert_decides,
    expected,
    rows_of,
    sure,
)
from lessons.l16_speculative_sampling.more import split
from lessons.l16_speculative_sampling.more.split import emit_kernel, masses_kernel, verify_split
from lessons.l16_speculative_sampling.optimized import verify
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.refusals import assert_message, assert_refused


@pytest.mark.parametrize("vocab_size", [1, 5, 97, 1000, 4099])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(4)
def test_decisions(kind, vocab_size, seed, proof):
    """Parts that the vocabulary fills and does not fill; NaN in all that nobody may read."""
    rows = rows_of(COUNTS if vocab_size < 1000 else [3, 0, -1, 2], vocab_size, kind)
    assert_decides(verify_split, rows, part=1024 if vocab_size == 4099 else 32)
    assert_decides(verify_split, sure(rows), q=None, part=512)
    proof.record(masses_kernel)
    proof.record(emit_kernel)


@pytest.mark.parametrize("count", range(9))
@pytest.mark.sample(2)
def test_any_number_of_drafted_tokens(count, seed, proof):
    assert_decides(verify_split, rows_of([count] * 5, 40), part=16)
    proof.record(emit_kernel)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-24])
@pytest.mark.sample(1)
def test_the_ends_of_the_random_numbers(u, seed):
    """The first token with any mass, and the last, in whatever part they are."""
    rows = rows_of([2, 0, 3], 97, "normal")
    rows.u[:, 1] = u
    assert_decides(verify_split, rows, part=16)


def test_probabilities_of_a_softmax(seed):
    """Sums that are not exact: where a number is 2e-6 from a boundary either side counts."""
    rows = rows_of([3] * 12, 700)
    p, q = (torch.randn(2, len(rows.p), 700) * 2).softmax(-1)
    u = torch.rand(len(p), 2).clamp(1e-5, 1 - 1e-5)
    rows = Rows(p, q, torch.multinomial(q, 1).squeeze(1), u, rows.cu_rows)
    low, high = (expected(rows._replace(u=u + shift))[0].view(-1, 4) for shift in (-2e-6, 2e-6))
    is_clear = (low == high).all(1)
    assert is_clear.sum() >= 8
    there = Rows(*(x.to(rows.cu_rows.device) for x in rows))
    tokens = verify_split(*there, 4, part=64)[0].cpu().view(-1, 4)
    assert torch.equal(tokens[is_clear], low[is_clear])


def test_the_batch_changes_nothing(seed, proof):
    """Nor does the size of a part."""
    rows = rows_of([3, 5, 0, 2], 97)
    tokens, accepted = verify_split(*rows, rows.max_rows, part=32)
    for other in (verify_split(*rows, rows.max_rows, part=128), verify(*rows, rows.max_rows)):
        assert torch.equal(tokens, other[0]) and torch.equal(accepted, other[1])
    for b, (first, end) in enumerate(pairwise(rows.cu_rows.tolist())):
        cu_rows = torch.tensor([0, end - first], dtype=torch.int32, device=rows.p.device)
        alone = Rows(*(x[first:end] for x in rows[:4]), cu_rows)
        got = verify_split(*alone, alone.max_rows, part=32)
        assert torch.equal(got[0], tokens[first:end]) and int(got[1]) == int(accepted[b])
    proof.record(masses_kernel)


def test_a_token_without_mass_is_never_drawn(seed):
    """By the largest random number, where the two sums of a part round differently."""
    rows = rows_of([0] * 40, 97)
    rows.p.copy_((2 * torch.randn(40, 97)).softmax(-1))
    rows.p[:, 80:], rows.u[:, 1] = 0, 1 - 2.0**-24
    tokens, _ = verify_split(*rows, 1, part=128)
    assert rows.p.gather(1, tokens[:, None]).gt(0).all()


def test_it_stays_within_its_tensors(seed):
    """Where nothing is between rows, and the last token of the last row is drawn."""
    dense = Rows(*(x.contiguous() for x in rows_of([3, 2, 0], 37)))
    dense.u[:, 1] = 1 - 2.0**-24
    with in_bounds():
        for q in (dense.q, None):
            verify_split(dense.p, q, *dense[2:], dense.max_rows, part=16)


def test_logits_that_are_not_finite_are_told(seed):
    rows = rows_of([2, 2], 40)
    rows.p[:3] = torch.nan
    tokens, accepted = verify_split(*rows, 3, part=16)
    assert accepted[0] == 0 and tokens[0] == -1 and tokens[3] >= 0


def on_the_ends_of_parts() -> Rows:
    """Draws from p whose number is the sum of one part, of two or of three, or of some tokens."""
    rows = rows_of([0] * 6, 97, "on the boundary")
    for row, count in enumerate((32, 64, 96, 32, 5, 70)):
        p = rows.p[row].zero_()
        p[::3] = 1 / 64
        p[96] += 1 - p.sum()
        rows.u[row, 1] = p[:count].sum()
    return rows


def without_a_residual() -> Rows:
    """p is half of q, so a rejected token leaves nothing but p to draw from."""
    rows = rows_of([2, 2], 97, "normal")
    rows.p.copy_(rows.q.nan_to_num(1 / 128) / 2)
    rows.u[:, 0] = 0.75
    return rows


def after_the_first_row() -> Rows:
    """A sure draft whose first token stays and whose second one does not; 64 tokens are alike."""
    rows = rows_of([2, 3], 97, "normal")
    rows.p[:, :64], rows.p[:, 64:] = 1 / 64, 0
    rows.drafted[rows.drafted >= 0] = 63
    first = rows.cu_rows[:-1].long()
    rows.drafted[first], rows.u[:, 0], rows.u[:, 1] = 0, 0.75, 0.5
    rows.u[first, 0] = 0.0
    return sure(rows)


@pytest.mark.parametrize("rows_of_a_kind", [on_the_ends_of_parts, without_a_residual])
def test_edges(rows_of_a_kind, seed, proof):
    assert_decides(verify_split, rows_of_a_kind(), part=32)
    assert_decides(verify_split, after_the_first_row(), q=None, part=32)
    proof.record(emit_kernel)


BUGS = {
    "the residual of the last row": (
        "end - 1, stride_p, stride_q, SURE\n    )\n    token",
        "end - 2, stride_p, stride_q, SURE\n    )\n    token",
    ),
    "the token of another row": (
        "tl.load(drafted_ptr + stop, mask=stop",
        "tl.load(drafted_ptr + first, mask=stop",
    ),
    "a part is summed short": (
        "    tl.store(out, tl.sum(rest, axis=0))",
        "    tl.store(out, tl.sum(tl.where(ids % PART > 0, rest, 0.0), axis=0))",
    ),
    "p in the place of its residual": ("tl.store(out, tl.sum(rest", "tl.store(out, tl.sum(p"),
    "a residual for the bonus row": (
        "token, reads, stop < end - 1, SURE)",
        "token, reads, stop < end, SURE)",
    ),
    "no way out of an empty residual": ("has_draft = stop < first", "has_draft = stop < end - 1"),
    "one number decides and draws": ("u_ptr + 2 * stop + 1", "u_ptr + 2 * stop"),
    "the part before": ("weighs & (reached > mass)", "weighs & (reached >= mass)"),
    "always the first part": ("part = tl.minimum(passing", "part = 0 * tl.minimum(passing"),
    "each part begins at 0": (
        "(mass - tl.sum(tl.where(parts < part, masses, 0.0), axis=0))",
        "(mass * 1.0)",
    ),
    "the part itself is taken off": ("parts < part, masses", "parts <= part, masses"),
    "the token before": (
        "tl.cumsum(rest, axis=0) > rest_of_mass",
        "tl.cumsum(rest, axis=0) >= rest_of_mass",
    ),
    "the id within its part": (
        "tl.where(is_above, ids, vocab_size)",
        "tl.where(is_above, ids - part * PART, vocab_size)",
    ),
    "padding counts as accepted": ("stop - first)\n\n\ndef", "stop - first + 1)\n\n\ndef"),
}


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.sample(2)
def test_a_planted_bug_is_found(name, seed, tmp_path):
    buggy = with_bug(split, tmp_path, *BUGS[name])
    with pytest.raises(AssertionError):
        for rows in (on_the_ends_of_parts(), without_a_residual()):
            assert_decides(buggy.verify_split, rows, part=32)
        assert_decides(buggy.verify_split, after_the_first_row(), q=None, part=32)
        for kind in ("normal", "p is zero", "disjoint", "normal"):
            rows = rows_of([3, -1, 5, 2, 0], 97, kind)
            rows.drafted.clamp_(min=0)  # so that no bug reads outside
            assert_decides(buggy.verify_split, rows, part=32)
            assert_decides(buggy.verify_split, sure(rows), q=None, part=32)


def test_what_is_refused(seed):
    rows = rows_of([2, 1], 40)
    arguments = dict(zip(Rows._fields, rows), max_rows=3)
    for name in ("q", "u", "cu_rows"):
        assert_refused(verify_split, arguments, name, ("dtype", "device"))
    assert_message(verify_split, {**arguments, "max_rows": 0}, "max_rows: got 0")
