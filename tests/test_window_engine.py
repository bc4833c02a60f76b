"""The engine over layers in groups: whatever happens inside, every request gets the tokens of the
same model without any engine, and every page comes back.
"""

import random
from collections import Counter
from functools import cache, partial

import pytest
import torch

from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l11_cuda_graphs.simulator import SimulatedGraphs
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l17_tree_speculation.heads.heads import EagleDraft, MedusaHeads, MTPDraft
from lessons.toolbox.measure.device import has_triton
from reference.engine.cache_memory import blocks_that_fit, run_largest_step
from reference.engine.engine_args import EngineArgs
from reference.engine.model_runner import ModelRunner
from reference.engine.sampling_params import SamplingParams
from reference.features.windows import pool as pool_module
from reference.features.windows.blocks import GroupBlocks
from reference.features.windows.graphs import GroupGraphs
from reference.features.windows.room import groups_for, one_group_because
from tests.engine_cases import assert_clean
from tests.window_cases import (
    FAMILIES,
    LONGEST,
    VOCAB,
    alone,
    answers_of,
    greedy,
    new_engine,
    new_model,
)

pytestmark = pytest.mark.usefixtures("seed")
needs_triton = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")
MOST = 14  # tokens of an answer
PLAIN = "two windows"  # whose attention knows trees, too
ONE_GROUP = dict(disable_hybrid_kv_cache_manager=True)


@cache
def model_of(name: str, dtype=torch.float64):
    return new_model(name, dtype)


@cache
def known(name: str) -> list[tuple[list[int], list[int], list[list[int]]]]:
    """Prompts of a family with some beginnings in common, the greedy answer to each without any
    engine, and two drawn ones of an engine that has one group and runs one request at a time.
    """
    draw, found, model = random.Random(5), [], model_of(name)
    beginnings = [draw.choices(range(VOCAB), k=40) for _ in range(2)]
    for length in (1, 3, 12, 30, 45, 60):
        own = draw.choices(range(VOCAB), k=length)
        prompt = (draw.choice(beginnings) + own)[:length] if length > 12 else own
        (drawn,) = answers_of(new_engine(model, **ONE_GROUP), [prompt], sampled(MOST))
        found.append((prompt, alone(model, prompt, MOST), drawn))
    return found


def sampled(limit: int) -> SamplingParams:
    return SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=limit, detokenize=False)


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_in_float32(name):
    """Lesson 2's, an engine's with one group and one request at a time, and those of groups."""
    model = model_of(name, torch.float32)
    prompts = [random.choices(range(VOCAB), k=random.randint(1, 60)) for _ in range(6)]
    want = [[alone(model, prompt, MOST)] for prompt in prompts]
    assert answers_of(new_engine(model, **ONE_GROUP), prompts, greedy(MOST), together=False) == want
    engine = new_engine(model)
    assert answers_of(engine, prompts, greedy(MOST)) == want
    assert isinstance(engine.scheduler.blocks, GroupBlocks)
    assert engine.scheduler.blocks.given_back > 0


def a_history(name: str) -> tuple[dict, list]:
    """The arguments of an engine, and what is asked of it: (which prompt, params, before which step
    it comes, before which its client gives up).
    """
    places, tokens = random.choice([(1, 1), (3, 3), (4, 7), (4, 16), (6, 40)])
    house = dict(
        block_size=random.choice([1, 2, 4, 16]),
        max_num_seqs=places,
        max_num_batched_tokens=tokens,
        async_scheduling=random.random() < 0.3,
        enable_prefix_caching=random.random() < 0.7,
    )
    if random.random() < 0.4:
        house |= dict(preemption_mode="swap")
    if tokens > 4 * places and not house["async_scheduling"] and random.random() < 0.5:
        house |= dict(speculative_config=dict(method="ngram", num_speculative_tokens=3))
    groups = groups_for(EngineArgs(**house), model_of(name).config, LONGEST)
    longest = groups.most_pages(60 + MOST, house["block_size"], tokens)
    pages = random.choice([longest, longest + 2, 2 * longest, 800])
    house["num_gpu_blocks_override"] = -(-pages // len(groups.windows))  # blocks of all layers
    asked = []
    for _ in range(random.randint(3, 8)):
        count = random.choice([1, 1, 2]) if places > 1 else 1
        limit = random.randint(1, MOST)
        params = greedy(limit) if count == 1 else sampled(limit)
        aborts = random.choice([None, None, None, random.randint(0, 30)])
        asked.append((random.randrange(6), params, random.randint(0, 15), aborts))
    print(house, [(at, s.n, s.max_tokens, *rest) for at, s, *rest in asked])
    return house, asked


def serve(name: str, engine, asked) -> Counter:
    """Every answer must be the known one. Returns what was seen."""
    outputs, seen, step = {}, Counter(), 0
    while step == 0 or engine.has_unfinished_requests or step <= max(one[2] for one in asked):
        for at, (which, params, arrives, aborts) in enumerate(asked):
            if arrives == step:
                engine.add_request(str(at), known(name)[which][0], params)
            if aborts == step and engine.abort_request(str(at)) is not None:
                seen["aborted"] += 1
        outputs |= {out.request_id: out for out in engine.step()}
        step += 1
        assert step < 3000, "the engine makes no progress"
    for at, (which, params, *_) in enumerate(asked):
        if (out := outputs.get(str(at))) is None:
            continue
        _, likeliest, drawn = known(name)[which]
        wanted = [likeliest] if params.n == 1 else drawn
        for answer, want in zip(out.outputs, wanted):
            got = answer.token_ids
            assert got == want[: params.max_tokens if out.finished else len(got)], at
        if out.finished:
            seen["finished"] += 1
            seen["preempted"] += out.metrics.preemptions
            seen["answers"] += len(out.outputs) > 1
            seen["found"] += out.num_cached_tokens > 0
    seen["given back"] = engine.scheduler.blocks.given_back
    if engine.speculation is not None:
        seen["accepted"] = engine.speculation.counts.accepted
    assert_clean(engine)
    assert not any(engine.scheduler.blocks.owned), "counted wrong"
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_random_histories(name, request):
    """Tokens under preemption, swapping, chunks, forks, aborts, drafts, hits of the prefix cache,
    and with a loop one step ahead.
    """
    seen = Counter()
    for _ in range(60 if request.config.getoption("--all") else 8):
        house, asked = a_history(name)
        seen += serve(name, new_engine(model_of(name), **house), asked)
    print(seen)
    assert seen["finished"] and seen["given back"]
    if request.config.getoption("--all"):
        assert min(seen[one] for one in ("preempted", "answers", "aborted", "found")) > 0


# ---------------------------------------------------------------- drafts


def drafter_of(method: str):
    """What drafts for the plain model; now and then it is right."""
    model = model_of(PLAIN)
    torch.manual_seed(1)
    if method == "draft":
        draft = new_model(PLAIN)
        for parameter in draft.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * parameter.std())
        return draft
    config = model.config
    kinds = dict(
        medusa=lambda: MedusaHeads(config.hidden_size, 3),
        eagle=lambda: EagleDraft(config, 32),
        mtp=lambda: MTPDraft(config, 32),
    )
    return kinds[method]().double().eval().requires_grad_(False) if method in kinds else None


WAYS = {
    "ngram": {},
    "suffix": {},
    "draft": {},
    "medusa": {},
    "eagle": {},
    "mtp": {},
    "eagle in trees": dict(speculative_token_tree="[(0,), (1,), (0, 0)]"),
    "medusa in trees": dict(speculative_token_tree="[(0,), (1,), (0, 0), (0, 1)]"),
}


@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_no_token(way):
    """Drafts that are refused were written into pages; what they see is never given back early."""
    method, model = way.split()[0], model_of(PLAIN)
    named = None if method in ("ngram", "suffix") else "made here"
    config = dict(method=method, model=named, num_speculative_tokens=3) | WAYS[way]
    if "speculative_token_tree" in config:
        del config["num_speculative_tokens"]
    prompts = [prompt[:25] * 2 for prompt, *_ in known(PLAIN)]  # so that n-grams are found
    want = answers_of(new_engine(model, **ONE_GROUP), prompts, greedy(MOST), together=False)
    for house in (dict(), dict(num_gpu_blocks_override=26), dict(max_num_batched_tokens=24)):
        engine = new_engine(model, drafter_of(method), speculative_config=config, **house)
        assert isinstance(engine.scheduler.blocks, GroupBlocks)
        assert answers_of(engine, prompts, greedy(MOST)) == want, house
        assert engine.speculation.counts.drafted and engine.scheduler.blocks.given_back


# ---------------------------------------------------------------- kernels and graphs


def kernel_engine(kind=GroupGraphs, **how):
    """An engine whose kernels are interpreted, and whose decode steps are recorded."""
    config, most = how.pop("speculative_config", None), 1
    if config is not None:
        most += config["num_speculative_tokens"]
    engine = new_engine(
        fused(model_of(PLAIN, torch.float32)),
        max_num_seqs=3,
        max_model_len=32,
        speculative_config=config,
        **how,
    )
    runner = engine.runner
    runner.pool.ops = LESSON_12
    graphs = SimulatedGraphs(1)
    runner.captured = kind(runner.model, runner.pool, graphs, [1, 3 * most], 32, most)
    return engine


@needs_triton
@pytest.mark.parametrize(
    "config", [None, dict(method="ngram", num_speculative_tokens=2)], ids=["tokens", "drafts"]
)
def test_kernels_and_replayed_steps_read_the_tables_of_groups(config):
    """The unused slots hold NaN, so a table, a length or a padded row that is wrong shows."""
    engine = kernel_engine(speculative_config=config)
    prompts = [[7, 8, 9] * 5, random.choices(range(VOCAB), k=3), [3, 4] * 7]
    want = [[alone(model_of(PLAIN, torch.float32), prompt, 6)] for prompt in prompts]
    assert answers_of(engine, prompts, greedy(6)) == want
    assert engine.scheduler.blocks.given_back > 0
    assert engine.runner.pool.k_slots[:, -1].isnan().all(), "a row of padding was written"


@needs_triton
@pytest.mark.parametrize("row", [1, 2, 3], ids=["positions", "slots", "contexts"])
def test_a_row_of_another_group_is_found(row):
    """The last group's slots or contexts are those of the first, or its positions begin with the
    first page that is left.
    """

    class Mixed(GroupGraphs):
        def filled(self, bucket, chunks, *arguments):
            inputs, table = super().filled(bucket, chunks, *arguments)
            inputs[-4 + row] = inputs[-1] - 1 if row == 1 else inputs[row]
            return inputs, table

    prompts = [random.choices(range(VOCAB), k=20) for _ in range(3)]
    want = [[alone(model_of(PLAIN, torch.float32), prompt, 10)] for prompt in prompts]
    try:
        assert answers_of(kernel_engine(Mixed), prompts, greedy(10)) != want
    except ValueError as error:
        assert "finite" in str(error)


# ---------------------------------------------------------------- what a hit is


@pytest.mark.parametrize("name", ["gpt-oss", "mistral", "gemma3"])
def test_a_prefix_is_found_although_its_window_has_moved_on(name):
    model, prompt = model_of(name), random.choices(range(VOCAB), k=50)
    engine = new_engine(model)
    first, again = [], []
    for found in (first, again):
        engine.add_request("a", [*prompt, len(found)], greedy(MOST))
        while engine.has_unfinished_requests:
            found += engine.step()
    assert first[-1].num_cached_tokens == 0 and again[-1].num_cached_tokens == 48
    assert again[-1].outputs[0].token_ids == alone(model, [*prompt, 0], MOST)
    # An answer has moved each window past the prompt's end. A shorter beginning has no window left
    # in an engine that has had other use for its pages.
    assert engine.scheduler.blocks.given_back > 0


# ---------------------------------------------------------------- planted slips

SEEN = pool_module.send


def rotated_from_zero(values, device):
    """The first page that is left is position 0."""
    return SEEN([0 for _ in values], device)


def one_place(self, layer):
    """All layers of a page at its first place."""
    return 0


def all_kept(self, sequence, held):
    """A table says that pages are gone which it still owns."""
    for group, table in enumerate(self.tables[sequence].groups):
        window = self.groups.windows[group]
        first = 0 if window is None else max(0, held - window + 1) // self.block_size
        table[:first] = [-1] * first


SLIPS = {
    "rotated from zero": ("gpt-oss", pool_module, "send", rotated_from_zero),
    "one place for all layers": ("gpt-oss", pool_module.InGroups, "index_of", one_place),
    "pages that no one gives back": ("gpt-oss", GroupBlocks, "leave_behind", all_kept),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_planted_slip_is_found(slip, monkeypatch):
    name, *planted = SLIPS[slip]
    known(name)  # as it is
    monkeypatch.setattr(*planted)
    with pytest.raises(AssertionError):
        for _ in range(20):
            house, asked = a_history(name)
            serve(name, new_engine(model_of(name), **house), asked)


# ---------------------------------------------------------------- one group


@pytest.mark.parametrize(
    "name, how, because",
    [
        ("gemma3", ONE_GROUP, "disable_hybrid_kv_cache_manager asks for it"),
        ("gemma3", dict(max_model_len=4), "no window is shorter than max_model_len"),
        ("gemma3", dict(kv_offloading_size=0.001), "kv_offloading_size: a block that travels"),
        ("gemma3", dict(tensor_parallel_size=2), "each process holds its own share of a block"),
        (
            "mistral",
            dict(speculative_config=dict(method="draft", model="x", num_speculative_tokens=2)),
            "what drafts keeps K and V of all tokens, and no group of the model's does",
        ),
    ],
)
def test_why_an_engine_has_one_group(name, how, because):
    config = model_of(name).config
    said = one_group_because(EngineArgs(**how), config, how.get("max_model_len", LONGEST))
    assert said.startswith(because) and "\n" not in said
    assert groups_for(EngineArgs(**how), config, how.get("max_model_len", LONGEST)) is None


def test_one_group_gives_the_same_tokens():
    """Where blocks travel, and where a draft has no full group to go along with."""
    model = model_of("mistral")
    config = dict(method="draft", model="made here", num_speculative_tokens=2)
    for drafter, how in (
        (None, dict(kv_offloading_size=0.001)),
        (new_model("mistral"), dict(speculative_config=config)),
    ):
        engine = new_engine(model, drafter, **how)
        assert engine.runner.groups is None
        prompts = [prompt for prompt, *_ in known("mistral")]
        want = [[likeliest] for _, likeliest, _ in known("mistral")]
        assert answers_of(engine, prompts, greedy(MOST)) == want


# ---------------------------------------------------------------- memory


def test_a_page_is_as_large_as_its_layers():
    """7 layers, of which a page holds one: as many bytes are 7 times as many pages."""
    model = model_of("gemma3")
    token = model.config.kv_bytes_per_token(8)
    args = EngineArgs(block_size=4, max_num_seqs=64, kv_cache_memory_bytes=100 * 4 * token)
    groups = groups_for(args, model.config, LONGEST)
    assert groups.layers_each == 1 and len(groups.windows) == 7
    assert blocks_that_fit(args, model, LONGEST) == 100
    assert blocks_that_fit(args, model, LONGEST, groups=groups) == 700
    memory = dict(num_gpu_blocks_override=None, kv_cache_memory_bytes=400 * token)
    pool = new_engine(model, max_num_seqs=64, **memory).runner.pool
    assert pool.num_blocks == 700
    assert pool.allocated_bytes == 400 * token + token // 7  # and the slot that no one owns


def test_memory_for_less_than_the_longest_says_how_much_it_is_for():
    model = model_of("mistral")  # all three layers see 7 tokens
    token = model.config.kv_bytes_per_token(8)
    args = EngineArgs(
        block_size=4, max_num_batched_tokens=8, max_num_seqs=8, kv_cache_memory_bytes=20 * token
    )
    groups = groups_for(args, model.config, LONGEST)
    assert blocks_that_fit(args, model, LONGEST, groups=groups) == 5  # 6 + 8 tokens, over 5 pages
    few = EngineArgs(
        block_size=4, max_num_batched_tokens=8, max_num_seqs=8, kv_cache_memory_bytes=16 * token
    )
    with pytest.raises(ValueError, match="max_model_len: got 96; accepted: at most 16, the tokens"):
        blocks_that_fit(few, model, LONGEST, groups=groups)


def test_blocks_that_are_asked_for_are_of_all_layers():
    """So a number that was enough for a request with one group is enough with several."""
    model = model_of("gemma3")
    engine = new_engine(model, num_gpu_blocks_override=15, max_num_batched_tokens=60)
    assert engine.runner.pool.num_blocks == 7 * 15
    prompt = random.choices(range(VOCAB), k=58)
    assert answers_of(engine, [prompt], greedy(2)) == [[alone(model, prompt, 2)]]


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_the_largest_step_is_measured_over_groups(name):
    """A GPU has to hold the pages of one sequence then, and not as many as with one group."""
    model = model_of(name)
    args = EngineArgs(max_num_seqs=3, max_num_batched_tokens=40, block_size=4)
    groups = groups_for(args, model.config, LONGEST)
    held = run_largest_step(args, model, LONGEST, partial(ModelRunner, groups=groups))
    whole = run_largest_step(args, model, LONGEST)
    share = groups.layers_each / model.config.num_hidden_layers
    assert held == pytest.approx(whole * share)


def test_more_requests_run_at_once():
    """The same bytes: with one group two requests of 60 tokens, with groups all six."""
    model = model_of("gemma3")
    token = model.config.kv_bytes_per_token(8)
    prompts = [random.choices(range(VOCAB), k=60) for _ in range(6)]
    most = {}
    for name, how in (("one group", ONE_GROUP), ("groups", {})):
        engine = new_engine(
            model, max_num_seqs=6, num_gpu_blocks_override=None, max_num_batched_tokens=16,
            kv_cache_memory_bytes=160 * token, **how,
        )  # fmt: skip
        for at, prompt in enumerate(prompts):
            engine.add_request(str(at), prompt, greedy(30))
        most[name] = 0
        while engine.has_unfinished_requests:
            engine.step()
            most[name] = max(most[name], len(engine.scheduler.running))
        assert_clean(engine)
    assert most == {"one group": 2, "groups": 6}
