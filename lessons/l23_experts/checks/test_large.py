"""The arithmetic of many GPUs: rows by drawing tokens, bytes by hand, and published tables."""

import json
from math import comb

import pytest

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.planner.models import find_model
from lessons.l23_experts.lab import large as lab
from lessons.l23_experts.ranks import large
from lessons.l23_experts.ranks.large import H800, Wide, decode, direct, forwarded, prefill
from lessons.toolbox.proof.planted import with_bug

V3 = find_model("deepseek-v3")


def test_where_groups_limit_the_nodes():
    """On 1 to 8 nodes each has whole groups, so a token reaches 4 of 8; on 18 any node."""
    eight = Wide(V3, H800, 64)
    assert 3.5 < eight.reached(8) < 4 < eight.reached(64) < 8
    assert Wide(V3, H800, 16).reached(2) < 2 and Wide(V3, H800, 8).reached(1) == 1
    many = Wide(V3, H800, 144)
    assert many.reached(18) == pytest.approx(18 * (1 - comb(272, 8) / comb(288, 8)))
    one_each = Wide(V3, H800, 320)
    assert one_each.reached(320) == pytest.approx(8)


def test_what_the_report_and_the_overview_say():
    """Experts of a GPU in DeepSeek's deployments, and the parameters add up to the model's."""
    for gpus, slots in ((32, 9), (144, 2), (320, 1)):
        assert Wide(V3, H800, gpus).slots_per_gpu == slots
    alone = Wide(V3, H800, 1, redundant=0)
    embeddings = large.WIDE_BYTES * 2 * V3.embedding_params
    assert alone.weight_bytes == pytest.approx(V3.params - 2 * V3.embedding_params + embeddings)
    wide = Wide(V3, H800, 32)
    without = Wide(V3, H800, 32, redundant=0)
    assert wide.weight_bytes - without.weight_bytes == 58 * V3.expert_params  # a copy on each GPU
    fits = wide.tokens_that_fit()
    latents = fits * calc.kv_bytes_per_token(V3, 16)
    assert 71.9e9 < latents + wide.weight_bytes <= 72e9
    assert Wide(V3, H800, 8).tokens_that_fit() == 0  # 36 experts of each layer do not fit


def test_rows_of_experts():
    """Of 144 GPUs with 128 tokens each, a slot has 512 rows; a row needs 2 FLOPs for a byte."""
    wide = Wide(V3, H800, 144)
    assert wide.rows_of_expert(128) == 144 * 128 * 8 / 288 == 512
    assert wide.ridge_rows == pytest.approx(1979e12 / 3.35e12 / 2)
    parts = {part.name: part for part in large.layer_parts(wide, 0.0, direct(wide))}
    at = wide.compute_bound_batch
    assert parts["experts"].token_s * at == pytest.approx(parts["experts"].least_s)
    assert parts["experts"].token_s == pytest.approx(2 * 8 * V3.expert_params / 1979e12)


def test_traffic():
    """Each GPU holds one expert: all rows travel, once for each; and nodes share a row."""
    wide = Wide(V3, H800, 320)
    rows = direct(wide)
    assert rows.rdma_rows + rows.nvlink_rows == pytest.approx(8 * 319 / 320)
    assert rows.rdma_rows == 8 * 312 / 320
    shared = forwarded(Wide(V3, H800, 32))
    assert shared.rdma_rows < direct(Wide(V3, H800, 32)).rdma_rows / 2
    assert shared.rdma_rows <= 3 and shared.nvlink_rows < 8
    assert forwarded(Wide(V3, H800, 8)).rdma_rows == 0
    assert large.row_bytes(7168) == (7168 + 4 * 56, 14336)


def test_a_decode_step_in_one_batch_by_hand():
    """In one batch each part waits for the one before, and shared experts run beside dispatch."""
    wide = Wide(V3, H800, 64)
    core_s = large.decode_core_s(wide, 4096)
    assert core_s == pytest.approx(4096 * 2 * 576 / 3.35e12)
    parts = {p.name: p.seconds(128) for p in large.layer_parts(wide, core_s, direct(wide))}
    assert parts["shared"] < parts["dispatch"]
    layer = sum(parts.values()) - parts["shared"]
    dense = 3 * (parts["projections"] + parts["attention"] + wide.dense_params / 3.35e12)
    head = 2 * V3.embedding_params / 3.35e12
    found = decode(wide, 128, 4096, halves=1)
    assert found.seconds == pytest.approx(58 * layer + dense + head)
    assert found.network_s == pytest.approx(58 * (parts["dispatch"] + parts["combine"]))
    two = decode(wide, 128, 4096)
    assert max(two.compute_s, two.network_s) <= two.seconds < found.seconds
    assert decode(Wide(V3, H800, 16), 24, 4096).seconds > (
        decode(Wide(V3, H800, 16), 24, 4096, halves=1).seconds
    )
    full = prefill(Wide(V3, H800, 32), 16384, 4096)
    flops = 2 * (V3.active_params - V3.embedding_params)
    least_s = 16384 * flops / 1979e12
    assert full.compute_s > least_s and full.seconds > full.network_s


def test_published_tables():
    """DeepEP's own bandwidths follow from our rows, within its rounding; its latencies are longer
    than our floors, but less than twice; DeepSeek's arithmetic is ours.
    """
    bandwidths = {8: (98, 127), 16: (63, 74), 32: (48, 53), 64: (43, 46), 128: (39, 39)}
    for gpus, (out_gb, back_gb) in bandwidths.items():
        for row, us, gb in zip(large.row_bytes(7168), lab.LATENCIES_US[gpus], (out_gb, back_gb)):
            assert 128 * 8 * row / us / 1e3 == pytest.approx(gb, rel=0.03)
    for row in lab.latencies().values():
        assert all(0.5 < cell["share"] < 1 for cell in row.values())
    found = lab.insights()
    assert found["exchange_us"] == pytest.approx(lab.DISPATCH_AND_COMBINE_US)
    assert found["step_ms"] == pytest.approx(lab.STEP_MS, abs=0.01)
    for row in lab.checks()["rows"].values():
        assert 0.2 < row["share"] < 0.7  # a floor is below what was measured, not far below


def test_what_cannot_be_is_refused():
    for wrong, why in (
        (lambda: Wide(find_model("mixtral-8x7b"), H800, 8), "model: got 'mixtral-8x7b'"),
        (lambda: Wide(V3, H800, 0), "gpus: got 0"),
        (lambda: decode(Wide(V3, H800, 8), 0, 10), "tokens: got 0"),
    ):
        with pytest.raises(ValueError, match=why) as caught:
            wrong()
        assert "\n" not in str(caught.value)


def flat(record: dict, path: str = "") -> dict[str, float]:
    """The numbers of a record, by their path."""
    found = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= flat(value, f"{path}{key}.")
        elif not isinstance(value, str):
            found[f"{path}{key}"] = value
    return found


def test_the_record_is_what_the_code_predicts(capsys):
    record = json.loads(lab.RECORD.read_text(encoding="utf-8"))
    assert flat(lab.record_of()) == pytest.approx(flat(record))
    lab.show(record)
    text = capsys.readouterr().out
    assert "nothing fits" in text and "PREDICTED" in text
    assert lab.main(["--batch", "0"]) == 2


# ---------------------------------------------------------------- planted bugs

LARGE_BUGS = {
    "one FLOP a weight": ("2 * rows * params / chip", "rows * params / chip"),
    "experts of all GPUs": (
        "share = model.num_experts_per_tok / wide",
        "share = model.num_experts_per_tok * wide",
    ),
    "rows that stay are sent": ("* (nodes - 1) / nodes", ""),
    "rows in 16 bits": ("Float8().row_bytes(hidden_size, DTYPE), ", "2 * hidden_size, "),
    "groups hold on any number of nodes": (
        "(1, 1) if self.num_groups % self.nodes else",
        "(1, 1) if self.gpus > 200 else",
    ),
    "copies have no weights": (
        "experts = self.slots_per_gpu + model",
        "experts = self.model.num_experts // self.gpus + model",
    ),
    "each head reads latents of its own": (
        "WIDE_BYTES * latent / chip",
        "model.num_attention_heads * WIDE_BYTES * latent / chip",
    ),
}


@pytest.mark.parametrize("bug", LARGE_BUGS)
def test_a_planted_bug_of_large_is_seen(bug, tmp_path, monkeypatch):
    buggy = with_bug(large, tmp_path, *LARGE_BUGS[bug])
    names = ("Wide", "decode", "direct", "forwarded", "prefill")
    for name in names:
        monkeypatch.setitem(globals(), name, getattr(buggy, name))
    monkeypatch.setitem(globals(), "large", buggy)
    with pytest.raises((AssertionError, ValueError)):
        test_where_groups_limit_the_nodes()
        test_what_the_report_and_the_overview_say()
        test_rows_of_experts()
        test_traffic()
        test_a_decode_step_in_one_batch_by_hand()
