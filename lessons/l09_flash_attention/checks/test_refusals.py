"""Bad input to the wrappers: each is refused in one line that names the argument, the value and
what is accepted.
"""

import pytest
import torch

from lessons.l09_flash_attention import arguments as checks
from lessons.l09_flash_attention.fa1 import flash_attention_fa1
from lessons.l09_flash_attention.hopper.fp8 import flash_attention_fp8
from lessons.l09_flash_attention.optimized import flash_attention
from lessons.l09_flash_attention.tiles import Tiles
from lessons.l09_flash_attention.worklog.cuda_flash import flash_attention_cuda
from lessons.toolbox.proof.refusals import assert_message


def arguments(head_dim=8):
    return dict(
        q=torch.zeros(4, 4, head_dim),
        k=torch.zeros(6, 2, head_dim),
        v=torch.zeros(6, 2, head_dim),
    )


def starts(q=(0, 1, 4), k=(0, 2, 6)):
    """cu_seqlens of two packed sequences."""
    q, k = (torch.tensor(values, dtype=torch.int32) for values in (q, k))
    return dict(cu_seqlens_q=q, cu_seqlens_k=k)


ASCENDING = "accepted: ascending from 0 to"
BAD = [
    (dict(window=-1), "window: got -1; accepted: None, or 1 or more"),
    (dict(window=2.5), "window: got 2.5; accepted: None, or 1 or more"),
    (dict(k=torch.zeros(6, 0, 8), v=torch.zeros(6, 0, 8)), "accepted: Hq a multiple of Hkv"),
    (dict(tiles=Tiles(0, 16)), "block_m: got 0; accepted: a power of two, 16 or more"),
    (dict(tiles=Tiles(16, 3)), "block_n: got 3; accepted: a power of two, 16 or more"),
    (dict(tiles=Tiles(31, 16)), "block_m: got 31"),
    (dict(max_seqlen_q=3), "max_seqlen_q: got 3; accepted: None, or 4 or more"),
    (starts() | dict(max_seqlen_q=2), "max_seqlen_q: got 2; accepted: None, or 3 or more"),
    (starts(q=(0, 1, 5)), f"cu_seqlens_q: got .0, 1, 5.; {ASCENDING} 4"),
    (starts(q=(1, 2, 4)), f"cu_seqlens_q: got .1, 2, 4.; {ASCENDING} 4"),
    (starts(q=(0, 5, 4)), f"cu_seqlens_q: got .0, 5, 4.; {ASCENDING} 4"),
    (starts(k=(0, 1, 5)), f"cu_seqlens_k: got .0, 1, 5.; {ASCENDING} 6"),
    (
        starts() | dict(cu_seqlens_q=torch.zeros(6, dtype=torch.int32)[::2]),
        "cu_seqlens_q: .* dense",
    ),
    (dict(q=torch.zeros(4, 4, 8).as_strided((1, 4, 8), (2**24 + 1, 8, 1))), "q, k, v: .* apart"),
]


@pytest.mark.parametrize("change, message", BAD)
def test_bad_arguments_are_refused(change, message):
    assert_message(flash_attention, arguments() | change, message)


BAD_TILES = [
    (flash_attention_fa1, arguments(), Tiles(16, 31), "block_n: got 31"),
    (flash_attention_fp8, arguments(32), Tiles(16, 16), "block_n: got 16; accepted: .* 32 or more"),
    (flash_attention_fp8, arguments(32), Tiles(3, 32), "block_m: got 3"),
]


@pytest.mark.parametrize("wrapper, given, tiles, message", BAD_TILES)
def test_bad_tiles_are_refused(wrapper, given, tiles, message):
    assert_message(wrapper, given | dict(tiles=tiles), message)


@pytest.mark.parametrize("wrapper", [flash_attention, flash_attention_fa1, flash_attention_fp8])
def test_a_device_without_data_is_refused(wrapper):
    assert_message(wrapper, {name: x.to("meta") for name, x in arguments(32).items()}, "not meta")


def test_longer_than_a_grid_is_refused():
    """One row of memory stands for all queries, so they cost none."""
    long = torch.zeros(1, 2, 64).expand(2**20, 2, 64)
    tiles = "q: got 65536 tiles of 16 queries; accepted: up to 65535"
    assert_message(checks.check_tiles, dict(tiles=Tiles(16, 16), num_queries=len(long)), tiles)
    blocks = "q, k, v: got head sizes 64 and 64, strides .*; accepted: 64 or 128 for all, dense"
    assert_message(flash_attention_cuda, dict(q=long, k=long, v=long), blocks)


class OnGPU:
    """A tensor of integers that says that it lies on a GPU, and breaks if anybody looks."""

    dtype, ndim, is_cpu, is_meta, device = torch.int32, 1, False, False, torch.device("cuda", 0)

    def __len__(self):
        return 3

    def is_contiguous(self):
        return True


def test_values_on_a_gpu_are_read_only_when_asked_for(monkeypatch):
    q = OnGPU()
    given = (q, q, OnGPU(), OnGPU())
    assert checks.check_sequences(*given, max_seqlen_q=2)[2] == 2
    monkeypatch.setattr(checks, "VALUES_ON_GPU", True)
    with pytest.raises(AttributeError):
        checks.check_sequences(*given, max_seqlen_q=2)


def test_one_sequence_needs_no_cu_seqlens():
    _, _, longest = checks.check_sequences(
        torch.zeros(4, 1, 8), torch.zeros(6, 1, 8), None, None, 9
    )
    assert longest == 4
