"""Every number in a quiz answer is recomputed here, by the lesson's own code where it has some.

A new answer needs an entry, and a number that no test recomputes is refused.
"""

import random
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.calculators import kv_bytes_per_token, weight_bytes
from lessons.l01_roofline.planner.models import find_model
from lessons.l10_flash_decoding.lab.occupancy import Decode
from lessons.l10_flash_decoding.splits import cdiv, wave_efficiency
from lessons.l11_cuda_graphs.optimized import bucket_for
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.lab import traffic
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l14_continuous_batching.lab.cost import predicted
from lessons.l15_chunked_prefill.lab.costs import LINKS_BYTES_PER_S
from lessons.l16_speculative_sampling.more.speed import expected_tokens, speedup
from lessons.toolbox.measure.hardware import CHIPS
from tests.course_rules import complete_rooms
from tests.markdown import section
from tests.number_rules import agrees

REPOSITORY = Path(__file__).resolve().parents[1]
LESSONS = range(10, 17)
ITEM = re.compile(
    r"^(\d)\. (.*?)<details><summary>Answer</summary>(.*?)</details>", re.DOTALL | re.MULTILINE
)
# not the 3 of Llama-3, not the 200 of H200, not the 9 of 10⁹
NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?!\d*[⁰¹²³⁴⁵⁶⁷⁸⁹])")

GB, MIB, KIB = 1e9, 2**20, 2**10
KV_8B = kv_bytes_per_token(find_model("llama-3-8b"))  # bytes
H200 = CHIPS["h200"].memory_bytes_per_s


def numbers(text: str) -> list[str]:
    """The numbers of a text as printed; code hides its own."""
    return NUMBER.findall(re.sub(r"`[^`]*`", "", text))


def quiz(lesson: int) -> dict[int, tuple[str, str]]:
    """{number: (question, answer)} of a lesson's README."""
    (room,) = [
        room for room in complete_rooms(REPOSITORY) if room.name.startswith(f"l{lesson:02}_")
    ]
    text = section((room / "README.md").read_text(encoding="utf-8"), "Quiz")
    return {int(number): (question, answer) for number, question, answer in ITEM.findall(text)}


def complaints(question: str, answer: str, values: Iterable[float]) -> list[str]:
    """Numbers of an answer that are neither in the question nor recomputed, and recomputed ones
    that the answer lacks.
    """
    values, given = list(values), numbers(question)
    quoted = numbers(answer)
    unknown = [n for n in quoted if n not in given and not any(agrees(n, v) for v in values)]
    missing = [v for v in values if not any(agrees(n, v) for n in quoted)]
    return [f"{n} is not recomputed" for n in unknown] + [f"{v:.6g} is missing" for v in missing]


# ---------------------------------------------------------------- lesson by lesson


def splits_33_and_34():
    programs = [8 * splits for splits in (33, 34)]
    waves = [cdiv(count, 264) for count in programs]
    assert wave_efficiency(264, 264) == 1
    return [*programs, *waves, programs[1] - 264]


def weights_of_two_splits():
    weights = torch.tensor([5.0, 5.0 + torch.tensor(3.0).log()]).softmax(0)
    assert weights.tolist() == pytest.approx([1 / 4, 3 / 4])
    return [1, 3, 4]


def flattened_weights():
    lse = torch.tensor([1.0, 3.0]).log()
    wrong, right = torch.exp2(lse), torch.exp(lse)
    return [0, 3, *(wrong / wrong.sum()).tolist(), *(right / right.sum()).tolist()]


def first_batch_that_is_not_split():
    return [next(batch for batch in range(1, 100) if Decode(8192, batch).num_splits() == 1)]


def partials_and_kv():
    work = Decode(65536)
    return [129, 4, 2, work.partial_bytes(32) / KIB, work.kv_bytes / MIB]


def hidden_launches():
    launches_ms, bytes_ms = 419 * 6e-3, 15.0 * GB / H200 * 1e3
    assert launches_ms < bytes_ms
    return [launches_ms, bytes_ms]


def nine_in_a_bucket():
    bucket = bucket_for(9, [1, 2, 4, 8, 16])
    return [bucket - 9, bucket]


def next_block_of_47_tokens():
    blocks = BlockManager(9, 16)
    blocks.grow(0, 0, 47)
    owned = len(blocks.tables[0])
    first = next(n for n in range(48, 99) if blocks.needs(0, 47, n))
    return [owned, 16 * owned, first]


def four_samples():
    full, rest, table = 1000 // 16, 1000 % 16, cdiv(1100, 16)
    own = table - full
    return [full, rest, full + 1, 1100, table, 4, own, full + 4 * own, 4 * table]


def equal_answers():
    reserved = 512 + 512
    held = sum(range(512, 1024)) / 512
    assert 1 - held / reserved == pytest.approx(1 / 4, abs=0.001)
    return [reserved, round(held)]


def bytes_of_a_pool():
    size = 2000 * 16 * 128 * KIB
    return [128 * KIB, size / GB, round(size / GB, 1), size / 2**30]


def runs_the_second_time(length):
    manager = CachingBlockManager(num_blocks=200, block_size=16, cache=HashBlocks(16))
    for sequence in range(2):
        held = manager.reuse(sequence, range(length))
        manager.grow(sequence, held, length)
        manager.remember(sequence, range(length))
    return length - held


def twice_the_same_prompt():
    return [1000 / 16, 1000 // 16, *map(runs_the_second_time, (1000, 1008)), 1008 // 16]


def hit_rates_of_documents():
    hits = traffic.replay(traffic.documents(random.Random(13)))
    per_request, per_token = 23 / 24, 23 * 32 / (24 * 440)
    assert hits.rate_per_token == pytest.approx(per_token)
    return [23, 100 * per_request, 32, 440, 100 * per_token, 1 / (1 - per_token)]


def prefix_apart_and_together():
    token = 2 * 8 * 128 * 2
    prefix = 8192 * token
    return [2, 128, token, prefix / 1e6, 32, 32 * prefix / GB, 2 * prefix / 1e6]


def gain_of_a_long_answer():
    lengths = [10] * 7 + [170]
    return [7, 8, 10, 170, sum(lengths) / 8, max(lengths) / (sum(lengths) / 8)]


def latency_of_one_request():
    cost = predicted()
    alone_s = cost.seconds(100, 100) + sum(cost.seconds(1, 100 + n) for n in range(1, 100))
    return [alone_s, alone_s + 0.5]


def steps_of_a_prompt():
    chunk = 2048 - 8
    steps = cdiv(32768, chunk)
    return [steps, chunk, steps - 1, (steps - 1) * chunk]


def prompt_over_a_link():
    size = 4096 * KV_8B
    return [KV_8B, size / GB, 1e3 * size / LINKS_BYTES_PER_S["InfiniBand"]]


def tokens_of_a_step():
    tokens = expected_tokens(0.8, 4)
    return [tokens, 1, tokens - 1]


def drafts_that_are_rejected():
    return [1 / speedup(0.0, 4, 0.1), speedup(0.0, 4, 0.1)]


def bytes_of_a_speculative_step():
    draft, target = 16, 141
    assert weight_bytes(find_model("llama-3-70b")) / GB == pytest.approx(target, abs=0.5)
    read = 4 * draft + target
    bandwidth = 4 * 3.35e12
    return [4, read, 1e3 * read * GB / bandwidth, 1e3 * target * GB / bandwidth]


NO_NUMBER = list
ANSWERS = {
    10: (
        splits_33_and_34,
        weights_of_two_splits,
        flattened_weights,
        first_batch_that_is_not_split,
        partials_and_kv,
    ),
    11: (
        hidden_launches,
        nine_in_a_bucket,
        NO_NUMBER,
        NO_NUMBER,
        lambda: [970 / 0.006, 8 / 0.006, 0.006],
    ),
    12: (next_block_of_47_tokens, four_samples, NO_NUMBER, equal_answers, bytes_of_a_pool),
    13: (
        twice_the_same_prompt,
        hit_rates_of_documents,
        NO_NUMBER,
        NO_NUMBER,
        prefix_apart_and_together,
    ),
    14: (
        gain_of_a_long_answer,
        latency_of_one_request,
        NO_NUMBER,
        NO_NUMBER,
        lambda: [0.75, 0.01, 32 * 0.75 / 0.01],
    ),
    15: (lambda: [2048 - 100], steps_of_a_prompt, NO_NUMBER, NO_NUMBER, prompt_over_a_link),
    16: (
        tokens_of_a_step,
        drafts_that_are_rejected,
        NO_NUMBER,
        lambda: [1],  # of the formula
        bytes_of_a_speculative_step,
    ),
}


@pytest.mark.parametrize("lesson", LESSONS)
def test_quiz_answers_are_recomputed(lesson):
    items = quiz(lesson)
    assert sorted(items) == [1, 2, 3, 4, 5]
    wrong = [
        f"{lesson}.{number}: {why}"
        for number, recompute in enumerate(ANSWERS[lesson], 1)
        for why in complaints(*items[number], recompute())
    ]
    assert not wrong, "\n".join(["", *wrong])


def test_a_wrong_answer_and_one_that_is_not_recomputed_are_seen():
    question = "How many are 3 · 4 on an H200 with Llama-3-8B?"
    assert complaints(question, "3 · 4 are 12, see `f(7)`.", [12]) == []
    assert complaints(question, "3 · 4 are 13.", [12]) == ["13 is not recomputed", "12 is missing"]
    assert complaints(question, "A dozen.", [12]) == ["12 is missing"]
    assert numbers("4.19 · 10⁹ bytes, 1,234.5 and 62.") == ["4.19", "1,234.5", "62"]
