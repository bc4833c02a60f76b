"""A trace tells where each block is: in the pool, on its way, in host memory, in a folder."""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import re
import time
from itertools import pairwise

import pytest

from reference import LLM, SamplingParams
from reference.trace import places as trace_places
from reference.trace.places import FOLDER, HOST, LOADING, SAVING, Places
from reference.trace.recorder import read_trace, traced
from tests.test_kv_tiers import MODEL, prompts
from tests.test_trace import in_a_browser, opened, trace

PARAMS = SamplingParams(temperature=0, max_tokens=8)


def slowly(copy):
    """A copy that takes longer than a step."""

    def slow(*arguments):
        time.sleep(0.03)
        return copy(*arguments)

    return slow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(file, the engine, tokens): six prompts twice, of which the pool holds two and host memory
    four blocks.
    """
    folder = tmp_path_factory.mktemp("kv")
    llm = LLM(
        MODEL,
        device="cpu",
        max_model_len=128,
        num_gpu_blocks_override=16,
        max_num_seqs=2,
        kv_offloading_size=0.0005,
        kv_offloading_folder=str(folder),
    )
    pages = llm.engine.scheduler.blocks.connector.pages
    pages.read, pages.write = slowly(pages.read), slowly(pages.write)
    path, asked = folder / "steps.json", prompts(llm, 6)
    with traced(llm.engine, path):
        outputs = llm.generate(asked + asked, PARAMS, use_tqdm=False)
    yield path, llm.engine, [out.outputs[0].token_ids for out in outputs]
    llm.shutdown()


def histories(path) -> dict[int, list]:
    """{block: [its place in each step since it appeared]}."""
    found = {}
    for step in read_trace(path).steps:
        for number, place in step["places"].items():
            found.setdefault(int(number), []).append(place)
        for number, own in found.items():
            if str(number) not in step["places"]:
                own.append(own[-1])
    return found


def test_blocks_go_out_and_come_back(recorded):
    path, _, tokens = recorded
    assert tokens[:6] == tokens[6:]
    seen = {
        (place[0] >= 0, place[1], place[2]) for own in histories(path).values() for place in own
    }
    assert {(True, SAVING, ""), (True, "", HOST), (False, "", HOST), (False, "", FOLDER)} <= seen
    assert any(copy == LOADING and not here for here, copy, _ in seen)
    # a block that a load brought is in the pool again, after it was not
    back = [
        own for own in histories(path).values()
        for before, after in pairwise(own)
        if before[1] == LOADING and before[0] < 0 and after[0] >= 0 and after[1] == ""
    ]  # fmt: skip
    assert len(back) >= 6


def test_places_are_where_the_blocks_are(recorded):
    """The last step's, against the tiers and the cache themselves."""
    path, engine, _ = recorded
    blocks = engine.scheduler.blocks
    tier = blocks.connector.tier
    places = Places(blocks)
    recorder_of_last = {number: own[-1] for number, own in histories(path).items()}
    assert len(recorder_of_last) == len(list(tier.below.files())) + len(
        [key for key in tier.rows if not tier.below.has(key)]
    )
    assert sum(place[2] == HOST for place in recorder_of_last.values()) <= len(tier.buffer)
    in_pool = [place[0] for place in recorder_of_last.values() if place[0] >= 0]
    assert len(in_pool) == len(set(in_pool)), "a block of the pool holds one block"
    assert set(in_pool) <= set(blocks.cache.hash_of)
    assert places.changed() == {}, "nothing is under way"


def test_the_pool_of_each_step_agrees_with_the_cache(recorded):
    """What is said to be in the pool is remembered by the prefix cache in that step."""
    path, _, _ = recorded
    remembered, now = set(), {}
    for step in read_trace(path).steps:
        remembered = remembered - set(step["forgotten"]) | set(step["remembered"])
        now |= step["places"]
        here = [place[0] for place in now.values() if place[0] >= 0]
        assert len(here) == len(set(here)) and set(here) <= remembered


def forgets(self, key, is_loading):
    """A block of the pool is still said to hold what it was taken for long ago."""
    return self.in_pool[key][0]


@pytest.mark.parametrize(
    "name, wrong", [("block_of", forgets), ("check_folder", lambda self: None)]
)
def test_a_planted_bug_is_found(name, wrong, recorded, tmp_path, monkeypatch):
    _, engine, _ = recorded
    monkeypatch.setattr(trace_places.Places, name, wrong)
    path = tmp_path / "steps.json"
    ids = [[3, *range(40, 134)], [4, *range(40, 134)], [5, *range(40, 134)]] * 2
    params = SamplingParams(temperature=0, max_tokens=4)
    with traced(engine, path):
        for number, prompt in enumerate(ids):
            engine.add_request(f"{name}{number}", prompt, params)
        while engine.has_unfinished_requests:
            engine.step()
    with pytest.raises(AssertionError):
        test_the_pool_of_each_step_agrees_with_the_cache((path, None, None))
        test_blocks_go_out_and_come_back((path, None, [0] * 12))


def test_an_engine_without_tiers_says_nothing_of_them(tmp_path):
    llm = LLM(MODEL, device="cpu", max_model_len=64)
    with traced(llm.engine, tmp_path / "steps.json"):
        llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
    assert all("places" not in step for step in read_trace(tmp_path / "steps.json").steps)


@in_a_browser
def test_the_page_counts_the_places(recorded, tmp_path):
    path, _, _ = recorded
    assert trace.main([str(path), "--out", str(tmp_path / "steps.html")]) == 0
    last = len(read_trace(path).steps) - 1
    shown = opened(tmp_path / "steps.html", tmp_path, last)
    in_host = sum(own[-1] == [-1, "", HOST] for own in histories(path).values())
    # how many are left there depends on the copies, and the page says nothing of none
    said = re.findall(r"(\d+) in host memory", shown["where"])
    assert shown["error"] == "" and said == [str(in_host)] * (in_host > 0)
