"""What the tests of the Gluon kernels have in common: inputs, the proof, planted bugs."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from lessons.l09_flash_attention.naive import attention
from lessons.toolbox.measure.device import compiled_chip, default_device
from lessons.toolbox.proof.numerics import NotEquivalent, attention_inputs, floor_for, prove

DEVICE = default_device()
# Of a prompt, around the 64 rows of a group of warps and the 128 of a program on Hopper.
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 200]
LONG = [1000, 4097] if DEVICE.type == "cuda" else []  # a CPU takes a second for 10 tiles


def inputs(
    num_queries, num_keys, heads=2, kv_heads=1, head_dim=64, seed=0, name="normal", on=DEVICE
):
    """q: [num_queries, heads, head_dim]; k, v: [num_keys, kv_heads, head_dim], bfloat16."""
    sizes = num_queries, num_keys, heads, kv_heads, head_dim
    return attention_inputs(name, *sizes, dtype=torch.bfloat16, seed=seed, device=on)


def need_chip(chip: int) -> None:
    """Skip the test unless a GPU of this generation is here, or a CPU that may run its code."""
    on_gpu = DEVICE.type == "cuda"
    here = 10 * torch.cuda.get_device_capability()[0] if on_gpu else compiled_chip() or chip
    if here != chip:
        pytest.skip(f"NOT RUN: needs a GPU of compute capability {chip / 10}, or none")


def need_no_gpu() -> None:
    """Skip the test if a GPU is here, whose process a wrong kernel might end."""
    if DEVICE.type == "cuda":
        pytest.skip("NOT RUN: needs a process without a GPU")


def check_lse(lse, exact) -> None:
    """A log-sum-exp is held to 1e-5 · max(1, |exact|). Raises NotEquivalent."""
    if not torch.equal(lse.isneginf(), exact.isneginf()):
        raise NotEquivalent("E0", "the log-sum-exps differ in being -inf")
    gap = ((lse - exact).abs() / exact.abs().clamp(min=1)).masked_fill(exact.isneginf(), 0).max()
    if not gap <= 1e-5:
        raise NotEquivalent("E2", f"log-sum-exp off by {gap:.2g}")


def proved(q, k, v, causal, kernel, name="normal"):
    """The errors of the output against the oracle, two calls bit by bit the same; the log-sum-exp
    is held to 1e-5 · max(1, |lse|).
    """
    last = []

    def run(*given):
        last[:] = kernel(*given, causal=causal)
        return last[0]

    def oracle(*given):
        return attention(*given, causal=causal)

    floor = floor_for(torch.bfloat16, name)
    errors = prove(run, lambda *given: oracle(*given)[0], (q, k, v), floor=floor)
    check_lse(last[1], oracle(*(x.double() for x in (q, k, v)))[1])
    return errors


def with_bug(module, inlined: tuple, old, new: str, folder: Path):
    """A copy of a module with the texts of the modules `inlined` in the places of their imports,
    and `old`, a text or a pattern that is there once, replaced.
    """
    source = Path(module.__file__).read_text(encoding="utf-8")
    for part in inlined:
        name = re.escape(part.__name__)
        imported = re.search(rf"^from {name} import (\([^)]*\)|.*)$", source, re.MULTILINE)
        source = source.replace(imported[0], Path(part.__file__).read_text(encoding="utf-8"))
    pattern = old if isinstance(old, re.Pattern) else re.escape(old)
    planted, count = re.subn(pattern, lambda _: new, source)
    assert count == 1, f"{old!r} stands {count} times in the kernel"
    file = folder / "gluon_with_a_bug.py"
    file.write_text(planted, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("gluon_with_a_bug", file)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed
