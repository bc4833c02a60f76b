"""Proves that the pictures fit, that the README and GUIDES.md quote what the code says, and that
the planner's ways out are those of lesson 1.
"""

import re
import textwrap
from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.planner.models import find_model
from lessons.l01_roofline.planner.plan import make_plan
from lessons.l02_naive_attention.naive import attention
from lessons.l19_kv_quantization.activations.smoothquant import smoothing_scales
from lessons.l19_kv_quantization.activations.w8a8 import to_eight_bits
from lessons.l19_kv_quantization.formats import FORMATS, row_bytes
from lessons.l19_kv_quantization.kivi.kivi import KiviCache
from lessons.l19_kv_quantization.lab import pictures, ways_out
from lessons.l19_kv_quantization.lab.savings import plan_for
from lessons.l19_kv_quantization.lab.testing import attention_over
from lessons.l19_kv_quantization.lab.ways_out import bits_per_value, seven_ways, way
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.measure.records import read_json
from lessons.toolbox.proof.pages import pages

ROOM = Path(__file__).parents[1]
TEXT = pages(ROOM)
README = re.sub(r"\[([^\]]*)\]\(\.\./GLOSSARY[^)]*\)", r"\1", TEXT)  # terms as they are read
GUIDES = (ROOM.parent / "GUIDES.md").read_text(encoding="utf-8")
RESULTS = ROOM.parents[1] / "results"

CACHES = {
    "int8": "INT8, a scale a row",
    "fp8": "FP8, a scale a row",
    "int4": "INT4, a scale and a low a row",
    "kivi": "KIVI, INT4, the last 32 tokens as they are",
}


@pytest.mark.parametrize("name", ["page", "fit", "loses", "outliers", "quality"])
@pytest.mark.sample(4, of="pictures")
def test_the_pictures_fit(name):
    figure = getattr(pictures, f"draw_{name}")()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_excerpts_stand_in_the_sources():
    """Line by line, however far they are indented there."""
    sources = [file.read_text(encoding="utf-8") for file in ROOM.rglob("*.py")]
    found = TEXT.split("```python\n")[1:]
    assert len(found) == 5
    for block in found:
        code = block.split("```")[0]
        indented = [textwrap.indent(code, " " * depth) for depth in (0, 4, 8)]
        assert any(lines in source for source in sources for lines in indented), code


def test_the_readme_quotes_the_page():
    """Step 5. A scale for each channel loses about half of what one for each token does."""
    page = pictures.seen(1)[1][: pictures.PAGE, 1]
    token, channel = (float(e.norm() / page.norm()) for e in pictures.errors_of(page))
    assert (
        f"one for each token loses {token:.1%} of K, one for each channel {channel:.1%}" in README
    )
    assert channel < 0.6 * token


def test_the_readme_quotes_the_errors_of_attention():
    """The table of step 5."""
    q, k, v = pictures.seen(1)
    exact = attention(q, k, v)
    kivi = KiviCache(residual=1)
    kivi.append(k, v)
    assert (len(k), kivi.coded) == (96, 64)
    outs = {name: attention_over(format, q, k, v) for name, format in FORMATS.items()}
    bits = {name: bits_per_value(name, 64) for name in FORMATS} | {"kivi": 4 + 2 * 16 / 32}
    outs["kivi"] = attention(q, *kivi.numbers())
    for name, out in outs.items():
        (row,) = (line for line in README.splitlines() if line.startswith(f"| {CACHES[name]} |"))
        assert row.endswith(f"| {bits[name]:.2f} | {relative(out, exact):.1%} |"), (name, row)


def relative(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out - exact).norm() / exact.norm())


def test_the_readme_quotes_the_smoothed_layer():
    """The table of step 10, and the largest channel of the picture."""
    x, weight = pictures.received(pictures.LOUD_LAYER)
    for name in ("not smoothed", "0.3", "0.5", "0.8", "1"):
        s = torch.ones(x.shape[1])
        if name != "not smoothed":
            s = pictures.smoothing(x, weight, float(name))
        one, each = pictures.product_error(x, weight, s)
        assert f"| {name} | {one:.1%} | {each:.1%} |" in README
    most = x.abs().amax(0)
    assert f"is {float(most.max() / most.median()):.0f} times the median" in README


def test_the_readme_quotes_the_ways_out():
    """The table of step 11, row by row, and the sentences below it and in GUIDES.md."""
    plan = make_plan(find_model("llama-3-70b"), CHIPS["h200"], 1, 8192, 2)
    ways = seven_ways(plan, 2048)
    first = ways[0]
    for found in ways:
        more, faster = (
            found.sequences / first.sequences,
            found.tokens_per_s / first.tokens_per_s,
        )
        row = f"| {found.name} | {found.sequences} | {more:.2f}x | {1e3 * found.step_s:.1f} ms | "
        row += f"{found.tokens_per_s:.0f} | {faster:.2f}x |"
        assert row in README, row
    plan = make_plan(find_model("llama-2-70b"), CHIPS["h100"], 1, 4096, 2)
    few, eight, _, cache, *_ = (found.sequences for found in seven_ways(plan, 0))
    assert (
        f"fits {few} sequences. An FP8 cache makes them {cache}, and 8-bit weights {eight}"
        in README
    )
    assert (
        f"goes from {few} to {cache} sequences of 4096 tokens, and 8-bit weights make them {eight}"
        in (GUIDES)
    )


def test_what_the_readme_concludes_from_what_was_counted():
    """In words, where a number has a comment anyway."""
    found = pictures.recorded()
    for name in ("int8", "fp8"):  # "cannot be told from that of the model"
        assert (
            found["formats"][name]["added_loss"]["low"]
            < 0
            < found["formats"][name]["added_loss"]["high"]
        )
    added = {name: entry["added_loss"]["mean"] for name, entry in found["formats"].items()}
    assert 1 - added["kivi 4 bits"] / added["int4"] > 0.5  # "most of it"
    four = {over: found["scales"][f"{over}, 4 bits"] for over in pictures.SHOWN}
    channel = four.pop("channel of a page")
    for part in ("k", "v"):
        assert channel[part]["kl"]["mean"] < min(
            entry[part]["kl"]["mean"] for entry in four.values()
        )
    quiet, loud = (channel[part]["kl"]["mean"] for part in ("k", "k, a loud channel"))
    assert loud == pytest.approx(quiet, rel=0.01)
    w8a8 = {name: entry["kl"]["mean"] for name, entry in found["w8a8"].items()}
    broken = w8a8.pop("int8, loud activations, not smoothed")
    assert broken > 50 * max(w8a8.values())


def test_codes_multiplied_were_below_bfloat16_at_every_size():
    """The figure of products on an H200, as its description says it."""
    assert "codes multiplied as codes are below bfloat16 everywhere" in README
    series = read_json(RESULTS / "h200" / "l19_products.json")["series"]
    names = ("W8A8, codes multiplied", "bfloat16, PyTorch")
    codes, plain = ([p["median_s"] for p in series[name]["points"]] for name in names)
    assert len(codes) == len(plain) and all(c < p for c, p in zip(codes, plain))


def test_a_way_fits_and_one_sequence_more_does_not():
    plan = make_plan(find_model("llama-3-8b"), CHIPS["l40s"], 1, 4096, 1)
    for shared in (0, 1024):
        found = way("", plan, shared)
        fixed = plan.weight_bytes + plan.activation_bytes + shared * plan.kv_bytes_per_token
        own = (4096 - shared) * plan.kv_bytes_per_token
        assert (
            fixed + found.sequences * own <= plan.usable_bytes < fixed + (found.sequences + 1) * own
        )
    assert way("", plan).sequences == plan.sequences


def test_the_command_prints_the_table(capsys):
    assert ways_out.main(["--model", "llama-3-8b", "--gpus", "1", "--context", "4096"]) == 0
    assert "fp8 cache" in capsys.readouterr().out
    for arguments, message in [
        (["--shared", "8192"], "--shared is 8192; accepted: 0 to 8191"),
        (["--gpu", "h100"], "do not fit"),
    ]:
        with pytest.raises(SystemExit):
            ways_out.main(arguments)
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_the_readme_quotes_the_bytes():
    """Steps 1 to 3, the cheat-sheet and the quiz."""
    for name, wanted in (("fp8", 8.125), ("int8", 8.125), ("int4", 4.25)):
        assert bits_per_value(name, 128) == wanted and f"{wanted}" in README
    llama, small = find_model("llama-2-70b"), find_model("llama-3-8b")
    values = llama.kv_values_per_token * 4096
    sizes = [values * bits_per_value(name, 128) / 8e9 for name in ("bf16", "fp8", "int4")]
    assert "{:.2f} GB become {:.2f} GB, or {:.2f} GB".format(*sizes) in README
    kappa = small.kv_values_per_token * 2
    assert f"κ = {kappa:,} bytes" in README
    # As the planner counts: of the input embedding a step reads a few rows.
    read = (small.params - small.embedding_params) * 2
    gigabytes = f"{read / 1e9:.2f} GB"
    assert f"P · b = {gigabytes} (" in README
    assert f"from B · N = {gigabytes} / κ, about {round(read // kappa, -2):,} tokens, on" in README
    cache = 8192 * kappa
    step = plan_for("llama-3-8b", 1, 8192, "bf16").decode.bytes_moved
    assert step == pytest.approx(read + cache, rel=1e-5)
    quiz = f"{read / 1e9:.1f} GB of weights and {cache / 1e9:.2f} GB of cache. "
    assert quiz + f"0.53 GB of {(read + cache) / 1e9:.1f} are saved" in README
    alone, many = pictures.gain("llama-3-8b", 1, 8192), pictures.gain("llama-3-8b", 32, 4096)
    assert f"gains {alone:.2f} times, 32 sequences of 4096 tokens gain {many:.2f} times" in README
    assert f"gains {alone:.2f}× with one sequence of 8192 tokens, {many:.2f}× with 32" in GUIDES
    assert "a single sequence is predicted to gain under `1 %`" in README
    assert 1 < pictures.gain("llama-3-8b", 1, 512) < 1.01
    rows = small.num_hidden_layers * 2 * small.num_key_value_heads
    token = rows * row_bytes(FORMATS["int4"], 128, 2)
    assert f"{token:,} bytes, {token / 1024:.0f} KiB" in README
    assert f"{kappa / token:.2f} times as much" in README
    kivi_bits = 4 + 2 * 16 / 32
    held = small.kv_values_per_token * 131072 / 8e9
    assert f"= {kivi_bits:.0f} bits" in README and f"= {held * kivi_bits:.1f} GB" in README
    assert f"16 bits are {held * 16:.1f} GB" in README


def test_the_examples_by_hand():
    """The row of step 1 and the product of step 10."""
    row = torch.tensor([6.0, -0.3, 0.5, 0.2])
    for name in ("int8", "int4"):
        codes, scales = FORMATS[name].quantize(row)
        means = FORMATS[name].dequantize(codes, scales)
        if name == "int4":
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten()
        listed = codes.view(torch.int8).tolist()
        digits = 3 if name == "int8" else 2
        quoted = ", ".join(str(code) for code in listed).replace("-", "−")
        line = next(line for line in README.splitlines() if f"codes ({quoted})" in line)
        assert f"scale {scales[0]:.{digits if digits == 2 else 4}f}" in line
        for value in means.tolist():
            text = f"{value:.{digits}f}".replace("-", "−")
            assert text in line or text.rstrip("0").rstrip(".") in line, (text, line)
    x, weight = torch.tensor([[100.0, 1.0]]), torch.tensor([[1.0, 1.0]])
    s = smoothing_scales(x[0], [weight], 0.5)
    assert s.tolist() == pytest.approx([10, 1])
    int8, products = FORMATS["int8"], []
    for by in (torch.ones(2), s):
        rows = to_eight_bits(weight * by, "int8").dequantize()
        products.append(float(int8.dequantize(*int8.quantize(x / by)) @ rows.T))
    assert f"product {products[0]:.2f}." in README and f"both sides, {products[1]:.2f}." in README


def test_the_examples_of_steps_6_and_8():
    """Codes that are rounded again, and a scale that is taken out of a sum."""
    channel = torch.tensor([6.0, -1.5, 63.5])
    scale = float(channel.abs().max()) / 127
    codes = torch.round(channel / scale)
    again = torch.round(codes * scale / (127 / 127))
    first, second = (
        ", ".join(f"{int(code)}".replace("-", "−") for code in each) for each in (codes, again)
    )
    assert f"scale 63.5 / 127 = {scale:g}, codes {first}\n" in README
    assert f"codes {second} and 127.  −1.5 has become −{-int(again[1])}" in README
    scale, (one, other) = 6 / 127, (127, round(-0.3 / (6 / 127)))
    assert (one, other) == (127, -6)
    found, exact = scale * (one + 2 * other), 6 + 2 * -0.3
    assert f"{scale:.4f} · (127 − {-2 * other}) = {found:.2f}, exactly {exact:.1f}" in README


def test_the_example_of_step_9():
    """Codes that are multiplied, and their scales after the sum."""
    x, row = torch.tensor([[12.7, -0.34]]), torch.tensor([[0.5, 2.54]])
    (x_codes, x_scale), (w_codes, w_scale) = (FORMATS["int8"].quantize(one) for one in (x, row))
    x_codes, w_codes = (codes.view(torch.int8) for codes in (x_codes, w_codes))
    assert (x_codes.tolist(), w_codes.tolist()) == ([[127, -3]], [[25, 127]])
    assert (float(x_scale), float(w_scale)) == pytest.approx((0.1, 0.02))
    found = 0.1 * 0.02 * float((x_codes.float() @ w_codes.float().T).item())
    exact = float(x.double() @ row.double().T)
    assert f"(127 · 25 − 3 · 127) = {found:.3f}, exactly {exact:.3f}\n" in README
