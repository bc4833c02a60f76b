"""Proves that the pictures fit, that the simulation loses no memory, and that the README quotes
what the code says.
"""

import json
import random
from pathlib import Path

import pytest

from lessons.l12_paged_kv.lab import latent_times, pictures, profile, ragged
from lessons.l12_paged_kv.lab.pictures import counted_share
from lessons.l12_paged_kv.lab.testing import paged
from lessons.l12_paged_kv.lab.walk import draw_walk, loads_of_programs
from lessons.l12_paged_kv.lab.workload import (
    ALPACA,
    MAX_TOKENS,
    MEMORY_TOKENS,
    SHAREGPT,
    Mix,
    reports,
)
from lessons.l12_paged_kv.more.waste import expected_empty_share, more_requests
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.kernels.kernel_hash import kernel_hash
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.measure.passes import passes_of, total_bytes
from lessons.toolbox.proof.pages import pages

ROOM = Path(__file__).parents[1]
RESULTS = ROOM.parents[1] / "results"
README = pages(ROOM)
DRAW = [
    pictures.draw_tables,
    pictures.draw_waste,
    pictures.draw_block_size,
    pictures.draw_ragged,
]


@pytest.mark.parametrize("draw", DRAW)
@pytest.mark.sample(4, of="pictures")
def test_the_pictures_fit(draw):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_tables_of_the_readme_are_those_of_the_picture():
    manager, _ = pictures.example_tables()
    said = [f"{name} {manager.tables[n]}" for n, name in enumerate("ABCD")]
    assert f"tables:   {'     '.join(said)}\n" in README


def test_the_simulation_loses_no_memory():
    """The five parts are the whole memory, and blocks hold more than any reservation."""
    for mix in (ALPACA, SHAREGPT, Mix("long answers", 50, 600)):
        found = reports(mix, steps=600)
        for report in found.values():
            assert sum(report.waste.values()) == pytest.approx(1)
            assert min(report.waste.values()) >= 0
        blocks = found.pop("blocks of 16")
        assert blocks.waste["external"] == 0
        assert all(blocks.at_once > report.at_once for report in found.values())
        assert found["reserve exactly (an oracle)"].waste["internal"] == 0


def test_the_readme_quotes_the_simulation():
    text = README
    for mix in (ALPACA, SHAREGPT):
        for policy, report in reports(mix).items():
            parts = [report.waste[name] for name in ("used", "reserved", "internal", "external")]
            shares = " | ".join(f"{part:.0%}" for part in parts)
            row = f"| {mix.name} | {policy} | {report.at_once:.0f} | {shares} |"
            assert row in text, f"the README lacks {row}"


def test_the_record_of_ragged_steps_is_what_the_model_predicts():
    assert json.loads(ragged.RECORD.read_text(encoding="utf-8")) == ragged.predictions()


def test_ragged_steps_come_near_the_bound_and_equal_ones_stay(seed):
    """Of batches that take 50 µs or more, beside which the 2 µs of a merge are little."""
    draws, chip = random.Random(seed), CHIPS["h200"]
    for _ in range(12):
        count, longest = draws.choice((2, 8, 20, 64)), draws.choice((32768, 65536, 131072))
        short = [draws.randint(1, 4096) for _ in range(count - 1)]
        lengths = [longest, *short, *(draws.randint(1, 4096) for _ in range(40))]
        found = ragged.prediction(lengths, chip)
        assert found["by_length"] and found["chosen_to_bound"] <= 1.15
        assert found["chosen_to_equal"] < 1
        same = [draws.randint(64, 8192)] * count
        assert ragged.prediction(same, chip)["chosen_to_equal"] == 1


@pytest.mark.parametrize("name", ["trees", "latents"])
def test_ragged_trees_and_latents_come_near_the_bound(name, seed):
    """Of batches that take 50 µs or more, as above."""
    draws, chip = random.Random(seed), CHIPS["h200"]
    work, times = {"trees": (ragged.TREES, 1), "latents": (ragged.LATENTS, 4)}[name]
    for _ in range(6):
        short = [times * draws.randint(1, 4096) for _ in range(draws.choice((30, 41, 100)))]
        found = ragged.prediction([times * draws.choice((32768, 65536)), *short], chip, work)
        assert found["by_length"] and found["bound_us"] > 50
        assert found["chosen_to_bound"] <= 1.15 and found["chosen_to_equal"] < 1


def test_the_record_holds_a_ragged_batch_of_each_kind_near_its_bound():
    record = json.loads(ragged.RECORD.read_text(encoding="utf-8"))
    for kind in (record, record["trees"], record["latents"]):
        listed = [found for found in kind["batches"].values() if found["by_length"]]
        assert len(listed) >= 3
        assert all(found["chosen_to_bound"] <= 1.15 for found in listed)


def test_the_readme_quotes_the_formulas():
    text = README
    for tokens in (100, 180, 500):
        share, gain = expected_empty_share(tokens, 16), MAX_TOKENS / (tokens + 7.5)
        row = f"| {tokens} | {share:.1%} | {gain:.0f} × |"
        assert row in text, f"the README lacks {row}"
    short, long = ALPACA.lengths(4000), SHAREGPT.lengths(4000)
    for lengths in (short, long):
        assert f"{counted_share(lengths, 16):.1%}" in text
        assert f"{more_requests(lengths, MAX_TOKENS, 16):.1f} times" in text
    assert f"A mean of 365 tokens gives {MAX_TOKENS / (365 + 7.5):.1f}." in text


def test_the_readme_says_why_chats_gain_more_in_the_simulation():
    found = reports(SHAREGPT)
    reserved, blocks = (found[way].at_once for way in ("reserve 2048", "blocks of 16"))
    exact = MEMORY_TOKENS / MAX_TOKENS
    assert f"holds {reserved:.0f} reservations of {MAX_TOKENS}, not {exact:.1f}" in README
    assert f"chats gain {blocks / reserved:.1f} times, and not the" in README


def test_the_readme_counts_what_naive_moves():
    """In the shapes of `make profile`; what it explains of the time is in those of the record."""
    passes, kv_bytes = passes_of(profile.naive), 2 * profile.K[0, 0].nbytes * profile.LENGTHS.sum()
    ratio = total_bytes(passes) / kv_bytes
    assert f"operations move {ratio:.0f} times the bytes of K and V" in README
    assert (
        f"some {round(len(passes) / len(profile.LENGTHS), -1):.0f} operations a sequence" in README
    )
    record = json.loads((RESULTS / "h200" / "l12_batch.json").read_text(encoding="utf-8"))
    slow = record["series"]["gather, then attend"]["points"][-1]["median_s"]
    rest_us = 1e6 * (slow - ratio * record["floor_s"][-1])
    each_us = rest_us / record["x"][-1] / (len(passes) / len(profile.LENGTHS))
    assert f"The rest is `{each_us:.0f} µs` for each of some" in README
    assert "explains a seventh" in README and ratio * record["floor_s"][-1] / slow == pytest.approx(
        1 / 7, rel=0.1
    )


def test_the_excerpts_stand_in_the_sources():
    sources = [file.read_text(encoding="utf-8") for file in ROOM.rglob("*.py")]
    excerpts = README.split("```python\n")[1:]
    assert len(excerpts) == 2
    for excerpt in excerpts:
        code = excerpt.split("```")[0]
        assert any(code in source for source in sources), code


@pytest.mark.sample(1, of="compiled code")
def test_each_program_loads_its_own_rows_once():
    if not interpreting():
        pytest.skip("NOT RUN: the film is compared beside the interpreter")
    inputs = paged([10, 7], block_size=4, heads=(1, 1, 16, 16), seed=3)
    every, source = loads_of_programs(inputs)
    assert source == "compiled for an H100, run on a CPU"
    for sequence, (loads, length) in enumerate(zip(every, (10, 7))):
        blocks = inputs.block_table[sequence].tolist()
        rows = {(blocks[i // 4], i % 4) for i in range(length)}
        assert {tuple(x) for x in loads.nonzero().tolist()} == rows and loads.max() == 1
    figure = draw_walk([10, 7, 13])
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_predicted_times_are_of_these_kernels():
    """What the record says follows from its own numbers, and its kernels are today's."""
    record = json.loads(latent_times.RECORD.read_text(encoding="utf-8"))
    for name, (_, kernel, contexts) in latent_times.KERNELS.items():
        found = record["kernels"][name]
        assert found["hash"] == kernel_hash(kernel), f"{name}: predict it anew"
        at = {context: found["at"][str(context)] for context in contexts}
        said = latent_times.continued(at)
        assert said == {key: found[key] for key in said}
