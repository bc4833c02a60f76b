"""The batched sampler: its distribution is sampling.probabilities, row by row, whatever the rows
are; planted bugs are found; wrong logits are told where tokens are read.
"""

import math
import random

import pytest
import torch

from lessons.l02_naive_attention.batched import batch_cuts, batch_sampling
from lessons.l02_naive_attention.batched.batch_penalties import SeenTokens
from lessons.l02_naive_attention.batched.batch_sampling import (
    SamplingBatch,
    batch_probabilities,
    read_tokens,
    sample_batch,
)
from lessons.l02_naive_attention.sampling import GREEDY, SamplingParams, probabilities
from tests.batch_sampling_cases import KINDS, Case, kept_range, worst_difference

pytestmark = pytest.mark.usefixtures("seed")

# ---------------------------------------------------------------- the exact distribution


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 7, 255, 256, 257, 4096])
def test_batch_equals_the_specification(kind, vocab):
    """In float64 to 1e-12: the same tokens are kept, ties included."""
    for rows in (1, 33):
        assert worst_difference(Case(rows, vocab, kind)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_batch_in_lower_precision(dtype):
    """In float32, also for 16-bit logits: a token may be kept or not only where the specification's
    comparison is closer than 2e-5. Probabilities are right to 2e-5, relatively.
    """
    undecided = tokens = 0
    for vocab in (7, 300, 4096):
        # 16 bits tie so often that top-p's cut falls among equal tokens: float64 judges those
        fixed = {} if dtype == torch.float32 else dict(top_p=1.0)
        case = Case(66, vocab, random.choice(["normal", "flat"]), **fixed)
        case.logits = case.logits.to(dtype)
        got = batch_probabilities(case.logits, case.batch())
        assert got.dtype == torch.float32
        for p, row in zip(got.double(), case.rows()):
            must, may = kept_range(*row, slack=2e-5)
            kept = p > 0
            assert (must <= kept).all() and (kept <= may).all()
            uncut = probabilities(row[0], without_cuts(row[1]), *row[2:])
            expected = uncut * kept / (uncut * kept).sum()
            torch.testing.assert_close(p, expected, rtol=2e-5, atol=1e-35)
            undecided += int((must != may).sum())
            tokens += vocab
    # the check would be empty if it let most tokens be either
    assert undecided < 0.03 * tokens


def without_cuts(params: SamplingParams) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__dataclass_fields__}
    return SamplingParams(**fields | dict(top_k=0, top_p=1.0, min_p=0.0))


def test_equal_logits_in_sixteen_bits():
    """Among equal tokens top-p keeps the smallest ids, top-k and min-p all, in bfloat16 too."""
    case = Case(40, 3000, "ties", temperature=1.0, repetition_penalty=1.0)
    got = batch_probabilities(case.logits.bfloat16(), case.batch()) > 0
    # a sum in float32 may move the end of the ties by one token
    assert ((got != (case.expected() > 0)).sum(dim=1) <= 1).all()


def test_a_vocabulary_of_128_thousand():
    for kind in ("normal", "ties"):
        case = Case(3, 131072, kind, temperature=1.1, top_k=0)
        case.params[0] = SamplingParams(top_p=0.9137)
        case.params[1] = SamplingParams(top_k=5000, top_p=0.9137)
        assert worst_difference(case) < 1e-12


def test_extreme_values():
    logits = torch.tensor([[-math.inf, 1e4, 1e4 - 1, -1e4, -math.inf]])
    for params in (
        SamplingParams(),
        SamplingParams(temperature=1e-300),
        SamplingParams(temperature=1e300, top_p=0.5123),
        SamplingParams(repetition_penalty=100, presence_penalty=2, min_p=1.0),
    ):
        for dtype in (torch.float64, torch.float32, torch.float16):
            got = batch_probabilities(
                logits.to(dtype), SamplingBatch.of([params], [[0, 1]], [[1, 2]])
            )
            expected = probabilities(logits[0].to(dtype), params, [0, 1], [1, 2])
            torch.testing.assert_close(got[0].double(), expected, atol=1e-6, rtol=0)


# ---------------------------------------------------------------- planted bugs are found


def without_the_last(p, cut, wanted, *memory):
    kept = batch_cuts.keep_down_to(p, cut, wanted, *memory)
    return torch.where(wanted.isinf(), kept, p * (p > cut))


def without_prompts(params, prompts, outputs, *rest):
    return SEEN_TOKENS_OF(params, [[] for _ in prompts], outputs, *rest)


def prompts_as_outputs(params, prompts, outputs, *rest):
    both = [prompt + output for prompt, output in zip(prompts, outputs)]
    return SEEN_TOKENS_OF(params, prompts, both, *rest)


def counted_once(params, prompts, outputs, *rest):
    return SEEN_TOKENS_OF(params, prompts, [list({*output}) for output in outputs], *rest)


def divided(seen, logits):
    logits += 100  # all are positive now, so each is divided
    PENALIZE(seen, logits)
    logits -= 100


SEEN_TOKENS_OF, PENALIZE = SeenTokens.of, SeenTokens.penalize_
MISTAKES = {
    "top-p leaves out the token that reaches p": ("keep_down_to", without_the_last),
    "top-p keeps all ties": ("keep_down_to", lambda p, cut, *_: p * (p >= cut)),
    "top-p of another row": (
        "lowest_kept",
        lambda p, wanted, *rest, **kw: batch_cuts.lowest_kept(p, wanted.roll(1), *rest, **kw),
    ),
    "top-k of the whole batch": (
        "kth_largest",
        lambda p, top_k: batch_cuts.kth_largest(p, top_k).amin(dim=0, keepdim=True),
    ),
    "top-p is forgotten beside top-k": (
        "reaching",
        lambda p, top_k, wanted: batch_cuts.kth_largest(p, top_k),
    ),
    "repetition leaves the prompt out": ("of", without_prompts),
    "the prompt counts as output": ("of", prompts_as_outputs),
    "frequency is presence": ("of", counted_once),
    "a negative logit is divided": ("penalize_", divided),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_bug_is_found(name, monkeypatch):
    attribute, mistake = MISTAKES[name]
    if attribute == "of":
        monkeypatch.setattr(SeenTokens, "of", staticmethod(mistake))
    else:
        owner = SeenTokens if attribute == "penalize_" else batch_sampling
        monkeypatch.setattr(owner, attribute, mistake)
    cases = [Case(60, 50, kind) for kind in KINDS] + [Case(60, 50, temperature=1.0, top_k=9)]
    assert max(worst_difference(case) for case in cases) > 1e-6


# ---------------------------------------------------------------- wrong logits, wrong arguments


@pytest.mark.parametrize("wrong", [[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=1, top_p=0.5)])
def test_logits_that_are_no_distribution(wrong, params):
    """The row says so where its token is read; the other rows never notice."""
    logits = torch.tensor([[0.0, 1.0], wrong, [5.0, 0.0]])
    batch = SamplingBatch.of([GREEDY, params, GREEDY], [[0]] * 3, [[]] * 3)
    tokens = sample_batch(logits, batch)
    batch.append(tokens)
    assert tokens.tolist() == [1, -1, 0]
    with pytest.raises(ValueError, match=r"^logits: the largest of row 1 is not finite; accepted"):
        read_tokens(tokens)
    p = batch_probabilities(logits, batch)
    assert p[1].isnan().all() and p[[0, 2]].isfinite().all()


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"^params, prompts, outputs: got 1, 2 and 0 entries;"):
        SamplingBatch.of([GREEDY], [[1], [2]], [])
    batch = SamplingBatch.of([SamplingParams(presence_penalty=1)], [[7]], [[]])
    for logits in (torch.zeros(2, 9), torch.zeros(9), torch.zeros(1, 9, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"^logits: got .*; accepted: \[1, V\] of a float"):
            sample_batch(logits, batch)
    with pytest.raises(ValueError, match=r"^prompts, outputs: got token 7; accepted: 0 to 6"):
        sample_batch(torch.zeros(1, 7), batch)
    with pytest.raises(ValueError, match=r"^rows: got \[\]; accepted: one or more"):
        batch.select([])
