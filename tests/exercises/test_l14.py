"""Checks of lesson 14's exercises. Each exists because it rejects a named wrong answer
(wrong/l14.py).
"""

import itertools
import random

import pytest
import torch

from lessons.l14_continuous_batching.lab.testing import (
    Limits,
    check_history,
    new_request,
    new_scheduler,
    run,
)
from tests.exercises.checking import assert_equal, call, check, compare

# ---------------------------------------------------------------- 14.1 predict


def played(lengths, num_places):
    """The four numbers, by playing every step of every place."""
    queue, static, busy = list(lengths), 0, 0
    while queue:
        wave, queue = queue[:num_places], queue[num_places:]
        while any(wave):
            static += 1
            busy += sum(1 for left in wave if left)
            wave = [max(left - 1, 0) for left in wave]
    queue, places, continuous = list(lengths), [0] * num_places, 0
    while queue or any(places):
        places = [left or (queue.pop(0) if queue else 0) for left in places]
        places = [max(left - 1, 0) for left in places]
        continuous += 1
    return static, continuous, busy / (static * num_places), static * num_places / busy


PLACE_CASES = {  # name: (lengths, places, why)
    "example": ([6, 8, 5, 7, 3], 4, "the docstring's"),
    "figure": ([6, 8, 5, 7], 4, "26 of 32 places: no schedule gains more than 1.23"),
    "short_last_wave": ([4, 4, 4, 4, 1], 4, "one request in the last wave: its empty places count"),
    "long_answer_last": ([1, 1, 1, 1, 1, 1, 1, 12], 4, "a long answer that comes last runs alone"),
    "one_place": ([3, 1, 4, 1, 5], 1, "one after the other: nothing to gain"),
    "more_places": ([3, 9], 8, "places that no request ever has count as well"),
    "not_in_turn": ([9, 1, 1, 1, 1, 9], 2, "a request takes the place that is free first"),
    "equal_lengths": ([5] * 12, 4, "without variance waves are as good"),
}


@check("14.1", {case: why for case, (*_, why) in PLACE_CASES.items()}, seconds=5)
def test_places(impl, case, seed):
    lengths, num_places, _ = PLACE_CASES[case]
    inputs = dict(lengths=list(lengths), num_places=num_places)
    compare(impl, inputs, want=played(lengths, num_places), atol=1e-9)


@check("14.1", seconds=10)
def test_random_answers(impl, seed):
    draw = random.Random(seed)
    for num_places in (2, 3, 5, 8):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(10, 30))]
        inputs = dict(lengths=lengths, num_places=num_places)
        compare(impl, inputs, want=played(lengths, num_places), atol=1e-9)


# ---------------------------------------------------------------- 14.2 find the bugs

VOCABULARY, PRIME = 23, 8191


class ToyModel:
    """A decoder whose logits depend on every token that a column sees, and on their order."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.rand(PRIME, VOCABULARY, generator=generator)
        self.calls, self.rows = 0, set()

    def __call__(self, tokens, mask):
        self.calls += 1
        self.rows.add(len(tokens))
        assert tokens.shape == mask.shape, (
            f"tokens {list(tokens.shape)} and mask {list(mask.shape)} differ in shape"
        )
        logits = torch.zeros(*tokens.shape, VOCABULARY)
        for b, (row, seen) in enumerate(zip(tokens.tolist(), mask.tolist())):
            state = 1
            for column, (token, is_seen) in enumerate(zip(row, seen)):
                here = (state * 131 + token + 7) % PRIME
                logits[b, column] = self.table[here]
                state = here if is_seen else state
        return logits

    def alone(self, prompt, limit, stops):
        """The answer to one prompt, greedy."""
        tokens = list(prompt)
        while True:
            logits = self(torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.bool))
            tokens.append(int(logits[0, -1].argmax()))
            if len(tokens) - len(prompt) == limit or tokens[-1] in stops:
                return tokens[len(prompt) :]


def wave_of(seed, prompt_lens, limits, stops=()):
    """(model, arguments, the answers and their share). stops: (row, index) whose tokens in the free
    answers become stop tokens.
    """
    draw = random.Random(seed)
    model = ToyModel(seed)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in prompt_lens]
    free = [model.alone(prompt, limit, ()) for prompt, limit in zip(prompts, limits)]
    stop_ids = frozenset(free[row][index] for row, index in stops)
    answers = [model.alone(prompt, limit, stop_ids) for prompt, limit in zip(prompts, limits)]
    lengths = [len(answer) for answer in answers]
    inputs = dict(model=model, prompts=prompts, limits=limits, stop_token_ids=stop_ids, pad_token=0)
    model.calls, model.rows = 0, set()
    return model, inputs, (answers, sum(lengths) / (len(lengths) * max(lengths)))


WAVE_CASES = {  # name: (prompt lengths, limits, stops, why)
    "one_prompt": ([5], [6], [(0, 3)], "a batch of one, and an EOS that is not 2"),
    "prompts_differ": ([5, 2, 9], [4, 4, 4], [], "a shorter prompt ends before the last column"),
    "limits_differ": ([4, 4, 4], [2, 7, 4], [], "each row ends at its own limit"),
    "stops_differ": ([4, 4, 4], [9, 9, 9], [(0, 2), (1, 5)], "a row that has stopped stays ended"),
    "all_differ": ([3, 8, 1, 6], [9, 3, 6, 1], [(0, 4), (2, 1)], "prompts, limits, stop tokens"),
}


@check("14.2", {case: why for case, (*_, why) in WAVE_CASES.items()}, seconds=10)
def test_wave(impl, case, seed):
    prompt_lens, limits, stops, _ = WAVE_CASES[case]
    _, inputs, want = wave_of(seed, prompt_lens, limits, stops)
    assert_equal(impl(**inputs), want, atol=1e-9)


@check("14.2", seconds=10)
def test_token_2_is_a_token_like_others(impl, seed):
    """Greedy answers in which token 2 occurs, and ends nothing."""
    waves = (wave_of(attempt, [3, 3], [12, 12]) for attempt in itertools.count(seed))
    in_question = (wave for wave in waves if all(2 in answer[:-1] for answer in wave[2][0]))
    for _, inputs, want in itertools.islice(in_question, 3):
        assert_equal(impl(**inputs), want, atol=1e-9)


@check("14.2", seconds=10)
def test_padding_does_not_show(impl, seed):
    """The same wave with every token as padding, stop tokens among them."""
    _, inputs, want = wave_of(seed, [6, 2, 4], [5, 5, 5], [(1, 3)])
    for pad_token in range(VOCABULARY):
        got = impl(**{**inputs, "pad_token": pad_token})
        assert_equal(got, want, atol=1e-9, label=f"with pad_token {pad_token} your result")


@check("14.2", seconds=10)
def test_one_call_a_step(impl, seed):
    model, inputs, (answers, _) = wave_of(seed, [3, 5, 2], [4, 7, 2])
    call(impl, inputs)
    longest = max(map(len, answers))
    assert model.calls == longest, (
        f"{model.calls} calls of the model, expected {longest}: one for each token of the longest"
    )
    assert model.rows == {3}, f"calls with {sorted(model.rows)} rows, expected 3 in every call"


# ---------------------------------------------------------------- 14.3 the scheduler

ROOMY = Limits(num_blocks=200, max_num_batched_tokens=400)


def random_requests(draw, longest_prompt=24, longest_answer=20):
    """As lab.testing.run takes them: arrives, prompt, limit, tokens until a stop."""
    return [
        (
            draw.randint(0, 12),
            draw.randint(1, longest_prompt),
            draw.randint(1, longest_answer),
            draw.randint(1, longest_answer + 5),
        )
        for _ in range(draw.randint(1, 12))
    ]


HISTORY_CASES = {  # name: (limits, why)
    "places": (ROOMY, "blocks and budget for all: places are the limit"),
    "blocks": (Limits(max_num_seqs=8, max_num_batched_tokens=400), "few blocks: some must wait"),
    "budget": (Limits(200, 4, 8, 20), "a step has at most 20 tokens, or one prompt"),
    "everything": (Limits(), "places, blocks and budget are all short"),
}


@check("14.3", {case: why for case, (_, why) in HISTORY_CASES.items()}, seconds=20)
def test_random_histories(impl, case, seed):
    """25 histories, each held to every rule after every step."""
    draw = random.Random(seed)
    limits, _ = HISTORY_CASES[case]
    for _ in range(25):
        check_history(impl, random_requests(draw), limits)


def rows_of(impl, requests, **limits):
    """Which requests each step runs."""
    steps = []
    scheduler = new_scheduler(impl, **limits)
    run(scheduler, requests, lambda step: steps.append([c.sequence.row for c in step.chunks]))
    return steps


@check("14.3", seconds=10)
def test_scheduler_example(impl, seed):
    got = rows_of(impl, [(0, 3, 2, 9), (0, 3, 5, 9), (0, 3, 2, 9)], max_num_seqs=2)
    want = [[0, 1], [0, 1], [1, 2], [1, 2], [1]]
    assert got == want, f"the steps run {got}, expected {want}"


@check("14.3", seconds=10)
def test_a_large_request_is_not_overtaken(impl, seed):
    """Request 1 needs the whole pool; requests 2 to 5 would fit beside request 0."""
    requests = [(0, 8, 8, 99), (0, 30, 3, 99), *[(0, 2, 2, 99)] * 4]
    got = rows_of(impl, requests, num_blocks=8, max_num_seqs=3)
    first = {row: next(i for i, rows in enumerate(got) if row in rows) for row in range(6)}
    assert first[1] < first[2], f"request 2 ran before request 1, which came first: {got}"
    assert first[1] == 8, f"request 1 starts at step {first[1]}, expected 8, when all is free"


@check("14.3", seconds=10)
def test_refuses_what_never_fits(impl, seed):
    scheduler = new_scheduler(impl, num_blocks=4, block_size=4)
    scheduler.add(new_request(0, 9, 8))  # 16 tokens: its last one is never stored
    with pytest.raises(ValueError):
        scheduler.add(new_request(1, 10, 8))
    assert len(scheduler.waiting) == 1, "a refused request is in the queue"


@check("14.3", seconds=10)
def test_leave_says_who(impl, seed):
    scheduler = new_scheduler(impl)
    ended, going = new_request(0, 3, 1), new_request(1, 3, 2)
    for sequence in (ended, going):
        scheduler.add(sequence)
    for sequence in scheduler.finish(scheduler.schedule()):
        sequence.append(0)
    got = scheduler.leave()
    assert got == [ended], f"leave() returned {got!r}, expected the one that has finished"
