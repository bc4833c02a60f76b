"""One line of a kernel or of a hook changed: the proof rejects it."""

import pytest
import torch

from lessons.l18_weight_quantization import optimized
from lessons.l18_weight_quantization.kernels import products as kernels
from lessons.l18_weight_quantization.kernels import unpack
from lessons.l18_weight_quantization.lab.testing import DEVICE, matrix, problem
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.proof.numerics import NotEquivalent, draw, prove
from lessons.toolbox.proof.planted import with_bug

pytestmark = pytest.mark.skipif(not interpreting(), reason="a wrong kernel may end the process")
ZEROS, SHORT, MXFP4, NVFP4 = "int4, zeros", "int4, groups of 32", "mxfp4", "nvfp4"

# name: (format, the right line, the wrong one)
KERNEL_BUGS = {
    "columns as if there were one group": (ZEROS, "group_of_byte * (CODES - 1) + half", "half"),
    "high halves and odd bytes confused": (ZEROS, "8 * odd + 4 * half", "8 * half + 4 * odd"),
    "zero point 0 instead of the middle": (ZEROS, "zero, dtype) - MIDDLE", "zero, dtype)"),
    "zero point off by one": (ZEROS, "- 1024.0)", "- 1023.0)"),
    "the first group's scale": (ZEROS, "row * stride_row + group *", "row * stride_row + 0 *"),
    "no scale": (ZEROS, "part * tl.trans(scale_of(scale))", "part"),
    "a step left out": (ZEROS, "begin + steps_a_split,", "begin + steps_a_split - 1,"),
    "every split from the start": (ZEROS, "split * steps_a_split\n", "0 * steps_a_split\n"),
    "partials in one place": (ZEROS, "split.to(tl.int64) * num_rows", "0 * num_rows"),
    "the last partial left out": (ZEROS, "range(num_splits)", "range(num_splits - 1)"),
    "the bias of another output": (ZEROS, "value % num_outputs", "value // num_outputs"),
    "no scale for short groups": (SHORT, "number *= weight_scale", "number *= 1"),
    "E8M0 counts from 126": (MXFP4, "exponent << 23)", "(exponent + 1) << 23)"),
    "E4M3 counts from another bias": (NVFP4, "tl.float32) * 256.0", "tl.float32) * 128.0"),
    "a mantissa bit of the scale lost": (NVFP4, "(bits & 0x7F) << 7", "(bits & 0x7E) << 7"),
    "no scale of the matrix": (NVFP4, "acc *= tl.load(tensor_scale_ptr)", "acc *= 1"),
}
HOOK_BUGS = {
    "codes counted from 7": (ZEROS, "tl.bfloat16) - 136.0", "tl.bfloat16) - 135.0"),
    "the lower half of a word twice": (ZEROS, "(word >> 16).to(tl.uint16)", "word.to(tl.uint16)"),
    "a sign as a bit of the exponent": (MXFP4, "magnitude | (top & 0x80008000)", "magnitude"),
    "a bias of one less": (MXFP4, "2 ** (EXPONENT_BITS - 1))", "2 ** (EXPONENT_BITS - 1) - 1)"),
}


def the_check(name: str, seed: int) -> None:
    """Two splits of several steps, two rows, a bias."""
    weight = matrix(name, 18, 192, seed, scale_dtype=torch.bfloat16)
    x = draw("normal", (2, 192), dtype=torch.bfloat16, seed=seed + 1, device=DEVICE)
    bias = draw("normal", (18,), dtype=torch.bfloat16, seed=seed + 2, device=DEVICE)

    def multiply(x, weight, bias):
        return optimized.matmul(x, weight, bias, num_splits=2)

    fast, plain, tensors = problem(weight, multiply)
    prove(fast, plain, (x, tensors, bias))


@pytest.mark.parametrize("bug", [None, *KERNEL_BUGS, *HOOK_BUGS], ids=str)
def test_a_changed_line_is_rejected(bug, seed, tmp_path, monkeypatch):
    """And without a bug the same check passes, for each format."""
    if bug is None:
        for name in (ZEROS, SHORT, MXFP4, NVFP4):
            the_check(name, seed)
        return
    if bug in KERNEL_BUGS:
        name, right, wrong = KERNEL_BUGS[bug]
        changed = with_bug(kernels, tmp_path, right, wrong)
        for kernel in ("quantized_matmul_kernel", "add_partials_kernel"):
            monkeypatch.setattr(optimized, kernel, getattr(changed, kernel))
    else:
        name, right, wrong = HOOK_BUGS[bug]
        changed = with_bug(unpack, tmp_path, right, wrong)
        for hook in ("int4", "e2m1"):
            monkeypatch.setattr(unpack, hook, getattr(changed, hook))
    with pytest.raises(NotEquivalent):
        the_check(name, seed)
