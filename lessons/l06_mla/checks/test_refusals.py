"""Bad input to the wrapper: each is refused in one line that names the argument, the value and what
is accepted.
"""

import pytest
import torch

from lessons.l06_mla.optimized import Tiles, mla_decode
from lessons.toolbox.proof.refusals import assert_message

INTEGERS = torch.ones(4, dtype=torch.int32)


def arguments():
    return dict(
        q=torch.zeros(2, 4, 48),
        kv_cache=torch.zeros(2, 9, 48),
        context_lens=torch.ones(2, dtype=torch.int32),
        softmax_scale=0.2,
        kv_lora_rank=32,
    )


BAD = [
    (dict(context_lens=INTEGERS[::2]), "context_lens: got .* strides .2,.; accepted: contiguous"),
    (dict(context_lens=INTEGERS[:1].expand(2)), "context_lens: got .* strides .0,.; accepted"),
    (dict(context_lens=INTEGERS[:2] * 10), "context_lens: got values from 10 to 10; .* 0 to 9"),
    (dict(q=torch.zeros(48).as_strided((2, 1, 48), (0, 2**31 + 1, 1))), "q: got heads .* apart"),
    (dict(tiles=Tiles(0, 16, 4, 1)), "block_h: got 0; accepted: a power of two, 16 or more"),
    (dict(tiles=Tiles(16, 3, 4, 1)), "block_n: got 3; accepted: a power of two, 16 or more"),
    (dict(tiles=Tiles(16, 31, 4, 1)), "block_n: got 31"),
    (dict(q=torch.zeros(2, 4, 16), kv_cache=torch.zeros(2, 9, 16)), "leaves .* -16 rotary values"),
]


@pytest.mark.parametrize("change, message", BAD)
def test_bad_arguments_are_refused(change, message):
    assert_message(mla_decode, arguments() | change, message)


def test_a_device_without_data_is_refused():
    names = ("q", "kv_cache", "context_lens")
    given = arguments()
    assert_message(mla_decode, given | {name: given[name].to("meta") for name in names}, "not meta")


def test_more_sequences_than_a_grid_holds_are_refused():
    many = dict(
        q=torch.zeros(1, 4, 48).expand(65536, 4, 48),
        kv_cache=torch.zeros(1, 9, 48).expand(65536, 9, 48),
        context_lens=torch.ones(65536, dtype=torch.int32),
    )
    assert_message(mla_decode, arguments() | many, "q: got 65536 sequences; accepted: up to 65535")


def test_no_sequence_and_no_head_give_nothing():
    given = arguments()
    nobody = {name: given[name][:0] for name in ("q", "kv_cache", "context_lens")}
    assert mla_decode(**given | nobody)[0].shape == (0, 4, 32)
    assert mla_decode(**given | dict(q=torch.zeros(2, 0, 48)))[0].shape == (2, 0, 32)
