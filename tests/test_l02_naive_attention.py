"""Lesson 2 beyond its equivalence tests: the bytes that it counts are those that move, and its
README says what the code says.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lessons.l01_roofline.planner.models import find_model
from lessons.l02_naive_attention import naive, optimized
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.lab import inside, traffic
from lessons.l02_naive_attention.lab import pictures as picture
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities
from lessons.toolbox.draw.plotting import overlapping_texts, texts_outside
from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.pages import pages

README = pages(Path(traffic.__file__).parents[1])
README = re.sub(r"\[([^\]]*)\]\(\.\./GLOSSARY[^)]*\)", r"\1", README)  # terms as they are read


# ---------------------------------------------------------------- counting


# NumPy's, of rows that see no key
@pytest.mark.skipif(
    not interpreting(),
    reason="NOT RUN: counts the loads of the interpreter, and this machine compiles kernels",
)
@pytest.mark.parametrize(
    "heads, queries, keys, window",
    [
        (2, 40, 40, None),
        (1, 5, 37, None),
        (3, 1, 64, None),
        (1, 33, 33, 7),
        (1, 20, 50, 18),
        (2, 9, 4, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_moves_what_is_counted(heads, queries, keys, window, dtype):
    with Accesses() as accesses:
        optimized.fused_softmax(torch.randn(heads, queries, keys).to(dtype), 1.0, window=window)
    counted = traffic.kernel_pass(heads, queries, keys, dtype.itemsize, window)
    assert (accesses.read_bytes, accesses.written_bytes) == (
        counted.read_bytes,
        counted.written_bytes,
    )


def test_every_pass_over_the_scores_is_seen():
    """Copies, casts and in-place steps count; views, and tensors of another size, do not."""

    def attention(q, k, v):
        scores = torch.einsum("qhd,khd->hqk", q, k)  # written: 4 bytes
        scores.transpose(1, 2).contiguous()  # a view moves nothing, the copy 8
        scores.half()  # 4 + 2
        scores.mul_(2)  # 8, in place
        return scores.sum(-1)  # 4

    q = torch.empty(24, 2, 8, device="meta")
    found = traffic.passes_of(attention, q, q, q)
    assert [p.name for p in found] == ["bmm", "clone", "_to_copy", "mul_", "sum"]
    assert traffic.total_bytes(found) == (4 + 8 + 6 + 8 + 4) * 2 * 24**2


def test_shapes_that_cannot_be_counted():
    q = torch.empty(16, 2, 16, device="meta")  # as many scores as elements of q
    with pytest.raises(ValueError, match=r"q, k: got .*; accepted: shapes with more scores"):
        traffic.passes_of(naive.attention, q, q, q)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--tokens", "0"], "accepted: 1 or more"),
        (["--model", "gpt-5"], "known are"),
        (["--model", "deepseek-v3"], "without MLA"),
        (["--gpu", "abacus"], "known are"),
    ],
)
def test_command_line(argv, message, capsys):
    assert traffic.main(argv) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
    assert traffic.main(["--tokens", "500", "--gpu", "t4"]) == 0  # a chip without bfloat16


# ---------------------------------------------------------------- the README


def versions(tokens):
    return traffic.versions(tokens, 32, 8, 128)


def test_readme_shows_the_counted_passes():
    assert "\n".join(traffic.pass_table(versions(8192), 32 * 8192**2)) in README


def test_readme_shows_the_counted_bytes():
    rows = re.findall(
        r"^\| (\d+) \| ([\d.]+) GiB \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GB \|$",
        README,
        re.MULTILINE,
    )
    assert [int(row[0]) for row in rows] == [1024, 8192, 32768, 131072]
    for tokens, *quoted in ((int(row[0]), *row[1:]) for row in rows):
        found = versions(tokens)
        moved = [
            traffic.total_bytes(found[name]) / 1e9
            for name in ("naive.attention", "optimized.attention")
        ]
        numbers = [2 * 32 * tokens**2 / 2**30, *moved, 2 * 2 * tokens * (32 + 8) * 128 / 1e9]
        for text, value in zip(quoted, numbers):
            assert abs(float(text) - value) <= 0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-9, (
                tokens,
                text,
                value,
            )


def test_readme_quotes_the_floors():
    chip = lookup("h200")
    product_ms = 1e3 * 4 * 32 * 8192**2 * 128 / chip.bf16_flops_per_s
    naive_ms = (
        1e3 * traffic.total_bytes(versions(8192)["naive.attention"]) / chip.memory_bytes_per_s
    )
    assert (
        f"{product_ms:.2f} ms of an H200" in README.replace("\n", " ")
        and f"{naive_ms:.1f} ms of its memory" in README
    )
    per_score = {
        name: traffic.total_bytes(passes) / (32 * 8192**2)
        for name, passes in versions(8192).items()
    }
    assert f"= {4 * 128 / per_score['optimized.attention']:.0f} FLOP/byte" in README
    assert f"(naive: {4 * 128 / per_score['naive.attention']:.0f})" in README
    assert f"ridge at {chip.bf16_flops_per_s / chip.memory_bytes_per_s:.0f}" in README


def test_readme_shows_what_each_sampling_parameter_does():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    rows = re.findall(r"^\| `(\w+)=([\d.]+)` \| ((?:[\d.]+ \| ){5})", README, re.MULTILINE)
    assert {name for name, *_ in rows} == {name for name in SamplingParams.__dataclass_fields__} - {
        "seed",
        "stop_token_ids",
        "ignore_eos",
    }
    for name, value, cells in rows:
        params = SamplingParams(**{name: int(value) if name == "top_k" else float(value)})
        got = probabilities(logits, params, prompt=[3], output=[0, 0]).tolist()
        assert cells.split(" | ")[:5] == [f"{p:.3f}" for p in got], name


def test_readme_worked_example():
    q = torch.tensor([2.0, 0, 0, 0])[None, None]
    k, v = torch.zeros(3, 1, 4), torch.tensor([4.0, 8, 12])[:, None, None].expand(3, 1, 4)
    k[2, 0, 0] = np.log(2)
    for options, answer in ((dict(), 9), (dict(softmax_scale=1.0), 10)):
        assert (
            naive.attention(q, k, v, **options)[0, 0, 0].item() == pytest.approx(answer)
            and str(answer) in README
        )
    # what a top-left mask shows the query
    assert naive.attention(q, k[:1], v[:1])[0, 0, 0].item() == pytest.approx(4)


def test_readme_counts_the_recomputed_tokens():
    """Each step of naive.generate runs the whole sequence; counted on a model that only counts."""

    class Counter(Decoder):
        device, dtype = torch.device("cpu"), torch.float32

        def __init__(self):
            torch.nn.Module.__init__(self)
            self.config, self.tokens = ModelConfig("llama", 9, 8, 1, 1, 1, 4, 4, 999), 0

        def __call__(self, tokens, attend):
            self.tokens += len(tokens)
            return torch.zeros(len(tokens), 1)

        def logits(self, hidden):
            return torch.eye(9)[:1]

    model = Counter()
    naive.generate(model, [[1] * 100], 100)
    assert (
        f"{model.tokens} tokens pass through the model" in README
        and f"only {100 + 100 - 1}" in README
    )


def test_the_claims_of_the_museum():
    llama = find_model("llama-3-8b")
    weights = (llama.layer_params(0)) / llama.num_hidden_layers
    assert f"has {weights / 1e6:.0f} million weights, so {2 * weights / 1e6:.0f} MFLOPs" in README
    per_key = 4 * llama.head_dim * llama.num_attention_heads / 2
    assert f"= {per_key:.0f} · N" in README
    assert f"equal at N = {2 * weights / per_key:,.0f}" in README
    share = per_key * 8192 / (per_key * 8192 + 2 * weights)
    assert f"attention is {share * 100:.0f} % of" in README
    # top-p as printed: the token that reaches p is cut
    for probs, p, kept in (([0.5, 0.25, 0.25], 0.6, 1), ([0.95, 0.05], 0.9, 0)):
        assert int((torch.tensor(probs).cumsum(0) < p).sum()) == kept
    right = probabilities(torch.tensor([0.5, 0.25, 0.25]).log(), SamplingParams(top_p=0.6), [], [])
    assert int((right > 0).sum()) == 2
    # a negative logit that is divided
    assert f"{np.exp(-1) / np.exp(-2):.1f} times as likely" in README


def test_the_answers_of_the_quiz():
    assert 2 * 16 * 4096**2 / 2**30 == 0.5
    wide = traffic.versions(4096, 32, 8, 128, torch.float32)["naive.attention"]
    assert traffic.total_bytes(wide) == 40 * 32 * 4096**2
    assert 2 * 32 * 4096 == 256 * 1024 and 2 * 2 * 4096 * 8 * 128 == 64 * 256 * 1024
    logits = torch.tensor([0.6, 0.2, 0.2 - 1e-6, 1e-6]).log()
    kept = probabilities(logits, SamplingParams(top_k=2, top_p=0.9), [], [])
    assert kept.tolist() == pytest.approx([0.75, 0.25, 0, 0], abs=1e-6)


def test_the_excerpts_of_the_readme_are_the_code():
    room = Path(traffic.__file__).parents[1]
    code = "".join((room / name).read_text("utf-8") for name in ("naive.py", "optimized.py"))
    excerpts = README.split("```python\n")[1:]
    assert len(excerpts) == 2
    for excerpt in excerpts:
        assert excerpt.split("```")[0] in code


def test_picture_is_drawn_from_the_counted_passes():
    figure = picture.draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    per_score = re.search(r"moves (\d+) .* kernel (\d+)", figure.get_suptitle()).groups()
    assert per_score == tuple(
        f"{traffic.total_bytes(versions(8192)[name]) / (32 * 8192**2):.0f}"
        for name in ("naive.attention", "optimized.attention")
    )


@pytest.mark.parametrize(
    "settings", [{"temperature": 2.0}, {"top_p": 0.5, "top_k": 3}, {"temperature": 0.1}]
)
def test_the_figure_of_sampling_can_be_read(settings):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
    figure = picture.draw_sampling(logits, list("ABCDEF"), likeliest=5, **settings)
    assert not texts_outside(figure) and not overlapping_texts(figure)
    params = SamplingParams(**settings)
    kept = int((probabilities(logits, params, [], []) > 0).sum())
    assert f"{kept} of 6 tokens" in figure.get_suptitle()


def test_the_figure_of_growth_is_counted():
    figure = picture.draw_growth([1024, 2048])
    assert not texts_outside(figure) and not overlapping_texts(figure)
    moved = traffic.total_bytes(versions(2048)["optimized.attention"])
    assert f"{moved / (4 * 2048 * 40 * 128):.0f} times" in figure.get_suptitle()


def test_the_weights_inside_a_model_are_those_it_uses():
    torch.manual_seed(0)
    config = ModelConfig("llama", 11, 16, 2, 4, 2, 4, 8, 64)
    weights = inside.weights_of(Decoder(config).eval(), [1, 2, 3, 4, 5]).clone()
    assert weights.shape == (2, 4, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5))
    assert not weights.triu(1).any()
    weights[1, 3] = torch.eye(5).roll(1, 0)  # a head that looks one token back
    assert inside.one_back(weights)[:2] == (1, 3)
    weights[0, 2] = torch.full((5, 5), 0.2)
    assert inside.most_spread(weights) == (0, 2)
    figure = inside.draw_head(weights, 0, 2, list("abcde"), "a head")
    assert not texts_outside(figure)
