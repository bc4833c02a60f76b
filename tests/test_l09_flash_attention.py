"""What lesson 9 says beyond its kernels: figures, the numbers of its text, and the command that
shows PyTorch's backends.
"""

import math
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from lessons.l09_flash_attention import naive
from lessons.l09_flash_attention.lab import backends, pictures, traffic
from lessons.l09_flash_attention.lab.eight_bits import launch_s
from lessons.l09_flash_attention.tiles import SKIPPED, UNMASKED, VISITED, Tiles, tile_map
from lessons.toolbox.draw.plotting import overlapping_texts, texts_outside
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.profile.replay import CONSTANTS
from tests.excerpts import excerpts, plain_readme, stray_excerpts

ROOM = Path(traffic.__file__).parents[1]
README = plain_readme(ROOM)
LLAMA = traffic.Shape(8192, 8192, 32, 8, 128)  # the README's layer
H200 = lookup("h200")


def said(text):
    """The README says this, word by word."""
    assert text in README, text


@pytest.mark.parametrize("draw", [pictures.draw_tiles, pictures.draw_memory])
@pytest.mark.sample(4, of="pictures")
def test_figures_are_readable(draw):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


@pytest.mark.parametrize("block_m, block_n", [(16, 128), (128, 64), (256, 16)])
@pytest.mark.sample(4, of="pictures")
def test_the_slider_of_tile_sizes(block_m, block_n):
    figure = pictures.draw_tile_size(block_m, block_n)
    assert not texts_outside(figure) and not overlapping_texts(figure)
    moved = sum(traffic.fa2_bytes(LLAMA, Tiles(block_m, block_n))) / 1e9
    assert f"{block_m} x {block_n} move {moved:.3g} GB, and keep" in figure.get_suptitle()


def test_the_excerpts_of_the_readme_are_the_code():
    assert len(excerpts(README)) == 5 and not stray_excerpts(ROOM)


def all_tiles(num_tokens, tiles):
    """What happens to each tile of a causal head, as one list."""
    return [what for row in tile_map(num_tokens, num_tokens, tiles) for what in row]


def one_query(order):
    """Step 3's query over its three keys, by a tiled version of naive.py: (out, lse)."""
    q, k = torch.ones(1, 1, 1), torch.tensor([0, 0, math.log(2)]).view(3, 1, 1)
    v = torch.tensor([3.0, 6, 12]).view(3, 1, 1)
    out, lse = order(q, k, v, softmax_scale=1.0, tiles=Tiles(1, 2))
    return out.item(), lse.item()


def test_the_derivation_on_paper():
    n, b, d = 8192, 2, 128
    said(f"{4 * n * n * b / 1e6:.0f} MB a head, {32 * 4 * n * n * b / 1e9:.1f} GB for 32 heads")
    for order in (naive.tiled_attention, naive.tiled_attention_fa1):
        out, lse = one_query(order)
        assert out == pytest.approx(8.25) and lse == pytest.approx(math.log(4))
    said(f"ln 2 + ln 2 = {math.log(4):.3f}")
    tiles = Tiles(128, 64)
    fa1, fa2 = (sum(order(LLAMA, tiles)) for order in (traffic.fa1_bytes, traffic.fa2_bytes))
    said(f"FA-1 moves {fa1 / 1e9:.1f} GB, FA-2 {fa2 / 1e9:.1f} GB")
    said("FA-1 order** moves five times FA-2's bytes")
    assert 4.5 < fa1 / fa2 < 5.5
    read, _ = traffic.fa2_bytes(traffic.Shape(n, n, 1, 1, d, causal=False), tiles)
    assert read == n * d * b + n // 128 * n * 2 * d * b
    said(f"2.1 MB + 64 · 4.19 MB = {read / 1e6:.0f} MB a head")
    large = traffic.Shape(131072, 131072, 32, 8, 128)
    lse_mb, naive_tb = traffic.flash_memory_bytes(large) / 1e6, traffic.naive_memory_bytes(large)
    said(f"32 heads: {lse_mb:.1f} MB instead of {naive_tb / 1e12:.1f} TB")
    grid = all_tiles(24, Tiles(4, 4))
    counts = [grid.count(what) for what in (SKIPPED, UNMASKED, VISITED)]
    said("{} are skipped, {} need no mask, {} are on the diagonal".format(*counts))


def test_the_numbers_of_the_bottleneck():
    moved = traffic.naive_bytes(LLAMA)
    products_ms = 1e3 * LLAMA.flops / H200.bf16_flops_per_s
    said(f"moves {moved / 1e9:.0f} GB for its scores")
    said(f"takes {1e3 * moved / H200.memory_bytes_per_s:.0f} ms on an H200")
    said(f"take {products_ms:.2f} ms. (Lesson 2 says {2 * products_ms:.2f} ms")


def test_the_limit_of_exponentials():
    """Step 8: 16 exponentials and 128 other operations a clock on each of 132 SMs."""
    clocks_per_s = 132 * 1.83e9
    said(f"which is {16 * clocks_per_s / 1e12:.1f} · 10¹² a second")
    product_s = 512 / 989e12
    exp_s, rest_s = 1 / (16 * clocks_per_s), 5 / (128 * clocks_per_s)
    assert (product_s + exp_s) / product_s == pytest.approx(1.5, abs=0.02)
    assert (product_s + exp_s + rest_s) / product_s == pytest.approx(1.8, abs=0.03)
    assert round(989 / 1.5, -1) == 660 and round(989 / 1.8, -1) == 550


def test_a_predicted_launch_is_as_long_as_its_busiest_processor():
    """32 heads of 64 blocks are 15.5 programs for each of 132 processors, so one has 16."""
    clocks = launch_s(8192, False, fixed=1000, tile=10) * H200.clock_hz
    assert clocks == pytest.approx(16 * (1000 + 64 * 10) + CONSTANTS.launch)
    even = 32 * (1000 * 64 + 10 * 64 * 65 / 2) / 132
    causal = launch_s(8192, True, fixed=1000, tile=10) * H200.clock_hz - CONSTANTS.launch
    assert even < causal < 1.04 * even  # short ones come last, and one may be left over


def test_the_answers_of_the_quiz():
    grid = all_tiles(4096, Tiles(128, 128))
    visited = len(grid) - grid.count(SKIPPED)
    said(f"= {visited} of {len(grid)}. {grid.count(UNMASKED)} of them need no mask.")
    assert visited == 32 * 33 // 2
    said(f"32 · 131,072² · 2 bytes = {32 * 131072**2 * 2 / 1e12:.1f} TB")
    acc = 9 + 12  # not multiplied by alpha
    said(f"acc becomes {acc} instead of 16.5, and out {acc / 2:.3g} instead of 8.25")
    rate = 0.55 / 0.9e-3
    said(f"{rate:.0f} TFLOP/s, {rate / 989:.0%}".replace("%", " %"))


def test_what_the_museum_shows_is_wrong():
    half = traffic.Shape(4096, 4096, 32, 8, 128, causal=False)
    whole = traffic.Shape(8192, 8192, 32, 8, 128, causal=False)
    assert whole.flops == 4 * half.flops, "arithmetic stays quadratic"
    assert traffic.flash_memory_bytes(whole) == 2 * traffic.flash_memory_bytes(half)
    q, k, v = torch.randn(3, 50, 2, 16, dtype=torch.float64)
    for ours, exact in zip(naive.tiled_attention(q, k, v), naive.attention(q, k, v)):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    said(f"so it is {1200 / 1979:.0%} where the first is {740 / 989:.0%}".replace("%", " %"))


def test_a_backend_can_be_forced(capsys):
    q = torch.randn(1, 2, 8, 16)
    out = backends.attend_with(SDPBackend.MATH, q, q, q)
    want, _ = naive.attention(*(q[0].transpose(0, 1),) * 3)
    torch.testing.assert_close(out[0].transpose(0, 1), want, rtol=1e-5, atol=1e-5)
    assert backends.refusal(SDPBackend.MATH, q, q, q) is None
    if not torch.cuda.is_available():
        assert "No viable backend" in backends.refusal(SDPBackend.CUDNN_ATTENTION, q, q, q)
    assert backends.main(["--tokens", "0"]) == 2
    assert "tokens: got 0; accepted: 1 or more" in capsys.readouterr().err


def test_the_command_tries_each_backend(capsys, monkeypatch):
    monkeypatch.setenv("TIMED_ONCE", "1")
    assert backends.main(["--tokens", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(backends.BACKENDS)
    assert lines[1].endswith("ms"), "math runs anywhere"
