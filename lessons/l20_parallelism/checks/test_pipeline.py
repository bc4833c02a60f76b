"""Proves that stages and micro-batches give the tokens of one process, and that the schedule and
the formulas of the bubble agree with each other and with the order in which real processes work.
"""

import random
from itertools import pairwise

import pytest
import torch

from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import generate
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.l11_cuda_graphs.lab.testing import CONFIG, new_model, new_prompts
from lessons.l11_cuda_graphs.naive import LOCKSTEP
from lessons.l20_parallelism.pipeline import (
    MicroBatch,
    bubble,
    decode_bubble,
    decode_in_flight,
    idle_share,
    of_stage,
    run_micro_batches,
    schedule,
    split_layers,
)
from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.l20_parallelism.processes.mesh import Mesh, new_links
from lessons.l20_parallelism.shards.layers import Elsewhere

LAYERS, STEPS, ROOM = 5, 4, 24
WINDOWS = (None, 5, None, 5, None)


# ---------------------------------------------------------------- who has which layers


@pytest.mark.parametrize("num_layers, num_stages", [(80, 4), (7, 3), (61, 4), (5, 5), (1, 1)])
def test_every_layer_is_in_one_stage_and_stages_differ_by_one(num_layers, num_stages):
    stages = split_layers(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert len(sizes) == num_stages and max(sizes) - min(sizes) <= 1


def test_the_fullest_stage_has_as_little_as_possible():
    """Held against all ways to split 9 layers over 3 stages."""
    for _ in range(20):
        first, last = random.uniform(0, 4), random.uniform(0, 4)
        sizes = [len(stage) for stage in split_layers(9, 3, first, last)]
        fullest = max(sizes[0] + first, sizes[1], sizes[2] + last)
        ways = [(a, b, 9 - a - b) for a in range(1, 8) for b in range(1, 9 - a)]
        best = min(max(a + first, b, c + last) for a, b, c in ways)
        assert fullest == pytest.approx(best)


def test_stages_in_the_middle_take_the_layers_that_are_left():
    assert [len(stage) for stage in split_layers(61, 4)] == [15, 16, 15, 15]
    assert [len(stage) for stage in split_layers(80, 4)] == [20] * 4
    # the head of Llama-3-70B weighs 1.23 layers
    assert [len(stage) for stage in split_layers(80, 4, last=1.23)] == [20, 21, 20, 19]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((2, 3), "num_stages: got 3; accepted: 1 to 2"),
        ((0, 1), "num_layers"),
        ((2, 1, -1.0), "first: got -1.0"),
    ],
)
def test_splits_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        split_layers(*arguments)


# ---------------------------------------------------------------- against one process


def stage_of(model, links):
    """The model with the layers of this rank alone; a layer of another stage would raise."""
    for layer in set(range(LAYERS)) - set(split_layers(LAYERS, links.mesh.pp)[links.pipeline.rank]):
        model.layers[layer] = Elsewhere()
    return model


def pool_of(model, num_sequences, layers=None):
    return KVPool(
        model.config, num_sequences, ROOM, LOCKSTEP.stand_ins, torch.float64, layers=layers
    )


def prefill_rank(world, model, prompts):
    links = new_links(Mesh(pp=world.size))
    model = stage_of(model, links)
    ran = []
    model.layers[model.stage_layers.start].register_forward_pre_hook(lambda *_: ran.append(1))
    passes = []
    for prompt in prompts:
        batch = new_batch([(prompt, 0)], ROOM)
        passes.append((batch.tokens, pool_of(model, 1, model.stage_layers).attending(batch)))
    with torch.inference_mode():
        hidden = run_micro_batches(model, links, passes)
    return (
        [None if x is None else x.tolist() for x in hidden],
        len(ran),
        dict(links.pipeline.wire.bytes),
    )


def decode_rank(world, model, prompts):
    links = new_links(Mesh(pp=world.size))
    model = stage_of(model, links)
    order = []
    micro_batches = [MicroBatch(p, pool_of(model, len(p), model.stage_layers)) for p in prompts]
    for number, micro_batch in enumerate(micro_batches):
        attending = micro_batch.pool.attending

        def noted(batch, number=number, attending=attending):
            order.append(number)
            return attending(batch)

        micro_batch.pool.attending = noted
    tokens = decode_in_flight(model, links, micro_batches, STEPS)
    return [[x.tolist() for x in step] for step in tokens], order


def alone(model, prompts):
    """Greedy tokens by lesson 3's loop in this process: [step][sequence]."""
    outputs = generate(model, prompts, STEPS, rung=PREALLOCATED)
    return [list(tokens) for tokens in zip(*outputs)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.sample(1, of="pipelines")
def test_stages_give_the_hidden_states_of_one_process(size, seed):
    model, prompts = (
        new_model(num_hidden_layers=LAYERS, sliding_windows=WINDOWS),
        new_prompts(7, 1, 5),
    )
    ranks = run_ranks(size, prefill_rank, model, prompts)
    for prompt, hidden in zip(prompts, ranks[-1][0]):
        batch = new_batch([(prompt, 0)], ROOM)
        whole = model(batch.tokens, pool_of(model, 1).attending(batch))
        # not to the bit: processes with other numbers of threads may add in another order
        got = torch.tensor(hidden, dtype=torch.float64)
        torch.testing.assert_close(got, whole, rtol=1e-10, atol=1e-10)
    tokens = sum(map(len, prompts))
    for stage, (hidden, ran, sent) in enumerate(ranks):
        assert ran == len(prompts)
        is_last = stage == size - 1
        assert is_last or hidden == [None] * len(prompts)
        assert sent.get("send", 0) == (0 if is_last else 8 * tokens * CONFIG.hidden_size)


@pytest.mark.parametrize("size, in_flight", [(3, 4), (3, 3), (3, 2), (2, 1), (1, 2)])
@pytest.mark.sample(1, of="pipelines")
def test_decoding_in_flight_gives_the_tokens_of_one_process(size, in_flight, seed):
    """And every stage works in the order of the schedule."""
    model = new_model(num_hidden_layers=LAYERS, sliding_windows=WINDOWS)
    prompts = [new_prompts(random.randint(1, 6), 3) for _ in range(in_flight)]
    ranks = run_ranks(size, decode_rank, model, prompts)
    pieces = schedule([1.0] * size, in_flight, STEPS)
    for stage, (tokens, order) in enumerate(ranks):
        for number, sequences in enumerate(prompts):
            assert [step[number] for step in tokens] == alone(model, sequences)
        assert order == [number for _, number in of_stage(pieces, stage)]


# ---------------------------------------------------------------- schedules and formulas


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 16])
def test_the_schedule_has_the_bubble_of_the_formula(num_stages, num_micro_batches):
    pieces = schedule([2.5] * num_stages, num_micro_batches)
    assert idle_share(pieces) == pytest.approx(bubble(num_stages, num_micro_batches))


@pytest.mark.parametrize("in_flight", [1, 2, 3, 4, 6])
def test_long_decoding_has_the_bubble_of_its_formula(in_flight):
    pieces = schedule([1.0] * 4, in_flight, num_steps=500)
    assert idle_share(pieces) == pytest.approx(decode_bubble(4, in_flight), abs=0.01)


def test_a_schedule_keeps_every_order(seed):
    """No stage does two things at once, no piece begins before what it needs has come."""
    times = [random.uniform(0.5, 2) for _ in range(random.randint(1, 4))]
    micro_batches, steps, send = random.randint(1, 5), random.randint(1, 4), random.choice([0, 0.3])
    pieces = schedule(times, micro_batches, steps, send)
    assert len(pieces) == len(times) * micro_batches * steps
    when = {(p.step, p.micro_batch, p.stage): p for p in pieces}
    for stage in range(len(times)):
        mine = sorted((p for p in pieces if p.stage == stage), key=lambda p: p.start)
        assert all(a.end <= b.start for a, b in pairwise(mine))
        assert list(of_stage(pieces, stage)) == sorted(of_stage(pieces, stage))
    for (step, number, stage), piece in when.items():
        assert piece.end - piece.start == pytest.approx(times[stage])
        if stage:
            assert piece.start >= when[step, number, stage - 1].end + send - 1e-9
        elif step:
            assert piece.start >= when[step - 1, number, len(times) - 1].end + send - 1e-9


def test_eighty_layers_on_four_gpus():
    """The figures of the text: one batch leaves three quarters of the GPUs idle."""
    assert bubble(4, 1) == 0.75 and decode_bubble(4, 1) == 0.75
    assert bubble(4, 4) == pytest.approx(3 / 7)
    assert bubble(4, 16) == pytest.approx(3 / 19)
    assert decode_bubble(4, 4) == decode_bubble(4, 9) == 0


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: schedule([], 1), "stage_times: got"),
        (lambda: schedule([1, 0], 1), "stage_times: got"),
        (lambda: schedule([1], 0), "num_micro_batches: got 0"),
        (lambda: bubble(0, 1), "num_stages: got 0"),
        (lambda: decode_bubble(4, -1), "num_in_flight: got -1"),
    ],
)
def test_schedules_that_cannot_be_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
