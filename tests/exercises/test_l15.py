"""Checks of lesson 15's exercises. Each exists because it rejects a named wrong answer
(wrong/l15.py).
"""

import random

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l15_chunked_prefill.lab.histories import Asked, Rules, Trial
from lessons.l15_chunked_prefill.lab.virtual import VirtualModel, new_request, run
from tests.exercises.checking import call, check, compare

# ---------------------------------------------------------------- 15.1 predict


def played(prompt_len, num_decodes, budget):
    """The four numbers, chunk by chunk and token by token."""
    chunks, done, pairs, read = [], 0, 0, 0
    while done < prompt_len:
        count = min(budget - num_decodes, prompt_len - done)
        pairs += sum(done + at + 1 for at in range(count))
        done += count
        read += done
        chunks.append(count)
    return chunks[0], len(chunks), pairs, read


CHUNK_CASES = {  # name: (prompt, decodes, budget, why)
    "example": (10, 2, 6, "the docstring's"),
    "decodes_first": (32768, 8, 2048, "17 steps, and 16 if no request decoded"),
    "whole_chunks": (96, 0, 32, "the last chunk is as large as the others"),
    "short_prompt": (5, 3, 64, "a prompt that fits one step"),
}


@check("15.1", {case: why for case, (*_, why) in CHUNK_CASES.items()}, seconds=5)
def test_chunks(impl, case, seed):
    prompt_len, num_decodes, budget, _ = CHUNK_CASES[case]
    inputs = dict(prompt_len=prompt_len, num_decodes=num_decodes, budget=budget)
    compare(impl, inputs, want=played(**inputs))


@check("15.1", seconds=5)
def test_random_prompts(impl, seed):
    draw = random.Random(seed)
    for _ in range(30):
        num_decodes = draw.randint(0, 20)
        inputs = dict(
            prompt_len=draw.randint(1, 400),
            num_decodes=num_decodes,
            budget=num_decodes + draw.randint(1, 90),
        )
        compare(impl, inputs, want=played(**inputs))


# ---------------------------------------------------------------- 15.2 find the bugs


def planned(running, waiting, budget, max_num_seqs):
    """The step, token by token."""
    counts, order = {}, []
    queue = sorted(running, key=lambda request: request[1] > 1)
    queue += waiting[: max(0, max_num_seqs - len(running))]
    for id, lacking in queue:
        while budget and counts.get(id, 0) < lacking:
            counts[id] = counts.get(id, 0) + 1
            budget -= 1
        if id in counts:
            order.append((id, counts[id], counts[id] == lacking))
    return order


STEP_CASES = {  # name: (running, waiting, budget, places, why)
    "example": ([(0, 7), (1, 1)], [(2, 3), (3, 9)], 10, 3, "the docstring's"),
    "long_prompt": ([(0, 90), (1, 1), (2, 1)], [], 16, 4, "a prompt never delays a decode"),
    "many_decodes": ([(i, 1) for i in range(9)], [(9, 20)], 12, 10, "decodes cost budget, too"),
    "no_place": ([(0, 1), (1, 1)], [(2, 2)], 8, 2, "no request comes in without a place"),
    "no_budget": ([(0, 4), (1, 9)], [(2, 2)], 4, 4, "who gets nothing is not in the step"),
    "no_request_overtakes": (
        [(0, 1)],
        [(1, 9), (2, 2)],
        6,
        4,
        "the first that waits takes the rest",
    ),
}


@check("15.2", {case: why for case, (*_, why) in STEP_CASES.items()}, seconds=5)
def test_step(impl, case, seed):
    running, waiting, budget, max_num_seqs, _ = STEP_CASES[case]
    inputs = dict(
        running=list(running), waiting=list(waiting), budget=budget, max_num_seqs=max_num_seqs
    )
    compare(impl, inputs, want=planned(**inputs))


@check("15.2", seconds=5)
def test_two_tokens_are_no_decode(impl, seed):
    inputs = dict(running=[(0, 2), (1, 1)], waiting=[], budget=2, max_num_seqs=2)
    compare(impl, inputs, want=[(1, 1, True), (0, 1, False)])


@check("15.2", seconds=5)
def test_random_steps(impl, seed):
    draw = random.Random(seed)
    for _ in range(50):
        ids = iter(range(40))
        running = [(next(ids), draw.choice([1, 1, draw.randint(2, 30)])) for _ in range(5)]
        waiting = [(next(ids), draw.randint(1, 30)) for _ in range(draw.randint(0, 5))]
        max_num_seqs = draw.randint(5, 8)
        inputs = dict(
            running=running[: draw.randint(0, 5)],
            waiting=waiting,
            budget=max_num_seqs + draw.randint(0, 40),
            max_num_seqs=max_num_seqs,
        )
        assert call(impl, inputs) == planned(**inputs), f"for {inputs}"


# ---------------------------------------------------------------- 15.3 preemption


class DecodingRules(Rules):
    """Also: every running request that decodes is in every step."""

    def check(self, step):
        super().check(step)
        in_step = {chunk.sequence.row for chunk in step.chunks}
        waits = [s.row for s in self.scheduler.running if s.is_decoding and s.row not in in_step]
        assert not waits, f"requests {waits} decode, and are not in the step"


def check_history(impl, requests, num_blocks, block_size, max_num_seqs, budget):
    """Serve the requests; after every step all rules hold, and the answers are right."""
    scheduler = impl(BlockManager(num_blocks, block_size), max_num_seqs, budget)
    trial = Trial(scheduler, requests)
    trial.rules = DecodingRules(scheduler)
    trial.run()


POOL_CASES = {  # name: (blocks, block_size, places, budget, why)
    "few_blocks": (11, 4, 8, 64, "blocks run out again and again"),
    "small_chunks": (11, 4, 4, 6, "blocks run out in the middle of prompts"),
    "blocks_of_one": (44, 1, 8, 16, "every token takes a block"),
}


@check("15.3", {case: why for case, (*_, why) in POOL_CASES.items()}, seconds=20)
def test_random_histories(impl, case, seed):
    """Eight histories, each held to every rule after every step."""
    draw = random.Random(seed)
    for _ in range(8):
        requests = [
            Asked(draw.randint(0, 8), draw.randint(1, 24), draw.randint(1, 16))
            for _ in range(draw.randint(3, 8))
        ]
        check_history(impl, requests, *POOL_CASES[case][:4])


def steps_of(impl, num_blocks, block_size, asked, count):
    """The first steps, {row: tokens} of each, and the sequences. asked: (prompt, limit) of each."""
    scheduler = impl(BlockManager(num_blocks, block_size), 8, 64)
    sequences = [
        new_request(row, list(range(prompt)), limit) for row, (prompt, limit) in enumerate(asked)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    model, seen = VirtualModel(scheduler.blocks), []
    for _ in range(count):
        run(scheduler, model, lambda step: seen.append({s.row: n for s, n in step.chunks}))
    return seen, sequences


@check("15.3", seconds=5)
def test_preemption_example(impl, seed):
    got, (first, last) = steps_of(impl, 4, 2, [(3, 4), (3, 4)], 5)
    want = [{0: 3, 1: 3}, {0: 1, 1: 1}, {0: 1}, {0: 1}, {1: 5}]
    assert got == want, f"the steps run {got}, expected {want}"
    counts = (first.preemptions, last.preemptions)
    assert counts == (0, 1), f"preemptions are {counts}, expected (0, 1)"


@check("15.3", seconds=5)
def test_two_give_way_to_one(impl, seed):
    """Blocks of one token, six of them: in the third step the first of three finds none left, and
    the block of the last serves it and the second.
    """
    got, _ = steps_of(impl, 6, 1, [(1, 6), (1, 6), (1, 6)], 4)
    want = [{0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1}, {0: 1}]
    assert got == want, f"the steps run {got}, expected {want}"


@check("15.3", seconds=5)
def test_an_urgent_prompt_takes_what_is_in_the_step_already(impl, seed):
    """Six requests decode. Request 0 comes a step later, and in the middle of its prompt it lacks
    the blocks of two of them.
    """
    urgent, others = Asked(1, 20, 2), [Asked(0, 1, 9)] * 6
    check_history(impl, [urgent, *others], 32, 1, 8, 16)


@check("15.3", seconds=5)
def test_a_chunk_is_not_cut_by_the_blocks(impl, seed):
    """In the third step the second half of the urgent prompt lacks 6 of 10 blocks: two of those who
    decode give back 3 each.
    """
    scheduler = impl(BlockManager(32, 1), 8, 16)
    for row in range(1, 7):
        scheduler.add(new_request(row, [0], 9))
    model, seen = VirtualModel(scheduler.blocks), []
    for turn in range(3):
        run(scheduler, model, lambda step: seen.append({s.row: n for s, n in step.chunks}))
        if not turn:
            scheduler.add(new_request(0, list(range(20)), 2))
    want = {0: 10, 1: 1, 2: 1, 3: 1, 4: 1}
    assert seen[2] == want, f"the third step runs {seen[2]}, expected {want}"
