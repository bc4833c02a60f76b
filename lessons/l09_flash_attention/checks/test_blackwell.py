"""The Blackwell kernel equals the oracle on a CPU that runs its code for sm_100, and on a Blackwell
GPU; planted bugs are caught.
"""

import re

import pytest
import torch

from lessons.l09_flash_attention.checks.gluon_cases import (
    DEVICE,
    inputs,
    need_chip,
    need_no_gpu,
    proved,
    with_bug,
)
from lessons.l09_flash_attention.hopper.blackwell import gluon_flash as blackwell
from lessons.l09_flash_attention.hopper.blackwell import tiles
from lessons.l09_flash_attention.hopper.blackwell.gluon_flash import flash_blackwell_kernel
from lessons.l09_flash_attention.hopper.blackwell.tiles import exp2_by_polynomial, gl, gluon
from lessons.l09_flash_attention.lab import specs
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.gpu.gluon import on_the_machine
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.proof.numerics import ATTENTION_INPUTS, NotEquivalent

LENGTHS = [1, 127, 128, 129, 255, 256, 257]
KERNEL = blackwell.flash_attention_blackwell


@pytest.fixture
def blackwell_or_cpu():
    need_chip(100)


@pytest.fixture
def compiled_on_cpu(blackwell_or_cpu):
    need_no_gpu()


# ---------------------------------------------------------------- equal to the oracle


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.sample(1, of="the Blackwell kernel")
def test_blackwell_kernel(length, head_dim, seed, proof, blackwell_or_cpu):
    for causal in (True, False):
        given = inputs(length, length + 5, 2, 1, head_dim, seed=seed)
        proof.record(flash_blackwell_kernel, proved(*given, causal, KERNEL), chip=100)


@pytest.mark.parametrize("num_queries, num_keys", [(1, 1), (1, 700), (5, 129), (300, 70), (300, 1)])
@pytest.mark.sample(1, of="the Blackwell kernel")
def test_blackwell_kernel_is_aligned_bottom_right(
    num_queries, num_keys, seed, proof, blackwell_or_cpu
):
    """With more queries than keys the first ones see no key: 0 and -inf, whole groups of them."""
    given = inputs(num_queries, num_keys, seed=seed)
    proof.record(flash_blackwell_kernel, proved(*given, True, KERNEL), chip=100)


@pytest.mark.parametrize("name", [name for name in ATTENTION_INPUTS if name != "non_contiguous"])
@pytest.mark.sample(1, of="the Blackwell kernel")
def test_blackwell_kernel_on_hard_inputs(name, seed, proof, blackwell_or_cpu):
    """Among them rows whose maximum grows by more than 8, and by less, from tile to tile."""
    given = inputs(150, 400, 2, 1, 64, seed=seed, name=name)
    proof.record(flash_blackwell_kernel, proved(*given, True, KERNEL, name), chip=100)


@pytest.mark.sample(1, of="the Blackwell kernel")
def test_blackwell_kernel_with_grouped_heads(seed, proof, blackwell_or_cpu):
    given = inputs(20, 140, 8, 2, 64, seed=seed)
    proof.record(flash_blackwell_kernel, proved(*given, True, KERNEL), chip=100)


def rising(step: float, seed: int, tiles: int = 5):
    """One head of queries, and keys whose scores grow by `step`, in bits, from tile to tile, as the
    kernel walks: from the last tile to the first.
    """
    num_keys = 128 * tiles
    q, k, v = inputs(64, num_keys, 1, 1, 64, seed=seed, on="cpu")
    unit = torch.zeros(64)
    unit[0] = 1.0
    tile = tiles - 1 - torch.arange(num_keys) // 128
    k = (k * 0.01 + (tile * step)[:, None, None] * unit).bfloat16()
    q = (q * 0.01 + 8 / 1.4426950408889634 * unit).bfloat16()  # 1 / 8 is the scale of the scores
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)


@pytest.mark.parametrize("step, tiles", [(2.0, 5), (7.5, 5), (8.5, 5), (40.0, 5), (40.0, 2)])
@pytest.mark.sample(1, of="the Blackwell kernel")
def test_a_maximum_that_grows(step, tiles, seed, proof, blackwell_or_cpu):
    """Below, at and above the 8 bits from which on a row's maximum is replaced. With two tiles the
    first one weighs nothing, which later tiles would hide.
    """
    given = rising(step, seed, tiles)
    proof.record(flash_blackwell_kernel, proved(*given, False, KERNEL), chip=100)


@pytest.mark.sample(1, of="the Blackwell kernel")
def test_every_order_of_events_gives_the_same_bits(seed, compiled_on_cpu):
    """Programs, and the ends of copies and of products, in three drawn orders."""
    given = inputs(200, 400, seed=seed)
    first, *others = [KERNEL(*given) for _ in range(3)]
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other))


def test_blackwell_refuses_what_it_does_not_do():
    with pytest.raises(ValueError, match="64 or 128 for all"):
        KERNEL(*inputs(4, 4, head_dim=32, on="cpu"))
    q, k, v = inputs(4, 4, on="cpu")
    with pytest.raises(ValueError, match="float32"):
        KERNEL(q.float(), k.float(), v.float())


# ---------------------------------------------------------------- the polynomial


@gluon.jit
def exp2_kernel(x_ptr, y_ptr, N: gl.constexpr):
    """y = 2^x. x, y: [N] float32."""
    i = gl.arange(0, N, gl.BlockedLayout([4], [32], [4], [0]))
    gl.store(y_ptr + i, exp2_by_polynomial(gl.load(x_ptr + i)))


def test_the_polynomial(compiled_on_cpu):
    """Within 3e-6 of 2^x, exact at integers, 0 where a key is masked."""
    x = torch.linspace(-126, 8, 4096, dtype=torch.float32)
    x[:5] = torch.tensor([float("-inf"), -1e30, -127.0, 0.0, 8.0])
    y = torch.empty_like(x)
    with on_the_machine(100):
        exp2_kernel[(1,)](x, y, N=len(x))
    assert y[:5].tolist() == [0.0, 0.0, 0.0, 1.0, 256.0]
    exact = torch.exp2(x[5:].double())
    assert ((y[5:] - exact).abs() / exact).max() < 3e-6


# ---------------------------------------------------------------- planted bugs

RACE = r"race in (shared|tensor) memory|is read before it is written|deadlock|more arrivals"
WAITS = r"deadlock in program .* at the mbarrier of "
# name: (the text, what it becomes, what the error says; "" where only the numbers show it)
BUGS = {
    "the next scores do not wait for p · v": (
        "                mbarrier.wait(done, i & 1)  # the next scores overwrite the weights\n",
        "",
        RACE,
    ),
    "the product does not wait for the weights": (
        "            mbarrier.wait(weights_ready.index(group), i & 1)\n",
        "",
        RACE,
    ),
    "the softmax does not wait for the scores": (
        "            mbarrier.wait(scores_ready.index(GROUP), i & 1)\n",
        "",
        r"",
    ),
    "the phase of the scores never turns": (
        "mbarrier.wait(scores_ready.index(GROUP), i & 1)",
        "mbarrier.wait(scores_ready.index(GROUP), 0)",
        r"",
    ),
    "out is read before its last product has ended": (
        "    mbarrier.wait(out_ready.index(GROUP), (num_tiles - 1) & 1)\n",
        "",
        r"",
    ),
    "v freed for each group": (
        "        free_tile(v, i)\n",
        "            free_tile(v, i)\n",
        RACE,
    ),
    "v never freed": ("        free_tile(v, i)\n", "", WAITS),
    "k's first tile never freed": ("    free_tile(k, 0)\n", "", WAITS),
    "k freed twice": (
        "            free_tile(k, i + 1)\n",
        "            free_tile(k, i + 1)\n            free_tile(k, i + 1)\n",
        r"",
    ),
    "the first product adds to what was there": ("use_acc=i > 0", "use_acc=True", RACE),
    "no product adds to those before": ("use_acc=i > 0", "use_acc=False", r""),
    "both groups multiply the first one's weights": (
        "weights_of(scores.index(group), 0",
        "weights_of(scores.index(0), 0",
        r"",
    ),
    "weights as far apart as scores": (
        "scores.slice(j * COLUMNS // 2, COLUMNS // 2)",
        "scores.slice(j * COLUMNS % 96, COLUMNS // 2)",
        r"",
    ),
    "out is not rescaled": ("                rescale(out, alpha, COLUMNS, PART)\n",
                            "                pass\n", r""),
    "only a quarter of out is rescaled": (
        "gl.static_range(tile.shape[1] // COLUMNS)", "gl.static_range(1)", r"",
    ),
    "out is rescaled only if all rows are": ("gl.min(alpha, 0)", "gl.max(alpha, 0)", r""),
    "l is not rescaled": ("    l_i = l_i * alpha\n", "", r""),
    "a maximum is never replaced": ("m_new - m_i > 8.0", "m_new - m_i > 8000.0", r""),
    "queries that see no key get NaN": (
        'gl.where(m_new == float("-inf"), 0.0, m_new)', "m_new", r"",
    ),
    "division by zero where no key is seen": ("gl.where(l_i == 0.0, 1.0, l_i)", "l_i", r""),
    "keys beyond the last are seen": ("key < num_keys,", "key < num_keys + 128,", r""),
    "the diagonal is not seen": ("expand_dims(key, 0) <= gl", "expand_dims(key, 0) < gl", r""),
    "each part is masked as the first": ("start_n + j * COLUMNS + gl", "start_n + gl", r""),
    "both groups take the first one's queries": ("    first += GROUP * ROWS\n", "", r""),
    "masked keys weigh a little": ("gl.maximum(x, -127.0)", "gl.maximum(x, -20.0)", r""),
    "the exponent at the wrong bit": ("<< 23", "<< 22", r""),
    "a polynomial of degree 3": ("0.009582853168910178 * f + 0.0559064250364588",
                                 "0.0 * f + 0.0559064250364588", r""),
    "the log-sum-exp in base 2": (" * 0.6931471805599453", "", r""),
    "the program ends before its store": (
        "    tma.store_wait(pendings=0)\n",
        "",
        r"the program ends before the copy engine has read",
    ),
}  # fmt: skip


def shown_by(kernel, seed: int) -> None:
    """Raises NotEquivalent for every bug of BUGS."""
    for num_queries, num_keys, causal in [(300, 420, True), (300, 100, True), (70, 300, False)]:
        proved(*inputs(num_queries, num_keys, 2, 1, seed=seed), causal, kernel)
    for step in (40.0, -300.0):
        proved(*rising(step, seed), False, kernel)


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.sample(1)
def test_a_planted_bug_is_caught(bug, tmp_path, seed, compiled_on_cpu):
    old, new, said = BUGS[bug]
    kernel = with_bug(blackwell, (tiles,), old, new, tmp_path).flash_attention_blackwell
    with pytest.raises(NotEquivalent) as caught:
        shown_by(kernel, seed)
    assert re.search(said, str(caught.value)), caught.value
    assert not said or isinstance(caught.value, Fault)


# ---------------------------------------------------------------- the compiler


@pytest.mark.compiler
def test_the_compiler_keeps_the_products_on_the_tensor_core():
    """No spills; products and copies beside the warps; every score has an exponential, and of those
    a quarter are no instruction of the special function unit.
    """
    reports = check_all(spec for spec in specs.KERNELS if spec.name.startswith("blackwell"))
    for report in reports:
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, report
        assert report.matrix_instruction == "UTCHMMA" and report.tma_instructions, report
        # two groups, each with a loop with a mask and one without: a row of 96 scores and alpha
        assert 4 * (96 + 1) <= report.census["MUFU"] <= 4 * (96 + 1) + 8, report
