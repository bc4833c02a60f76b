"""The record of predicted times is of the launches that this lesson has."""

import json

import pytest

from lessons.l27_states.lab.predicted import BATCHES, RECORD, TOKENS, of_prompt, of_step

KERNELS = {
    "step": {"state_step_kernel"},
    "prompt": {"prepare_kernel", "states_kernel", "outputs_kernel"},
}


@pytest.mark.parametrize("kind", KERNELS)
def test_the_record_holds_each_launch(kind):
    record = json.loads(RECORD.read_text(encoding="utf-8"))[kind]
    counts = {"step": BATCHES, "prompt": TOKENS}[kind]
    assert list(record) == [str(count) for count in counts]
    for found in record.values():
        assert set(found["kernels"]) == KERNELS[kind]
        parts = sum(kernel["predicted_s"] for kernel in found["kernels"].values())
        assert found["predicted_s"] == pytest.approx(parts)
        assert found["floor_s"] < found["predicted_s"]
        assert all(kernel["spill_bytes"] == 0 for kernel in found["kernels"].values())


def test_what_has_to_move():
    """States of float32, read and written; q, k, v and the output of 16 bits."""
    assert of_step(3)[1] == 2 * 3 * 32 * 128 * 128 * 4
    assert of_prompt(100)[1] == 4 * 100 * 32 * 128 * 2
