"""Proves that scheduling ahead changes no token: on random histories over a hash, and with a real
model, greedy and drawn, the tokens are those of the serial loop and of one request at a time.
"""

from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.batched.batch_sampling import BAD_LOGITS
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l11_cuda_graphs.lab.testing import new_model, new_prompts
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.optimized import RadixTree
from lessons.l14_continuous_batching.sequence import Chunk, Step
from lessons.l15_chunked_prefill.lab.virtual import new_request
from lessons.l25_one_step_ahead import generate as rung
from lessons.l25_one_step_ahead.device import PLACEHOLDER, Pass
from lessons.l25_one_step_ahead.generate import generate
from lessons.l25_one_step_ahead.lab.histories import History
from lessons.l25_one_step_ahead.lab.testing import DEVICE_SLIPS, FOUND_BY, LOOP_SLIPS
from lessons.l25_one_step_ahead.model_device import Drawn, ModelDevice, put_tokens
from lessons.l25_one_step_ahead.naive import Serial
from lessons.l25_one_step_ahead.optimized import OneStepAhead

LOOPS = {"serial": Serial, "ahead": OneStepAhead}
each_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
LIMITS = [6, 11, 1, 0, 4, 20]
LENGTHS = (3, 1, 12, 7, 5, 13)
WAYS = {
    "roomy": (dict(), None),
    "small chunks": (dict(max_num_seqs=3, max_num_batched_tokens=5), None),
    "few blocks": (dict(max_num_seqs=4, max_num_batched_tokens=9), (11, 3)),
}


# ---------------------------------------------------------------- random histories


@each_loop
def test_random_histories(loop, request):
    """500 in the long form. A failure names its seed: History.drawn(seed).run(loop) repeats it."""
    for seed in range(500 if request.config.getoption("--all") else 40):
        try:
            History.drawn(seed).run(loop)
        except Exception as error:
            raise AssertionError(f"history {seed}: {error!r}") from error


@pytest.mark.parametrize("slip", (*LOOP_SLIPS, *DEVICE_SLIPS))
def test_a_planted_slip_is_found(slip):
    """By one of the histories that the right loop passes."""
    loop = slip if issubclass(slip, OneStepAhead) else OneStepAhead
    more = () if loop is slip else (slip,)
    for seed in range(120):
        try:
            History.drawn(seed).run(loop, *more)
        except FOUND_BY:
            return
    pytest.fail(f"{slip.__name__} passed all histories")


def test_histories_meet_what_they_are_for():
    """Preemptions, ends by a stop token, aborts, shared prefixes: the first seeds hold each."""
    preempted = stopped = gone = known = 0
    for seed in range(60):
        history = History.drawn(seed)
        served = history.run(OneStepAhead)
        sequences = served.sequences.values()
        preempted += sum(sequence.preemptions for sequence in sequences)
        stopped += sum(s.output[-1:] != [] and s.output[-1] in s.stop_token_ids for s in sequences)
        gone += len(served.gone)
        alone = sum(len(s.prompt) + max(0, len(s.output) - 1) for s in sequences)
        known += history.cache is not None and served.device.computed_tokens < alone
    assert min(preempted, stopped, gone, known) >= 3, (preempted, stopped, gone, known)


# ---------------------------------------------------------------- a real model


def blocks_of(pool) -> BlockManager | None:
    return None if pool is None else BlockManager(*pool)


@each_loop
@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_of_one_at_a_time(way, loop, seed):
    """Greedy and in float64; told as they come, in each answer's order."""
    model, prompts = new_model(), new_prompts(*LENGTHS)
    arguments, pool = WAYS[way]
    seen = [[] for _ in prompts]
    got = generate(
        model,
        prompts,
        LIMITS,
        None,
        lambda row, token: seen[row].append(token),
        blocks=blocks_of(pool),
        loop=loop,
        **arguments,
    )
    assert got == seen == one_at_a_time.generate(model, prompts, LIMITS)


SAMPLED = [
    SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2, seed=17),
    SamplingParams(temperature=0, seed=3),
    SamplingParams(temperature=1.0, frequency_penalty=0.3, seed=0),
    SamplingParams(temperature=0.7, top_k=7, min_p=0.01, presence_penalty=0.4, seed=99),
    SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2, seed=17),
    SamplingParams(temperature=1.2, seed=5),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_seeded_request_draws_the_same(way, seed):
    """With penalties, which look at all tokens so far, and while the batch changes."""
    model, prompts = new_model(), new_prompts(*LENGTHS)
    arguments, pool = WAYS[way]
    expected = one_at_a_time.generate(model, prompts, LIMITS, SAMPLED)
    got = generate(model, prompts, LIMITS, SAMPLED, blocks=blocks_of(pool), **arguments)
    assert got == expected


def test_a_stop_token_ends_an_answer_one_step_late_and_nothing_is_kept_of_it(seed):
    model, prompts = new_model(), new_prompts(4, 2, 6)
    free = one_at_a_time.generate(model, prompts, 9)
    model.config = replace(model.config, eos_token_ids=(free[0][2], free[1][4]))
    expected = one_at_a_time.generate(model, prompts, 9)
    assert len(expected[0]) <= 3
    assert generate(model, prompts, 9, max_num_seqs=2) == expected


def test_a_prefix_that_another_request_is_still_computing(seed):
    """Six requests with one prompt, on a radix tree of small blocks."""
    model, (prompt,) = new_model(), new_prompts(20)
    prompts = [prompt[: 12 + row] for row in range(6)]
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    blocks = CachingBlockManager(60, 4, RadixTree(4))
    assert generate(model, prompts, LIMITS, blocks=blocks, max_num_seqs=2) == expected
    assert blocks.num_free == blocks.num_blocks and not blocks.tables


def test_refuses_what_lesson_2_refuses(seed):
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(new_model(), [[1]], -1)
    with pytest.raises(ValueError, match="the whole pool"):
        generate(new_model(), [[1] * 9], 9, blocks=BlockManager(2, 4))
    assert generate(new_model(), [[1], [2]], 0) == [[], []]


@pytest.mark.gpu
def test_the_tokens_of_a_gpu_and_nothing_waits_but_the_reading(seed):
    """With lesson 12's kernels. PyTorch raises at each operation that would wait for the GPU."""
    model = new_model(torch.float32, head_dim=16, hidden_size=64).cuda()
    prompts = new_prompts(*LENGTHS)
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    generate(model, prompts, LIMITS)  # compiles the kernels

    class Strict(OneStepAhead):
        def step(self):
            torch.cuda.set_sync_debug_mode("error")
            try:
                super().step()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    assert generate(model, prompts, LIMITS, max_num_seqs=3, loop=Strict) == expected


# ---------------------------------------------------------------- wrong versions must fail


class NothingIsPut(ModelDevice):
    """The next pass runs token 0 in the place of the one that was sampled."""

    def launch(self, step, before=None):
        return super().launch(step, None)


class FirstRows(ModelDevice):
    """Takes the first tokens of the pass before, as if no sequence had come or gone."""

    def launch(self, step, before=None):
        if before is not None:
            before = replace(before, sequences=[chunk.sequence for chunk in step.chunks])
        return super().launch(step, before)


class KeepsTheOldRows(ModelDevice):
    """Samples the first rows of the logits, as if the ended ones had the last."""

    def sample(self, passed, sequences):
        passed.ending = passed.ending[: len(sequences)]
        passed.logits = passed.logits[: len(sequences)]
        super().sample(passed, sequences)


def finds(wrong: type, monkeypatch) -> bool:
    """Whether one random model tells it from the right device. Some answers end by a stop token."""
    model, prompts, limits = new_model(), new_prompts(*LENGTHS), [12, 4, 9, 3, 12, 6]
    free = one_at_a_time.generate(model, prompts, limits)
    model.config = replace(model.config, eos_token_ids=(free[0][5],))
    expected = one_at_a_time.generate(model, prompts, limits)
    assert generate(model, prompts, limits, max_num_seqs=3) == expected
    with monkeypatch.context() as planted:
        planted.setattr(rung, "ModelDevice", wrong)
        try:
            return generate(model, prompts, limits, max_num_seqs=3) != expected
        except FOUND_BY:
            return True


@pytest.mark.parametrize("wrong", [NothingIsPut, FirstRows, KeepsTheOldRows])
def test_a_wrong_device_is_found(wrong, seed, monkeypatch):
    assert any(finds(wrong, monkeypatch) for _ in range(5))


def test_tokens_are_put_where_their_placeholders_are(seed):
    """By hand: rows of the pass before in another order, a prompt that has none, and bad logits."""
    a, b, c = (new_request(row, [1, 2, 3], 9) for row in range(3))
    for sequence in (a, c):
        sequence.computed = 3
        sequence.append(PLACEHOLDER)
    step = Step([Chunk(c, 1), Chunk(b, 3), Chunk(a, 1)], [])
    before = Pass(Step([], []), [], [a, c], tokens=Drawn.of(torch.tensor([70, 72])))
    tokens = torch.tensor([0, 1, 2, 3, 0])
    put_tokens(tokens, step, before)
    assert tokens.tolist() == [72, 1, 2, 3, 70]
    before.tokens.tokens[1] = BAD_LOGITS  # no id, and the next pass runs before it is read
    put_tokens(tokens, step, before)
    assert tokens.tolist() == [0, 1, 2, 3, 70]
