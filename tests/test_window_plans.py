"""Lesson 1's planner for models with windows: parameters as published, bytes as the engine's pools
have them, and how many requests fit.
"""

from collections import OrderedDict
from dataclasses import replace

import pytest

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.__main__ import main
from lessons.l01_roofline.planner import windows
from lessons.l01_roofline.planner.formats import bits_of
from lessons.l01_roofline.planner.models import MODELS, find_model
from lessons.l01_roofline.planner.plan import Plan, make_plan
from lessons.l01_roofline.planner.windows import (
    BLOCK_SIZE,
    WINDOWED,
    page_values,
    pages_of_sequence,
    values_of_step,
)
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.model.window_groups import groups_of
from reference.features.windows.blocks import GroupBlocks
from tests.window_cases import FAMILIES, new_engine, new_model

CONTEXT = 32768


def plan_of(name: str, context: int = CONTEXT) -> Plan:
    """A model of WINDOWED on one H200; gpt-oss with MXFP4 experts, as it is published."""
    shape = WINDOWED[name]
    bits = bits_of(shape, "mxfp4") if name.startswith("gpt-oss") else 16
    return make_plan(shape, lookup("h200"), 1, context, gpus=1, bits_per_weight=bits)


def without_groups(plan: Plan) -> Plan:
    """The same model in an engine whose layers all keep all tokens."""
    return replace(plan, model=replace(plan.model, num_window_layers=0))


@pytest.mark.parametrize("name", WINDOWED)
def test_parameters_are_the_published_ones(name):
    shape = WINDOWED[name]
    digits = len(shape.published.rstrip("B").partition(".")[2])
    assert shape.params / 1e9 == pytest.approx(float(shape.published[:-1]), abs=0.6 * 10**-digits,
                                               rel=4e-4)  # fmt: skip
    assert find_model(name.upper()) is shape and name not in MODELS


@pytest.mark.parametrize(
    "name, with_groups, one_group",
    [
        ("gpt-oss-120b", 51, 26),
        ("gpt-oss-20b", 140, 70),
        ("gemma-3-27b", 22, 4),
        ("gemma-3-1b", 847, 143),
        ("mistral-7b-v0.1", 207, 26),
    ],
)
def test_requests_at_once(name, with_groups, one_group):
    plan = plan_of(name)
    assert (plan.sequences, without_groups(plan).sequences) == (with_groups, one_group)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "gemma-3-27b", "mistral-7b-v0.1"])
def test_as_many_fit_into_the_engines_pages(name):
    """By the manager itself: so many sequences grow to the whole context in chunks, one of them
    computes a prompt, and no page is left for another.
    """
    plan = replace(plan_of(name, 8192), memory_share=0.55)
    shape, groups = plan.model, groups_of(plan.model.layer_windows)
    page_bytes = page_values(shape) * 2
    room = plan.usable_bytes - plan.weight_bytes - plan.activation_bytes
    blocks = GroupBlocks(groups, 2048, int(room // page_bytes), BLOCK_SIZE)
    blocks.pool.free = OrderedDict(blocks.pool.free)  # because a dict's front is slow to empty
    count = 0
    while True:
        try:
            for held in range(0, 8192, 2048):
                blocks.grow(count, held, held + 2048)
            blocks.grow(count, 8191, 8192)  # a step of one token, as a sequence that decodes
        except Exception as error:
            assert type(error).__name__ == "OutOfBlocks"
            break
        count += 1
    assert plan.sequences <= count <= plan.sequences * 1.01 + 1


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mistral"])
def test_a_page_is_as_large_as_the_pools(name):
    model = new_model(name)
    seen = [window for window in FAMILIES[name][1] if window is not None]
    config = model.config
    shape = replace(
        WINDOWED["gemma-3-1b"],
        num_hidden_layers=config.num_hidden_layers,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_window_layers=len(seen),
        window=seen[0],
    )
    pool = new_engine(model, block_size=BLOCK_SIZE, max_num_batched_tokens=64).runner.pool
    tokens = pool.num_blocks * BLOCK_SIZE + 1  # and the slot that no one owns
    assert pool.allocated_bytes * BLOCK_SIZE == page_values(shape) * 8 * tokens
    assert pool.groups == groups_of(config.sliding_windows)
    assert pool.groups.windows == groups_of(shape.layer_windows).windows


def test_a_window_is_read_and_not_the_context():
    """By hand, 2 layers of 4 with a window of 8: a query after 20 tokens reads 20 and 8, and a
    prompt of 10 has 55 pairs, or 55 without the (1 + 2) that are out of sight.
    """
    shape = replace(MODELS["llama-3-8b"], num_hidden_layers=4, num_window_layers=2, window=8)
    assert shape.layer_windows == (None, None, 8, 8)
    assert shape.seen_tokens(20) == 14 and shape.seen_tokens(6) == 6
    assert shape.causal_pairs(10) == (55 + 52) / 2 and shape.causal_pairs(8) == 36
    plain = replace(shape, num_window_layers=0)
    assert plain.seen_tokens(20) == 20 and plain.causal_pairs(10) == 55
    floors = [calc.decode_floor(one, 4, 4096, 1e12, 1e15) for one in (shape, plain)]
    kv = 4 * 4096 * calc.kv_bytes_per_token(shape)
    moved = floors[1].bytes_moved - floors[0].bytes_moved
    assert moved == pytest.approx(kv / 2 * (1 - 8 / 4096))


def test_pages_by_hand():
    """gpt-oss-120b at 32,768 tokens: 2048 full pages, and 9 for a window of 128 in pages of 16."""
    shape = WINDOWED["gpt-oss-120b"]
    assert pages_of_sequence(shape, CONTEXT) == 2048 + 9
    assert page_values(shape) == 16 * 18 * 2 * 8 * 64
    assert values_of_step(shape, 2048) == 128 * page_values(shape)
    assert values_of_step(MODELS["llama-3-8b"], 2048) == 0


def test_the_command_knows_them(capsys):
    assert (
        main(["--model", "gemma-3-27b", "--gpu", "h200", "--context", "32768", "--batch", "8"]) == 0
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "of a window of" in printed and "gemma-3-27b" in printed


def test_a_planted_slip_is_found(monkeypatch):
    """Pages of a sequence at rest, without the one that a window straddles."""
    monkeypatch.setattr(windows, "pages_of_sequence", lambda model, context: 2048 + 8)
    assert plan_of("gemma-3-1b").sequences != 847
