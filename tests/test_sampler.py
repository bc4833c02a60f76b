"""The engine's two shortcuts, to top-p and for greedy steps, find what lesson 2 finds, and only
that.
"""

import pytest
import torch

from lessons.l02_naive_attention.batched.batch_cuts import lowest_kept
from lessons.l02_naive_attention.batched.batch_sampling import SamplingBatch, sample_batch
from lessons.l02_naive_attention.batched.requests import kernel_batch
from lessons.l02_naive_attention.sampling import GREEDY, SamplingParams
from reference.engine import nucleus
from reference.engine.nucleus import among_largest, lowest_reaching
from reference.engine.request import EngineSequence
from reference.engine.sampler import Sampler, likeliest

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
    honest = nucleus.among_largest

    def always(p, wanted):
        lowest, is_found = honest(p, wanted)
        return lowest, torch.ones_like(is_found)

    monkeypatch.setattr(nucleus, "among_largest", always)
    p = probabilities(1000)
    found, want = both(p, 0.9 * p.double().sum((1, 2), keepdim=True))
    assert not torch.allclose(found, want, rtol=1e-3, atol=0)


# ---------------------------------------------------------------- greedy steps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [7, 512, 1000])
def test_a_greedy_step_takes_what_lesson_2_takes(dtype, width):
    """Of equal logits the first, also where most of a row are equal."""
    logits = torch.randint(-3, 4, (40, width)).to(dtype)
    logits[0] = -torch.inf
    logits[0, width // 2 :] = 1.5
    logits[1] = 0
    batch = SamplingBatch.of([GREEDY] * 40, [[]] * 40, [[]] * 40)
    assert likeliest(logits) == sample_batch(logits, batch).tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_greedy_step_refuses_what_lesson_2_refuses(bad):
    logits = torch.randn(3, 300)
    logits[1, 200] = bad
    with pytest.raises(ValueError, match="the largest of row 1 is not finite"):
        likeliest(logits)
    with pytest.raises(ValueError, match="the largest of row 0 is not finite"):
        likeliest(torch.full((1, 4), -torch.inf))


def test_only_plain_greedy_requests_are_spared_the_draw():
    """A penalty changes the logits, so such a row has to be sampled by lesson 2."""
    penalized = SamplingParams(temperature=0, presence_penalty=2.0, seed=0)
    for params, is_greedy in ((GREEDY, True), (penalized, False), (SamplingParams(seed=0), False)):
        sequence = EngineSequence(0, [1], 4, params, frozenset())
        assert sequence.is_greedy == is_greedy
    logits = torch.zeros(1, 4)
    logits[0, 1], logits[0, 2] = 1.0, 0.5
    one = EngineSequence(0, [3], 4, penalized, frozenset(), output=[1])
    assert Sampler()(logits.clone(), [one])[0].tokens == [2]
    plain = EngineSequence(1, [3], 4, GREEDY, frozenset(), output=[1])
    assert Sampler()(logits.clone(), [plain])[0].tokens == [1]


# ---------------------------------------------------------------- the kernels


@pytest.mark.parametrize("settings", [dict(top_p=0.8123), dict(top_k=9, repetition_penalty=1.3)])
@pytest.mark.sample(1)
def test_the_kernels_choose_the_same_tokens(settings):
    """Step after step, beside a greedy request; logits that are not finite are refused by both."""
    params = [SamplingParams(**settings, seed=7), GREEDY]
    with_kernels, without = Sampler(kernel_batch), Sampler()
    for sampler in (with_kernels, without):
        sampler.sequences = [
            EngineSequence(row, [1, 2], 9, each, frozenset()) for row, each in enumerate(params)
        ]
    for _ in range(3):
        logits = 2 * torch.randn(2, 300)
        chosen = [
            [emitted.tokens[0] for emitted in sampler(logits.clone(), sampler.sequences)]
            for sampler in (with_kernels, without)
        ]
        assert chosen[0] == chosen[1]
        for sampler in (with_kernels, without):
            for sequence, token in zip(sampler.sequences, chosen[0]):
                sequence.append(token)
    logits[0, 3] = torch.nan
    for sampler in (with_kernels, without):
        with pytest.raises(ValueError, match="the largest of row 0 is not finite"):
            sampler(logits.clone(), sampler.sequences)
