"""Proves the products with an epilogue equal to the eager chains, that nothing between exists, and
that they refuse what they cannot read.
"""

import pytest
import torch

from lessons.l07_kernel_fusion import epilogue, naive
from lessons.l07_kernel_fusion.epilogue import relu_linear_kernel, swiglu_kernel
from lessons.l07_kernel_fusion.lab.specs import EPILOGUES
from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import default_device, interpreting
from lessons.toolbox.proof.numerics import NotEquivalent, draw, prove
from lessons.toolbox.proof.refusals import assert_message

DEVICE = default_device()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (R, I, K): one value, tiles with tails on every side, more than one tile on every side
SHAPES = [(1, 1, 1), (3, 70, 33), (65, 64, 32), (70, 130, 97)]


def matrices(shape, seed, dtype=torch.float32, count=3):
    """x: [R, K] and count - 1 weights [I, K], whose rows have gaps of poison between them."""
    rows, columns, size = shape
    sizes = [(rows, size)] + [(columns, size)] * (count - 1)
    found = [
        draw("non_contiguous", one, dtype=dtype, seed=seed + n, device=DEVICE)
        for n, one in enumerate(sizes)
    ]
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in found]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_with_its_epilogue(shape, dtype, seed, proof):
    x, gate, up = matrices(shape, seed, dtype)
    proof.record(swiglu_kernel, prove(epilogue.swiglu, naive.swiglu, (x, gate, up)))
    proof.record(relu_linear_kernel, prove(epilogue.relu_linear, naive.relu_linear, (x, gate)))


def test_the_epilogue_rounds_less_than_the_chain(seed):
    """Once instead of four times: so its error is the smaller one."""
    x, gate, up = matrices((64, 64, 64), seed, torch.bfloat16)
    exact = naive.swiglu(x.double(), gate.double(), up.double())
    errors = [
        (function(x, gate, up).double() - exact).square().mean().sqrt().item()
        for function in (epilogue.swiglu, naive.swiglu)
    ]
    assert errors[0] < 0.8 * errors[1], errors


def test_halves_of_a_merged_weight(seed):
    x, merged = matrices((5, 24, 40), seed, count=2)
    gate, up = merged.chunk(2)
    assert torch.equal(
        epilogue.swiglu(x, gate, up), epilogue.swiglu(x, gate.contiguous(), up.contiguous())
    )


def test_a_nan_stays_visible(seed):
    x, weight = matrices((3, 5, 7), seed, count=2)
    x[1, 2] = float("nan")
    out = epilogue.relu_linear(x, weight)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()
    assert (out[[0, 2]] >= 0).all()


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: accesses are counted in the interpreter")
def test_nothing_between_product_and_activation_exists(seed):
    """One result is written, once; x is read once for both weights, by each tile of columns."""
    x, gate, up = matrices((40, 70, 64), seed)
    with Accesses() as accesses:
        out = epilogue.swiglu(x, gate, up)
    assert (accesses.stores(out) == 1).all() and not accesses.loads(out).any()
    assert (accesses.loads(x) == 3).all(), "70 columns are three tiles of 32"
    assert all((accesses.loads(w) == 2).all() for w in (gate, up)), "40 rows are two tiles"
    assert accesses.outside(x, gate, up, out) == 0


WRONG = {
    "the epilogue on each part of the sum": lambda x, gate, up: sum(
        naive.swiglu(x[:, i : i + 32], gate[:, i : i + 32], up[:, i : i + 32]) for i in (0, 32)
    ),
    "gate and up exchanged": lambda x, gate, up: epilogue.swiglu(x, up, gate),
    "sigmoid in the place of silu": lambda x, gate, up: torch.sigmoid(x @ gate.T) * (x @ up.T),
    "a weight that is not transposed": lambda x, gate, up: naive.swiglu(x, gate.T, up.T),
}


@pytest.mark.parametrize("slip", WRONG)
def test_a_wrong_epilogue_is_rejected(slip, seed):
    inputs = matrices((64, 64, 64), seed)
    with pytest.raises(NotEquivalent):
        prove(WRONG[slip], naive.swiglu, inputs)


def test_no_rows_and_no_columns():
    assert epilogue.relu_linear(torch.zeros(0, 4), torch.zeros(3, 4)).shape == (0, 3)
    assert epilogue.relu_linear(torch.zeros(2, 4), torch.zeros(0, 4)).shape == (2, 0)


GIVEN = dict(x=torch.zeros(2, 4), gate_weight=torch.zeros(3, 4), up_weight=torch.zeros(3, 4))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=torch.zeros(4)), r"x: got torch.float32 \(4,\); accepted: \[R, K\]"),
        (dict(x=torch.zeros(2, 0)), "K at least 1"),
        (dict(x=torch.zeros(2, 4).double()), "x: got torch.float64"),
        (dict(gate_weight=torch.zeros(3, 5)), r"gate_weight: got .* \(3, 5\); accepted: .* 4\]"),
        (dict(up_weight=torch.zeros(2, 4)), "up_weight: got .*the same I for all weights"),
        (dict(up_weight=torch.zeros(3, 4).half()), "up_weight: got torch.float16"),
        (dict(x=torch.zeros(4, 2).T), r"x: got strides \(1, 2\); accepted: dense rows"),
        (dict(up_weight=torch.zeros(3, 4, device="meta")), "meta"),
    ],
)
def test_bad_input_is_one_line(change, message):
    assert_message(epilogue.swiglu, GIVEN | change, message)


@pytest.mark.compiler
def test_the_compiler_uses_tensor_cores_without_spills():
    for report in check_all(EPILOGUES):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, f"{report.name} on sm_{report.chip}: {report}"
        assert report.loads_128bit > 0 or report.census.get("LDGSTS"), report
        if "bf16" in report.name and report.chip >= 80:
            matrix = {"HMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "OMMA"} & set(report.census)
            assert matrix, f"{report.name} on sm_{report.chip}: {report.census}"
