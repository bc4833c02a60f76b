"""The weights of 8-bit attention: from scores to the operand of p · v, in registers.

The sums of q · kᵀ leave a thread weights of keys 2j, 2j + 1, 2j + 8, 2j + 9, and the operand wants
four neighbours a word. V's keys have the order in which these are neighbours (transpose.py), so no
thread gives a weight away. Four weights are four conversions and no more.
"""

from lessons.l09_flash_attention.hopper.transpose import sort_keys
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton

if has_triton():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma
else:  # the file can be imported and read, nothing in it launched
    gluon, gl = triton.experimental.gluon, triton.experimental.gluon.language


@gluon.jit
def sums_of_threads(p):
    """p: [ROWS, BLOCK_N] -> [ROWS, 4]: the four threads that hold a row each add up what they
    have. Their sums come together once, after the last tile.
    """
    ROWS: gl.constexpr = p.shape[0]
    BLOCK_N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def rescaled(sums, alpha):
    """sums: [ROWS, 4] times alpha: [ROWS]."""
    LAYOUT: gl.constexpr = sums.type.layout
    return sums * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def softmax_step(
    scores,
    m_i,
    l_i,
    qk_scale,
    first,
    start_n,
    num_keys,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    SHIFT: gl.constexpr,
):
    """As gluon_flash.softmax_step, but the weights are 2^SHIFT · p, float32, in layout SCORES."""
    ROWS: gl.constexpr = scores.shape[0]
    BLOCK_N: gl.constexpr = scores.shape[1]
    if MASKED:
        query = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        key = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        sees = gl.expand_dims(key < num_keys, 0) & gl.full([ROWS, BLOCK_N], True, gl.int1, SCORES)
        if CAUSAL:
            sees = sees & (gl.expand_dims(key, 0) <= gl.expand_dims(query, 1))
        scores = gl.where(sees, scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * qk_scale)
    m_safe = m_new
    if MASKED:  # without a mask every row has seen a key
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m_i - m_safe)
    p = gl.exp2(scores * qk_scale - gl.expand_dims(m_safe - SHIFT, 1))
    # shifted as well, so the division takes the shift back
    return p, m_new, rescaled(l_i, alpha) + sums_of_threads(p), alpha


@gluon.constexpr_function
def held_by_4_warps(rows, words):
    """Which thread holds what of an operand of `words` words a row, [rows, words, 4 bytes], with
    lane = 4 g + j: rows g and g + 8 of 16 for each warp, word j of each 4.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]]
        + [[0, 4 << k, 0] for k in range((words // 4).bit_length() - 1)],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[rows, words, 4],
    )


@gluon.jit
def four_a_word(p):
    """p: [rows, keys] float32 -> [rows, keys / 4] int32, four sorted neighbours each, as E4M3. A
    thread that keeps them through a loop has 16 registers of words, and 64 of single weights.
    """
    ROWS: gl.constexpr = p.shape[0]
    WORDS: gl.constexpr = p.shape[1] // 4
    x = sort_keys(p)  # a word's weights are all in one thread
    even, odd = gl.split(x.reshape([ROWS, WORDS, 2, 2]))
    p0, p2 = gl.split(even)
    p1, p3 = gl.split(odd)
    words = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [p0, p1, p2, p3],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return gl.convert_layout(words, gl.SliceLayout(2, held_by_4_warps(ROWS, WORDS)))


@gluon.jit
def one_by_one(words):
    """words: [rows, keys / 4] of four_a_word -> [rows, keys] in E4M3, in the same registers."""
    ROWS: gl.constexpr = words.shape[0]
    WORDS: gl.constexpr = words.shape[1]
    nothing = gl.zeros([ROWS, WORDS, 4], gl.int32, held_by_4_warps(ROWS, WORDS))
    weights = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;",  # of four times the same word
        "=r,r,r,r,r",
        [gl.expand_dims(words, 2) + nothing],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )
    return weights.reshape([ROWS, WORDS * 4]).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def start_output(weights, v_tile, OUT: gl.constexpr):
    """p · v of one tile in flight: [ROWS, HEAD_DIM] in layout OUT, a sum of its own."""
    ROWS: gl.constexpr = weights.shape[0]
    HEAD_DIM: gl.constexpr = v_tile.shape[0]
    nothing = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)
    p = gl.convert_layout(one_by_one(weights), gl.DotOperandLayout(0, OUT, 4))
    return warpgroup_mma(p, v_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
