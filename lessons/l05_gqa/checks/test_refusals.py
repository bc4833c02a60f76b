"""Bad input to the wrappers: each is refused in one line that names the argument, the value and
what is accepted. The kernel's wrapper and its stand-in in PyTorch refuse the same.
"""

import pytest
import torch

from lessons.l03_kv_cache.lab.testing import decode_arguments as arguments
from lessons.l05_gqa import arguments as checks
from lessons.l05_gqa.optimized import decode_attention, decode_attention_grouped
from lessons.toolbox.proof.refusals import KINDS, assert_message, assert_refused

WRAPPERS = [decode_attention, decode_attention_grouped]
INTEGERS = torch.ones(4, dtype=torch.int32)


def without_heads():
    return dict(k_cache=torch.zeros(2, 9, 0, 8), v_cache=torch.zeros(2, 9, 0, 8))


BAD = [
    (dict(context_lens=INTEGERS[::2]), "context_lens: got .* strides .2,.; accepted: contiguous"),
    (dict(context_lens=INTEGERS[:1].expand(2)), "context_lens: got .* strides .0,.; accepted"),
    (dict(context_lens=INTEGERS[:2] * 10), "context_lens: got values from 10 to 10; .* 0 to 9"),
    (dict(context_lens=-INTEGERS[:2]), "context_lens: got values from -1 to -1; accepted: 0 to 9"),
    (dict(context_lens=INTEGERS[:2].short()), "context_lens: got torch.int16; accepted: int32"),
    (dict(window=-1), "window: got -1; accepted: None, or 1 or more"),
    (dict(window=2.0), "window: got 2.0; accepted"),
    (
        dict(v_cache=torch.zeros(2, 9, 2, 4)),
        r"accepted: \[B, Hq, D\], \[B, capacity, Hkv, D\] twice",
    ),
    (without_heads(), "4 query heads and 0 KV heads; accepted"),
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("change, message", BAD)
def test_bad_arguments_are_refused(wrapper, change, message):
    assert_message(wrapper, arguments() | change, message)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "context_lens"])
def test_the_stand_in_refuses_every_kind_of_wrong_tensor(name):
    kinds = KINDS if name != "context_lens" else ("dtype", "device", "shape")
    assert_refused(decode_attention_grouped, arguments(), name, kinds)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_device_without_data_is_refused(wrapper):
    assert_message(wrapper, {name: x.to("meta") for name, x in arguments().items()}, "not meta")


def test_heads_too_far_apart_are_refused():
    far = torch.zeros(8).as_strided((2, 1, 8), (0, 2**31 + 1, 1))
    caches = {name: x[:, :, :1] for name, x in arguments().items() if "cache" in name}
    message = "q: got heads that are 2147483649 elements apart; accepted: all of a token's within"
    assert_message(decode_attention, arguments() | caches | dict(q=far), message)


def test_rows_too_far_apart_are_refused():
    """Their offsets would pass 32 bits. One row of memory stands for all, so it costs none."""
    apart = torch.zeros(8).as_strided((2, 1, 2, 8), (0, checks.MAX_ROW_STRIDE + 1, 0, 1))
    message = "k_cache, v_cache: got strides .*; accepted: rows up to 16777216 elements apart"
    assert_message(decode_attention, arguments() | dict(k_cache=apart, v_cache=apart), message)


def test_more_sequences_than_a_grid_holds_are_refused():
    many = 65536
    given = dict(
        q=torch.zeros(1, 4, 8).expand(many, 4, 8),
        k_cache=torch.zeros(1, 9, 2, 8).expand(many, 9, 2, 8),
        v_cache=torch.zeros(1, 9, 2, 8).expand(many, 9, 2, 8),
        context_lens=torch.ones(many, dtype=torch.int32),
    )
    assert_message(decode_attention, given, "q: got 65536 sequences; accepted: up to 65535")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_sequence_gives_nothing(wrapper):
    assert wrapper(**{name: x[:0] for name, x in arguments().items()}).shape == (0, 4, 8)
