"""GPTQ against the problem that it solves, least squares, solved in full at every step; and what
layers receive on a text.
"""

import copy

import pytest
import torch
from torch import nn

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l18_weight_quantization.lab.cases import small_decoder
from lessons.l18_weight_quantization.methods import awq, gptq
from lessons.l18_weight_quantization.methods.calibration import (
    InputStatistics,
    calibration_windows,
    collect,
    layer_by_layer,
    output_error,
)
from lessons.l18_weight_quantization.naive import round_to_nearest
from lessons.toolbox.proof.planted import with_bug


def case(rows: int = 6, columns: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and the gram of correlated inputs of very different sizes. Always the same, because
    a number that lies between two codes would be a rare failure.
    """
    generator = torch.Generator().manual_seed(1)
    draw = dict(generator=generator, dtype=torch.float64)
    weight = torch.randn(rows, columns, **draw)
    x = torch.randn(300, columns, **draw) @ torch.randn(columns, columns, **draw)
    x *= torch.rand(columns, **draw) * 3 + 0.1
    return weight, x.T @ x / len(x)


def solved_in_full(weight, gram, bits, size, symmetric, act_order):
    """GPTQ without its algebra: behind every rounded column the free ones are found by least
    squares, from the original matrix.
    """
    root = gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    root = torch.linalg.cholesky(root).T  # |root · d|² is the error of a change d
    order = torch.arange(len(gram))
    if act_order:
        order = gram.diagonal().argsort(descending=True, stable=True)
    weight, root = weight[:, order], root[:, order]
    rounded, free = torch.zeros_like(weight), weight.clone()
    for j in range(weight.shape[1]):
        if j % size == 0:
            # the scales of a group: those of rounding what its columns are now
            group = round_to_nearest(free[:, j : j + size], bits, size, symmetric)
        zero = 2 ** (bits - 1) if group.zeros is None else group.zeros.double()
        scale = group.scales.double()
        codes = (torch.round(free[:, j : j + 1] / scale) + zero).clamp(0, 2**bits - 1)
        rounded[:, j : j + 1] = (codes - zero) * scale
        done, rest = slice(None, j + 1), slice(j + 1, None)
        moved = (rounded - weight)[:, done] @ root[:, done].T  # what the free columns make up for
        best = torch.linalg.lstsq(root[:, rest], -moved.T).solution.T
        free[:, rest] = weight[:, rest] + best
    return torch.empty_like(rounded).index_copy_(1, order, rounded)


SETTINGS = [(4, 16, False, False), (4, 48, True, False), (8, 12, False, True), (4, 24, False, True)]


def check_gptq(gptq):
    weight, gram = case()
    for bits, size, symmetric, act_order in SETTINGS:
        found = gptq.gptq_weight(weight, gram, bits, size, symmetric, act_order)
        expected = solved_in_full(weight, gram, bits, size, symmetric, act_order)
        assert torch.allclose(found.dequantize().double(), expected, atol=1e-6)


@pytest.mark.parametrize("block", [5, 16, 128])
def test_gptq_is_the_exact_least_squares_solution_at_every_step(block, monkeypatch):
    """Whatever the blocks: smaller than a group, as large, or larger than the matrix."""
    monkeypatch.setattr(gptq, "BLOCK", block)
    check_gptq(gptq)


GPTQ_BUGS = {
    "no error feedback": ("left[:, j + 1 : end] -= ", "left[:, j + 1 : end] -= 0 * "),
    "feedback within a block only": ("left[:, end:] -= ", "left[:, end:] -= 0 * "),
    "H in place of its inverse": (
        "torch.linalg.cholesky(inverse, upper=True)",
        "torch.linalg.cholesky(gram, upper=True)",
    ),
    "the lower factor": (
        "torch.linalg.cholesky(inverse, upper=True)",
        "torch.linalg.cholesky(inverse).T.flip(0, 1)",
    ),
    "an error that is not divided by the diagonal": ("- rounded) / factor[j, j]", "- rounded)"),
    "groups that ignore what the block still owes": ("-= told", "-= 0 * told"),
    "H is not permuted": (
        "left, gram = left[:, order], gram[order][:, order]",
        "left = left[:, order]",
    ),
    "the order is not stored": (
        "zeros, bits, group_size, order)",
        "zeros, bits, group_size, None)",
    ),
    "no damping": ("diagonal += damping *", "diagonal += 0 * damping *"),
}


@pytest.mark.parametrize("name", GPTQ_BUGS)
def test_wrong_versions_of_gptq_are_rejected(name, tmp_path, monkeypatch):
    wrong = with_bug(gptq, tmp_path, *GPTQ_BUGS[name])
    wrong.BLOCK = 5
    with pytest.raises(AssertionError):
        check_gptq(wrong)


def test_gptq_and_awq_change_outputs_less_than_rounding():
    weight, gram = case(16, 64)
    mean_abs = gram.diagonal().sqrt()

    def error(matrix):
        return float(output_error(matrix - weight, gram))

    rounded = error(round_to_nearest(weight, 4, 32).dequantize())
    scales = awq.search([weight], gram, mean_abs, 4, 32)
    scaled = error(round_to_nearest(weight * scales, 4, 32).dequantize() / scales)
    solved = error(gptq.gptq_weight(weight, gram, 4, 32).dequantize())
    ordered = error(gptq.gptq_weight(weight, gram, 4, 32, act_order=True).dequantize())
    assert scaled < 0.9 * rounded
    assert solved < 0.7 * rounded and ordered < 0.7 * rounded


def test_an_input_that_never_came_is_rounded():
    weight, gram = case(3, 8)
    gram[2], gram[:, 2] = 0, 0
    found = gptq.gptq_weight(weight, gram, 8, 8).dequantize()
    assert torch.allclose(found[:, 2], weight[:, 2].float(), atol=0.02)
    nothing = gptq.gptq_weight(weight, torch.zeros(8, 8), 4, 8)
    assert torch.equal(nothing.dequantize(), round_to_nearest(weight, 4, 8).dequantize())


def test_refusals():
    weight, gram = case(3, 8)
    with pytest.raises(ValueError, match=r"gram: got \(4, 4\); accepted: \(8, 8\), because"):
        gptq.gptq_weight(weight, gram[:4, :4], 4, 8)
    with pytest.raises(ValueError, match="damping: got 0; accepted: a positive"):
        gptq.gptq_weight(weight, gram, 4, 8, damping=0)
    with pytest.raises(ValueError, match="group_size: got 3; accepted: a divisor of"):
        gptq.gptq_weight(weight, gram, 4, 3)
    with pytest.raises(
        ValueError, match=r"windows: got \(4,\); accepted: tokens, \[count, length\]"
    ):
        layer_by_layer(small_decoder(), torch.arange(4), lambda layer, statistics: layer)


# ---------------------------------------------------------------- what layers receive


def test_statistics_are_those_of_all_inputs_together():
    x = torch.randn(3, 5, 7)
    parts = [InputStatistics.of(part) for part in (x[0], x[1:], x[:0])]
    found = parts[0].merged(parts[1]).merged(parts[2])
    rows = x.view(15, 7)
    assert found.rows == 15
    assert torch.allclose(found.gram.float(), rows.T @ rows / 15, atol=1e-5)
    assert torch.allclose(found.mean_abs, rows.abs().mean(0))
    assert torch.equal(found.max_abs, rows.abs().amax(0))


def test_collect_sees_every_linear_layer_and_leaves_no_hook():
    first, second = nn.Linear(4, 6), nn.Linear(6, 2)
    pair, x = nn.Sequential(first, nn.ReLU(), second), torch.randn(9, 4)
    found = collect(pair, lambda: [pair(x[:2]), pair(x[2:])])
    inputs = {"0": x, "2": first(x).relu()}
    for name, received in inputs.items():
        assert torch.allclose(found[name].gram.float(), received.T @ received / 9, atol=1e-6)
    assert not first._forward_pre_hooks and not second._forward_pre_hooks


def test_a_layer_sees_what_the_replaced_layers_before_it_give():
    """And nothing of the model that is given changes."""
    model, windows = small_decoder(), torch.randint(50, (2, 6))
    before = copy.deepcopy(model.state_dict())
    seen = []

    def replace(layer, statistics):
        seen.append(statistics["self_attn.q_proj"].gram)
        layer = copy.deepcopy(layer)
        layer.mlp.down_proj.weight *= 2
        return layer

    twin = layer_by_layer(model, windows, replace)
    received = []
    for window in windows:
        hidden = model.embed_tokens(window)
        hidden = twin.run_layers(hidden, whole_sequence(twin, 6), [0])
        received.append(twin.layers[1].input_layernorm(hidden).float())
    rows = torch.cat(received)
    assert torch.allclose(seen[1].float(), rows.T @ rows / len(rows), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_calibration_windows_take_all_modules_in_turn():
    class Letters:
        def __call__(self, text, **_):
            return {"input_ids": list(text[:5000].encode())}

    windows = calibration_windows(Letters(), 18, 40)
    assert windows.shape == (18, 40) and len(windows.unique(dim=0)) == 18
    more = calibration_windows(Letters(), 32, 40)
    assert torch.equal(more[:18], windows)
    with pytest.raises(ValueError, match="count: got 10000000; accepted: at most"):
        calibration_windows(Letters(), 10_000_000, 40)
