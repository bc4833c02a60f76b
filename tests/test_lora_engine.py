"""The engine with adapters: whatever the scheduler does, every request gets the tokens of naive
generation with their own adapter merged into the model.

In float64, where two orders of the same sum differ by about 1e-15, so a token differs only if the
two likeliest are equal to 14 digits. The requests are the same in every run.
"""

import copy
import random
import shutil
from pathlib import Path

import pytest

from lessons.l02_naive_attention.naive import generate as alone
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l11_cuda_graphs.simulator import SimulatedGraphs
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l17_tree_speculation.lab.testing import random_heads
from lessons.l21_multi_lora import optimized, slots
from lessons.l21_multi_lora.batch import AdapterBatch
from lessons.l21_multi_lora.lab.testing import linears_of, random_adapter
from lessons.l21_multi_lora.layers import adapter_layers, merged
from lessons.l21_multi_lora.peft.adapters import save_adapter
from lessons.toolbox.measure.device import has_triton
from reference import EngineArgs, LoRARequest, SamplingParams
from reference.engine import request as request_module
from reference.engine.assembly import engine_over
from reference.features.decode_graphs import DecodeGraphs
from reference.features.lora import at_most
from tests.engine_cases import LONGEST, assert_clean, greedy, new_model

RANKS = {"a": 2, "b": 5, "c": 8}
NAMES = [None, "a", "b", "c", "b", "a", None, "c"]
LIMITS = [7, 9, 6, 8, 10, 5, 9, 7]


@pytest.fixture(scope="module")
def model():
    return new_model().cpu().double()


@pytest.fixture(scope="module")
def adapters(model):
    linears = linears_of(model)
    return {name: random_adapter(linears, name, rank, seed=rank) for name, rank in RANKS.items()}


def save(adapter, folder):
    """As PEFT would, in float64, so that nothing is rounded."""
    pairs = {name: (layer.a.double(), layer.b.double()) for name, layer in adapter.layers.items()}
    save_adapter(folder, pairs, lora_alpha=2 * adapter.rank)  # random_adapter's scaling is 2


@pytest.fixture
def requests(adapters, tmp_path):
    """{name: LoRARequest}, None for the base."""
    found = {None: None}
    for number, (name, adapter) in enumerate(adapters.items(), start=1):
        save(adapter, tmp_path / name)
        found[name] = LoRARequest(name, number, str(tmp_path / name))
    return found


@pytest.fixture(scope="module")
def prompts():
    """All begin alike, so that a cache that confuses adapters finds the wrong blocks."""
    rng = random.Random(21)
    head = rng.choices(range(60), k=9)
    return [head + rng.choices(range(60), k=length) for length in (3, 5, 1, 8, 2, 4, 6, 3)]


@pytest.fixture(scope="module")
def expected(model, adapters, prompts):
    """The answers of each adapter alone; no two adapters agree on a prompt."""
    models = {name: merged(model, adapter) for name, adapter in adapters.items()} | {None: model}
    answers = {name: alone(one, prompts, LIMITS) for name, one in models.items()}
    assert all(len({tuple(one[at]) for one in answers.values()}) == 4 for at in range(len(prompts)))
    return [answers[name][at] for at, name in enumerate(NAMES)]


def new_engine(model, drafter=None, **how):
    settings = dict(
        enable_lora=True, max_loras=2, max_lora_rank=8, block_size=4, max_num_seqs=4, device="cpu"
    )
    return engine_over(model, None, EngineArgs(**settings | how), drafter)


def serve(engine, prompts, requests, names=NAMES):
    """All at once; returns the answers, and how much of each prompt was known."""
    for at, (prompt, name) in enumerate(zip(prompts, names)):
        engine.add_request(str(at), prompt, greedy(LIMITS[at]), lora_request=requests[name])
    outputs = finish(engine)
    found = [outputs[str(at)] for at in range(len(prompts))]
    return [out.outputs[0].token_ids for out in found], [out.num_cached_tokens for out in found]


def finish(engine) -> dict:
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {out.request_id: out for out in engine.step() if out.finished}
    assert_all_given_back(engine)
    return outputs


def assert_all_given_back(engine):
    """No block, no slot and no adapter on the host is still held."""
    assert_clean(engine)
    adapters = engine.runner.adapters
    assert not adapters.slots.users and not adapters.store.users
    assert not getattr(engine.scheduler.blocks, "adapter_of", None)
    assert adapters.context.batch is None


WAYS = {
    "one adapter at a time": dict(max_loras=1),
    "all adapters at once": dict(max_loras=3, max_num_seqs=8),
    "chunks of prompts": dict(max_num_batched_tokens=7),
    "preempted, computed again": dict(num_gpu_blocks_override=9),
    "preempted, swapped": dict(num_gpu_blocks_override=9, preemption_mode="swap"),
    "without a prefix cache": dict(enable_prefix_caching=False),
    "whole prompts": dict(enable_chunked_prefill=False),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", WAYS)
def test_every_request_gets_the_tokens_of_its_adapter(way, model, prompts, requests, expected):
    engine = new_engine(model, **WAYS[way])
    got, _ = serve(engine, prompts, requests)
    assert got == expected
    if "preempted" not in way:
        return
    engine = new_engine(model, **WAYS[way])
    for at, name in enumerate(NAMES):
        engine.add_request(str(at), prompts[at], greedy(LIMITS[at]), lora_request=requests[name])
    outputs = finish(engine)
    assert sum(out.metrics.preemptions for out in outputs.values()), "no request was preempted"


DRAFTS = {
    "n-grams": dict(method="ngram"),
    "a draft model": dict(method="draft", model="made here"),
    "Medusa": dict(method="medusa", model="made here"),
    "EAGLE": dict(method="eagle", model="made here"),
    "MTP": dict(method="mtp", model="made here"),
    "EAGLE's tree": dict(
        method="eagle", model="made here", speculative_token_tree="[(0,), (1,), (0, 0)]"
    ),
}
PREEMPTED = ("preempted, computed again", "preempted, swapped")


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", [None, *PREEMPTED])
@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_change_no_adapter_s_tokens(draft, way, model, prompts, requests, expected):
    """A draft follows the base model. The target verifies with the adapter of each row."""
    drafter = {"draft": model, "ngram": None}.get(DRAFTS[draft]["method"])
    if "model" in DRAFTS[draft] and drafter is None:
        drafter = random_heads(model, DRAFTS[draft]["method"])
    config = dict(num_speculative_tokens=3, **DRAFTS[draft])
    engine = new_engine(model, drafter, speculative_config=config, **WAYS.get(way, {}))
    run, trees_run = engine.runner.run, []

    def watched(chunks, tables, row_slots=None, trees=()):
        trees_run.extend(tree for tree in trees if tree is not None)
        return run(chunks, tables, row_slots, trees)

    engine.runner.run = watched
    got, _ = serve(engine, prompts, requests)
    assert got == expected
    assert engine.speculation.counts.drafted, "nothing was drafted"
    assert bool(trees_run) is ("speculative_token_tree" in DRAFTS[draft])


def test_blocks_are_shared_with_the_same_adapter_only(model, prompts, requests, expected):
    """The second round finds what the first left, each adapter its own: as much as the base model
    finds of its own; and a prompt that only another adapter has run is computed whole.
    """
    engine = new_engine(model, max_num_seqs=8, max_loras=3)
    serve(engine, prompts, requests)
    got, known = serve(engine, prompts, requests)
    assert got == expected and all(known)
    _, known = serve(engine, prompts[3:4], requests, ["a"])
    head = (9 // 4) * 4  # of which "a" has run the same tokens after other prompts
    assert known == [head]


def test_a_cache_that_confuses_adapters_is_seen(model, prompts, requests, expected, monkeypatch):
    monkeypatch.setattr(request_module, "names_of", lambda *given: {})
    engine = new_engine(model, max_loras=3)
    serve(engine, prompts, requests)
    assert serve(engine, prompts, requests)[0] != expected


def test_a_slot_taken_from_a_running_request_is_seen(
    model, prompts, requests, expected, monkeypatch
):
    """Were the slot of an adapter in use given away, its rows would get the neighbour's."""

    def take_any(self):
        return self.free.pop() if self.free else self.slot_of.popitem(last=False)[1]

    monkeypatch.setattr(slots.AdapterSlots, "take_slot", take_any)
    engine = new_engine(model, max_loras=2)
    monkeypatch.setattr(engine.scheduler, "may_join", at_most(3))
    assert serve(engine, prompts, requests)[0] != expected


def test_several_answers_to_a_prompt(model, adapters, prompts, requests):
    """They fork from one prefill; each draws with the adapter of its parent."""
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, detokenize=False)
    engine, plain = (
        new_engine(model),
        engine_over(merged(model, adapters["b"]), None, EngineArgs(block_size=4, device="cpu")),
    )
    engine.add_request("0", prompts[0], params, lora_request=requests["b"])
    engine.add_request("1", prompts[0], params)
    plain.add_request("0", prompts[0], params)
    while plain.has_unfinished_requests:
        for out in plain.step():
            wanted = out
    got = finish(engine)
    tokens = {name: [one.token_ids for one in out.outputs] for name, out in got.items()}
    assert tokens["0"] == [one.token_ids for one in wanted.outputs] != tokens["1"]
    assert got["0"].lora_request is requests["b"] and got["1"].lora_request is None


# ---------------------------------------------------------------- adapters that go


def test_an_adapter_deleted_while_in_use(model, adapters, prompts, requests, expected):
    """Folder and id are gone after the first step, and the folder then holds another adapter. Those
    that run, wait and are preempted end as they began; the next request gets the new one, and none
    of the old one's blocks.
    """
    engine = new_engine(model, num_gpu_blocks_override=12)
    for at, name in enumerate(NAMES):
        engine.add_request(str(at), prompts[at], greedy(LIMITS[at]), lora_request=requests[name])
    engine.step()
    for name in ("a", "b"):
        assert engine.remove_lora(requests[name].lora_int_id)
        shutil.rmtree(requests[name].lora_path)
    save(random_adapter(linears_of(model), "new", 3, seed=77), requests["a"].lora_path)
    outputs = finish(engine)
    assert [outputs[str(at)].outputs[0].token_ids for at in range(len(NAMES))] == expected
    (new,), (known,) = serve(engine, prompts[1:2], requests, ["a"])
    other = merged(model, random_adapter(linears_of(model), "new", 3, seed=77))
    assert new == alone(other, prompts[1:2], LIMITS[:1])[0] and not known
    with pytest.raises(ValueError, match="lora_path"):  # b is gone for good
        engine.add_request("late", prompts[0], greedy(3), lora_request=requests["b"])
    assert not engine.remove_lora(requests["b"].lora_int_id)
    assert_all_given_back(engine)


def test_aborted_requests_give_their_adapter_back(model, prompts, requests):
    engine = new_engine(model, max_loras=1)
    for at, name in enumerate(NAMES):
        engine.add_request(str(at), prompts[at], greedy(9), lora_request=requests[name])
    engine.step()
    for at in range(len(NAMES)):
        engine.abort_request(str(at))
    assert_all_given_back(engine)


def test_adapters_are_paged_by_least_recent_use(model, prompts, requests):
    """Three adapters, two slots: a third one takes the slot of the one that ran longest ago."""
    engine = new_engine(model, max_cpu_loras=2)
    traffic = engine.runner.adapters.slots.traffic
    for names, loads, ids in (
        ("ab", 2, {1, 2}),
        ("a", 2, {1, 2}),
        ("c", 3, {1, 3}),
        ("a", 3, {1, 3}),
        ("b", 4, {1, 2}),
    ):
        serve(engine, prompts[: len(names)], requests, list(names))
        assert (traffic.loads, engine.list_loras()) == (loads, ids), names


# ---------------------------------------------------------------- refusals


def test_refusals_take_one_line_and_hold_nothing(model, adapters, prompts, requests, tmp_path):
    engine = new_engine(model)
    save(random_adapter(linears_of(model), "large", 9), tmp_path / "large")
    a = requests["a"]
    engine.add_lora(a)
    for wrong, said in (
        (LoRARequest("large", 9, str(tmp_path / "large")), "max_lora_rank: got 8 .* rank 9"),
        (LoRARequest("other", a.lora_int_id, a.lora_path), "lora_int_id: got 1"),
        (LoRARequest("none", 8, str(tmp_path / "none")), "lora_path: got"),
        ("a", "lora_request: got 'a'"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            engine.add_request("x", prompts[0], greedy(3), lora_request=wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="tokens need"):  # the scheduler refuses, a is given back
        small = new_engine(model, num_gpu_blocks_override=2)
        small.add_request("x", prompts[0], greedy(9), lora_request=a)
    assert_all_given_back(engine)
    assert_all_given_back(small)
    plain = engine_over(model, None, EngineArgs(device="cpu"))
    with pytest.raises(ValueError, match="enable_lora is False"):
        plain.add_request("x", prompts[0], greedy(3), lora_request=a)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(enable_lora=1), "enable_lora: got 1"),
        (dict(max_loras=0), "max_loras: got 0"),
        (dict(max_lora_rank=513), "max_lora_rank: got 513; accepted: 1 to 512"),
        (dict(max_loras=3, max_cpu_loras=2), "max_cpu_loras: got 2; accepted: None, or max_loras"),
    ],
)
def test_wrong_arguments(wrong, said):
    with pytest.raises(ValueError, match=said):
        EngineArgs(**wrong)


@pytest.mark.parametrize("name, number", [("", 1), (None, 1), ("a", 0), ("a", True), ("a", "1")])
def test_wrong_requests(name, number):
    with pytest.raises(ValueError, match="lora_"):
        LoRARequest(name, number, "somewhere")


# ---------------------------------------------------------------- replayed steps


@pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")
@pytest.mark.parametrize("is_stale", [False, True])
def test_replayed_steps_follow_the_adapters_of_their_rows(is_stale, model, requests, monkeypatch):
    """Kernels interpreted, steps recorded: the grid stays, the adapters of the rows change. Rows
    that are not copied in are found. The adapters change down_proj only, to save time.
    """
    linears = {key: shape for key, shape in linears_of(model).items() if "down_proj" in key}
    adapters = {}
    for rank, name in enumerate("ab", start=1):
        adapters[name] = random_adapter(linears, name, rank, seed=rank, size=1.0)
        save(adapters[name], Path(requests[name].lora_path))
    model = fused(copy.deepcopy(model).float())
    engine = new_engine(model, max_num_seqs=2, max_loras=2, num_gpu_blocks_override=8)
    runner = engine.runner
    for name, layer in adapter_layers(runner.model).items():
        layer.add_lora = optimized.add_lora if "down_proj" in name else lambda out, *_: out
    runner.pool.ops = LESSON_12
    runner.captured = DecodeGraphs(
        runner.model, runner.pool, SimulatedGraphs(1), [2], LONGEST, 1, runner.adapters
    )
    if is_stale:
        monkeypatch.setattr(AdapterBatch, "copy_in", lambda self, other: None)
    names, limits = ["a", None, "b"], [2, 4, 3]  # so rows change their adapters
    for at, name in enumerate(names):
        engine.add_request(str(at), [at, 7], greedy(limits[at]), lora_request=requests[name])
    outputs = finish(engine)
    models = {name: merged(model, adapters[name]) for name in ("a", "b")} | {None: model}
    want = [alone(models[name], [[at, 7]], [limits[at]])[0] for at, name in enumerate(names)]
    got = [outputs[str(at)].outputs[0].token_ids for at in range(3)]
    assert (got == want) is not is_stale
