"""Poison, canaries and the allocation counter each catch the slip that they are for, and leave
honest code alone.
"""

import pytest
import torch

from lessons.toolbox.proof.traps import (
    Allocations,
    NotEquivalent,
    guarded_empty,
    poisoned,
    poisoned_empty,
    with_canaries,
)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_poison_is_nan(dtype):
    assert poisoned((3, 2), dtype).float().isnan().all()


@pytest.mark.parametrize(
    "dtype,value", [(torch.int64, 2**30), (torch.int32, 2**30), (torch.int8, 127), (torch.bool, 1)]
)
def test_poison_of_integers_is_out_of_every_bound(dtype, value):
    assert (poisoned((4,), dtype) == value).all()


def test_every_way_to_leave_memory_unwritten_is_poisoned():
    x = torch.ones(2, 3)
    with poisoned_empty():
        fresh = [
            torch.empty(4),
            torch.empty_like(x),
            x.new_empty(5),
            torch.empty_strided((2, 2), (2, 1)),
            x.new_empty_strided((2, 2), (2, 1)),
            torch.empty(2, dtype=torch.bfloat16),
            torch.Tensor(3),
        ]
        zeros = torch.zeros(3)
        computed = x + 1
    assert all(t.isnan().all() for t in fresh)
    assert zeros.sum() == 0 and computed.sum() == 12
    assert (torch.empty_like(x).fill_(1) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_canaries_let_writes_inside_pass(shape, dtype):
    out, check = with_canaries(shape, dtype, row_padding=3)
    assert out.shape == shape and out.dtype == dtype
    out.fill_(1)
    check()


@pytest.mark.parametrize(
    "offset,where",
    [
        (-1, "1 before its start"),
        (23, "1 behind its end"),
        (30, "8 behind its end"),
        (5, "in the padding of a row"),
    ],
)
def test_canaries_catch_a_write_outside(offset, where):
    # element [2, 4] is the last one, at 2 * 9 + 4 = 22
    out, check = with_canaries((3, 5), row_padding=4)
    out.as_strided((1,), (1,), out.storage_offset() + offset).fill_(float("nan"))
    with pytest.raises(NotEquivalent, match=where) as caught:
        check()
    assert caught.value.rule == "canary" and "1 elements outside" in str(caught.value)


def test_canaries_start_poisoned():
    out, _ = with_canaries((4, 4))
    assert out.isnan().all()


@pytest.mark.parametrize("place", [-1, 6])
def test_a_write_beside_an_empty_tensor_is_caught(place):
    with guarded_empty() as checks:
        inside = torch.empty(2, 3, dtype=torch.float32, device="cpu").fill_(1)
    assert len(checks) == 1 and inside.shape == (2, 3)
    with pytest.raises(NotEquivalent, match="1 elements outside"), guarded_empty():
        out = torch.empty(2, 3, dtype=torch.float32, device="cpu")
        out.as_strided((1,), (1,), out.storage_offset() + place).fill_(1)


def test_allocations_count_new_memory_only():
    x = torch.zeros(8, 4)
    with Allocations() as seen:
        # a transposed view of contiguous memory: the reshape of [4, 8] needs no copy
        x.t().reshape(-1, 8)[0].add_(1)
        x.expand(100, 8, 4)
        x.mul_(2)
    assert seen.bytes_allocated == 0 and seen.largest_elements == 0
    with Allocations() as seen:
        y = x + 1
        (y @ y.t()).softmax(-1)
    assert seen.largest_shape == (8, 8) and seen.largest_elements == 64
    assert seen.bytes_allocated == 4 * (32 + 64 + 64)


def test_allocations_see_the_score_matrix_and_not_the_tiles():
    q, k = torch.randn(32, 8), torch.randn(512, 8)
    with Allocations() as naive:
        (q @ k.t()).softmax(-1)
    with Allocations() as tiled:
        for start in range(0, 512, 64):
            (q @ k[start : start + 64].t()).exp_()
    assert naive.largest_elements == 32 * 512 and tiled.largest_elements == 32 * 64
