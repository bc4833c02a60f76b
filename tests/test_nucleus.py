"""The engine's top-p on a CPU draws what the definition draws from the same random numbers, row by
row.
"""

import numpy as np
import pytest
import torch

from lessons.l02_naive_attention.batched.batch_sampling import (
    BAD_LOGITS,
    SamplingBatch,
    sample_batch,
)
from lessons.l02_naive_attention.sampling import SamplingParams, sample
from reference.engine import nucleus

pytestmark = pytest.mark.usefixtures("seed")
CPU = torch.device("cpu")


def drawn(logits: torch.Tensor, params: list[SamplingParams], outputs=None, shortcut=True) -> list:
    outputs = outputs or [[]] * len(params)
    batch = SamplingBatch.of(params, [[1]] * len(params), outputs, CPU)
    batch.shortcut = nucleus.shortcut_of(batch) if shortcut else None
    assert bool(batch.shortcut) == shortcut
    return sample_batch(logits, batch).tolist()


def defined(logits: torch.Tensor, params: list[SamplingParams], outputs=None) -> list:
    return sample(logits, params, [[1]] * len(params), outputs or [[]] * len(params))


def new_params(rows: int, **fixed) -> list[SamplingParams]:
    """Temperatures from cold to hot, and a top-p from a single token to nearly all."""
    temperatures, shares = (0.1, 0.8, 1.0, 3.0), (1e-9, 0.3, 0.9, 0.95, 0.999)
    return [
        SamplingParams(
            **{"temperature": temperatures[row % 4], "top_p": shares[row % 5]} | fixed,
            seed=int(torch.randint(2**62, ())),
        )
        for row in range(rows)
    ]


@pytest.mark.parametrize("flatness", [0.3, 1, 30])
@pytest.mark.parametrize("vocab_size", [3, 600, 4096])
def test_tokens_of_the_definition(vocab_size, flatness):
    """Also where the cut is deeper than the likeliest entries, and in a vocabulary of no whole
    number of blocks. About one token in a million may differ, because the probabilities are
    float32.
    """
    rows = 200
    logits = torch.randn(rows, vocab_size) * 3 / flatness
    params, outputs = new_params(rows), [[7] * (row % 6) for row in range(rows)]
    pairs = zip(drawn(logits, params, outputs), defined(logits, params, outputs))
    assert sum(own != want for own, want in pairs) <= 1


def test_of_equal_tokens_the_first_stay(monkeypatch):
    """All alike, two heights, and a vocabulary whose likeliest entries all equal the cut."""
    monkeypatch.setattr(nucleus, "LIKELY", 8)
    rows = 100
    logits = torch.zeros(rows, 301)  # no share of it is a whole number of tokens
    logits[::3, ::7] = 4.0
    logits[1::3, 5] = 6.0
    params = new_params(rows, temperature=1.0)
    assert drawn(logits, params) == defined(logits, params)


def test_forbidden_tokens_are_never_drawn():
    """A structure leaves few tokens, perhaps fewer than top-p wants; NaN and inf have no token."""
    logits = torch.full((64, 700), -torch.inf)
    logits[:, [3, 300, 699]] = torch.tensor([1.0, 1.0, 0.5])
    params = new_params(64)
    found = drawn(logits, params)
    assert found == defined(logits, params) and set(found) <= {3, 300, 699}
    logits[0, 5], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    assert drawn(logits, params) == [BAD_LOGITS] * 3 + found[3:]


def test_a_row_does_not_depend_on_the_others():
    """In bits: the same with a flat neighbour, with one that is greedy and alone."""
    logits = torch.randn(12, 4096) * 3
    logits[::4] *= 0.01
    params = new_params(12)
    params[5] = SamplingParams(temperature=0)
    together = drawn(logits, params)
    assert together[5] == int(logits[5].argmax())
    for row in (0, 1, 4, 7):
        assert drawn(logits[row : row + 1], params[row : row + 1]) == [together[row]]
    kept = np.empty((2, 12, 4096), np.float32)
    p = (logits - logits.amax(1, keepdim=True)).exp().numpy()
    top_p = np.full(12, 0.9)
    nucleus.keep_likeliest(p, top_p, kept[0])
    for row in range(12):
        nucleus.keep_likeliest(p[row : row + 1], top_p[:1], kept[1, row : row + 1])
    assert (kept[0] == kept[1]).all()


@pytest.mark.parametrize(
    "other",
    [dict(top_k=5, top_p=1.0), dict(top_k=300), dict(min_p=0.1), dict(presence_penalty=1.0)],
)
def test_other_requests_take_the_long_way(other):
    """A row that asks for more is sampled by lesson 2, and a small top_k needs no search at all."""
    params = [*new_params(3), SamplingParams(temperature=1.0, seed=1, **{"top_p": 0.9} | other)]
    batch = SamplingBatch.of(params, [[1]] * 4, [[]] * 4, CPU)
    assert bool(nucleus.shortcut_of(batch)) == (other.get("top_k") == 5)
    logits = torch.randn(4, 512)
    batch.shortcut = nucleus.shortcut_of(batch)
    assert sample_batch(logits, batch).tolist() == defined(logits, params)


def test_the_end_of_a_row_is_never_passed():
    """The largest random number there is, where the sums of blocks and of their entries may round
    differently.
    """
    p = (torch.randn(400, 2048) * 9).exp().numpy()  # their sums are not exact in 53 bits
    p[:, 1500:] = 0
    tokens = nucleus.draw(p, np.full(400, 1 - 2.0**-53))
    assert (p[np.arange(400), tokens] > 0).all()
    last_block = (p.reshape(400, -1, 256).sum(2) > 0).sum(1) - 1
    assert (tokens // 256 == last_block).all()
