"""Lesson 7's counts: bytes of each chain, launches of a decode step, the model of launch time; and
its pictures.
"""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.generate import generate
from lessons.l05_gqa.optimized import IN_GROUPS
from lessons.l07_kernel_fusion import naive, optimized
from lessons.l07_kernel_fusion.fused_decoder import FUSED_LAYERS
from lessons.l07_kernel_fusion.lab import launches, layer_profile, traffic
from lessons.l07_kernel_fusion.lab import pictures as picture
from lessons.l07_kernel_fusion.lab.launches import MODELS, STEPS, schedule
from lessons.l07_kernel_fusion.lab.traffic import chains
from lessons.toolbox.draw.figure import alt_of
from lessons.toolbox.draw.plotting import overlapping_texts, texts_outside
from lessons.toolbox.kernels import accesses
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.measure.passes import Pass, Traffic, passes_of, total_bytes
from lessons.toolbox.model.config import ModelConfig
from tests.excerpts import excerpts, plain_readme, stray_excerpts

R, N = 512, 1024
VALUES = R * N


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    "dtype, eager, fused",
    [
        (
            torch.bfloat16,
            {"RMSNorm": 36, "add + RMSNorm": 42, "SwiGLU": 10, "QK-norm": 36, "softmax": 44},
            {"RMSNorm": 4, "add + RMSNorm": 8, "SwiGLU": 6, "QK-norm": 4, "softmax": 4},
        ),
        (
            torch.float32,
            {"RMSNorm": 28, "add + RMSNorm": 40, "SwiGLU": 20, "QK-norm": 28, "softmax": 32},
            {"RMSNorm": 8, "add + RMSNorm": 16, "SwiGLU": 12, "QK-norm": 8, "softmax": 8},
        ),
    ],
)
def test_bytes_of_each_chain(dtype, eager, fused):
    """Whole bytes for each value, by pencil and paper; what is one number a row, or the weight,
    comes on top: below 1 byte.
    """
    for name, (passes, kernel) in chains(R, N, dtype).items():
        values = R * 40 * 128 if name == "QK-norm" else VALUES
        for found, want in (
            (total_bytes(passes), eager[name]),
            (total_bytes([kernel]), fused[name]),
        ):
            assert want <= found / values < want + 0.5, (name, found / values)


def test_the_passes_of_rms_norm():
    chain = chains(R, N)["RMSNorm"][0]
    passes = {
        p.name: (p.read_bytes / VALUES, p.written_bytes / VALUES)
        for p in chain
        if p.name != "_to_copy"
    }
    assert list(passes) == ["pow", "mean", "add", "rsqrt", "mul"]
    assert passes["pow"] == (4, 4) and passes["mean"] == (4, 4 / N)


def test_a_kernel_reads_its_inputs_once_and_writes_its_outputs_once():
    """By formula here; by address, in the interpreter, in the lesson's test_equivalence.py."""
    x, weight = R * N * 2, N * 2
    found = {
        name: (kernel.read_bytes, kernel.written_bytes)
        for name, (_, kernel) in chains(R, N).items()
    }
    q, k, head = R * 32 * 256, R * 8 * 256, 256
    assert found == {
        "RMSNorm": (x + weight, x),
        "add + RMSNorm": (2 * x + weight, 2 * x),
        "SwiGLU": (2 * x, x),
        "QK-norm": (q + k + 2 * head, q + k),
        "softmax": (x, x),
    }


def test_what_moves_nothing_is_no_pass():
    x = torch.zeros(6, 8, device="meta")
    assert (
        passes_of(
            lambda: (
                x.view(8, 6),
                x.T,
                x[2:],
                x.unflatten(-1, (2, 4)),
                x.chunk(2),
                torch.empty(3, device="meta"),
            )
        )
        == []
    )
    assert passes_of(lambda: x.mul_(2)) == [Pass("mul_", 192, 192)]
    assert passes_of(lambda: x + x) == [Pass("add", 192, 192)]  # the same tensor twice is read once
    # two views of one storage are two tensors
    assert passes_of(lambda: x[:, :4] * x[:, 4:]) == [Pass("mul", 192, 96)]
    with torch.no_grad(), Traffic() as counted:
        x.add_(x[0])
    assert counted.passes == [Pass("add_", 192 + 32, 192)]


def test_traffic_command(capsys):
    assert traffic.main(["--rows", "512", "--size", "1024"]) == 0
    out = capsys.readouterr().out
    assert (
        re.search(r"\| RMSNorm \| 8 \| 18\.8\d \| 1 \| 2\.099 \| \d\.\d\d \|", out)
        and "_to_copy 1.05+2.1" in out
    )
    assert traffic.main(["--rows", "0"]) == 2
    assert "rows, size: got 0, 4096; accepted: 1 or more" in capsys.readouterr().err


def test_accesses_see_a_second_read_and_a_row_that_was_not_written(seed, monkeypatch):
    x, weight = torch.randn(3, 40), torch.ones(40)
    if not accesses.interpreting():
        pytest.skip("NOT RUN: accesses are counted in the interpreter")
    with accesses.Accesses() as counted:
        optimized.rms_norm(x[:2], weight, 1e-5)
        out = optimized.rms_norm(x[1:], weight, 1e-5)
    assert (
        counted.loads(x).unique(dim=1).flatten().tolist() == [1, 2, 1]
        and (counted.stores(out) == 1).all()
    )
    assert counted.outside(x, weight) > 0, "the first call's output was not named"
    monkeypatch.setattr(accesses, "interpreting", lambda: False)
    with pytest.raises(
        RuntimeError, match="counted in Triton's interpreter: set TRITON_INTERPRET=1"
    ):
        accesses.Accesses()


# ---------------------------------------------------------------- launches

TINY = ModelConfig("llama", 97, 48, 3, 6, 2, 8, 64, 64)


@pytest.mark.parametrize(
    "config, inner, saved", [(TINY, 39, 17), (replace(TINY, qk_norm=True), 55, 32)]
)
def test_launches_of_a_step(config, inner, saved):
    """Eager: a layer has 7 products, 2 norms of 8, 2 additions, silu and product, 10 for RoPE, 2
    for attention. QK-norm: 16 more.

    Fused: two junctions of 9 become 1 each, silu · up 1 instead of 2, and QK-norm 1 instead of 16.
    Around the layers: the embedding, 9 for RoPE's tables, the last norm, the output head.
    """
    dtype, layers = torch.bfloat16, config.num_hidden_layers
    eager, fused, rope = (launches_of(config, 16, dtype) for launches_of in STEPS.values())
    assert len(eager) == layers * inner + 1 + 9 + 8 + 1
    # 7: the first norm, whose addition does not exist
    assert len(eager) - len(fused) == layers * saved + 7
    assert len(fused) - len(rope) == layers * 10 + 9
    assert [p.name for p in fused].count("add_rms_norm") == 2 * layers and [
        p.name for p in fused
    ].count("rms_norm") == 1
    assert (
        [p.name for p in eager].count("mm") == [p.name for p in fused].count("mm") == 7 * layers + 1
    )


def test_bytes_of_a_step_are_weights_and_cache():
    config = MODELS["Llama-3-8B"]
    # the embedding: one row
    least = 2 * (
        8.03e9 - config.vocab_size * config.hidden_size
    ) + 4096 * config.kv_bytes_per_token(2)
    for launches_of in STEPS.values():
        assert least < total_bytes(launches_of(config, 4096)) < 1.01 * least


def test_schedule():
    """Bound by launches: one after the other, each waits for its issue. Bound by bytes: back to
    back.
    """
    small, large = Pass("small", 4, 4), Pass("large", 100, 100)
    found = schedule([small, large, small], launch_s=10, bytes_per_s=1, shortest_s=0)
    assert found == [(0, 10, 18), (10, 20, 220), (20, 220, 228)]
    assert [span.start_s for span in schedule([small] * 3, 10, 1, 0)] == [10, 20, 30]
    assert schedule([small] * 100, 10, 1, 0)[-1].end_s == 100 * 10 + 8
    assert schedule([large] * 100, 10, 1, 0)[-1].end_s == 10 + 100 * 200
    assert schedule([small], 10, 1, shortest_s=50)[0].end_s == 60


def test_launches_command(capsys):
    assert launches.main(["--launch-us", "5", "--gpu", "h200"]) == 0
    out = capsys.readouterr().out
    assert (
        "predicted" in out
        and re.search(r"\| Llama-3.2-1B \| eager \| 643 \|", out)
        and out.count("| fused |") == 3
    )
    assert (
        launches.main(["--launch-us", "0"]) == 2
        and "more than 0, 1 or more" in capsys.readouterr().err
    )
    assert launches.main(["--gpu", "abacus"]) == 2 and "known are" in capsys.readouterr().err


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    "draw, path",
    [(picture.draw_passes, picture.PASSES_SVG), (picture.draw_launches, picture.LAUNCHES_SVG)],
)
@pytest.mark.sample(4, of="pictures")
def test_pictures(draw, path):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_the_passes_picture_says_what_its_alt_text_says():
    labels = [label.get_text() for label in picture.draw_passes().axes[0].get_yticklabels()]
    assert labels[0::2] == [
        f"{name}, eager: {count} B"
        for name, count in (
            ("RMSNorm", 36),
            ("add + RMSNorm", 42),
            ("SwiGLU", 10),
            ("QK-norm", 36),
            ("softmax", 44),
        )
    ]
    assert [label.rpartition(": ")[2] for label in labels[1::2]] == [
        "4 B",
        "8 B",
        "6 B",
        "4 B",
        "4 B",
    ]
    alt = alt_of(picture.LAUNCHES_SVG)
    assert "39 launches" in alt and "issues 22" in alt
    lanes = [label.get_text() for label in picture.draw_launches().axes[0].get_yticklabels()]
    assert lanes == [
        "eager, CPU issues 39",
        "eager, GPU runs",
        "fused, CPU issues 22",
        "fused, GPU runs",
    ]


def test_generates_the_tokens_of_the_rung_below(seed):
    model = Decoder(ModelConfig("qwen3", 61, 48, 3, 6, 2, 8, 80, 64, qk_norm=True))
    for parameter in model.requires_grad_(False).parameters():
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    prompts = [[1, 2, 3], [5]]
    want = generate(model, prompts, 12, rung=IN_GROUPS)
    assert generate(model, prompts, 12, rung=FUSED_LAYERS) == want
    assert len({token for row in want for token in row}) > 1, "the model must say something"


@pytest.mark.parametrize("launch_us, size", [(0.5, 1024), (5.0, 4096), (10.0, 16384)])
def test_the_slider_of_launches_and_bytes(launch_us, size):
    """For one row launches decide, for many the bytes: their ratios are in the title."""
    figure = picture.draw_fusing(launch_us, size)
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert figure.get_suptitle().startswith("add + RMSNorm: 9x at one row, 5.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT RUN: it shows a CPU's operations")
def test_the_profile_of_a_layer():
    model = Decoder(replace(TINY, max_position_embeddings=256)).eval().requires_grad_(False)
    spans = layer_profile.second_layer(model)
    kinds = [kind for *_, kind in spans]
    assert kinds.count("matrix product") == 7 and kinds.count(layer_profile.SMALL_OPERATIONS) > 15
    assert all(start < end for start, end, _ in spans)
    assert not overlapping_texts(layer_profile.draw_layer({"plain": model}))


# ---------------------------------------------------------------- the README

ROOM = Path(traffic.__file__).parents[1]
README = plain_readme(ROOM)
H200 = lookup("h200")


def said(text):
    """The README says this, word by word."""
    assert text in README, text


def test_the_excerpts_of_the_readme_are_the_code():
    assert len(excerpts(README)) == 3 and not stray_excerpts(ROOM)


def mlp_passes(function, rows=4096, hidden=4096, inner=14336, dtype=torch.bfloat16):
    """Bytes of the passes of an MLP's first half, without those of x and the weights."""
    x, gate, up = (torch.empty(n, hidden, dtype=dtype, device="meta") for n in (rows, inner, inner))
    passes = passes_of(lambda: function(x, gate, up))
    products = [one for one in passes if one.name == "mm"]
    assert len(products) == 2
    return total_bytes(passes) - sum(one.read_bytes for one in products)


def test_the_derivation_on_paper():
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0])
    result = naive.rms_norm(x, weight, 0.0)[0].tolist()
    said(f"root {12.5**0.5:.3f},   result ({result[0]:.3f}, {result[1]:.2f})")
    assert 6 + 6 + 8 + 4 + 8 + 6 + 4 == 42 and 42 / 8 == 5.25
    said(f"1 + 64 = {1 + 2 * 32} launches")
    said(f"65 · 8 + 64 = {65 * 8 + 64}")
    result_bytes = 4096 * 14336 * 2
    eager = mlp_passes(naive.swiglu)
    assert eager == 7 * result_bytes
    sizes = [eager, 5 * result_bytes, result_bytes]
    said("{:.0f}, {:.0f} and {:.0f} MB;".format(*(size / 1e6 for size in sizes)))
    times_us = [1e6 * size / H200.memory_bytes_per_s for size in sizes]
    said("at 4.8 TB/s {:.0f}, {:.0f} and {:.0f} µs".format(*times_us))
    products_us = 1e6 * 4 * 4096 * 4096 * 14336 / H200.bf16_flops_per_s
    said(f"take {products_us:.0f} µs at an H200's peak")
    whole_us, saved_us = products_us + times_us[1], times_us[1] - times_us[2]
    said(f"that is about {whole_us / 1e3:.2f} ms")
    said(f"saves {saved_us:.0f} µs of it, {100 * saved_us / whole_us:.0f} percent")
    said(f"leaves it {100 * saved_us / whole_us:.0f} percent to win")
    said(f"643 launches of 5 µs are {643 * 5e-3:.1f} ms; 2.6 GB at 4.8 TB/s are")
    said(f"{1e3 * 2.6e9 / 4.8e12:.2f} ms:   launches decide")


def test_the_numbers_of_the_bottleneck():
    passes = STEPS["eager"](MODELS["Llama-3.2-1B"], 4096)
    names = [one.name for one in passes]
    said(f"launches {len(names)} of them. Only {names.count('mm')} of these are matrix products")
    said(f"and {names.count('attention')} are attention over the cache")


def test_the_answers_of_the_quiz():
    eager, kernel = chains(1000, 1000, torch.float32)["RMSNorm"]
    said(f"{total_bytes(eager) / 1e6:.0f} and {total_bytes([kernel]) / 1e6:.0f}. Square 8")
    said(f"{1 + 2 * 32}: two junctions a layer")
    said(f"the mean is {100 * (1 - 1000 / 1024):.1f} % too small")
    fused = chains(4096, 4096)["SwiGLU"][1]
    megabytes = total_bytes([fused]) / 1e6
    said(f"*Units.* {megabytes:.1f} MB at 4.8 TB/s")
    said(f"{megabytes / 4.8:.0f}: {megabytes:.1f} · 10⁶ / 4.8 · 10¹² s")


def test_what_the_museum_shows_is_wrong():
    eager, _ = chains(1, 4096)["add + RMSNorm"]
    whole = total_bytes(eager)
    said(f"8 KB, and the whole chain moves {whole / 1e3:.0f} KB")
    said(f"That is {1e6 * whole / 4.8e12:.2f} µs at 4.8 TB/s, beside {5 * len(eager)} µs")
    x = torch.randn(64, 256).bfloat16()
    weight = (1 + 0.3 * torch.randn(256)).bfloat16()
    theirs = torch.nn.functional.rms_norm(x, (256,), weight, 1e-5)
    differ = (theirs != naive.rms_norm(x, weight, 1e-5)).float().mean().item()
    assert differ == pytest.approx(0.25, abs=0.1)
    assert torch.relu(torch.tensor([3.0, -2])).sum() == 3 and torch.relu(torch.tensor(1.0)) == 1
