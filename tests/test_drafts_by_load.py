"""The number of drafts by load: no token changes, the best number is found, and looking for it
costs no more than 3 %.
"""

import json
import random
from collections.abc import Iterator

import pytest

from lessons.l17_tree_speculation.trees.tree import chain
from lessons.toolbox.model.checkpoint import REPOSITORY
from reference.bench import drafts_by_load, virtual_drafts
from reference.bench.virtual_drafts import Device
from reference.speculation.by_load import ByLoad, MeasuredSpeculation
from reference.speculation.speculation import Speculation
from tests import by_load_cases as cases
from tests.by_load_cases import GOOD, MOST, USELESS, expected_tokens, loss
from tests.engine_cases import new_model, random_prompts, run
from tests.test_speculative_engine import (
    EVERY_WISH,
    chance_of_outputs,
    drafters,  # noqa: F401
    new_engine,
    wishes,
)

pytestmark = pytest.mark.usefixtures("seed")
ALLOWED = drafts_by_load.ALLOWED_LOSS


@pytest.fixture(scope="module")
def model():
    return new_model()


# ---------------------------------------------------------------- no token changes


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft", "medusa", "eagle", "mtp"])
def test_no_token_changes_whatever_number_is_chosen(model, drafters, method):  # noqa: F811
    prompts = [prompt[:20] * 2 for prompt in random_prompts(len(EVERY_WISH), shared=9)]
    prompts = [prompt[:48] for prompt in prompts]
    params = [wishes(index) for index in range(len(prompts))]
    if method == "draft":  # of its sampled requests only the distribution is the same
        prompts, params = prompts[:2] * 2, params[:2] * 2
    want = run(new_engine(model), prompts, params)
    config, arrivals = dict(enable_adaptive_verification=True), [0, 0, 1, 2, 2, 4][: len(prompts)]
    for house in (dict(), dict(num_gpu_blocks_override=15)):
        engine = new_engine(model, method, drafters[method], 3, config, **house)
        engine.scheduler.chooser.clock = cases.AnyTime()
        assert run(engine, prompts, params, arrivals) == want
        engine = new_engine(model, method, drafters[method], 3, **house)
        engine.scheduler.chooser = cases.Flips(3)
        assert run(engine, prompts, params, arrivals) == want
        assert engine.speculation.counts.drafted


def test_sampled_drafts_follow_the_targets_distribution_whatever_number_is_chosen(
    model,
    drafters,  # noqa: F811
):
    """False alarm: 1e-9."""
    assert chance_of_outputs(model, drafters["draft"], chooser=cases.Flips(3)) > 1e-9


class FlipsEachStep(Speculation):
    def __init__(self, runner, scheduler):
        super().__init__(runner, scheduler)
        scheduler.chooser = cases.Flips(scheduler.num_speculative_tokens)


class ChoosesByAnyTime(MeasuredSpeculation):
    """Steps take as long as chance says, so any number may seem the best."""

    def __init__(self, runner, scheduler):
        scheduler.chooser = ByLoad(scheduler.num_speculative_tokens, clock=cases.AnyTime())
        super().__init__(runner, scheduler)


@pytest.mark.parametrize("kind", [FlipsEachStep, ChoosesByAnyTime])
def test_random_histories_with_any_number_in_any_step(kind, request):
    pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
    from hypothesis import given
    from hypothesis import strategies as st

    from tests.speculative_histories import DraftedHistory, Drafting
    from tests.test_engine_histories import FAULTS, HOUSE, REQUESTS, histories

    drafting = st.builds(
        Drafting,
        kind=st.sampled_from(["ngram", "sure"]),
        num_speculative_tokens=st.integers(1, 5),
        temperature=st.sampled_from([0.0, 1.0, 1.0]),
        context=st.sampled_from([40, 40, 17]),
        min_tokens=st.sampled_from([0, 0, 3]),
        tree=st.just(chain(1)),
    )

    @histories(2_000 if request.config.getoption("--all") else 60)
    @given(HOUSE, REQUESTS, FAULTS, drafting)
    def check(house, requests, faults, drafting):
        DraftedHistory(house, requests, faults, drafting, kind).run()

    check()


# ---------------------------------------------------------------- the best number


def finds_the_best(kind: type[ByLoad]) -> bool:
    rng = random.Random(0)
    for _ in range(300):
        chooser = kind(MOST, costs=(costs := cases.Table(rng)))
        rates = [rng.random() for _ in range(MOST)]
        for own, rate in zip(chooser.acceptance.rates, rates):
            own.value = rate
        for batch in (1, 7, 64):
            found = chooser.best(batch)
            per_s = [expected_tokens(rates, k) / costs.seconds(batch, k) for k in range(MOST + 1)]
            if per_s[found] < max(per_s) * (1 - 1e-12):
                return False
    return True


def test_the_choice_is_that_of_brute_force():
    assert finds_the_best(ByLoad)
    assert not finds_the_best(cases.CostsOfOne)


def test_acceptance_is_counted_up_to_the_first_rejection():
    """30 of 40 first tokens stayed, and of these 30 second ones 15."""
    chooser = ByLoad(2)
    rates = chooser.acceptance.rates
    for rate in rates:
        rate.value, rate.count, rate.most = 0.0, 0, 1000
    for kept in [0] * 10 + [1] * 15 + [2] * 15:
        chooser.acceptance.note(2, kept)
    chooser.acceptance.note(0, 0)  # no place, no test
    assert [rate.value for rate in rates] == pytest.approx([30 / 40, 15 / 30])
    assert chooser.acceptance.tokens(2) == pytest.approx(1 + 0.75 + 0.75 * 0.5)


# ---------------------------------------------------------------- what looking for it costs


def losses(kind: type[ByLoad]) -> Iterator[float]:
    """Over batches, and drafts that are good, fading, useless, or change."""
    for batch in (1, 2, 5, 16, 40, 64):
        good, useless = [(batch, GOOD)], [(batch, USELESS)]
        fading = [(batch, drafts_by_load.DRAFTS["fading"])]
        for steps in (good, useless, fading):
            yield loss(kind, Device(), 1000 * steps)
        yield loss(kind, Device(), 1500 * useless + 1500 * good + 1500 * useless)


def test_the_choice_never_loses_more_than_three_percent():
    assert max(losses(ByLoad)) <= ALLOWED


@pytest.mark.parametrize(
    "kind",
    [
        cases.NeverProbes,
        cases.ProbesForNothing,
        cases.CountsRejected,
        cases.CountsUntested,
        cases.CostsOfOne,
        cases.IgnoresTheDrafter,
    ],
)
def test_a_planted_slip_loses_more(kind):
    assert any(lost > ALLOWED for lost in losses(kind))


@pytest.mark.parametrize("index", range(8))
def test_it_does_not_on_any_device_with_any_drafts(index):
    rng = random.Random(index)
    for _ in range(5):
        device = Device(
            host_ms=rng.uniform(0.1, 5),
            weights_ms=rng.uniform(1, 20),
            token_ms=10 ** rng.uniform(-2.5, 0),
            sequence_ms=rng.uniform(0, 0.1),
            draft_ms=rng.uniform(0, 3),
            draft_sequence_ms=rng.uniform(0, 0.1),
        )
        rates, batch = sorted((rng.random() for _ in range(MOST)), reverse=True), rng.randint(1, 64)
        lost = loss(ByLoad, device, [(batch, rates)] * 1500, index)
        assert lost <= ALLOWED, (device, rates, batch)


def test_a_load_that_changes_in_every_step_costs_no_more():
    rng = random.Random(0)
    for rates in (GOOD, USELESS):
        steps = [(rng.randint(1, 64), rates) for _ in range(2000)]
        assert loss(ByLoad, Device(), steps) <= ALLOWED


def test_a_disturbed_step_is_no_cost_of_its_number():
    costs = ByLoad(MOST).costs
    for seconds in (5.0, 1.0, 1.0, 1.0):  # the first pays for memory
        costs.note(2, 1, 0.0, seconds)
    assert costs.seconds(2, 1) == 1.0
    costs.note(2, 1, 0.0, 1000.0)
    assert costs.seconds(2, 1) < 1.6


# ---------------------------------------------------------------- the engine on a virtual device


def test_the_record_is_what_the_engine_does(tmp_path, monkeypatch, capsys):
    path = REPOSITORY / "results/counted/drafts_by_load.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    found = {(entry["drafts"], entry["batch"]) for entry in record["entries"]}
    assert len(found) == len(drafts_by_load.DRAFTS) * len(drafts_by_load.BATCHES)
    assert max(entry["loss"] for entry in record["entries"]) == record["worst_loss"] <= ALLOWED
    few = ["--batch", "8", "--drafts", "useless", "--out", str(tmp_path)]
    assert drafts_by_load.main(few) == 0
    (again,) = json.loads((tmp_path / path.name).read_text())["entries"]
    (entry,) = [one for one in record["entries"] if one["name"] == again["name"]]
    assert again["chosen"] == pytest.approx(entry["chosen"], rel=1e-9)
    assert again["fixed"] == pytest.approx(entry["fixed"], rel=1e-9)
    monkeypatch.setattr(virtual_drafts, "ByLoad", cases.CountsRejected)
    assert drafts_by_load.main(few) == 1
    assert "FAILED, more than 3 % lost: useless at 8" in capsys.readouterr().err
