"""Pictures in the engine: whatever the engine does with a request, it says what the model says
alone.
"""

import pickle
import random

import pytest
import torch

from lessons.l12_paged_kv.runner import step_batch
from reference.engine.sampling_params import SamplingParams
from reference.vision.pictures import Picture
from reference.vision.prompt import Placed
from reference.vision.sight import FeatureCache, PictureNames
from tests.engine_cases import CONFIG, assert_clean, greedy, run
from tests.vision_cases import (
    IMAGE,
    ROWS,
    a_picture,
    a_prompt,
    new_seeing_engine,
    plain_answer,
    seen,
    small_model,
)

pytestmark = pytest.mark.usefixtures("seed")
STOP = CONFIG.eos_token_ids
WAYS = {
    "roomy": dict(),
    "chunks": dict(max_num_batched_tokens=8),
    "preempted": dict(num_blocks=13, max_num_batched_tokens=8),
    "swapped": dict(num_blocks=13, preemption_mode="swap", swap_space=0.01),
    "no cache": dict(enable_prefix_caching=False, max_num_batched_tokens=8),
}


def ask(engine, *prompts, count=4) -> list[list[int]]:
    answers = run(engine, prompts, [greedy(count)] * len(prompts))
    return [answers[str(at)][0] for at in range(len(prompts))]


@pytest.mark.sample(2, of="ways of a picture through the engine")
@pytest.mark.parametrize("way", WAYS)
def test_the_engine_says_what_the_model_says_alone(way):
    """Text beside pictures, pictures that come again, prompts that begin alike, chunks that end
    within a picture, requests that are preempted and computed again.
    """
    model, eyes = small_model()
    engine = new_seeing_engine(**WAYS[way])
    cut, schedule = [], engine.scheduler.schedule

    def watched():
        step = schedule()
        for sequence, count in step.chunks:
            end = sequence.computed + count
            cut.extend(one for one in sequence.pictures if one.start < end < one.start + ROWS)
        return step

    engine.scheduler.schedule = watched
    one, two = a_picture(), a_picture()
    head = random.choices(range(58), k=6)
    prompts = [seen([*head, IMAGE, 3, 4], one), seen([*head, IMAGE, 3, 4], two), [*head, 1, 2]]
    prompts += [seen([*head, IMAGE, 3, 4], one), a_prompt(two, one), a_prompt(a_picture())]
    arrivals = [0, 0, *sorted(random.choices(range(6), k=4))]
    if "num_blocks" in WAYS[way]:
        arrivals = [0] * len(prompts)  # all at once, so that blocks are short whatever was drawn
    requests = []
    add = engine.add_request
    engine.add_request = lambda id, *more: (add(id, *more), requests.append(engine.requests[id]))
    got = run(engine, prompts, [greedy(8)] * len(prompts), arrivals)
    for at, prompt in enumerate(prompts):
        assert got[str(at)][0] == plain_answer(model, eyes, prompt, 8, STOP), f"{way}: {at}"
    assert cut or "max_num_batched_tokens" not in WAYS[way], "no chunk ended within a picture"
    preempted = sum(sequence.preemptions for one in requests for sequence in one.sequences)
    assert preempted or "num_blocks" not in WAYS[way], "no request was preempted"


def test_two_pictures_never_share_a_block_and_the_same_one_does():
    """Two requests whose ids are the same, before a picture, within and after it."""
    engine = new_seeing_engine()
    ids = [*random.choices(range(58), k=9), IMAGE, *random.choices(range(58), k=9)]
    one, two, shared = a_picture(), a_picture(), 9 // 4 * 4
    cached = []
    for at, picture in enumerate([one, two, Picture.of(one.pixels.copy()), two]):
        engine.add_request(str(at), seen(ids, picture), greedy(1))
        while engine.has_unfinished_requests:
            (output,) = engine.step()
        cached.append(output.num_cached_tokens)
    assert cached == [0, shared, 24, 24]  # all whole blocks of 9 + ROWS + 9 = 27 tokens
    assert engine.runner.sight.features.num_computed == 2


def test_one_row_of_a_picture_in_a_block_is_enough():
    """The picture's first row ends a block, so that block alone depends on its number."""
    engine = new_seeing_engine()
    ids = [*random.choices(range(58), k=3), IMAGE, 7]
    for at, picture in enumerate([a_picture(), a_picture()]):
        engine.add_request(str(at), seen(ids, picture), greedy(1))
        while engine.has_unfinished_requests:
            (output,) = engine.step()
        assert output.num_cached_tokens == 0


def test_each_row_of_each_picture_has_a_name_of_its_own():
    names, one, two = PictureNames(ROWS), a_picture(), a_picture()
    ids = [1, 2, *[IMAGE] * ROWS, 3, *[IMAGE] * ROWS, 4]
    found, other = list(ids), list(ids)
    names.put(found, [Placed(2, one), Placed(3 + ROWS, two)])
    names.put(other, [Placed(2, two), Placed(3 + ROWS, one)])
    assert len({*found}) == len(ids), "two rows have the same name"
    assert [id for id in found if id >= 0] == [1, 2, 3, 4]
    assert other[2 : 2 + ROWS] == found[3 + ROWS : -1]


@pytest.mark.sample(1, of="wrong names of pictures")
@pytest.mark.parametrize("wrong", ["tokens alone", "a number for all", "the first row alone"])
def test_keys_that_do_not_name_the_picture_are_found(wrong, monkeypatch):
    """What the two tests above are worth."""

    def put(self, names, pictures):
        for start, picture in pictures:
            if wrong == "a number for all":
                names[start : start + ROWS] = [-1] * ROWS
            if wrong == "the first row alone":
                names[start + 1] = -1 - self.number_of(picture)

    monkeypatch.setattr(PictureNames, "put", put)
    with pytest.raises(AssertionError):
        test_two_pictures_never_share_a_block_and_the_same_one_does()
        test_one_row_of_a_picture_in_a_block_is_enough()


class Replays:
    """In the place of DecodeGraphs: takes what they take, and sees no picture, as a captured
    step.
    """

    def __init__(self, runner):
        self.runner, self.ran = runner, []

    def fits(self, chunks) -> bool:
        return max(len(new) for new, _ in chunks) == 1

    def __call__(self, chunks, tables, row_slots=None, trees=(), late=None):
        runner, self.ran = self.runner, self.ran + chunks
        splice, runner.sight.splice = runner.sight.splice, None
        batch = step_batch(runner.pool, chunks, tables)
        hidden = runner.forward(batch.tokens, runner.pool.attending(batch))
        runner.sight.splice = splice
        return hidden, hidden


@pytest.mark.parametrize("misses", [False, True])
def test_a_step_with_a_row_of_a_picture_is_never_replayed(misses):
    """Chunks of one token look like decode steps. misses: the planted mistake, a runner that asks
    the graphs alone.
    """
    model, eyes = small_model()
    engine = new_seeing_engine()
    runner, prompt = engine.runner, seen([5, IMAGE, 6], a_picture())
    runner.captured = replays = Replays(runner)
    if misses:
        runner.run = lambda *step, **more: replays(*step, **more)[0]
    engine.scheduler.max_num_batched_tokens = 1  # as the end of a budget leaves it
    got = ask(engine, prompt)[0]
    assert (got == plain_answer(model, eyes, prompt, 4, STOP)) is not misses
    assert len(replays.ran) >= len(got) + 1, "decode steps and tokens of text are replayed"


def test_answers_fork_after_a_picture():
    model, eyes = small_model()
    engine, prompt = new_seeing_engine(), a_prompt(a_picture())
    params = SamplingParams(n=3, top_k=1, max_tokens=5, detokenize=False)
    answers = run(engine, [prompt], [params])["0"]
    assert answers == [plain_answer(model, eyes, prompt, 5, STOP)] * 3


def test_prompts_that_already_hold_all_rows_and_what_is_told_of_them():
    """As transformers' processor writes them. Penalties and scores look at ids, and find tokens."""
    engine, picture = new_seeing_engine(), a_picture()
    whole = [4, *[IMAGE] * ROWS, 8]
    params = SamplingParams(
        max_tokens=3, temperature=0, repetition_penalty=1.3, prompt_logprobs=1, detokenize=False
    )
    for ids in ([4, IMAGE, 8], whole):
        engine.add_request("a", seen(ids, picture), params)
        while engine.has_unfinished_requests:
            (output,) = engine.step()
        assert output.prompt_token_ids == whole and len(output.prompt_logprobs) == len(whole)
    assert_clean(engine)


def test_the_feature_cache_forgets_the_oldest_and_counts_its_bytes():
    _, eyes = small_model()
    row_bytes = ROWS * CONFIG.hidden_size * 4
    cache, pictures = FeatureCache(eyes, 2 * row_bytes), [a_picture() for _ in range(3)]
    first = cache[pictures[0]]
    cache[pictures[1]]
    assert cache[pictures[0]] is first and cache.num_computed == 2
    cache[pictures[2]]  # takes the place of 1, which was asked for longest ago
    assert cache[pictures[0]] is first and cache.num_bytes == 2 * row_bytes
    cache[pictures[1]]
    assert cache.num_computed == 4
    nothing = FeatureCache(eyes, 0)
    assert nothing[pictures[0]].equal(first) and len(nothing.rows) == 1


def test_pictures_are_pickled_and_hashed_by_what_the_model_sees():
    picture = a_picture()
    twin = pickle.loads(pickle.dumps(picture))
    assert twin.digest == picture.digest == Picture.of(twin.pixels).digest
    assert a_picture().digest != picture.digest


def refusals() -> dict:
    one, data = a_picture(), "multi_modal_data"
    return {
        "no token": ([1, 2], [one]),
        "no picture": ([1, IMAGE], []),
        "too few tokens": ([1, IMAGE, 2], [one, one]),
        "not in a row": ([*[IMAGE] * (ROWS - 1), 1, IMAGE], [one]),
        "too many": ([IMAGE] * 3, [one] * 3),
        "too long": ([IMAGE] * 2 + [1] * 80, [one] * 2),
        "a path": ([IMAGE], ["/etc/passwd"]),
        "wrong size": ([IMAGE], [a_picture(9)]),
        "no picture's bytes": ([IMAGE], [b"GIF89a"]),
        "another kind": {"prompt_token_ids": [1], data: {"audio": [1]}},
        "no object": {"prompt_token_ids": [1], data: [one]},
    }


@pytest.mark.sample(4, of="prompts that cannot be seen")
@pytest.mark.parametrize("what", refusals())
def test_what_cannot_be_seen_is_refused_in_one_line(what):
    engine, prompt = new_seeing_engine(limit_mm_per_prompt={"image": 2}), refusals()[what]
    prompt = prompt if isinstance(prompt, dict) else seen(*prompt[:1], *prompt[1])
    with pytest.raises(ValueError, match=r"(?s)accepted: ") as error:
        engine.add_request("a", prompt, greedy(1))
    assert "\n" not in str(error.value) and len(str(error.value)) < 250
    assert_clean(engine)


def test_the_number_of_pictures_is_checked_before_one_is_read():
    engine = new_seeing_engine(limit_mm_per_prompt="image=1")
    with pytest.raises(ValueError, match="got 2 pictures; accepted: at most 1"):
        engine.add_request("a", seen([IMAGE, IMAGE], b"no picture", b"no picture"), greedy(1))


def test_a_model_that_reads_text_alone_says_so():
    from tests.engine_cases import new_engine, new_model

    engine = new_engine(new_model(), 8, 4)
    with pytest.raises(ValueError, match=r"multi_modal_data: .*text alone"):
        engine.add_request("a", seen([1], a_picture()), greedy(1))


def test_rows_of_pictures_reach_the_embedding_where_they_stand():
    """Two sequences in one step, one in the middle of its picture: each row at its place."""
    engine, sight = new_seeing_engine(), None
    sight = engine.runner.sight
    pictures = [a_picture(), a_picture()]
    engine.add_request("0", seen([1, 2, IMAGE, 3], pictures[0]), greedy(1))
    engine.add_request("1", seen([IMAGE, 3], pictures[1]), greedy(1))
    step = engine.scheduler.schedule()
    splice = sight.splice_of(step)
    rows = [sight.features[one] for one in pictures]
    assert splice.at.tolist() == [*range(2, 2 + ROWS), *range(3 + ROWS, 3 + 2 * ROWS)]
    assert torch.equal(splice.rows, torch.cat(rows))
    step.chunks[0].sequence.computed = 5  # its picture began at 2
    cut = step._replace(chunks=[step.chunks[0]._replace(count=4)])
    assert torch.equal(sight.splice_of(cut).rows, rows[0][3:7])
    assert sight.splice_of(cut).at.tolist() == [0, 1, 2, 3]
