"""Every layout, to the last bit: against plain loops written from the other libraries' sources, and
against the libraries themselves where they are installed.
"""

from dataclasses import fields

import pytest
import torch

from lessons.l18_weight_quantization.naive import (
    round_to_nearest,
)
from lessons.l18_weight_quantization.weights import (
    GroupedInt,
    QuantizedWeight,
    pack,
    unpack,
)
from reference.checkpoints import float_layouts, layouts
from reference.checkpoints.layouts import awq, gptq, pack_quantized

pytestmark = pytest.mark.usefixtures("seed")
N, K, GROUP = 16, 64, 16
ASYMMETRIC = {4: dict(bits=4, symmetric=False), 8: dict(bits=8, symmetric=False)}


def random_ints(bits: int, symmetric: bool = False, ordered: bool = False) -> GroupedInt:
    """Random codes, scales and zeros, so that no value is left out. ordered: act-order."""
    codes = torch.randint(2**bits, (N, K // GROUP, GROUP), dtype=torch.uint8)
    zeros = None if symmetric else torch.randint(2**bits, (N, K // GROUP), dtype=torch.uint8)
    scales = torch.rand(N, K // GROUP).half() + 0.01
    order = torch.randperm(K) if ordered else None
    return GroupedInt(pack(codes, bits), scales, zeros, bits, GROUP, order)


def assert_same(one: QuantizedWeight, other: QuantizedWeight) -> None:
    """Every field, every bit."""
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == theirs.dtype and torch.equal(mine.float(), theirs.float()), field
        else:
            assert mine == theirs, field


# ---------------------------------------------------------------- plain loops


def bits_at(words: torch.Tensor, row: int, column: int, at: int, bits: int) -> int:
    """`bits` bits of an int32, from bit `at` on."""
    return (int(words[row, column]) >> at) & (2**bits - 1)


def plain_gptq(parts, bits, lag):
    """AutoGPTQ, qlinear_cuda_old.py, forward: number by number."""
    each, weight = 32 // bits, torch.empty(N, K)
    for n in range(N):
        for k in range(K):
            group = int(parts["g_idx"][k])
            code = bits_at(parts["qweight"], k // each, n, bits * (k % each), bits)
            zero = bits_at(parts["qzeros"], group, n // each, bits * (n % each), bits)
            zero = (zero + lag) % 2**bits
            weight[n, k] = (code - zero) * parts["scales"][group, n].float()
    return weight


def plain_awq(parts, bits=4, lag=0):
    """AutoAWQ, utils/packing_utils.py, unpack_awq and reverse_awq_order: number by number."""
    place_of = {column: place for place, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7])}
    weight = torch.empty(N, K)
    for n in range(N):
        at = 4 * place_of[n % 8]
        for k in range(K):
            code = bits_at(parts["qweight"], k, n // 8, at, 4)
            zero = bits_at(parts["qzeros"], k // GROUP, n // 8, at, 4)
            weight[n, k] = (code - zero) * parts["scales"][k // GROUP, n].float()
    return weight


def plain_packed(parts, bits, lag=0):
    """compressed-tensors, pack_quantized/helpers.py, unpack_from_int32: number by number."""
    each, weight = 32 // bits, torch.empty(N, K)
    for n in range(N):
        for k in range(K):
            code = bits_at(parts["weight_packed"], n, k // each, bits * (k % each), bits)
            zero = 2 ** (bits - 1)
            if "weight_zero_point" in parts:
                words = parts["weight_zero_point"]
                zero = bits_at(words, n // each, k // GROUP, bits * (n % each), bits)
            weight[n, k] = (code - zero) * parts["weight_scale"][n, k // GROUP].float()
    return weight


PLAIN = {
    "gptq, 4 bits": (lambda: gptq(4, GROUP), ASYMMETRIC[4], plain_gptq, 1),
    "gptq, 8 bits": (lambda: gptq(8, GROUP), ASYMMETRIC[8], plain_gptq, 1),
    "gptq_v2": (lambda: gptq(4, GROUP, False), ASYMMETRIC[4], plain_gptq, 0),
    "gptq, act-order": (lambda: gptq(4, GROUP), ASYMMETRIC[4] | dict(ordered=True), plain_gptq, 1),
    "gptq, symmetric": (lambda: gptq(4, GROUP), dict(bits=4, symmetric=True), plain_gptq, 1),
    "awq": (lambda: awq(GROUP), ASYMMETRIC[4], plain_awq, 0),
    "packed, 4 bits": (lambda: pack_quantized(4, GROUP, False), ASYMMETRIC[4], plain_packed, 0),
    "packed, 8 bits": (lambda: pack_quantized(8, GROUP, False), ASYMMETRIC[8], plain_packed, 0),
    "packed, symmetric": (
        lambda: pack_quantized(4, GROUP),
        dict(bits=4, symmetric=True),
        plain_packed,
        0,
    ),
}


def check_plain(name: str) -> None:
    """What is written means the same to plain loops, and reads back to the last bit. Raises
    AssertionError.
    """
    layout, how, plain, lag = PLAIN[name]
    layout, weight = layout(), random_ints(**how)
    parts = layout.write(weight)
    if not torch.equal(plain(parts, weight.bits, lag), weight.dequantize()):
        raise AssertionError(f"{name}: another reader gets other numbers")
    back = layout.read(parts, (N, K))
    if not torch.equal(back.dequantize(), weight.dequantize()):
        raise AssertionError(f"{name}: read back, the numbers differ")
    if weight.order is None:
        assert_same(back, weight)
    else:  # within a group the columns may be in another order
        assert torch.equal(layout.read(layout.write(back), (N, K)).codes, back.codes)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_loops_read_what_is_written(name):
    check_plain(name)


def swapped_pack(codes, bits):
    high, low = codes.chunk(2, dim=-1)
    return (low | high << 4).flatten(1) if bits == 4 else codes.flatten(1)


SLIPS = {
    "nibbles of AWQ in their order": ("AWQ_ORDER", tuple(range(8)), "awq"),
    "zero point off by one": ("gptq", lambda *a: gptq(4, GROUP, False), "gptq, 4 bits"),
    "groups that ignore act-order": ("order_of", lambda g_idx, size: None, "gptq, act-order"),
    "nibbles swapped": ("pack", swapped_pack, "packed, 4 bits"),
    "zeros left out": (
        "zeros_of",
        lambda weight: torch.full_like(weight.scales, 8, dtype=torch.uint8),
        "awq",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_a_layout_is_seen(slip, monkeypatch):
    attribute, wrong, name = SLIPS[slip]
    if attribute == "gptq":
        monkeypatch.setitem(PLAIN, name, (wrong, *PLAIN[name][1:]))
    else:
        monkeypatch.setattr(layouts, attribute, wrong)
    with pytest.raises(AssertionError):
        check_plain(name)


# ---------------------------------------------------------------- compressed-tensors


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_compressed_tensors_packs_the_same(bits, symmetric, strategy):
    pytest.importorskip("compressed_tensors", reason="NOT RUN: compressed-tensors is not installed")
    from compressed_tensors.compressors import PackedQuantizationCompressor as Packed
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    size = GROUP if strategy == "group" else None
    args = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=size or -1
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(N, K)
    ours = round_to_nearest(weight, bits, size, symmetric, torch.float32)
    zeros = layouts.zeros_of(ours).int() - 2 ** (bits - 1)
    # what the codes stand for, because a weight halfway between two codes may become either
    exact = ours.dequantize()
    parts = dict(weight=exact, weight_scale=ours.scales, weight_zero_point=zeros.to(torch.int8))
    theirs = Packed.compress(parts, scheme)
    layout = pack_quantized(bits, size, symmetric)
    assert_same(layout.read(theirs, (N, K)), ours)
    back = Packed.decompress(layout.write(ours), scheme)["weight"]
    assert torch.equal(back, exact)


def test_words_hold_every_bit():
    """The largest codes fill the sign bit of an int32."""
    for bits in (4, 8):
        codes = torch.full((2, 32), 2**bits - 1, dtype=torch.uint8)
        assert bool((layouts.to_words(codes, bits) == -1).all())
        assert torch.equal(layouts.from_words(layouts.to_words(codes, bits), bits), codes)
    assert unpack(pack(codes[:, None] & 15, 4), 4, 32).shape == (2, 1, 32)
    assert float_layouts.tiles_of((129, 128)) == (2, 1)
