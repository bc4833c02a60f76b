"""Proves optimized.cu, on a CPU in the emulator; tests/test_cuda_bugs.py plants bugs in it."""

from functools import partial

import pytest
import torch

from lessons.l12_paged_kv.kernels.cuda_paged import SOURCE, paged_decode_cuda
from lessons.l12_paged_kv.lab.testing import DEVICE, decoded, paged
from lessons.toolbox.kernels.compile_check import CHIPS, check_cuda
from lessons.toolbox.proof.numerics import assert_same_bits, floor_for, prove
from lessons.toolbox.proof.refusals import assert_message

HEADS = (3, 1, 64, 64)


@pytest.mark.cuda_cpp
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("options", [dict(num_splits=3), dict(split_size=20)])
@pytest.mark.sample(3)
def test_cuda_kernel_for_any_block_size(block_size, options, seed, proof):
    """Lengths around a block and around the 16 keys of a round; an empty sequence. Blocks are in
    random order; what no sequence owns is NaN, and so is what follows a context.
    """
    lengths = [0, 1, min(block_size + 1, 15), 16, 41]
    inputs = paged(lengths, block_size=block_size, heads=HEADS, seed=seed).decode
    proof.record(SOURCE, prove(partial(paged_decode_cuda, **options), decoded, inputs))


@pytest.mark.cuda_cpp
@pytest.mark.parametrize(
    "heads, dtype",
    [
        ((4, 2, 64, 64), torch.bfloat16),
        ((6, 1, 128, 128), torch.bfloat16),
        ((2, 2, 64, 64), torch.float16),
        ((9, 1, 128, 128), torch.float16),
        ((5, 1, 128, 128), torch.float32),
    ],
)
@pytest.mark.sample(2)
def test_cuda_kernel_for_any_heads(heads, dtype, seed, proof):
    """Groups of fewer and of more heads than a block serves; with and without a window."""
    inputs = paged([17, 50], block_size=16, heads=heads, dtype=dtype, seed=seed).decode
    for window in (None, 20):
        fast, plain = (partial(f, window=window) for f in (paged_decode_cuda, decoded))
        proof.record(SOURCE, prove(fast, plain, inputs))


@pytest.mark.cuda_cpp
@pytest.mark.parametrize("kind", ["large_logits", "ascending", "all_negative"])
def test_cuda_kernel_on_hard_inputs(kind, seed, proof):
    floor = floor_for(torch.float32, kind)
    inputs = paged([2, 40], block_size=7, heads=HEADS, kind=kind, seed=seed).decode
    fast = partial(paged_decode_cuda, num_splits=1)
    proof.record(SOURCE, prove(fast, decoded, inputs, floor=floor))


@pytest.mark.cuda_cpp
def test_cuda_bits_depend_on_the_sequence_alone(seed):
    """Neither on where its blocks are nor, in splits of a fixed size, on who else is there."""
    shuffled, ascending = (
        paged([50, 3], block_size=5, heads=HEADS, seed=seed, order=order).decode
        for order in ("random", "ascending")
    )
    together = paged_decode_cuda(*shuffled, split_size=16)
    assert_same_bits(together, paged_decode_cuda(*ascending, split_size=16))
    q, k_cache, v_cache, table, lens = ascending
    alone = paged_decode_cuda(q[:1], k_cache, v_cache, table[:1], lens[:1], split_size=16)
    assert_same_bits(together[:1], alone)


@pytest.mark.cuda_cpp
def test_the_cuda_kernel_reads_float16_as_pytorch_does():
    """With a single key the result is its value: the smallest, the largest and no numbers."""
    bits = [0, 0x8000, 1, 0x83FF, 0x400, 0x3C01, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3555]
    rows = torch.tensor(bits + [0] * (64 - len(bits)), device=DEVICE).to(torch.uint16)
    v_cache = rows.view(torch.float16)[None, None, None]
    q, one = torch.zeros(1, 1, 64, dtype=torch.float16, device=DEVICE), torch.ones(1, device=DEVICE)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    out = paged_decode_cuda(q, torch.zeros_like(v_cache), v_cache, table, one.int())
    torch.testing.assert_close(out[0, 0], v_cache[0, 0, 0], atol=0, rtol=0, equal_nan=True)


@pytest.mark.compiler
def test_cuda_compiles():
    """Nothing is spilled and nothing is in local memory; 128 registers let 4 blocks, 16 warps,
    share an SM. K, V and q are loaded 16 bytes at once.
    """
    for report in check_cuda(SOURCE.read_text(encoding="utf-8"), CHIPS, "optimized.cu"):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert not report.error and not report.spill_bytes and not report.stack_bytes, report
        assert report.registers <= 128 and report.shared_bytes < 10 * 1024, report
        assert report.loads_128bit >= 6 * (2 + 2 + 4), report  # 6 kernels, 2 keys, 4 heads


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=torch.zeros(2, 4, 80), k_cache=torch.zeros(9, 3, 2, 80)), "sizes .80, 64.; acc"),
        (dict(v_cache=torch.zeros(9, 3, 2, 66)[..., :64]), "v_cache: got strides .* of 16"),
        (dict(q=torch.zeros(513)[1:].view(2, 4, 64)), "q: got strides .* of 16"),
        (dict(num_splits=0), "num_splits: got 0; accepted: None, or 1 to 65535"),
    ],
)
def test_the_cuda_wrapper_refuses(change, message):
    integers = dict(dtype=torch.int32)
    k_cache, v_cache = torch.zeros(2, 9, 3, 2, 64)
    given = dict(q=torch.zeros(2, 4, 64), k_cache=k_cache, v_cache=v_cache)
    given |= dict(block_table=torch.zeros(2, 4, **integers), context_lens=torch.ones(2, **integers))
    assert_message(paged_decode_cuda, given | change, message)
