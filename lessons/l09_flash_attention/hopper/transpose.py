"""V turned around in shared memory: [keys, D] as it arrives, [D, keys] as 8-bit products need it.

A matrix instruction of 16 bits reads its right operand along the keys or across them. One of 8 bits
reads it along the summed dimension alone, and p · v sums over keys. So four warps turn each tile:

- `ldmatrix` with `.trans` turns tiles of 8 × 8 numbers of 16 bits, and two neighbours of a key, d
  and d + 1, are such a number. A thread gets (d, d + 1) of keys 2j, 2j + 1, 2j + 8, 2j + 9;
- `prmt` sorts the bytes of two registers: d of these four keys, and d + 1 of them;
- `stmatrix` writes them, four neighbours a thread. So keys of a row follow each other as

      0 1 8 9   2 3 10 11   4 5 12 13   6 7 14 15        (j = 0, 1, 2, 3), then the next 16

That order costs nothing, because the weights have it, too. A thread holds weights of keys 2j,
2j + 1, 2j + 8, 2j + 9 of a row, as the sums of q · kᵀ were left to it. The operand of p · v wants
four neighbours there. A sum over keys may go in any order, if p and v have the same one.

Rows are d = 0, 2, 4, …, then 1, 3, 5, …: eight that are written at once follow each other, so they
are in different banks. The output has its columns in that order, and `columns_in_order` sorts them.

Source: Shah et al. 2024, FlashAttention-3, section 3.3.
"""

from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton

if has_triton():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
else:  # the file can be imported and read, nothing in it launched
    gluon, gl = triton.experimental.gluon, triton.experimental.gluon.language


@gluon.constexpr_function
def as_pairs(keys, head_dim):
    """The layout of a tile of V, [keys, head_dim] bytes, as [keys, head_dim / 2] of 16 bits: the
    bytes stay where they are.
    """
    return gl.NVMMASharedLayout.get_default_for([keys, head_dim // 2], gl.int16)


@gluon.constexpr_function
def loaded_by_4_warps(pairs, keys):
    """Which thread holds what of [pairs, keys] after `ldmatrix`: with lane = 4 g + j, pairs g and
    keys 2j, 2j + 1 of each 8; eight pairs for each warp, then the next 32.
    """
    registers = [[0, 1], *([0, 8 << k] for k in range((keys // 8).bit_length() - 1))]
    return gl.DistributedLinearLayout(
        reg_bases=registers + [[32 << k, 0] for k in range((pairs // 32).bit_length() - 1)],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[pairs, keys],
    )


@gluon.jit
def two_bytes(x):
    """The lower and the upper byte of numbers of 16 bits, four numbers at a time."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=r,=r,r,r",
        [x],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def sort_keys(x):
    """x: [rows, keys] -> the same with keys 0 1 8 9 2 3 10 11 … of each 16 beside each other."""
    ROWS: gl.constexpr = x.shape[0]
    KEYS: gl.constexpr = x.shape[1]
    # key = 16 i + 8 a + 2 j + b becomes 16 i + 4 j + 2 a + b
    return x.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, KEYS])


@gluon.jit
def columns_in_order(x):
    """x: [rows, D] with columns 0, 2, 4, …, 1, 3, 5, … -> with columns 0, 1, 2, …"""
    ROWS: gl.constexpr = x.shape[0]
    HEAD_DIM: gl.constexpr = x.shape[1]
    return x.reshape([ROWS, 2, HEAD_DIM // 2]).permute((0, 2, 1)).reshape([ROWS, HEAD_DIM])


@gluon.jit
def turn(v, v_t, KEYS: gl.constexpr):
    """Write a tile of V, [BLOCK_N, D], to v_t, [D, BLOCK_N], both in shared memory and of 8 bits:
    rows and keys in the order above. KEYS at a time, because these warps have few registers.
    """
    BLOCK_N: gl.constexpr = v.shape[0]
    HEAD_DIM: gl.constexpr = v.shape[1]
    PAIRS: gl.constexpr = HEAD_DIM // 2
    pairs = v._reinterpret(gl.int16, [BLOCK_N, PAIRS], as_pairs(BLOCK_N, HEAD_DIM))
    pairs = pairs.permute((1, 0))
    for part in gl.static_range(BLOCK_N // KEYS):
        x = pairs.slice(part * KEYS, KEYS, dim=1).load(loaded_by_4_warps(PAIRS, KEYS))
        even, odd = two_bytes(x)
        rows = gl.join(even, odd).permute((2, 0, 1)).reshape([HEAD_DIM, KEYS])
        rows = sort_keys(rows).to(v_t.dtype, bitcast=True)
        v_t.slice(part * KEYS, KEYS, dim=1).store(rows)
