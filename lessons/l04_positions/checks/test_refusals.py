"""Bad input to the wrappers: each is refused in one line that names the argument, the value and
what is accepted.
"""

import pytest
import torch

from lessons.l04_positions.optimized import rope_cache, rotate_rows
from lessons.toolbox.proof.refusals import assert_message

INTEGERS = torch.arange(6)


def rope_arguments():
    q, k, v = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.zeros(3, 2, 8)
    k_cache, v_cache = torch.zeros(9, 2, 8), torch.zeros(9, 2, 8)
    at = dict(positions=torch.arange(3), slot_mapping=torch.arange(3))
    table = dict(cos_sin_cache=torch.zeros(64, 8), last_position=63)
    return dict(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache) | at | table


def rotate_arguments():
    table = dict(cos_sin_cache=torch.zeros(64, 8), last_position=63)
    return dict(x=torch.zeros(3, 2, 8), positions=torch.arange(3)) | table


def expanded(num_rows):
    """Caches whose slots are all the same memory: [num_rows, 2, 8] each."""
    one = torch.zeros(1, 2, 8).expand(num_rows, 2, 8)
    return dict(k_cache=one, v_cache=one)


BAD_ROPES = [
    (dict(positions=INTEGERS[::2]), "positions: got .* strides .2,.; accepted: contiguous"),
    (dict(positions=INTEGERS[:1].expand(3)), "positions: got .* strides .0,.; accepted"),
    (dict(slot_mapping=INTEGERS[::2]), "slot_mapping: got .* strides .2,.; accepted: contiguous"),
    (dict(slot_mapping=INTEGERS[:1].expand(3)), "slot_mapping: got .* strides .0,.; accepted"),
    (dict(slot_mapping=INTEGERS[:3] + 7), "slot_mapping: got values from 7 to 9; .* -1 to 8"),
    (dict(slot_mapping=INTEGERS[:3] - 2), "slot_mapping: got values from -2 to 0; .* -1 to 8"),
    (expanded(9), "k_cache: got .* strides .0, 8, 1.; accepted: elements that do not overlap"),
    (
        dict(q=torch.zeros(1, 4, 8).expand(3, 4, 8)),
        "q: got .* accepted: elements that do not overlap",
    ),
    (dict(q=torch.zeros(3, 0, 8)), "q, k: got 0 query heads for 2 KV heads"),
    (dict(k=torch.zeros(3, 0, 8), v=torch.zeros(3, 0, 8), k_cache=torch.zeros(9, 0, 8),
          v_cache=torch.zeros(9, 0, 8)), "q, k: got 4 query heads for 0 KV heads"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", BAD_ROPES)
def test_rope_cache_refuses(change, message):
    assert_message(rope_cache, rope_arguments() | change, message)


FAR_APART = torch.zeros(8).as_strided((1, 1, 8), (8, 2**31 + 1, 1))
BAD_ROTATIONS = [
    (dict(positions=INTEGERS[::2]), "positions: got .* strides .2,.; accepted: contiguous"),
    (dict(positions=INTEGERS[:1].expand(3)), "positions: got .* strides .0,.; accepted"),
    (dict(x=torch.zeros(1, 2, 8).expand(3, 2, 8)), "x: got .* accepted: elements that do not"),
    (dict(x=torch.zeros(3, 1, 8).expand(3, 2, 8)), "x: got .* accepted: elements that do not"),
    (dict(x=FAR_APART, positions=INTEGERS[:1]), "x: got heads that are 2147483649 elements apart"),
]


@pytest.mark.parametrize("change, message", BAD_ROTATIONS)
def test_rotate_rows_refuses(change, message):
    assert_message(rotate_rows, rotate_arguments() | change, message)


@pytest.mark.parametrize(
    "wrapper, given", [(rope_cache, rope_arguments()), (rotate_rows, rotate_arguments())]
)
def test_a_device_without_data_is_refused(wrapper, given):
    moved = {k: x.to("meta") if isinstance(x, torch.Tensor) else x for k, x in given.items()}
    assert_message(wrapper, moved, "not meta")
