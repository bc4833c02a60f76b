"""The engine gives every request the tokens that it would get alone, whatever it does inside, and
gives back every block.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import generate as alone
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.sampling import SamplingParams as RowParams
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import RadixTree
from reference.engine.request import by_priority
from reference.engine.sampling_params import SamplingParams
from tests.engine_cases import assert_clean, greedy, new_engine, new_model, random_prompts, run

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(scope="module")
def model() -> Decoder:
    return new_model()


WAYS = {
    "roomy": dict(num_blocks=400, block_size=3),
    "blocks of one": dict(num_blocks=400, block_size=1, cache=HashBlocks),
    "chunks of one": dict(num_blocks=60, block_size=16, max_num_seqs=1, max_num_batched_tokens=1),
    "small chunks": dict(
        num_blocks=200, block_size=3, cache=HashBlocks, max_num_seqs=5, max_num_batched_tokens=7
    ),
    "whole prompts": dict(
        num_blocks=100, block_size=4, max_num_batched_tokens=64, enable_chunked_prefill=False
    ),
    "few blocks": dict(num_blocks=16, block_size=4, max_num_seqs=8),
    "few blocks, hashes": dict(num_blocks=16, block_size=4, cache=HashBlocks, max_num_seqs=8),
    "few blocks, tree": dict(num_blocks=16, block_size=4, cache=RadixTree, max_num_seqs=8),
    "swapping": dict(num_blocks=16, block_size=4, host_blocks=1000, max_num_seqs=8),
    "swapping, hashes": dict(
        num_blocks=16, block_size=4, cache=HashBlocks, host_blocks=1000, max_num_seqs=8
    ),
    "swapping, a small host": dict(num_blocks=64, block_size=1, host_blocks=20, max_num_seqs=8),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_request_gets_the_tokens_of_running_alone(model, way):
    prompts = random_prompts(8) + random_prompts(4, shared=13)
    limits = [random.randint(1, 30) for _ in prompts]
    arrivals = sorted(random.choices(range(12), k=len(prompts)))
    got = run(new_engine(model, **WAYS[way]), prompts, [greedy(n) for n in limits], arrivals)
    want = alone(model, prompts, limits)
    assert [got[str(at)] for at in range(len(prompts))] == [[tokens] for tokens in want]


def test_few_blocks_preempt_and_many_do_not(model):
    prompts = random_prompts(8)
    engine = new_engine(model, **WAYS["few blocks"])
    counts = Counter()
    for at, prompt in enumerate(prompts):
        engine.add_request(str(at), prompt, greedy(30))
    while engine.has_unfinished_requests:
        for output in engine.step():
            counts[output.request_id] = output.metrics.preemptions
    assert sum(counts.values()) > 0 and counts["0"] == 0, "the first is never sent away"


def test_sampled_answers_depend_on_the_request_alone(model):
    prompts = random_prompts(6)
    rows = [RowParams(0.8, top_p=0.9, seed=at, frequency_penalty=0.5) for at in range(6)]
    params = [
        SamplingParams(
            temperature=0.8,
            top_p=0.9,
            seed=at,
            frequency_penalty=0.5,
            max_tokens=12,
            detokenize=False,
        )
        for at in range(6)
    ]
    got = run(new_engine(model, **WAYS["few blocks, tree"]), prompts, params)
    want = alone(model, prompts, 12, rows)
    assert [got[str(at)] for at in range(6)] == [[tokens] for tokens in want]


@pytest.mark.parametrize("way", ["roomy", "few blocks, hashes"])
def test_answers_that_fork_from_one_prompt(model, way):
    """n answers share the prompt's blocks, and each is what its seed gives alone."""
    prompts = random_prompts(3)
    params = [
        SamplingParams(n=3, temperature=1.0, seed=10 * at, max_tokens=10, detokenize=False)
        for at in range(3)
    ]
    got = run(new_engine(model, **WAYS[way]), prompts, params)
    for at, prompt in enumerate(prompts):
        for index, answer in enumerate(got[str(at)]):
            want = alone(model, [prompt], 10, RowParams(1.0, seed=10 * at + index))
            assert answer == want[0]


def test_a_forked_prompt_is_kept_once(model):
    engine = new_engine(model, num_blocks=60, block_size=4)
    prompt = random.choices(range(60), k=22)  # 5 whole blocks, and 2 tokens of a sixth
    engine.add_request("a", prompt, SamplingParams(n=4, seed=0, max_tokens=2, detokenize=False))
    engine.step()
    blocks = engine.scheduler.blocks
    assert blocks.num_blocks - blocks.num_free == 6
    engine.step()
    # three of the four have copied the sixth before they wrote into it
    assert blocks.num_blocks - blocks.num_free in (5 + 4, 0)


def test_a_known_prefix_is_not_computed_again(model):
    engine = new_engine(model, num_blocks=60, block_size=4, cache=HashBlocks)
    prompt = random.choices(range(60), k=17)
    run(engine, [prompt], [greedy(3)])
    engine.add_request("again", prompt, greedy(3))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert outputs[-1].num_cached_tokens == 16


def test_logprobs_are_the_models(model):
    engine = new_engine(
        model, num_blocks=60, block_size=4, cache=HashBlocks, max_num_batched_tokens=64
    )
    prompt = random.choices(range(60), k=9)
    params = SamplingParams(
        temperature=0.7, seed=1, max_tokens=5, logprobs=3, prompt_logprobs=2, detokenize=False
    )
    for _ in range(2):  # the second time its prefix is known
        engine.add_request("a", prompt, params)
        while engine.has_unfinished_requests:
            outputs = engine.step()
        output, answer = outputs[-1], outputs[-1].outputs[0]
        whole = torch.tensor(prompt + answer.token_ids, device=model.device)
        hidden = model(whole, whole_sequence(model, len(whole)))
        want = model.logits(hidden).log_softmax(-1)
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        found = output.prompt_logprobs[1:] + answer.logprobs
        for at, (logprobs, token) in enumerate(zip(found, whole[1:].tolist())):
            for id, logprob in logprobs.items():
                assert logprob.logprob == pytest.approx(want[at, id].item(), abs=1e-4)
            assert token in logprobs
            best = sorted(logprobs.values(), key=lambda logprob: logprob.rank)
            assert best[0].rank == 1
        total = sum(want[len(prompt) - 1 + i, t].item() for i, t in enumerate(answer.token_ids))
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_bias_and_min_tokens(model):
    engine = new_engine(model, **WAYS["roomy"])
    biased = SamplingParams(temperature=0, max_tokens=4, logit_bias={7: 100.0}, detokenize=False)
    stopping = SamplingParams(
        temperature=0, max_tokens=9, min_tokens=3, logit_bias={60: 100.0}, detokenize=False
    )
    got = run(engine, [[1, 2], [1, 2]], [biased, stopping])
    assert got["0"] == [[7] * 4]
    assert len(got["1"][0]) == 4 and got["1"][0][-1] == 60 and 60 not in got["1"][0][:3]


def test_priority(model):
    engine = new_engine(model, num_blocks=100, block_size=4, max_num_seqs=1, order=by_priority)
    for id, priority in (("low", 5), ("high", 0), ("middle", 3)):
        engine.add_request(id, [1, 2, 3], greedy(2), priority)
    order = []
    while engine.has_unfinished_requests:
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == ["high", "middle", "low"]


def test_swapped_tokens_come_back_and_are_not_computed_again(model):
    """Preempted either way, and the same tokens: the pass runs fewer when K and V wait outside."""
    prompts, computed = random_prompts(8), {}
    for way in ("few blocks", "swapping"):
        engine = new_engine(model, **WAYS[way])
        runner, counts = engine.runner, []
        engine.runner = Counting(runner, counts)
        got = run(engine, prompts, [greedy(30)] * 8)
        assert [got[str(at)][0] for at in range(8)] == alone(model, prompts, 30)
        computed[way] = sum(counts)
    assert engine.scheduler.host.swap.swapped_bytes > 0
    assert computed["swapping"] < computed["few blocks"]


class Counting:
    """A runner that notes how many tokens each of its steps runs."""

    def __init__(self, runner, counts):
        self.runner, self.counts = runner, counts

    def __call__(self, step, tables):
        self.counts.append(step.num_tokens)
        return self.runner(step, tables)

    def __getattr__(self, name):
        return getattr(self.runner, name)


def test_an_aborted_request_leaves_the_host(model):
    engine = new_engine(model, **WAYS["swapping"])
    for at, prompt in enumerate(random_prompts(8)):
        engine.add_request(str(at), prompt, greedy(30))
    while not engine.scheduler.host.swap.away:
        engine.step()
    for id in list(engine.requests):
        engine.abort_request(id)
    assert_clean(engine)


@pytest.mark.parametrize("way", ["few blocks, hashes", "few blocks", "swapping, hashes"])
def test_aborts_at_every_state(model, way):
    """Requests that are left get the same tokens, and nothing leaks."""
    prompts = random_prompts(8)
    want = alone(model, prompts, 20)
    for steps in range(0, 12, 3):
        engine = new_engine(model, **WAYS[way])
        for at, prompt in enumerate(prompts):
            engine.add_request(str(at), prompt, greedy(20))
        for _ in range(steps):
            engine.step()
        gone = random.sample(range(8), 4)
        for at in gone:
            engine.abort_request(str(at))
        assert engine.abort_request("unknown") is None
        got = {}
        while engine.has_unfinished_requests:
            got |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        assert_clean(engine)
        for at, tokens in got.items():
            assert tokens == want[int(at)]


def test_a_pass_that_raises_costs_only_its_own_requests(model):
    engine = new_engine(model, num_blocks=100, block_size=4, max_num_seqs=2)
    prompts = random_prompts(4)
    for at, prompt in enumerate(prompts):
        engine.add_request(str(at), prompt, greedy(5))
    got = {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    runner, engine.runner = engine.runner, lambda *step: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.runner = runner
    # Usually 2 and 3. Who stops at its first token makes room for one that then was in the pass.
    kept = set(engine.requests)
    assert kept == {"2", "3"} if not got else kept < {"2", "3"}
    while engine.has_unfinished_requests:
        got |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    assert_clean(engine)
    want = alone(model, prompts, 5)
    assert kept <= set(got) and all(tokens == want[int(at)] for at, tokens in got.items())


@pytest.mark.parametrize(
    "prompt, params, said",
    [
        ([], greedy(1), "prompt: got []"),
        ([61], greedy(1), "token ids from 0 to 60"),
        ([1.5], greedy(1), "got 1.5 at 0"),
        ([0, True], greedy(1), "got True at 1"),
        ([-1], greedy(1), "got -1 at 0"),
        (5, greedy(1), "prompt: got 5; accepted: text or token ids"),
        ({"prompt_token_ids": []}, greedy(1), "prompt: got []"),
        ({"prompt_token_ids": [1], "prompt": "x"}, greedy(1), "prompt: got {"),
        ("a\ud800", greedy(1), "without halves of surrogate pairs"),
        ([1] * 64, greedy(1), "accepted: at most 63"),
        ([1] * 40, greedy(20), "the whole pool"),
        ([1], SamplingParams(n=9, detokenize=False), "9 answers at once; accepted: at most 8"),
        ([1], SamplingParams(logit_bias={61: 1.0}, detokenize=False), "logit_bias: got 61; acc"),
        ([1], SamplingParams(stop_token_ids=[61], min_tokens=2), "token ids below 61"),
        ([1], "greedy", "sampling_params: got 'greedy'; accepted: SamplingParams"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(model, prompt, params, said):
    engine = new_engine(model, num_blocks=8, block_size=4, max_num_seqs=8)
    with pytest.raises(ValueError) as error:
        engine.add_request("a", prompt, params)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert_clean(engine)


def test_a_request_id_in_use_is_refused(model):
    engine = new_engine(model, num_blocks=8, block_size=4)
    engine.add_request("a", [1], greedy(3))
    with pytest.raises(ValueError, match="request_id: got 'a'"):
        engine.add_request("a", [1], greedy(3))
    with pytest.raises(ValueError, match="request_id: got 5"):
        engine.add_request(5, [1], greedy(3))
    with pytest.raises(ValueError, match="priority: got 'high'; accepted: a whole number"):
        engine.add_request("b", [1], greedy(3), "high")
    with pytest.raises(ValueError, match="request_id: got \\['a'\\]; accepted: a string"):
        engine.abort_request(["a"])
    assert engine.abort_request("b") is None, "one that the engine does not know"
    assert list(engine.requests) == ["a"]


def test_a_prompt_that_is_preempted_in_its_middle_is_scored_once(model):
    """Its first chunk had 25 of 31 tokens; alone again, it runs them all in one."""
    engine = new_engine(model, num_blocks=45, block_size=1, max_num_batched_tokens=33)
    for at in range(8):
        engine.add_request(str(at), [at + 1], replace(greedy(8), ignore_eos=True))
    prompt = random.choices(range(60), k=31)
    scored = replace(greedy(1), prompt_logprobs=0)
    engine.add_request("scored", prompt, scored)
    preemptions = 0
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.request_id == "scored":
                preemptions = output.metrics.preemptions
                assert len(output.prompt_logprobs) == len(prompt)
    assert preemptions


def test_two_engines_on_one_model(model):
    """Step by step beside each other, with one set of weights and a pool each."""
    prompts, got = random_prompts(6), [{}, {}]
    engines = [new_engine(model, **WAYS[way]) for way in ("few blocks, hashes", "swapping")]
    for engine in engines:
        for at, prompt in enumerate(prompts):
            engine.add_request(str(at), prompt, greedy(20))
    while any(engine.has_unfinished_requests for engine in engines):
        for engine, answers in zip(engines, got):
            answers |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    want = dict(zip("012345", alone(model, prompts, 20)))
    assert got == [want, want]
    for engine in engines:
        assert_clean(engine)
