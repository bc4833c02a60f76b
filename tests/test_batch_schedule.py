"""The number of drafts by the size of the batch: read as vLLM reads it, refused in one line where
it cannot work, followed by the engine.
"""

import pytest

from reference.speculation.batch_schedule import BySchedule
from reference.speculation.speculative_config import SpeculativeConfig
from tests.engine_cases import greedy, new_model
from tests.test_speculative_engine import new_engine

pytestmark = pytest.mark.usefixtures("seed")
NAME = "num_speculative_tokens_per_batch_size"


def read(**more) -> SpeculativeConfig:
    return SpeculativeConfig.read(dict(method="ngram", num_speculative_tokens=4) | more)


def test_a_schedule_is_read_as_vllm_reads_it():
    """Sorted; gaps and the tail keep the number before them."""
    config = read(**{NAME: [[32, 40, 1], (1, 16, 4), [50, 60, 0]]})
    assert config.num_speculative_tokens_per_batch_size == ((1, 16, 4), (32, 40, 1), (50, 60, 0))
    chooser = BySchedule(config.num_speculative_tokens_per_batch_size)
    sizes = (0, 1, 16, 17, 31, 32, 40, 41, 49, 50, 60, 61, 999)
    assert [chooser.count_for(size) for size in sizes] == [0, 4, 4, 4, 4, 1, 1, 1, 1, 0, 0, 0, 0]


def test_the_engine_drafts_as_the_schedule_says():
    model = new_model()
    schedule = [[1, 1, 3], [2, 2, 1], [3, 9, 0]]
    engine = new_engine(model, "draft", model, 3, {NAME: schedule})
    prompts, seen = [[1, 2], [3, 4, 5], [6]], {}
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, greedy(6 + 8 * index))
    while engine.has_unfinished_requests:
        decoding = sum(s.is_decoding for s in engine.scheduler.running)
        far = all(s.max_new_tokens - len(s.output) > 4 for s in engine.scheduler.running)
        engine.step()
        if decoding and far:
            drafted = [drafted for drafted, _ in engine.speculation.in_step.values()]
            seen.setdefault(decoding, set()).update(drafted)
    assert seen == {3: set(), 2: {1}, 1: {3}}


@pytest.mark.parametrize(
    "given, said",
    [
        ({NAME: 3}, "got 3; accepted: a list such as"),
        ({NAME: []}, "got []; accepted: a list such as"),
        ({NAME: [[1, 2]]}, "got [1, 2]; accepted: entries of three whole numbers"),
        ({NAME: [[1, 2, 1.5]]}, "got [1, 2, 1.5]; accepted: entries of three whole numbers"),
        ({NAME: [[1, 2, -1]]}, "got [1, 2, -1]; accepted: entries of three whole numbers"),
        ({NAME: [[0, 2, 1]]}, "got [0, 2, 1]; accepted: entries with 1 <= first <= last"),
        ({NAME: [[3, 2, 1]]}, "got [3, 2, 1]; accepted: entries with 1 <= first <= last"),
        ({NAME: [[1, 2, 5]]}, "got [1, 2, 5]; accepted: entries with K at most 4, num_spec"),
        ({NAME: [[2, 3, 1]]}, "accepted: ranges of which the first begins at 1"),
        ({NAME: [[1, 3, 1], [3, 5, 0]]}, "accepted: ranges that do not overlap, as they do at 3"),
        ({"enable_adaptive_verification": 1}, "got 1; accepted: True or False"),
        (
            {NAME: [[1, 3, 1]], "enable_adaptive_verification": True},
            "None with enable_adaptive_verification",
        ),
        (
            dict(
                method="eagle",
                model="x",
                num_speculative_tokens=2,
                speculative_token_tree="[(0,), (1,)]",
                enable_adaptive_verification=True,
            ),
            "False with speculative_token_tree, because a tree keeps its shape",
        ),
        (
            {
                "method": "eagle",
                "model": "x",
                "speculative_token_tree": "auto",
                NAME: [[1, 2, 3]],
            },
            "None with speculative_token_tree, because a tree keeps its shape",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(given, said):
    with pytest.raises(ValueError) as error:
        read(**given)
    assert said in str(error.value) and "\n" not in str(error.value), error.value
