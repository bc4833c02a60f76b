"""The launches that the lessons' notebooks film, and kernels of a few lines whose film is known."""

from collections.abc import Callable

import torch

from lessons.l00_gpu_and_triton import optimized as l00
from lessons.l01_roofline import optimized as l01
from lessons.l02_naive_attention import optimized as l02
from lessons.l03_kv_cache import optimized as l03
from lessons.l04_positions import optimized as l04
from lessons.l05_gqa import optimized as l05
from lessons.l06_mla import optimized as l06
from lessons.l07_kernel_fusion import epilogue
from lessons.l07_kernel_fusion import optimized as l07
from lessons.l08_online_softmax import optimized as l08
from lessons.l09_flash_attention import optimized as l09
from lessons.l10_flash_decoding import optimized as l10
from lessons.l12_paged_kv.lab.testing import paged
from lessons.l12_paged_kv.optimized import paged_decode
from lessons.l16_speculative_sampling import optimized as l16
from lessons.l16_speculative_sampling.lab.testing import rows_of
from lessons.l18_weight_quantization import optimized as l18
from lessons.l18_weight_quantization.lab.testing import matrix
from lessons.l19_kv_quantization import optimized as l19
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.lab.testing import coded
from lessons.l23_experts import kernels as l23
from lessons.l23_experts.align import align
from solutions import l00_gpu_and_triton as puzzles
from solutions import l00_tiles_and_cuda as tiles


def keys_in_use():
    """Three sequences of 3, 9 and 12 tokens in blocks of 12 slots."""
    k, v = torch.randn(2, 3, 12, 1, 4)
    l03.decode_attention(torch.randn(3, 1, 4), k, v, torch.tensor([3, 9, 12]), block_n=8)


def rotated():
    """Two tokens, each into a slot of its own."""
    k_cache, v_cache = torch.zeros(2, 5, 2, 8)
    tensors = torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8), k_cache, v_cache
    places = torch.tensor([2, 5]), torch.tensor([3, 1]), torch.randn(6, 8)
    l04.rope_cache(*tensors, *places, last_position=5)


def splits():
    """44 keys in three splits, and their merge."""
    k, v = torch.randn(2, 1, 64, 1, 16)
    lens = torch.tensor([44], dtype=torch.int32)
    l10.combine(*l10.split_decode(torch.randn(1, 2, 16), k, v, lens, num_splits=3, block_n=16))


def pages():
    q, k_cache, v_cache, table, _, lens = paged([10, 7, 13], block_size=4, heads=(1, 1, 16, 16))
    paged_decode(q, k_cache, v_cache, table, lens, num_splits=1)


def drafted():
    rows = rows_of([4, 2, 0, 3, 1], vocab_size=50)
    l16.verify(rows.p.contiguous(), rows.q.contiguous(), *rows[2:], rows.max_rows, block_v=16)


def codes():
    """A kernel that gets hooks, functions of Triton, as constants."""
    weight = matrix("int4, zeros", 8, 128)
    l18.matmul(torch.randn(1, 128), weight, tiles=l18.Tiles(16, 16, 32, 4, 2), num_splits=2)


def coded_pages():
    small = coded(FORMATS["int8"], paged([6], block_size=4, heads=(1, 1, 16, 16)))
    l19.quantized_decode(*small.decode, FORMATS["int8"], num_splits=1)


def experts():
    found = align(torch.tensor([[0, 2], [2, 1], [0, 2]]), num_experts=3, block_m=2)
    x, gate_up, h = torch.randn(3, 16), torch.randn(3, 8, 16), torch.zeros(6, 4)
    sizes = 6, 4, 16, x.stride(0), gate_up.stride(0), gate_up.stride(1)
    blocks = {"TOP_K": 2, "BLOCK_M": 2, "BLOCK_N": 4, "BLOCK_K": 16}
    given = x, gate_up, h, found.pairs, found.experts, *sizes
    l23.gate_up_kernel[len(found.experts), 1](*given, **blocks)


def online_softmax():
    scores, probs, lse = torch.randn(1, 20), torch.zeros(1, 20), torch.zeros(1)
    l08.online_softmax_kernel[(1,)](scores, probs, lse, 20, 20, BLOCK_N=8, STAGES=1)


LESSONS: dict[str, Callable[[], object]] = {
    "0.1": lambda: puzzles.copy(torch.randn(50)),
    "0.6": lambda: puzzles.transpose(torch.randn(12, 20)),
    "0.10": lambda: tiles.any_product(torch.randn(20, 24), torch.randn(24, 20)),
    "00": lambda: l00.scale(torch.randn(50), 2.0, block=16),
    "00 rows of a transpose": lambda: l00.row_max(torch.randn(4, 6).T),
    "01": lambda: l01.scale_copy_kernel[(3,)](torch.randn(40), torch.empty(40), 40, 2.0, TILE=16),
    "02": lambda: l02.fused_softmax(torch.randn(1, 36, 36), 1.0),
    "03": keys_in_use,
    "04": rotated,
    "05": lambda: l05.decode_attention(
        torch.randn(1, 4, 16), *torch.randn(2, 1, 12, 2, 16), torch.tensor([12])
    ),
    "06": lambda: l06.mla_decode(
        torch.randn(1, 4, 32),
        torch.randn(1, 24, 32),
        torch.tensor([20]),
        32**-0.5,
        kv_lora_rank=16,
        tiles=l06.Tiles(block_h=16, block_n=16, num_warps=4, num_stages=1),
    ),
    "07": lambda: l07.add_rms_norm(*torch.randn(2, 3, 20), torch.ones(20), 1e-5),
    "07 SwiGLU": lambda: epilogue.swiglu(torch.randn(32, 64), *torch.randn(2, 64, 64)),
    "08": online_softmax,
    "09": lambda: l09.flash_attention(*torch.randn(3, 32, 1, 16), tiles=l09.Tiles(16, 16)),
    "10": splits,
    "12": pages,
    "16": drafted,
    "18": codes,
    "19": coded_pages,
    "23": experts,
}
