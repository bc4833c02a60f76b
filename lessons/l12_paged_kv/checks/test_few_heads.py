"""The kernel of latents for at most 16 heads: equal to the definition, and wrong versions of it are
found. It takes 16 bits alone, so what is smaller than their rounding is not seen here.
"""

from functools import partial

import pytest
import torch

from lessons.l10_flash_decoding.splits import work_items
from lessons.l12_paged_kv.kernels import few_heads, latents
from lessons.l12_paged_kv.kernels.few_heads import grouped_mla_kernel, is_grouped
from lessons.l12_paged_kv.kernels.latents import paged_mla_decode
from lessons.l12_paged_kv.lab.testing import decoded, paged
from lessons.toolbox.proof.inputs import apart
from lessons.toolbox.proof.numerics import NotEquivalent, floor_for, prove
from lessons.toolbox.proof.planted import with_bug

RANK, ROPE, SCALE = 128, 64, 0.15


def inputs_of(
    lengths, seed, *, heads=5, block_size=16, rank=RANK, dtype=torch.bfloat16, kind="normal"
):
    """q, latents, table, lengths; pages in random order, rows without a token are NaN. Every
    tensor has gaps of its own.
    """
    sizes = heads, 1, rank + ROPE, 1
    q, rows, _, table, lens = paged(
        lengths, block_size=block_size, heads=sizes, dtype=dtype, seed=seed, kind=kind
    ).decode
    q, rows, table = apart(q, rows[:, :, 0], table)
    return q, rows, table, lens


def plain(q, rows, table, lens):
    cache = rows[:, :, None]
    rank = q.shape[2] - ROPE
    return decoded(q, cache, cache[..., :rank], table, lens, softmax_scale=SCALE)


def fast(rank=RANK, block_n=16, **options):
    how = dict(softmax_scale=SCALE, kv_lora_rank=rank, tiles=latents.Tiles(16, block_n, 4, 1))
    return partial(paged_mla_decode, **how, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
@pytest.mark.parametrize("options", [dict(num_splits=1), dict(num_splits=3), dict(split_size=10)])
@pytest.mark.sample(4)
def test_few_heads(options, block_size, dtype, seed, proof):
    inputs = inputs_of([0, 16, 50], seed, block_size=block_size, dtype=dtype)
    proof.record(grouped_mla_kernel, prove(fast(**options), plain, inputs))


@pytest.mark.parametrize("kind", ["large_logits", "ascending", "all_negative", "tied"])
@pytest.mark.sample(1)
def test_few_heads_on_hard_inputs(kind, seed, proof):
    inputs = inputs_of([40, 90], seed, kind=kind)
    errors = prove(fast(), plain, inputs, floor=floor_for(torch.bfloat16, kind))
    proof.record(grouped_mla_kernel, errors)


def test_16_heads_of_deepseek(seed, proof):
    """Four groups of 128 channels, and the tiles of the launch."""
    inputs = inputs_of([33], seed, heads=16, block_size=64, rank=512)
    decode = partial(paged_mla_decode, softmax_scale=SCALE, num_splits=1)
    proof.record(grouped_mla_kernel, prove(decode, plain, inputs))


def test_few_heads_by_a_list(seed, proof):
    def by_list(q, rows, table, lens):
        return fast(items=work_items(lens, 1, 6, 16))(q, rows, table, lens)

    inputs = inputs_of([3, 90, 0, 50], seed)
    proof.record(grouped_mla_kernel, prove(by_list, plain, inputs))


def test_who_is_served():
    """16 bits, at most 16 heads, four warps, and a tile for each group."""
    assert is_grouped(16, 512, 64, 2, 4) and is_grouped(1, 64, 64, 2, 4)
    for others in ((17, 512, 64, 2, 4), (16, 512, 32, 2, 4), (16, 512, 64, 4, 4)):
        assert not is_grouped(*others)
    assert not is_grouped(16, 512, 64, 2, 8)


SLIPS = {
    "two groups of four": ("total = first + second\n    return", "total = first\n    return"),
    "scores of the own group": ("total[None, :, :] + part * 0.0", "part + 0.0 * total[None, :, :]"),
    "rotary values of group 0": ("RANK + group * (ROPE", "RANK + 0 * group * (ROPE"),
    "channels of the next group": ("latent = group * (", "latent = (group + 1) % GROUPS * ("),
    "a split's last tile, unmasked": ("in_split[None, :], total, float(", "key[None, :] >= 0, total"
     ", float("),
    "old sums are kept": ("acc * alpha[:, :, None]", "acc"),
    "old weights are kept": ("l_i * alpha + tl.sum", "l_i + tl.sum"),
    "lse of another head": ("partial[None, :] + tl", "partial[None, :] * 0 + place + tl"),
}  # fmt: skip
FREE = {"channels of the next group"}  # every warp has some group: which one is no matter


def is_found(seed: int, late: float, num_splits: int) -> bool:
    """Whether sequences whose last keys are `late` times as large tell a wrong kernel."""
    q, rows, table, lens = inputs_of([50, 37], seed)
    for b, last in enumerate(lens.tolist()):
        rows[table[b, (last - 1) // 16]] *= late
    try:
        prove(fast(num_splits=num_splits), plain, (q, rows, table, lens))
    except NotEquivalent:
        return True
    return False


@pytest.mark.parametrize("name", SLIPS)
@pytest.mark.sample(4)
def test_a_wrong_kernel_of_few_heads_is_found(name, seed, tmp_path, monkeypatch):
    """By the merge of splits, or by a maximum in the last tile."""
    buggy = with_bug(few_heads, tmp_path, *SLIPS[name])
    monkeypatch.setattr(latents, "grouped_mla_kernel", buggy.grouped_mla_kernel)
    found = is_found(seed, 1.0, 3) or is_found(seed, 6.0, 1)
    assert found == (name not in FREE)
