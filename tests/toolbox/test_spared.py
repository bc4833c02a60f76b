"""What the interpreter does in vain is spared, and a kernel computes the same."""

from unittest import mock

import pytest
import torch

from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import has_triton, interpreting

if not (has_triton() and interpreting()):
    pytest.skip("NOT RUN: kernels are compiled here, not interpreted", allow_module_level=True)

from triton.runtime import interpreter

from lessons.toolbox.kernels import spared


@triton.jit
def twice(x):
    return tl.sum(tl.reshape(x + x, [16]), 0)


@triton.jit
def kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    total = 0
    for _ in range(3):
        total += twice(tl.load(x_ptr + at)) + tl.max(tl.load(x_ptr + at), 0)
    tl.store(out_ptr + tl.program_id(0), total)


def run(dtype) -> torch.Tensor:
    x, out = torch.arange(32).to(dtype), torch.zeros(2, dtype=dtype)
    kernel[(2,)](x, out, 16)
    wanted = 6 * x.view(2, 16).sum(1) + 3 * x.view(2, 16).amax(1)
    assert torch.equal(out, wanted)
    return out


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_the_language_is_replaced_once_a_launch(dtype):
    """And once more where a function inside the kernel knows another of its modules."""
    before = {name: getattr(tl, name) for name in ("load", "sum", "reduce")}
    with mock.patch.object(interpreter, "_patch_lang", wraps=interpreter._patch_lang) as patch:
        run(dtype)
        assert 1 <= patch.call_count <= 2
        run(dtype)
        assert patch.call_count <= 3
    assert {name: getattr(tl, name) for name in before} == before


def test_all_that_was_replaced_is_replaced():
    """By the names that are known the same functions are found as by looking at all."""
    scopes = [interpreter._LangPatchScope() for _ in range(2)]
    for place in spared.FUNCTIONS:
        found = []
        for scope, patch in zip(scopes, (interpreter._patch_builtin, SEARCHES)):
            patch(place, interpreter.interpreter_builder, scope)
            found.append([name for _, name, _ in scope._changes])
            scope.restore()
        assert found[0] == found[1]


SEARCHES = interpreter._patch_builtin.__wrapped__


def test_overflow_was_computed_and_never_told():
    """The whole answer of the check is an assertion that the interpreter leaves out."""
    semantic = interpreter.interpreter_semantic
    options = semantic.builder.options
    assert not options.debug and not options.sanitize_overflow
    with mock.patch.object(semantic.builder, "create_assert", side_effect=AssertionError):
        semantic.device_assert(semantic.to_tensor(False), "never told", None)


def test_an_error_inside_a_function_is_the_interpreters():
    @triton.jit
    def wrong(x):
        return tl.reshape(x, [3])

    @triton.jit
    def calls(x_ptr):
        wrong(tl.load(x_ptr + tl.arange(0, 16)))

    for _ in range(2):
        with pytest.raises(interpreter.InterpreterError):
            calls[(1,)](torch.zeros(16))
    run(torch.float32)
