"""The block-scaled product equals the product of the numbers, on a CPU that runs its code for
sm_100 and on a Blackwell GPU; planted bugs are caught.
"""

import re

import pytest
import torch

from lessons.l09_flash_attention.checks.gluon_cases import need_chip, need_no_gpu, with_bug
from lessons.l09_flash_attention.hopper.blackwell import tiles
from lessons.l18_weight_quantization.methods.nvfp4 import to_nvfp4
from lessons.l18_weight_quantization.weights import Mxfp4Weight
from lessons.l19_kv_quantization.activations.block_scaled import gluon_matmul, naive, operands
from lessons.l19_kv_quantization.activations.block_scaled.gluon_matmul import block_scaled_kernel
from lessons.l19_kv_quantization.activations.block_scaled.operands import (
    BlockScaled,
    in_atoms,
    in_rows,
)
from lessons.l19_kv_quantization.activations.w4a4 import nvfp4_tokens
from lessons.l19_kv_quantization.checks.block_scaled_cases import (
    DEVICE,
    MXFP4,
    NVFP4,
    WRONG,
    check,
    hold,
    random_operand,
)
from lessons.l19_kv_quantization.lab import block_scaled_picture as picture
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.proof.numerics import NotEquivalent


@pytest.fixture
def blackwell_or_cpu():
    need_chip(100)


@pytest.fixture
def compiled_on_cpu(blackwell_or_cpu):
    need_no_gpu()


# ---------------------------------------------------------------- operands


def test_atoms_are_cublas_layout():
    """Byte (r, s) of an atom by the formula, the last rows and columns 0, and back again."""
    scales = torch.arange(130 * 6, dtype=torch.int64).remainder(251).add(1).to(torch.uint8)
    scales = scales.view(130, 6)
    atoms = in_atoms(scales)
    assert atoms.shape == (2, 2, 512)
    for row, s in [(0, 0), (1, 0), (33, 3), (127, 5), (128, 1), (129, 4)]:
        r, byte = row % 128, s % 4
        at = r % 32 * 16 + r // 32 * 4 + byte
        assert atoms[row // 128, s // 4, at] == scales[row, s]
    assert int((atoms > 0).sum()) == scales.numel()
    assert torch.equal(in_rows(atoms, 130, 6), scales)


def test_the_picture_of_an_atom():
    """What README.md says of row 70, and no texts that collide."""
    matrix, atom, columns = picture.places()
    assert matrix.shape == (128, 4) and atom.reshape(-1)[107] == 70
    assert columns[6::32, 2].tolist() == [70] * 4 and sorted(columns[:32].reshape(-1)) == [
        *range(128)
    ]
    figure = picture.draw_atoms()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_tokens_are_those_of_w4a4(seed):
    """The same rounding, so what was said of its quality holds here."""
    torch.manual_seed(seed)
    x = torch.randn(5, 64) * torch.logspace(-3, 3, 5)[:, None]
    found = naive.dequantize(operands.of_tokens(x))
    torch.testing.assert_close(found.float(), nvfp4_tokens(x), rtol=1e-6, atol=0)


def test_weights_are_those_of_lesson_18(seed):
    torch.manual_seed(seed)
    weight = to_nvfp4(torch.randn(40, 96))
    found = naive.dequantize(operands.of_weight(weight))
    torch.testing.assert_close(found.float(), weight.dequantize(), rtol=1e-6, atol=0)
    codes = torch.randint(0, 256, (40, 48), dtype=torch.uint8)
    weight = Mxfp4Weight(codes, torch.randint(0, 256, (40, 3), dtype=torch.uint8))
    found = naive.dequantize(operands.of_weight(weight))
    torch.testing.assert_close(found.float(), weight.dequantize(), equal_nan=True, rtol=0, atol=0)


# ---------------------------------------------------------------- equal to the product of numbers


SHAPES = [  # tokens, outputs, inputs
    (1, 8, 32),
    (128, 128, 256),
    (129, 136, 288),
    (130, 264, 1312),
    (70, 520, 2336),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale_type", [NVFP4, MXFP4])
@pytest.mark.sample(1, of="the block-scaled product")
def test_block_scaled_product(shape, scale_type, seed, proof, blackwell_or_cpu):
    """Shapes below, at and above a tile, a step and the four stages."""
    tokens, outputs, inputs = shape
    a = random_operand(tokens, inputs, scale_type, seed)
    b = random_operand(outputs, inputs, scale_type, seed + 1)
    for block_n in (128, 256):
        check(gluon_matmul.block_scaled_matmul, a, b, block_n)
    proof.record(block_scaled_kernel, chip=100)


@pytest.mark.sample(1, of="the block-scaled product")
def test_a_layer_of_w4a4(seed, blackwell_or_cpu):
    """Tokens and weights as lessons 18 and 19 round them."""
    torch.manual_seed(seed)
    x, weight = torch.randn(20, 288), torch.randn(72, 288)
    a, b = operands.of_tokens(x.to(DEVICE)), operands.of_weight(to_nvfp4(weight.to(DEVICE)))
    check(gluon_matmul.block_scaled_matmul, a, b)


@pytest.mark.sample(1, of="the block-scaled product")
def test_a_scale_that_is_nan_stays_in_its_row(seed, blackwell_or_cpu):
    a = random_operand(130, 320, MXFP4, seed)
    b = random_operand(136, 320, MXFP4, seed + 1)
    scales = in_rows(a.atoms, 130, 10)
    scales[129, 9] = 255
    a = BlockScaled(a.codes, in_atoms(scales), a.row_scale)
    found = gluon_matmul.block_scaled_matmul(a, b)
    assert bool(found[129].isnan().all()) and bool(found[:129].isfinite().all())


@pytest.mark.sample(1, of="the block-scaled product")
def test_every_order_of_events_gives_the_same_bits(seed, compiled_on_cpu):
    a, b = (random_operand(rows, 1312, NVFP4, seed + rows) for rows in (130, 136))
    first, *others = [gluon_matmul.block_scaled_matmul(a, b) for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)


def test_it_refuses_what_it_does_not_do():
    a, b = (random_operand(8, 64, NVFP4, seed) for seed in (0, 1))
    run = gluon_matmul.block_scaled_matmul
    other = random_operand(8, 96, NVFP4, 0)
    for x, y, block_n, said in (
        (a, other, 128, r"a, b: got K 64 and 96; accepted: the same for both"),
        (a, random_operand(8, 64, MXFP4, 0), 128, "scales in torch.float8_e4m3fn and torch.uint8"),
        (a, random_operand(9, 64, NVFP4, 0), 128, "b: got 9 rows; accepted: a multiple of 8"),
        (a, b, 64, "block_n: got 64; accepted: 128 or 256"),
        (random_operand(8, 48, NVFP4, 0), b, 128, "K a multiple of 32"),
        (BlockScaled(a.codes, other.atoms, a.row_scale), other, 128, "a.atoms: got"),
        (BlockScaled(a.codes, a.atoms, a.row_scale[:4]), b, 128, r"a.row_scale: got"),
        (BlockScaled(a.codes, a.atoms.view(torch.int8), a.row_scale), b, 128, "a.atoms: got"),
    ):
        with pytest.raises(ValueError, match=said):
            run(x, y, block_n)


# ---------------------------------------------------------------- planted bugs

RACE = r"race in (shared|tensor) memory|before it is written|no fence|deadlock|more arrivals"
WAITS = r"deadlock in program .* at the mbarrier of "
# name: (the text, what it becomes, what the error says; "" where only the numbers show it)
BUGS = {
    "scales of the neighbouring step": (
        "load(a_scale_desc, [m, i, 0, 0]",
        "load(a_scale_desc, [m, i + 1, 0, 0]",
        r"",
    ),
    "scales of the neighbouring rows": (
        "load(b_scale_desc, [n, i, 0, 0]",
        "load(b_scale_desc, [n + 1, i, 0, 0]",
        r"",
    ),
    "both sides take A's scales": (
        "copy_scales(b_scales, b_columns, stage)",
        "copy_scales(a_scales, b_columns, stage)",
        r"",
    ),
    "sums are kept in the first step": ("use_acc=i > 0", "use_acc=True", RACE),
    "sums are dropped in each step": ("use_acc=i > 0", "use_acc=False", r""),
    "the larger scale of a row forgotten": (
        "gl.expand_dims(row_scale, 1) * gl.expand_dims(scale, 0)",
        "gl.expand_dims(scale, 0)",
        r"",
    ),
    "the larger scale of a column forgotten": (
        "gl.expand_dims(row_scale, 1) * gl.expand_dims(scale, 0)",
        "gl.expand_dims(row_scale, 1)",
        r"",
    ),
    "the column scales of the first part for all": (
        "each = column + j * COLUMNS + gl",
        "each = column + gl",
        r"",
    ),
    "one stage's columns for all scales": (
        "ring.index(stage)._reinterpret",
        "ring.index(0)._reinterpret",
        r"race in tensor memory: it (writes what the tensor core reads|overwrites what)",
    ),
    "the product does not wait for the codes": (
        "        mbarrier.wait(ready.index(stage), i // STAGES & 1)\n",
        "",
        RACE,
    ),
    "the phase of the codes never turns": (
        "i // STAGES & 1)\n        tcgen05",
        "0)\n        tcgen05",
        r"",
    ),
    "stages are never free": ("        tcgen05_commit(free.index(stage))\n", "", WAITS),
    "a stage is filled again at once": (
        "        mbarrier.wait(free.index(stage), (i // STAGES & 1) ^ 1)\n",
        "",
        RACE,
    ),
    "the sums are read before the end": ("    mbarrier.wait(done.index(0), 0)\n", "", r""),
    "the end is told for the first step": (
        "        tcgen05_commit(free.index(stage))\n    tcgen05_commit(done.index(0))\n",
        "        tcgen05_commit(free.index(stage))\n        if i == 0:\n"
        "            tcgen05_commit(done.index(0))\n",
        RACE,
    ),
    "too few bytes announced": ("        + b_scale_desc.block_type.nbytes\n", "", r""),
    "the program ends before its store": (
        "    tma.store_wait(pendings=0)\n",
        "",
        r"the program ends before the copy engine has read",
    ),
    "UE4M3 read as UE8M0": (
        "scales.dtype, [ROWS, SCALES], AT)",
        "gl.uint8, [ROWS, SCALES], AT)",
        r"",
    ),
    "rows of the second half swapped": (
        "[first, column + j * COLUMNS]",
        "[first, column + (PARTS - 1 - j) * COLUMNS]",
        r"",
    ),
}  # fmt: skip


def shown_by(kernel, seed: int) -> None:
    """Raises NotEquivalent for every bug of BUGS."""
    for scale_type in (NVFP4, MXFP4):
        a = random_operand(130, 1568, scale_type, seed)
        b = random_operand(264, 1568, scale_type, seed + 1)
        check(kernel, a, b)


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.sample(1)
def test_a_planted_bug_is_caught(bug, tmp_path, seed, compiled_on_cpu):
    old, new, said = BUGS[bug]
    kernel = with_bug(gluon_matmul, (tiles,), old, new, tmp_path).block_scaled_matmul
    with pytest.raises(NotEquivalent) as caught:
        shown_by(kernel, seed)
    assert re.search(said, str(caught.value)), caught.value
    assert not said or isinstance(caught.value, Fault)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.sample(1)
def test_an_operand_in_another_order_is_caught(wrong, seed, blackwell_or_cpu):
    for scale_type in (NVFP4, MXFP4):
        a = random_operand(130, 544, scale_type, seed)
        b = random_operand(136, 544, scale_type, seed + 1)
        for given in ((wrong(a), b), (a, wrong(b))):
            with pytest.raises(NotEquivalent):
                hold(gluon_matmul.block_scaled_matmul(*given), a, b)
