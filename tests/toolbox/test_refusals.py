"""The helper that feeds bad input to kernels' wrappers finds the wrapper that accepts it, crashes
on it, or speaks unclearly.
"""

import pytest
import torch

from lessons.toolbox.proof.refusals import KINDS, assert_refused, wrong_variants

X = torch.zeros(3, 4, 8)


def strict(q, k, skip=None):
    """Checks everything but `skip`."""
    tests = {
        "dtype": q.dtype == k.dtype,
        "device": q.device == k.device,
        "shape": q.shape == k.shape,
        "stride": q.stride(-1) == 1,
    }
    if failed := [kind for kind, good in tests.items() if not good and kind != skip]:
        raise ValueError(f"q: got another {failed[0]} than k")
    return q


def test_a_strict_wrapper_passes_and_a_loose_one_is_found():
    assert_refused(strict, {"q": X, "k": X}, "q")
    for kind in KINDS:
        with pytest.raises(AssertionError, match="accepted"):
            assert_refused(strict, {"q": X, "k": X, "skip": kind}, "q")


@pytest.mark.parametrize(
    "error, said",
    [
        (TypeError("no"), "TypeError instead of ValueError"),
        (ValueError("q: two\nlines"), "not one line"),
        (ValueError("x is wrong"), "names 'q'"),
    ],
)
def test_another_exception_or_an_unclear_line_is_no_refusal(error, said):
    def wrapper(q):
        raise error

    with pytest.raises(AssertionError, match=said):
        assert_refused(wrapper, {"q": X}, "q")


def test_variants_are_wrong_in_one_way_each():
    variants = wrong_variants(X)
    assert len(variants) == 5 and wrong_variants(X[..., :1], ["stride"]) == {}
    dense = variants["last dimension not dense"]
    assert torch.equal(dense, X) and dense.stride(-1) == 2 and dense.dtype == X.dtype
    assert (
        wrong_variants(torch.zeros(2, dtype=torch.int32), ["dtype"])["dtype torch.float32"].dtype
        == torch.float32
    )
    with pytest.raises(ValueError, match="accepted: dtype, device"):
        wrong_variants(X, ["colour"])
