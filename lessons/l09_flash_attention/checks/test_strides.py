"""Each tensor is read by its own strides: q, K and V lie in other storage, in another order, with
heads of another width. Bugs that mix them up are seen; wrong cu_seqlens reach no foreign row.
"""

import pytest
import torch

from lessons.l03_kv_cache.lab.testing import LAYOUTS, laid_out
from lessons.l09_flash_attention import fa1, optimized
from lessons.l09_flash_attention.fa1 import fa1_kernel
from lessons.l09_flash_attention.hopper import fp8
from lessons.l09_flash_attention.hopper.fp8 import flash_attention_fp8
from lessons.l09_flash_attention.naive import attention
from lessons.l09_flash_attention.optimized import flash_attention, flash_kernel
from lessons.l09_flash_attention.tiles import Tiles, has_e4m3
from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.measure.device import default_device, interpreting
from lessons.toolbox.proof.numerics import NotEquivalent, assert_same_bits, draw, prove
from lessons.toolbox.proof.planted import with_bug

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
SMALL = Tiles(16, 16)
LENGTHS_Q, LENGTHS_K = (5, 17), (20, 23)


def starts(lengths):
    """cu_seqlens of packed sequences: [B + 1] int32."""
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def inputs_of(layout, seed, head_dim=16, v_head_dim=24):
    """Two sequences, packed."""
    shapes = ((22, 4, head_dim), (43, 2, head_dim), (43, 2, v_head_dim))
    tensors = (
        draw("normal", shape, seed=seed + i, device=DEVICE) for i, shape in enumerate(shapes)
    )
    return laid_out(layout, *tensors)


def packed(module):
    """A module's flash_attention of the two sequences, as `prove` calls it."""
    cu_seqlens = starts(LENGTHS_Q), starts(LENGTHS_K)
    return lambda q, k, v: module.flash_attention(q, k, v, *cu_seqlens, tiles=SMALL)[0]


def one_by_one(q, k, v):
    pairs = zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K))
    return torch.cat([attention(*one)[0] for one in pairs])


@pytest.mark.parametrize("v_head_dim", [8, 16, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample(5)
def test_each_tensor_is_read_by_its_own_strides(layout, v_head_dim, seed, proof):
    inputs = inputs_of(layout, seed, v_head_dim=v_head_dim)
    assert len({x.stride() for x in inputs}) == 3
    proof.record(flash_kernel, prove(packed(optimized), one_by_one, inputs))


# The layout is one in which the wrong stride stays within the tensor that is read.
BUGS = {  # name: (layout, the code as it is, the code with the bug)
    "v with k's first row": ("K dense, V wide", "start_k * stride_vn", "start_k * stride_kn"),
    "v with k's head stride": ("K dense, V wide", "GROUP * stride_vh", "GROUP * stride_kh"),
    "v with k's row stride": ("K dense, V wide", "num_keys, stride_vn", "num_keys, stride_kn"),
    "v of k's width": ("K dense, V wide", "stride_vn, V_HEAD_DIM,", "stride_vn, HEAD_DIM,"),
    "k with v's first row": ("K wide, V dense", "start_k * stride_kn", "start_k * stride_vn"),
    "k with v's head stride": ("K wide, V dense", "GROUP * stride_kh", "GROUP * stride_vh"),
    "k with q's head stride": ("K wide, V dense", "GROUP * stride_kh", "GROUP * stride_qh"),
    "k with q's row stride": ("K wide, V dense", "num_keys, stride_kn", "num_keys, stride_qm"),
    "q's heads by its rows": ("K wide, V dense", "+ head * stride_qh", "+ head * stride_qm"),
    "out with q's strides": (
        "K wide, V dense",
        "cell[:, None] * V_HEAD_DIM",
        "((start_q + row) * stride_qm + head * stride_qh)[:, None]",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_mix_up_of_strides_is_seen(name, seed, tmp_path):
    layout, old, new = BUGS[name]
    buggy = with_bug(optimized, tmp_path, old, new)
    with pytest.raises(NotEquivalent):
        prove(packed(buggy), one_by_one, inputs_of(layout, seed))


# ---------------------------------------------------------------- FA-1 order, 8 bits


def in_fa1_order(module):
    return lambda *x: module.flash_attention_fa1(*x, tiles=SMALL)[0]


def naive_out(*inputs):
    return attention(*inputs)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample(2)
def test_fa1_reads_each_tensor_by_its_own_strides(layout, seed, proof):
    proof.record(fa1_kernel, prove(in_fa1_order(fa1), naive_out, inputs_of(layout, seed)))


FA1_BUGS = {
    "v with k's head stride": ("K dense, V wide", "GROUP * stride_vh", "GROUP * stride_kh"),
    "v with k's row stride": ("K dense, V wide", "num_keys, stride_vn", "num_keys, stride_kn"),
    "k with q's head stride": ("K wide, V dense", "GROUP * stride_kh", "GROUP * stride_qh"),
}


@pytest.mark.parametrize("name", FA1_BUGS)
def test_a_mix_up_in_fa1_order_is_seen(name, seed, tmp_path):
    layout, old, new = FA1_BUGS[name]
    buggy = with_bug(fa1, tmp_path, old, new)
    with pytest.raises(NotEquivalent):
        prove(in_fa1_order(buggy), naive_out, inputs_of(layout, seed))


needs_e4m3 = pytest.mark.skipif(
    not has_e4m3(DEVICE), reason="NOT RUN: needs a GPU of compute capability 8.9 or newer, or none"
)


@needs_e4m3
@pytest.mark.parametrize("layout", LAYOUTS)
def test_8_bits_do_not_depend_on_the_layout(layout, seed):
    inputs = inputs_of(layout, seed, head_dim=32, v_head_dim=32)
    dense = [x.contiguous() for x in inputs]
    out, want = (flash_attention_fp8(*x, tiles=Tiles(32, 32)) for x in (inputs, dense))
    assert_same_bits(out, want)


@needs_e4m3
def test_a_mix_up_in_8_bits_is_seen(seed, tmp_path):
    buggy = with_bug(fp8, tmp_path, "GROUP * stride_kh", "GROUP * stride_qh")
    inputs = inputs_of("K heads first, V dense", seed, head_dim=32, v_head_dim=32)
    out, want = (m.flash_attention_fp8(*inputs, tiles=Tiles(32, 32)) for m in (buggy, fp8))
    with pytest.raises(NotEquivalent):
        assert_same_bits(out, want)


# ---------------------------------------------------------------- cu_seqlens that lie

LIES = {
    "beyond the last row": [0, 9, 400],
    "before the first": [-50, 9, 22],
    "backwards": [0, 20, 5],
    "far away": [2**30, 2**30 + 20, 2**30 + 40],
}


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: loads are seen in the interpreter")
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("which", ["q", "k"])
def test_wrong_cu_seqlens_reach_no_foreign_row(lie, which, seed, monkeypatch):
    """As on a GPU, where their values are not read before the launch."""
    q, k, v = inputs_of("K dense, V heads first", seed)
    cu_seqlens = {"q": starts(LENGTHS_Q), "k": starts(LENGTHS_K)}
    cu_seqlens[which] = torch.tensor(LIES[lie], dtype=torch.int32)
    given = (q, k, v, *cu_seqlens.values())
    with pytest.raises(ValueError, match=f"cu_seqlens_{which}: got .*; accepted: ascending from 0"):
        flash_attention(*given)
    unread = lambda q, k, cu_seqlens_q, cu_seqlens_k, longest: (cu_seqlens_q, cu_seqlens_k, 40)
    monkeypatch.setattr(optimized, "check_sequences", unread)
    with Accesses() as accesses:
        out, lse = flash_attention(*given, tiles=SMALL)
    assert accesses.outside(q, k, v, out, lse, *cu_seqlens.values()) == 0


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: loads are seen in the interpreter")
def test_a_kernel_that_believes_cu_seqlens_is_seen(seed, tmp_path, monkeypatch):
    """Seven rows of K and V behind the last are there, but belong to somebody else."""
    old = "end = tl.minimum(tl.load(cu_seqlens_ptr + sequence + 1), num_rows)"
    buggy = with_bug(optimized, tmp_path, old, "end = tl.load(cu_seqlens_ptr + sequence + 1)")
    q, k, v = inputs_of("K dense, V heads first", seed)
    given = (q, k[:36], v[:36], starts(LENGTHS_Q), starts(LENGTHS_K))
    unread = lambda q, k, cu_seqlens_q, cu_seqlens_k, longest: (cu_seqlens_q, cu_seqlens_k, 40)
    foreign = {}
    for module in (optimized, buggy):
        monkeypatch.setattr(module, "check_sequences", unread)
        with Accesses() as accesses:
            results = module.flash_attention(*given, tiles=SMALL)
        foreign[module] = accesses.outside(*given, *results)
    assert foreign[optimized] == 0 < foreign[buggy]
