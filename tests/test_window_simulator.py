"""The simulator for models of which some layers see a window: steps that are planned at once give
what single steps give, blocks that come back let others in, and a step reads what is in sight.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from lessons.l01_roofline.planner.models import MODELS
from lessons.l14_continuous_batching.lab.cost import StepCost as FittedStep
from lessons.l14_continuous_batching.sequence import Chunk, Step
from lessons.l15_chunked_prefill.lab.costs import StepCost
from lessons.l15_chunked_prefill.lab.virtual import new_request
from reference.features.windows.blocks import GroupBlocks
from reference.simulator import replica as replica_module
from reference.simulator.__main__ import main
from reference.simulator.costs import (
    Deployment,
    FittedCost,
    RooflineCost,
    Tiers,
    in_sight,
    new_deployment,
    work_of,
)
from reference.simulator.policies import Policy, simulate
from reference.simulator.replica import Replica
from reference.simulator.traces import TracedRequest

pytestmark = pytest.mark.usefixtures("seed")
SIZE = 4
SHAPE = replace(MODELS["llama-3-8b"], num_hidden_layers=6, num_window_layers=4, window=10)
POLICIES = ("chunked", "continuous", "disaggregated")


def deployment(num_blocks: int, shape=SHAPE) -> Deployment:
    cost = RooflineCost(StepCost(shape))
    return Deployment("a model with windows", cost, num_blocks, block_size=SIZE, windows=shape)


def random_trace() -> list[TracedRequest]:
    """Requests that come close together, with prompts and answers of all lengths."""
    at, trace = 0.0, []
    for _ in range(random.randint(2, 10)):
        at += random.choice([0.0, 0.001, 0.02, 0.2])
        trace.append(TracedRequest(at, random.randint(1, 50), random.randint(1, 60)))
    return trace


def token_s(trace, deployed, name: str) -> np.ndarray:
    policy = Policy(name, max_num_seqs=8, max_num_batched_tokens=16)
    return simulate(trace, deployed, policy, replicas=policy.least_replicas).token_s


def check_plans(patch, count: int) -> int:
    """Steps that are planned at once against single ones. Returns how many traces had to wait."""
    waited = 0
    for _ in range(count):
        trace, name = random_trace(), random.choice(POLICIES)
        deployed = deployment(random.choice([90, 110, 200, 2000]))
        planned = token_s(trace, deployed, name)
        with patch.context() as inside:
            inside.setattr(replica_module, "MOST_ALIKE", 1)
            single = token_s(trace, deployed, name)
        assert planned == pytest.approx(single, rel=1e-9), (trace, name)
        roomy = token_s(trace, deployment(5000), name)
        waited += planned.sum() > roomy.sum() * (1 + 1e-6)
    return waited


def test_steps_planned_at_once_are_single_steps(monkeypatch, request):
    assert check_plans(monkeypatch, 300 if request.config.getoption("--all") else 60) > 3


def never_given_back(self, sequence):
    """A block is given back when an answer ends, and not before."""
    return 10**6


def test_a_plan_that_forgets_windows_is_found(monkeypatch):
    """Such a trace is rare, because a sequence takes as many blocks as its windows give back. Here
    the second request comes between the two: it waits for a block that the next step gives back.
    """
    trace = [TracedRequest(0.0, 29, 18), TracedRequest(16.5, 36, 6)]
    each_step = FittedCost(FittedStep(fixed_s=1.0, token_s=0.0, context_s=0.0))
    deployed = replace(deployment(42), cost=each_step)
    planned = token_s(trace, deployed, "chunked")
    with monkeypatch.context() as inside:
        inside.setattr(replica_module, "MOST_ALIKE", 1)
        assert (token_s(trace, deployed, "chunked") == planned).all()
    monkeypatch.setattr(Replica, "until_given_back", never_given_back)
    later = token_s(trace, deployed, "chunked")
    assert later.sum() == planned.sum() + 6, "its six tokens come a step too late"


def test_every_block_comes_back(monkeypatch):
    managers = []
    start = GroupBlocks.__init__

    def noted(self, *arguments):
        start(self, *arguments)
        managers.append(self)

    monkeypatch.setattr(GroupBlocks, "__init__", noted)
    for name in POLICIES:
        token_s(random_trace(), deployment(110), name)
    assert len(managers) == 4 and any(blocks.given_back for blocks in managers)
    for blocks in managers:
        assert not blocks.tables and blocks.num_free == blocks.num_blocks and not any(blocks.owned)


def test_more_of_them_run_at_once(monkeypatch):
    """Gemma 3 27B on one H200, 24 prompts of 8192 tokens and answers of 150: one group or seven."""
    trace = [TracedRequest(0.0, 8192, 150) for _ in range(24)]
    grouped = new_deployment("gemma-3-27b", "h200", 1)
    assert len(grouped.groups.windows) == 7 and grouped.windows.num_window_layers == 52
    # With a tier below it blocks hold all layers, as in the engine.
    one = new_deployment("gemma-3-27b", "h200", 1, tiers=Tiers(host_bytes=1.0))
    assert one.groups is None and 6.1 * one.num_blocks < grouped.num_blocks < 6.3 * one.num_blocks
    running, begin = [], Replica.begin

    def noted(self, now_s):
        begin(self, now_s)
        running.append(len(self.scheduler.running))

    monkeypatch.setattr(Replica, "begin", noted)
    most = []
    for deployed in (grouped, one):
        running.clear()
        simulate(trace, deployed, Policy("chunked", max_num_batched_tokens=2048))
        most.append(max(running))
    assert most == [24, one.num_blocks // one.blocks_for(8192 + 150)] == [24, 17]


def test_the_command_says_of_how_many_layers_a_block_is(capsys):
    trace = "poisson:rate=4,requests=5,prompt=64,output=8"
    assert main(["--model", "gemma-3-1b", "--gpu", "h200", "--trace", trace]) == 0
    assert "blocks of 16 tokens in 4 layers a replica" in " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------- what a step reads


def test_a_step_reads_what_is_in_sight():
    """By hand: 2 of 6 layers see all, 4 see 10 tokens."""
    sequence = new_request(0, [1] * 25, 1)
    sequence.computed = 20
    step = Step([Chunk(sequence, 5)], [])
    full = work_of(step)
    assert (full.pairs, full.context) == (21 + 22 + 23 + 24 + 25, 25)
    seen = in_sight(full, step, 1, SHAPE)
    assert float(seen.pairs[0]) == pytest.approx((2 * 115 + 4 * 50) / 6)
    assert float(seen.context[0]) == pytest.approx((2 * 25 + 4 * 14) / 6), "keys 11 to 24"


@pytest.mark.parametrize("held", [0, 3, 9, 10, 40])
def test_it_is_the_planners(held):
    """A prompt from its start has lesson 1's pairs, a decode its tokens."""
    sequence = new_request(0, [1] * (held + 1), 1)
    whole = Step([Chunk(sequence, held + 1)], [])
    pairs = in_sight(work_of(whole), whole, 1, SHAPE).pairs
    assert float(pairs[0]) == pytest.approx(SHAPE.causal_pairs(held + 1))
    sequence.computed = held
    decode = Step([Chunk(sequence, 1)], [])
    context = in_sight(work_of(decode), decode, 1, SHAPE).context
    assert float(context[0]) == pytest.approx(SHAPE.seen_tokens(held + 1))


def test_steps_that_follow_see_more():
    """Of the layers with a window no more than the window."""
    sequence = new_request(0, [1] * 7, 1)
    sequence.computed = 6
    deployed, step = deployment(100), Step([Chunk(sequence, 1)], [])
    planned = deployed.seconds(step, 12)
    single = []
    for _ in range(12):
        single.append(deployed(step))
        sequence.computed += 1
        sequence.all_tokens.append(0)
    assert planned == pytest.approx(single, rel=1e-12)
    plain = replace(deployed, windows=None)
    assert deployed(step) < plain(step)
