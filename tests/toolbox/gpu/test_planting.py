"""Bugs planted in a few lines of PTX: each outcome where it is known by hand; and in a lesson's
code.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from lessons.toolbox.gpu import machine
from lessons.toolbox.gpu.global_memory import Buffer, GlobalMemory
from lessons.toolbox.gpu.written import written_parameters
from lessons.toolbox.measure.device import CHIP
from lessons.toolbox.proof.planting import command
from lessons.toolbox.proof.planting.kinds import bugs_of
from lessons.toolbox.proof.planting.replay import Recorded
from lessons.toolbox.proof.planting.trial import outcome_of, plant
from tests.toolbox.gpu.running import kernel_of
from tests.toolbox.gpu.test_compiled import ROOT
from tests.toolbox.gpu.test_compiled import pytestmark as needs_triton
from tests.toolbox.gpu.test_faults import MINE, OTHER, SHARED

# 64 threads: each puts its number into shared memory and takes that of the other warp.
SWAP = (
    "mad.wide.u32 %rd1, %r70, 4, %rd30;\nmad.wide.u32 %rd2, %r70, 4, %rd31;\n"
    "ld.global.b32 %r8, [%rd1];\n"
    + MINE
    + OTHER
    + "st.shared.b32 [%r1], %r8;\nbar.sync 0;\nbar.sync 0;\nld.shared.b32 %r5, [%r3];\n"
    "st.global.b32 [%rd2], %r5;"
)


def recorded(body: str) -> Recorded:
    """A launch of 64 threads over x: [64] float32 -> out: [64]."""
    kernel = kernel_of(body, 2, SHARED)
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    arrays, written = [x, np.full(64, np.nan, np.float32)], written_parameters(kernel)
    buffers = [
        Buffer(data.view(np.uint8).copy(), name, f"tried_param_{i}" in written, torch.float32)
        for i, (name, data) in enumerate(zip(("x", "out"), arrays))
    ]
    contents = [buffer.data.copy() for buffer in buffers]
    parameters = {
        name: GlobalMemory.address(i).to_bytes(8, "little")
        for i, (name, _, _) in enumerate(kernel.parameters)
    }
    launch = ((1, 1, 1), (64, 1, 1))
    done = machine.launch(kernel, *launch, buffers, parameters, kernel.shared_bytes)
    return Recorded(kernel, *launch, buffers, contents, parameters, kernel.shared_bytes, None, done)


def outcomes(body: str, kind: str) -> list[str]:
    launch = recorded(body)
    bugs = [bug for bug in bugs_of(launch.kernel, launch.places) if bug.kind == kind]
    return [outcome_of(bug, [launch]) for bug in bugs]


def test_one_of_two_barriers_changes_nothing_and_the_only_one_is_a_race():
    assert outcomes(SWAP, "barrier") == ["same", "same"]
    assert outcomes(SWAP.replace("bar.sync 0;\n", "", 1), "barrier") == ["fault"]


def test_an_address_off_by_one_is_found_by_a_fault_or_by_numbers():
    assert set(outcomes(SWAP, "address")) == {"fault", "numbers"}


def test_a_fence_without_a_reader_is_not_called_equal():
    assert outcomes(SWAP.replace("bar.sync 0;\n", "membar.cta;\n", 1), "fence") == ["undecided"]
    proxy = SWAP.replace("bar.sync 0;\n", "fence.proxy.async.shared::cta;\n", 1)
    assert outcomes(proxy, "fence") == ["same"]


def test_a_change_that_the_judge_accepts_is_missed(monkeypatch):
    """The judge is made blind: what it let pass shows."""
    module = "lessons.toolbox.proof.planting.trial"
    monkeypatch.setattr(f"{module}.judge", lambda *arguments: None)
    assert "missed" in outcomes(SWAP, "address")


def test_bugs_of_all_kinds_in_turns():
    launch = recorded(SWAP)
    trials = plant([launch], each=2, seconds=60)
    assert {"barrier", "address", "row"} <= trials.counts.keys()
    assert all(sum(of_kind.values()) <= 2 for of_kind in trials.counts.values())
    assert not trials.missed


def test_the_record_keeps_other_lessons(tmp_path):
    file = tmp_path / "planted.json"
    trials = {"counts": {"barrier": {"fault": 2, "missed": 1}}, "missed": ["a.py:1: it"]}
    for number in ("02", "03"):
        command.record(file, "sm_80", number, {}, {"k": trials})
    command.record(file, "sm_80", "03", {}, {"other": trials})
    kept = json.loads(file.read_text())["sm_80"]
    assert list(kept) == ["02/k", "03/other"]
    assert kept["02/k"]["not found"] == ["a.py:1: it"]
    words = command.in_words(command.total(e for k in kept.values() for e in k["counts"].values()))
    assert words.startswith("4 of 6 found (66.7 %); 2 missed")


@needs_triton
@pytest.mark.sample(1, of="planted in compiled code")
@pytest.mark.parametrize("chip", [80, 90])
def test_bugs_in_the_softmax_of_lesson_2_are_found(chip, tmp_path):
    out = tmp_path / "found.json"
    asked = {"out": str(out), "kernels": ["softmax_kernel"], "each": 2, "seconds": 20}
    environment = {CHIP: str(chip), "TRITON_INTERPRET": "0", "PLANTED": json.dumps(asked)}
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "lessons.toolbox.proof.planting.plugin"]
    arguments += ["lessons/l02_naive_attention/test_equivalence.py", "-k", "softmax_kernel_rows"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    trials = json.loads(out.read_text())["softmax_kernel"]
    counts = command.total(trials["counts"].values())
    found, missed = counts["fault"] + counts["numbers"], counts["missed"] + counts["undecided"]
    assert found >= 5 and found >= 0.95 * (found + missed), trials
