"""Lesson 27: excerpts are lines of the sources, and its texts quote what the code says."""

from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.planner.models import find_model
from lessons.l01_roofline.planner.plan import make_plan
from lessons.l27_states.chunks import written, written_by_wy
from lessons.l27_states.lab import rounded
from lessons.l27_states.lab.costs import (
    QWEN3_NEXT,
    StateLayer,
    copied_and_repeated,
    even_memory,
    even_prompt,
    even_snapshot,
    even_step,
    given_bytes,
    state_at_each_token,
)
from lessons.l27_states.lab.needle import FEW_KEYS, RULES, different_keys, same_keys
from lessons.l27_states.lab.pictures import PICTURES
from lessons.l27_states.naive import (
    decayed_linear_attention,
    delta_rule,
    gated_delta_rule,
    linear_attention_recurrent,
)
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.measure.hardware import CHIPS
from reference.features.states.shapes import (
    DECAYED_FLOPS,
    NEMOTRON_H_8B,
    OF_NEMOTRON_8B,
    STATES,
    requests_at_once,
)
from reference.features.states.shapes import QWEN3_NEXT as QWEN3_NEXT_SHAPE
from reference.features.states.snapshots import SHORTEST
from tests.excerpts import plain_readme, stray_excerpts

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "lessons/l27_states"
README = plain_readme(ROOM)
STATE, CACHE = QWEN3_NEXT.state, QWEN3_NEXT.cache
WORDS = {4: "four"}


def said(text: str) -> None:
    assert text in README, text


def test_the_excerpts_are_lines_of_the_sources():
    assert not stray_excerpts(ROOM)


def test_the_shapes_are_those_of_transformers():
    config = pytest.importorskip(
        "transformers.models.qwen3_next.configuration_qwen3_next",
        reason="NOT RUN: transformers is not installed",
    ).Qwen3NextConfig()
    found = StateLayer(
        config.linear_num_value_heads,
        config.linear_num_key_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
    )
    assert found == STATE
    kinds = list(config.layer_types)
    found = kinds.count("linear_attention"), kinds.count("full_attention")
    assert found == (QWEN3_NEXT.state_layers, QWEN3_NEXT.cache_layers)
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert heads == (CACHE.heads, CACHE.kv_heads, CACHE.head_dim)


def test_the_bottleneck():
    said(f"keeps {CACHE.token_bytes:,} bytes for each token")
    cached, kept = QWEN3_NEXT.cached_bytes(131_072), QWEN3_NEXT.kept_bytes(131_072)
    said(f"{QWEN3_NEXT.layers} such layers would keep {cached / 1e9:.1f} GB")
    said(f"Its other {QWEN3_NEXT.state_layers} layers keep {STATE.kept_bytes / 1e6:.2f} MB each")
    said(f"the same request keeps {kept / 1e9:.1f} GB")
    said(f"keeps `{QWEN3_NEXT.kept_bytes(100) / 1e6:.1f} MB`")
    said(f"with caches alone `{QWEN3_NEXT.cached_bytes(100) / 1e6:.1f}`.")


def test_the_bytes_of_step_7():
    assert STATE.heads * 128 * 128 * 4 + 8192 * 3 * 2 == STATE.kept_bytes
    said(f"= {STATE.kept_bytes:,} bytes = K and V of {even_memory():,.0f} tokens")
    said(f"fewer bytes from {even_step():,.0f} tokens on")
    said(f"fewer FLOPs from {even_prompt():,.0f} tokens on")
    said(f"From {even_prompt():,.0f} tokens on for Qwen3-Next's shapes, by FLOPs")
    a_head = [each / STATE.heads for each in (STATE.step_flops, STATE.chunk_flops())]
    said(f"{a_head[0]:,.0f} for 128 × 128")
    said(f"it costs {a_head[1]:,.0f}, so {a_head[1] / a_head[0]:.1f} times as many")
    many = 256 * QWEN3_NEXT.state_layers * STATE.kept_bytes
    said(f"36 layers keep {many / 1e9:.1f} GB")
    said(f"= {2 * many / 1e9:.1f} GB, read and written")
    said(f"{2e3 * many / CHIPS['h100'].memory_bytes_per_s:.1f} ms.")


def test_what_a_mamba_2_layer_keeps():
    """The sizes of Nemotron-H 8B, and its token by hand."""
    shape = NEMOTRON_H_8B
    token_bytes = 2 * shape.num_key_value_heads * shape.head_dim * 2
    kept = shape.state_layer_bytes
    said(f"has 128 heads of 128 × 64 and {OF_NEMOTRON_8B.conv_dim:,} channels")
    said(f"so it keeps {kept:,} bytes. That is K and V of {kept / token_bytes:,.0f} tokens")
    said(f"one of its {WORDS[shape.num_kv_layers]} attention layers")
    said(f"A token costs {DECAYED_FLOPS} FLOPs for each number of a state")
    dt = torch.tensor([[2.0]]).log()
    q, k, x = torch.tensor([[[1.0, 0]], [[1.0, 0]], [[2.0, 4]]])[:, None]
    state = torch.tensor([[[1.0, 2], [6, 0]]])
    _, after = decayed_linear_attention(q, k, dt[..., None] * x, -dt, state)
    rows = [" ".join(f"{x:.3g}" for x in row) for row in (0.5 * state[0]).tolist()]
    said(f"First S fades to {' / '.join(rows)}.")
    rows = [" ".join(f"{x:.3g}" for x in row) for row in after[0].tolist()]
    said(f"added to its first row: {' / '.join(rows)}.")


def test_the_requests_at_once():
    assert requests_at_once() in README
    more, of_all = QWEN3_NEXT_SHAPE, find_model("qwen3-30b-a3b")
    said(f"Qwen3-Next has {more.params / of_all.params:.1f} times the parameters")
    counts = [make_plan(each, CHIPS["h200"], 1, 32768, 2).sequences for each in (more, of_all)]
    said(f"and {counts[0] / counts[1]:.1f} times the requests")


def test_the_bytes_of_a_snapshot():
    snapshot, block = QWEN3_NEXT.snapshot_bytes, 16 * QWEN3_NEXT.token_bytes
    assert snapshot == STATES.bytes_per_sequence(2), "the planner's shapes are others"
    said(f"| K and V of a block of 16 tokens, {QWEN3_NEXT.cache_layers} layers | {block:,} |")
    said(f"| a snapshot of {QWEN3_NEXT.state_layers} states | {snapshot:,} |")
    said(f"| {even_snapshot():,.0f} tokens, {snapshot / block:.1f} blocks |")
    said(f"states would take {snapshot / block:.1f} times as much as K and V")
    said(f"is nearer than {even_snapshot():,.0f} tokens")
    said(f"{SHORTEST} tokens if nothing is said")
    said(f"adds 1/{SHORTEST} to the bytes of its states")


def test_the_bytes_of_drafts():
    each, ours = state_at_each_token(3), copied_and_repeated(3)
    names = {"a state at each token": each, "a copy, and what the layers were given": ours}
    for name, found in names.items():
        cells = (f"{x / 1e6:.1f}" for x in (found.kept, found.moved, found.after_rejection))
        said(f"| {name} | {' | '.join(cells)} |")
    said(f"{given_bytes() / QWEN3_NEXT.state_layers:,.0f} bytes a token, beside a state of")
    even = 100 * (each.moved - ours.moved) / (ours.after_rejection - ours.moved)
    said(f"as long as fewer than {even:.0f} of 100 steps have a rejection")
    assert copied_and_repeated(4).after_rejection > state_at_each_token(4).moved
    assert copied_and_repeated(5).after_rejection < state_at_each_token(5).moved


def test_the_table_of_step_3():
    k = torch.tensor([[1.0, 0], [0, 1], [1, 0]])[:, None]
    v = torch.tensor([[2.0, 4], [6, 0], [0, 8]])[:, None]
    one, half = torch.ones(3, 1), torch.full((3, 1), 0.5).log()
    rules = (
        lambda n: linear_attention_recurrent(k[:n], k[:n], v[:n]),
        lambda n: decayed_linear_attention(k[:n], k[:n], v[:n], half[:n]),
        lambda n: delta_rule(k[:n], k[:n], v[:n], one[:n]),
        lambda n: gated_delta_rule(k[:n], k[:n], v[:n], half[:n], one[:n]),
    )
    for tokens, words in ((2, "two tokens"), (3, "three")):
        states = [rule(tokens)[1][0].tolist() for rule in rules]
        cells = [" / ".join(" ".join(f"{x:g}" for x in row) for row in state) for state in states]
        said(f"| S after {words} | {' | '.join(cells)} |")
    reads = [rule(3)[0][2, 0].tolist() for rule in rules]
    said(f"| read by (1, 0) | {' | '.join(f'({x:g}, {y:g})' for x, y in reads)} |")


def test_the_two_tokens_of_step_5():
    """And of MORE.md: the same key twice, beta 1, no decay."""
    k = torch.ones(1, 2, 1)
    v, zeros, one = torch.tensor([[[4.0], [6.0]]]), torch.zeros(1, 2), torch.ones(1, 2)
    for way in (written, written_by_wy):
        assert way(k, v, zeros, one, torch.zeros(1, 1, 1)).flatten().tolist() == [4, 2]
    said("u_1 = 4 and u_2 = 6 − 4 = 2. The state says 4 + 2 = 6")
    # W = [k, 0]: of a state of 10, the first token takes 10 away, the second nothing
    u = written_by_wy(k, v, zeros, one, torch.full((1, 1, 1), 10.0))
    assert u.flatten().tolist() == [-6, 2]


def test_what_is_still_read_right():
    """Left and right panel, as README.md and MORE.md quote them."""
    at_32 = [float(different_keys(rule, 32).mean()) for rule in RULES.values()]
    assert min(at_32) >= 0.99
    said("Of 32 pairs each rule reads at least `99 %` right")
    at_512 = {name: float(different_keys(rule, 512).mean()) for name, rule in RULES.items()}
    said(f"the sum reads `{100 * at_512['sum']:.0f} %`, the delta rule")
    said(f"the delta rule `{100 * at_512['delta rule']:.0f} %`: to make room")
    least, most = min(at_512.values()), max(at_512.values())
    said(f"reads {100 * least:.0f} to {100 * most:.0f} % right")
    again = {name: same_keys(rule, 512) for name, rule in RULES.items()}
    assert again["delta rule"] == again["both"] == 1.0 and FEW_KEYS == 16
    said(f"decay falls to about {100 * again['decay']:.0f}, the sum to {100 * again['sum']:.0f}")


@pytest.mark.parametrize("name", rounded.KEPT)
def test_the_table_of_rounded_states(name):
    """Up to 512 tokens. The last digit may differ on another CPU."""
    for dtype, off in rounded.errors(name, rounded.LENGTHS[:2]).items():
        row = f"| {name} | {str(dtype).removeprefix('torch.')} | "
        (line,) = (line for line in README.splitlines() if line.startswith(row))
        said_of_it = [float(cell) for cell in line.removeprefix(row).split(" | ")[:2]]
        assert off == pytest.approx(said_of_it, rel=0.5), line


def test_the_quiz_and_step_2():
    said(f"If exp(g) is 0.99, a token counts {0.99**100:.2f} after 100 more")
    assert 64 * 64 * 128 * 4 == 2_097_152
    k, beta = torch.ones(3, 1, 1), torch.full((3, 1), 0.5)
    out, _ = delta_rule(k, k, k, beta)
    assert out.flatten().tolist() == [1 / 2, 3 / 4, 7 / 8]


@pytest.mark.parametrize("name", PICTURES)
def test_figures_are_legible_and_drawn_anew(name):
    figure = PICTURES[name][0]()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    svg = (ROOM / f"lab/{name}.svg").read_text(encoding="utf-8")
    title = figure.get_suptitle()
    assert " ".join(title.split())[:40] in " ".join(svg.split())
