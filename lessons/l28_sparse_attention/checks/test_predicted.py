"""The record of predicted times is of the launches of a step."""

import json

import pytest

from lessons.l28_sparse_attention.lab.predicted import BATCHES, CONTEXTS, RECORD

KERNELS = {"index_kernel", "top_k_kernel", "sparse_mla_kernel", "combine_kernel"}


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_record_holds_each_launch(context):
    record = json.loads(RECORD.read_text(encoding="utf-8"))[str(context)]
    assert list(record) == [str(batch) for batch in BATCHES]
    for found in record.values():
        assert set(found["kernels"]) == KERNELS
        parts = sum(kernel["predicted_s"] for kernel in found["kernels"].values())
        assert found["predicted_s"] == pytest.approx(parts)
    top_k = [found["kernels"]["top_k_kernel"]["predicted_s"] for found in record.values()]
    assert top_k[-1] < 1.1 * top_k[0], "one program a sequence: a batch takes no longer"
