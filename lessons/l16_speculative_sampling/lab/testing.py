"""What tests and exercises share: rows of p and q with known edges, whose sums are exact in
float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l16_speculative_sampling import naive
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.inputs import apart
from lessons.toolbox.proof.traps import poisoned_empty

DEVICE = default_device()  # without a GPU the kernel runs in Triton's interpreter
UNITS = 2**16  # probabilities are multiples of 1 / UNITS
STEPS = 2**8  # random numbers are multiples of 1 / STEPS, so that products have at most 24 bits
KINDS = (
    "normal",
    "equal",
    "disjoint",
    "p is zero",
    "greedy",
    "residual of one unit",
    "on the boundary",
)


class Rows(NamedTuple):
    """The arguments of naive.verify, in its order."""

    p: Tensor
    q: Tensor
    drafted: Tensor
    u: Tensor
    cu_rows: Tensor

    @property
    def max_rows(self) -> int:
        return max(1, int(self.cu_rows.diff().max()))

    @property
    def wide(self) -> "Rows":
        """In float64 on the CPU, for the oracle. Unread rows stay NaN."""
        p, q, drafted, u, cu_rows = (x.cpu() for x in self)
        return Rows(p.double(), q.double(), drafted, u.double(), cu_rows)


def in_units(rows: int, vocab_size: int, units: int = UNITS) -> Tensor:
    """Random distributions in multiples of 1 / units, some tokens with 0: [rows, V] float32."""
    logits = 2 * torch.randn(rows, vocab_size)
    weights = logits.softmax(-1) * (torch.rand(rows, vocab_size) < 0.8)
    weights[:, 0] += 1e-3  # so that no row is empty
    counts = torch.stack(
        [
            torch.bincount(torch.multinomial(row, units, replacement=True), minlength=vocab_size)
            for row in weights
        ]
    )
    return counts.float() / units


def rows_of(counts: list[int], vocab_size: int, kind: str = "normal") -> Rows:
    """Sequences with so many drafted tokens each; -1: padding without rows.

    Rows of p and of q are apart, each in its own way, with NaN between them. In bonus rows drafted
    is -1 and q is NaN, or in every other one something that looks like a distribution.
    """
    total = sum(count + 1 for count in counts)
    # With coarse steps a random number often falls on the very end of a token.
    units = 64 if kind == "on the boundary" else UNITS
    p, q = in_units(total, vocab_size, units), in_units(total, vocab_size, units)
    drafted = torch.multinomial(q, 1).squeeze(1)
    steps = units if kind == "on the boundary" else STEPS
    u = torch.randint(steps, (total, 2)).float() / steps
    if kind == "equal":
        q = p.clone()
        drafted = torch.multinomial(q, 1).squeeze(1)
    if kind == "greedy":
        p, q = (torch.nn.functional.one_hot(x.argmax(-1), vocab_size).float() for x in (p, q))
        q[::2] = p[::2]  # every other draft is right
        drafted = q.argmax(-1)
    if kind == "disjoint":
        half = torch.arange(vocab_size) < max(1, vocab_size // 2)
        p = torch.where(half, p, 0)
        q = torch.where(half & (vocab_size > 1), 0, q)
    if kind == "p is zero" and vocab_size > 1:
        p.scatter_(1, drafted[:, None], 0)
        # so that no row is empty
        p.scatter_add_(1, (drafted[:, None] + 1) % vocab_size, torch.full((total, 1), 1 / UNITS))
        u[:, 0] *= torch.rand(total) < 0.5  # 0 passes for nothing
    if kind == "residual of one unit" and vocab_size > 1:
        q, first, second = p.clone(), p.argmax(-1), p.argmin(-1)
        q[torch.arange(total), first] -= 1 / UNITS
        q[torch.arange(total), second] += 1 / UNITS
        drafted = second  # the one that q has too much of
    bounds = torch.tensor([0, *(count + 1 for count in counts)]).cumsum(0).int()
    bonus = bounds[1:][bounds.diff() > 0].long() - 1
    drafted[bonus], q[bonus[::2]] = -1, torch.nan
    p, q = apart(p.to(DEVICE), q.to(DEVICE))
    return Rows(p, q, drafted.to(DEVICE), u.to(DEVICE), bounds.to(DEVICE))


def expected(rows: Rows) -> tuple[Tensor, Tensor]:
    """naive.verify in float64 -> tokens: [R], accepted: [B]."""
    return naive.verify(*rows.wide)


def sure(rows: Rows) -> Rows:
    """The same with a draft that was sure: q is 1 at the drafted token, which `q = None` means."""
    drafted = rows.drafted.clamp(min=0)
    return rows._replace(q=torch.nn.functional.one_hot(drafted, rows.p.shape[1]).float())


# -1: a sequence of a batch with fixed size that has left
COUNTS = [4, 0, 1, -1, 8, 3, 3, -1, 2]


def assert_decides(function, rows: Rows, q="rows.q", **options) -> None:
    """function, whose outputs are poisoned before, equals naive.verify in every token."""
    want = expected(rows)
    q = rows.q if q == "rows.q" else q
    with poisoned_empty():
        got = function(rows.p, q, *rows[2:], rows.max_rows, **options)
    for mine, theirs in zip(got, want):
        assert torch.equal(mine.cpu(), theirs), f"{mine.tolist()}, expected {theirs.tolist()}"
