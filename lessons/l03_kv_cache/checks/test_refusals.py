"""Bad input to the kernels' wrappers: each is refused in one line that names the argument."""

import pytest
import torch

from lessons.l03_kv_cache import arguments as checks
from lessons.l03_kv_cache.lab.testing import DEVICE, decode_arguments
from lessons.l03_kv_cache.optimized import append_rows, decode_attention
from lessons.toolbox.proof.refusals import KINDS, assert_message, assert_refused


def append_arguments(**changes):
    return dict(
        k=torch.zeros(3, 2, 8),
        v=torch.zeros(3, 2, 8),
        k_cache=torch.zeros(9, 2, 8),
        v_cache=torch.zeros(9, 2, 8),
        slot_mapping=torch.arange(3),
        **changes,
    )


FOUR = "k, v, k_cache, v_cache: got"
BAD_APPENDS = [
    (dict(v=torch.zeros(3, 2, 4)), FOUR),
    (dict(k_cache=torch.zeros(9, 1, 8), v_cache=torch.zeros(9, 1, 8)), "slots, Hkv, D"),
    (dict(v_cache=torch.zeros(9, 2, 4)), "slots, Hkv, Dv"),
    (dict(v_cache=torch.zeros(8, 2, 8)), "slots, Hkv, Dv"),
    (dict(v=torch.zeros(3, 2, 8).half()), "one dtype"),
    (dict(slot_mapping=torch.arange(3, dtype=torch.int32)), "slot_mapping: got torch.int32"),
    (dict(slot_mapping=torch.arange(4)), "accepted: int64 .3,"),
    (dict(slot_mapping=torch.arange(6)[::2]), "slot_mapping: got .* strides .2,.*contiguous"),
    (dict(slot_mapping=torch.zeros(1, dtype=torch.int64).expand(3)), "slot_mapping: .* contiguous"),
    (dict(k=torch.zeros(3, 8, 2).transpose(1, 2)), "got strides"),
    (dict(k_cache=torch.zeros(1, 2, 8).expand(9, 2, 8)), "k_cache: .* do not overlap"),
    (dict(v_cache=torch.zeros(99).as_strided((9, 2, 8), (8, 8, 1))), "v_cache: .* do not overlap"),
    (
        dict(slot_mapping=torch.tensor([0, 1, 9])),
        "slot_mapping: got values from 0 to 9; .* -1 to 8",
    ),
    (dict(slot_mapping=torch.tensor([0, 1, -2])), "slot_mapping: got values from -2 to 1"),
]


@pytest.mark.parametrize("change, message", BAD_APPENDS)
def test_append_refuses(change, message):
    assert_message(append_rows, append_arguments() | change, message)


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "slot_mapping"])
def test_append_refuses_every_kind_of_wrong_tensor(name):
    kinds = KINDS if name != "slot_mapping" else ("dtype", "device", "shape")
    assert_refused(append_rows, append_arguments(), name, kinds)


ALL = "q, k_cache, v_cache, context_lens: got"
NO_HEADS = torch.zeros(2, 9, 0, 8)
BAD_DECODES = [
    (dict(q=torch.zeros(2, 3, 8)), "Hq a multiple of Hkv"),
    (dict(q=torch.zeros(1, 4, 8)), ALL),
    (dict(context_lens=torch.ones(3, dtype=torch.int32)), ALL),
    (dict(context_lens=torch.ones(1, dtype=torch.int32).expand(2)), "context_lens: .* contiguous"),
    (dict(context_lens=torch.ones(4, dtype=torch.int32)[::2]), "context_lens: .* contiguous"),
    (dict(context_lens=torch.tensor([1, 10])), "context_lens: got values from 1 to 10; .* 0 to 9"),
    (dict(context_lens=torch.tensor([-1, 9])), "context_lens: got values from -1 to 9"),
    (dict(k_cache=NO_HEADS, v_cache=NO_HEADS), "Hq a multiple of Hkv"),
    (dict(v_cache=torch.zeros(2, 9, 2, 8).double()), "accepted: all three float32"),
    (dict(v_cache=torch.zeros(2, 9, 1, 8)), "Hkv, Dv"),
    (dict(v_cache=torch.zeros(1, 2, 9, 2, 8)), "Hkv, Dv"),
    (dict(q=torch.zeros(2, 8, 4).transpose(1, 2)), "stride 1"),
    (dict(window=0), "window: got 0; accepted: None, or 1 or more"),
    (dict(window=-3), "window: got -3"),
    (dict(window="3"), "window: got '3'"),
    (dict(block_n=0), "block_n: got 0; accepted: a power of two"),
    (dict(block_n=31), "block_n: got 31"),
]


@pytest.mark.parametrize("change, message", BAD_DECODES)
def test_decode_refuses(change, message):
    assert_message(decode_attention, decode_arguments() | change, message)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "context_lens"])
def test_decode_refuses_every_kind_of_wrong_tensor(name):
    # V may have another width.
    kinds = {"context_lens": ("dtype", "device", "shape"), "v_cache": ("dtype", "device", "stride")}
    assert_refused(decode_attention, decode_arguments(), name, kinds.get(name, KINDS))


@pytest.mark.parametrize(
    "function, arguments",
    [(append_rows, append_arguments()), (decode_attention, decode_arguments())],
)
def test_a_device_without_data_is_refused(function, arguments):
    assert_message(function, {name: x.to("meta") for name, x in arguments.items()}, "not meta")


def test_values_on_a_gpu_are_not_read(monkeypatch):
    """A tensor that says that it lies on a GPU, and breaks if anybody looks."""

    class OnGPU:
        is_cpu, is_cuda = False, True

        def numel(self):
            return 3

    checks.check_values(0, 1, x=OnGPU())
    monkeypatch.setattr(checks, "VALUES_ON_GPU", True)
    with pytest.raises(AttributeError):
        checks.check_values(0, 1, x=OnGPU())


def test_a_sequence_beyond_32_bits_is_refused(monkeypatch):
    """The kernel counts a sequence's elements in 32 bits. Here the limit moves, not the cache."""
    arguments = {name: x.to(DEVICE) for name, x in decode_arguments().items()}
    monkeypatch.setattr(checks, "MAX_ELEMENTS", 9 * 2 * 8)
    decode_attention(**arguments)
    monkeypatch.setattr(checks, "MAX_ELEMENTS", 9 * 2 * 8 - 1)
    assert_message(decode_attention, arguments, "k_cache, v_cache: got a sequence that spans")


def test_no_sequence_gives_nothing():
    empty = dict(
        q=torch.zeros(0, 4, 8),
        k_cache=torch.zeros(0, 9, 2, 8),
        v_cache=torch.zeros(0, 9, 2, 8),
        context_lens=torch.ones(0, dtype=torch.int32),
    )
    assert decode_attention(**empty).shape == (0, 4, 8)
