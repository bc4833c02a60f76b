"""Bugs planted in the kernels that sample, one at a time: cases of test_equivalence find each."""

import importlib
import sys
from pathlib import Path

import pytest

from lessons.l02_naive_attention.batched import fused
from lessons.l02_naive_attention.batched.draw_kernel import draw_kernel
from lessons.l02_naive_attention.batched.test_equivalence import assert_draws, assert_penalizes
from lessons.l02_naive_attention.lab.testing import HOSTILE, hostile_rows, mixed_rows
from lessons.toolbox.measure.device import interpreting

pytestmark = [
    pytest.mark.usefixtures("seed"),
    pytest.mark.skipif(not interpreting(), reason="NOT RUN: each bug compiles all kernels anew"),
]

# bug: (what the source says, what it says then, the case that finds it)
BUGS = {
    "NaN is not seen": ("x == x, x, float", "x == x, x, -float", "mixed"),
    "the last part is cut short": (
        "mask=ids < vocab_size",
        "mask=ids < vocab_size // 16 * 16",
        "all equal",
    ),
    "keys of negative logits fall": (
        "return tl.where(bits >= 0, bits, bits ^ LARGEST_INT)",
        "return bits",
        "top-k is one fewer",
    ),
    "faint tokens are cut": (
        "return (weight * UNIT + 0.5)",
        "return (weight * UNIT / 1024)",
        "faint",
    ),
    "min-p cuts what equals it": ("weight >= min_p", "weight > min_p", "min-p is 1"),
    "the next number": ("(drawn + 1).to", "(drawn + 2).to", "all equal"),
    "half of the number": ("return (x >> 11) << 11", "return (x >> 12) << 11", "all equal"),
    "one band too low": (
        "short = tl.min(tl.where(is_short, begins",
        "short = tl.min(tl.where(is_enough, begins",
        "all equal, top-p",
    ),
    "top-p counts tokens": (
        "(top_k < vocab_size) & (worth > 0), 1.0",
        "worth > 0, 1.0",
        "top-p among ties",
    ),
    "top-k ends at the band": (
        'tl.where(top_k < vocab_size, float("inf"), high)',
        "high",
        "one token, top-k",
    ),
    "each band begins one further": (
        "height >= begin_of(band, low",
        "height >= begin_of(band + 1, low",
        "top-p among ties",
    ),
    "places overlap": (
        "tl.cumsum(is_inside.to(tl.int32), axis=0) - 1",
        "tl.cumsum(is_inside.to(tl.int32), axis=0) // 2",
        "all equal, top-k",
    ),
    "the mass above the band is lost": (
        "tl.where(height >= high, units, 0)",
        "tl.where(height >= high, 0, 0)",
        "holes, top-p",
    ),
    "one fewer is not enough": (
        "tl.sum(reached) >= wanted",
        "tl.sum(reached) > wanted",
        "top-k without ties",
    ),
    "the cut itself is cut": ("ties += (x == cut)", "ties += (x > cut)", "all equal, top-k"),
    "top-p keeps all ties": (
        "tl.maximum(number - in_front, 0), ties)",
        "tl.maximum(number, ties), ties)",
        "all equal, top-p",
    ),
    "top-p keeps the last ties": (
        "in_front = tl.cumsum(ties, axis=0) - ties",
        "in_front = tl.sum(ties, axis=0) - tl.cumsum(ties, axis=0)",
        "all equal, top-p",
    ),
    "top-p keeps one tie fewer": (
        "- tl.sum(above, axis=0) + each - 1) // each",
        "- tl.sum(above, axis=0)) // each",
        "all equal, top-p",
    ),
    "top-p of the whole mass": (
        "if top_k < vocab_size:\n        cut",
        "if top_k < 0:\n        cut",
        "top-k ties across parts",
    ),
    "the token before": (
        "(reached <= target).to(tl.int32)",
        "(reached < target).to(tl.int32)",
        "holes",
    ),
    "the part before": (
        "(tl.cumsum(units, axis=0) <= target)",
        "(tl.cumsum(units, axis=0) < target)",
        "holes",
    ),
    "each part begins at 0": (
        "target -= tl.sum(tl.where(parts < part, units, 0), axis=0)",
        "target -= 0",
        "all equal",
    ),
    "greedy takes the last": (
        "tl.min(tl.where(maxima == highest, parts, num_parts)",
        "tl.max(tl.where(maxima == highest, parts, 0)",
        "greedy among ties",
    ),
    "greedy is drawn": ("min_p, temperature <= 0", "min_p, temperature < 0", "greedy among ties"),
    "bad logits give a token": (
        "tl.full((), BAD_LOGITS, tl.int32)",
        "tl.full((), 0, tl.int32)",
        "mixed",
    ),
    "a negative logit is divided": (
        "tl.div_rn(x, repetition), x * repetition",
        "tl.div_rn(x, repetition), tl.div_rn(x, repetition)",
        "to the bit",
    ),
    "frequency is presence": (
        "frequency * count.to(tl.float32)",
        "frequency * (count > 0).to(tl.float32)",
        "to the bit",
    ),
    "the prompt counts as output": (
        "presence * (count > 0)",
        "presence * (count >= 0)",
        "to the bit",
    ),
    "the last seen token is forgotten": (
        "inside = places < tl.minimum(width, tl.load(distinct_ptr + row))",
        "inside = places < tl.load(distinct_ptr + row) - 1",
        "to the bit",
    ),
    "penalized twice": (
        "- presence * (count > 0).to(tl.float32)",
        "- 2 * presence * (count > 0).to(tl.float32)",
        "to the bit",
    ),
}


def buggy_sampler(folder: Path, monkeypatch, old: str, new: str):
    """fused.py, whose kernels are those of copies in `folder` in which `old` says `new`."""
    package, found = f"buggy_{folder.name}", 0
    (folder / package).mkdir()
    monkeypatch.syspath_prepend(folder)
    names = "kernel_math", "sample_kernels", "draw_kernel", "fused"
    for name in names:
        text = (Path(fused.__file__).parent / f"{name}.py").read_text("utf-8")
        found += text.count(old)
        text = text.replace(old, new)
        for other in names:
            text = text.replace(
                f"lessons.l02_naive_attention.batched.{other} ", f"{package}.{other} "
            )
        (folder / package / f"{name}.py").write_text(text, "utf-8")
    assert found == 1, f"{old!r} is there {found} times"
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.fused")


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.sample(2)
def test_a_planted_bug_is_found(name, tmp_path, monkeypatch):
    old, new, case = BUGS[name]
    buggy = buggy_sampler(tmp_path, monkeypatch, old, new)
    with pytest.raises(AssertionError):
        if case == "to the bit":
            assert_penalizes(buggy.penalized)
        rows = hostile_rows(case) if case in HOSTILE else mixed_rows()
        assert_draws(rows, sample=buggy.sample_fused)


def test_the_copies_without_a_bug_pass(tmp_path, monkeypatch):
    """Otherwise the test above would prove nothing."""
    same = buggy_sampler(
        tmp_path, monkeypatch, "sample_fused(logits: Tensor", "sample_fused(logits: Tensor"
    )
    assert same.__name__ in sys.modules and same.draw_kernel is not draw_kernel
    assert_draws(mixed_rows(), sample=same.sample_fused)
