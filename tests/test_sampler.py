"""The engine's shortcut to top-p finds what lesson 2's search finds, and only that."""

import pytest
import torch

from lessons.l02_naive_attention.batched.batch_cuts import lowest_kept
from reference.engine import sampler
from reference.engine.sampler import among_largest, lowest_reaching

pytestmark = pytest.mark.usefixtures("seed")


def probabilities(flatness: float, rows: int = 9) -> torch.Tensor:
    """[rows, 16, 256] float32, the largest of each row 1. flatness: logits are divided by it."""
    logits = torch.randn(rows, 4096) * 3 / flatness
    return (logits - logits.amax(-1, keepdim=True)).exp().view(rows, 16, 256)


def both(p, wanted) -> tuple[torch.Tensor, torch.Tensor]:
    kept = torch.empty_like(p)
    return lowest_reaching(p, wanted, kept, p), lowest_kept(p, wanted, kept, weights=p)


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.95, 0.9999])
@pytest.mark.parametrize("flatness", [0.5, 1, 4, 1000])
def test_it_is_the_same_threshold(flatness, top_p):
    """Also where the largest entries are not enough, and where all entries are alike."""
    p = probabilities(flatness)
    wanted = top_p * p.double().sum((1, 2), keepdim=True)
    found, want = both(p, wanted)
    for row, least in enumerate(wanted.view(-1)):
        low, high = sorted((found[row].item(), want[row].item()))
        for threshold in (low, high):
            # As heavy as it has to be, and the next larger entry is too light, to rounding.
            assert p[row][p[row] >= threshold].double().sum() >= least * (1 - 1e-6)
            assert p[row][p[row] > threshold].double().sum() < least * (1 + 1e-6)
        # Neighbours, but for entries too light to count, because two ways of summing round
        # differently.
        between = p[row][(p[row] > low) & (p[row] < high)].double().sum()
        assert between <= least * 2e-6


def test_a_row_does_not_depend_on_the_others(monkeypatch):
    p = torch.cat([probabilities(0.5, rows=3), probabilities(1000, rows=2)])
    wanted = 0.9 * p.double().sum((1, 2), keepdim=True)
    wanted[1] = torch.inf  # a row that asks for no top-p
    together, _ = both(p, wanted)
    alone = [both(p[row : row + 1], wanted[row : row + 1])[0] for row in range(5)]
    assert torch.equal(together, torch.cat(alone))
    assert together[1] == 0
    _, is_found = among_largest(p, wanted)
    assert is_found.view(-1).tolist() == [True, True, True, False, False]


def test_short_rows():
    p = probabilities(1)[:, :1, :]  # fewer entries than LIKELY
    wanted = 0.9 * p.double().sum((1, 2), keepdim=True)
    found, want = both(p, wanted)
    assert torch.equal(found, want)


def test_a_row_that_is_found_wrongly_would_be_seen(monkeypatch):
    """Rows that need more than the largest entries must be searched."""
    honest = sampler.among_largest

    def always(p, wanted):
        lowest, is_found = honest(p, wanted)
        return lowest, torch.ones_like(is_found)

    monkeypatch.setattr(sampler, "among_largest", always)
    p = probabilities(1000)
    found, want = both(p, 0.9 * p.double().sum((1, 2), keepdim=True))
    assert not torch.allclose(found, want, rtol=1e-3, atol=0)
