"""Bad input to the wrappers: each is refused in one line that names the argument, the value and
what is accepted.
"""

import pytest
import torch

from lessons.l03_kv_cache.lab.testing import decode_arguments as arguments
from lessons.l06_mla.optimized import Tiles
from lessons.l10_flash_decoding.mla import mla_flash_decode
from lessons.l10_flash_decoding.optimized import combine, flash_decode, split_decode
from lessons.toolbox.proof.refusals import assert_message

INTEGERS = torch.ones(4, dtype=torch.int32)


def latents():
    return dict(
        q=torch.zeros(2, 4, 48),
        kv_cache=torch.zeros(2, 9, 48),
        context_lens=torch.ones(2, dtype=torch.int32),
        softmax_scale=0.2,
        kv_lora_rank=32,
    )


BAD_LENGTHS = [
    (INTEGERS[::2], "context_lens: got .* strides .2,.; accepted: contiguous"),
    (INTEGERS[:1].expand(2), "context_lens: got .* strides .0,.; accepted: contiguous"),
    (INTEGERS[:2] * 10, "context_lens: got values from 10 to 10; accepted: 0 to 9"),
]


@pytest.mark.parametrize("lengths, message", BAD_LENGTHS)
def test_bad_lengths_are_refused(lengths, message):
    for wrapper, given in (
        (flash_decode, arguments()),
        (split_decode, arguments()),
        (mla_flash_decode, latents()),
    ):
        assert_message(wrapper, given | dict(context_lens=lengths), message)


BAD = [
    (flash_decode, arguments(), dict(window=-1), "window: got -1; accepted: None, or 1 or more"),
    (split_decode, arguments(), dict(block_n=0), "block_n: got 0; accepted: a power of two, 16"),
    (split_decode, arguments(), dict(block_n=3), "block_n: got 3"),
    (split_decode, arguments(), dict(block_n=31), "block_n: got 31"),
    (mla_flash_decode, latents(), dict(tiles=Tiles(3, 16, 4, 1)), "block_h: got 3"),
    (mla_flash_decode, latents(), dict(tiles=Tiles(16, 0, 4, 1)), "block_n: got 0"),
    (combine, {}, dict(partial_out=torch.zeros(2, 4, 3, 0), partial_lse=torch.zeros(2, 4, 3)),
     "S and D at least 1"),
]  # fmt: skip


@pytest.mark.parametrize("wrapper, given, change, message", BAD)
def test_bad_arguments_are_refused(wrapper, given, change, message):
    assert_message(wrapper, given | change, message)


@pytest.mark.parametrize(
    "wrapper, given", [(flash_decode, arguments()), (mla_flash_decode, latents())]
)
def test_a_device_without_data_is_refused(wrapper, given):
    moved = {k: x.to("meta") if isinstance(x, torch.Tensor) else x for k, x in given.items()}
    assert_message(wrapper, moved, "not meta")
