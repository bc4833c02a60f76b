# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=09
# Generated from solutions/l09_flash_attention.py, checksum f985a3d37af8. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 09: tiles in PyTorch, a kernel with a sink, the traffic of both orders, a key
range with bugs.
"""

import torch
from torch import Tensor

from lessons.l09_flash_attention.naive import PYTORCH_TILES
from lessons.l09_flash_attention.tiles import Tiles
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@exercise(
    "9.1",
    "FlashAttention in PyTorch tiles",
    minutes=45,
    difficulty=3,
    replaces="lessons.l09_flash_attention.naive:tiled_attention",
)
def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: None = None,
    alibi_slopes: None = None,
    sinks: None = None,
    tiles: Tiles = PYTORCH_TILES,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence in FA-2 order. q: [T, Hq, D], k: [Tk, Hkv, D], v: [Tk, Hkv, Dv] ->
    out [T, Hq, Dv], lse [T, Hq].

    Outer loop: tiles.block_m queries; inner loop: tiles.block_n keys; the last tile of each may be
    shorter. softmax_scale: 1 / √D if None. Query head h reads KV head h // (Hq / Hkv). causal:
    bottom-right aligned, query i belongs to key i + Tk - T. window (with causal): a query sees that
    many keys, its own included. A query that sees no key: out 0, lse −inf. softcap, alibi_slopes,
    sinks: always None here; they are there so that yours can take the place of the lesson's
    function. out has q's dtype, lse is float32 (float64 for float64). lse: log Σ exp(score), the
    natural logarithm. Aim: no tensor of T · Tk elements, and no tile computed that no query of it
    sees. The arguments stay as they were.

    Example, D = 1, one head, softmax_scale = 1, causal, tiles of 1 query and 2 keys:
        q = [1, 1, 1], k = [0, 0, ln 2], v = [3, 6, 12]
        query 2, keys 0 and 1: m = 0,    l = 2,                 acc = 9
                 key 2:        m = ln 2, l = 2 · ½ + 1 = 2,     acc = 9 · ½ + 12 = 16.5
        out = 16.5 / 2 = 8.25, lse = ln 2 + ln 2 = ln 4 = 1.386
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    (num_queries, num_heads, head_dim), (num_keys, num_kv_heads, v_head_dim) = q.shape, v.shape
    out = torch.zeros(num_queries, num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    lse = torch.full((num_queries, num_heads), -torch.inf, dtype=wide, device=q.device)
    raise NotImplementedError("Exercise 9.1: FlashAttention in PyTorch tiles")


@triton.jit
def sink_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    out_ptr,
    softmax_scale,
    num_queries,
    num_keys,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_M queries of head program_id(1). All tensors are dense, [T, H, HEAD_DIM],
    with H = num_programs(1).
    """
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    raise NotImplementedError("Exercise 9.2: The kernel: any head size, and a sink")


@exercise("9.2", "The kernel: any head size, and a sink", minutes=50, difficulty=4)
def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, block: int = 16) -> Tensor:
    """Attention without a causal mask, with a sink. q: [T, H, D]; k, v: [Tk, H, D], dense; sinks:
    [H] float32 -> [T, H, D].

    A sink is one more score in each row's softmax, the same for all queries of a head, that has no
    key and no value: its weight goes nowhere. out = Σ exp(s_j) v_j / (exp(sink) + Σ exp(s_j)), with
    s = q · k / √D. Tk may be 0: then the sink takes all. D: 1 to 128, not only powers of two.
    block: queries and keys a tile, a power of two, 16 or more. The launch is below; the kernel
    above is yours: `sink_kernel` computes one tile of queries of one head. Give each tl.dot
    input_precision="ieee", because Triton's default rounds float32 inputs to 10 bits (TF32). Aim:
    no score beyond its tile; masked loads with `other`; float32 sums; nothing written beside `out`.

    Example, D = 1, one query, sink = ln 2: q = [1], k = [0, 0], v = [4, 8]
        weights 1 and 1, denominator 1 + 1 + 2 = 4    -> (4 + 8) / 4 = 3
    """
    out = torch.empty_like(q)
    sink_kernel[triton.cdiv(len(q), block), q.shape[1]](
        q,
        k,
        v,
        sinks,
        out,
        q.shape[2] ** -0.5,
        len(q),
        len(k),
        HEAD_DIM=q.shape[2],
        BLOCK_M=block,
        BLOCK_N=block,
        BLOCK_D=triton.next_power_of_2(max(q.shape[2], 16)),
    )
    return out


@exercise("9.3", "Predict: tiles visited, bytes moved", minutes=20, difficulty=2)
def tile_traffic(
    num_tokens: int, num_heads: int, head_dim: int, itemsize: int, block: int
) -> tuple[int, int, int, int]:
    """(tiles visited, those that need no mask, bytes read in FA-2 order, bytes of naive scores) of
    causal attention.

    As many queries as keys, num_tokens, a multiple of `block`; tiles of block × block; as many KV
    heads as heads; both counts for one head, both byte numbers for all heads. Bytes read in FA-2
    order: q once; k and v for every tile visited; no cache helps. Bytes of naive scores: an [H, T,
    T] matrix, written and read once as scores, written and read once as probabilities. Errors: none
    to raise. Aim: formulas, no loop.

    Example: 4 tokens, 1 head of size 8, 2 bytes, tiles of 2 × 2: a grid of 2 × 2 tiles, one above
    the diagonal.
        3 visited, 1 without a mask; q: 4 · 16 = 64 bytes, k and v: 3 tiles · 2 rows · 2 · 16 = 192
          -> 256; 4 · 16 · 2 = 128
        -> (3, 1, 256, 128)
    Write down your guess first: 8192 tokens, 32 heads of 128, bfloat16, tiles of 128. How many GB
    each?
    """
    raise NotImplementedError("Exercise 9.3: Predict: tiles visited, bytes moved")


@exercise(
    "9.4",
    "Find the bugs: which keys a tile visits",
    minutes=25,
    difficulty=3,
    replaces="lessons.l09_flash_attention.tiles:key_range",
)
def key_range(
    start_m: int,
    num_queries: int,
    num_keys: int,
    tiles: Tiles,
    causal: bool = True,
    window: int | None = None,
) -> tuple[int, int, int]:
    """(begin, full_end, end): queries start_m … start_m + block_m - 1 visit the keys begin … end -
    1 in tiles of block_n.

    begin: the first key of the first tile that one of these queries sees (with a window; 0
    without). end: one past the last key that one of them sees. full_end: tiles before it are
    whole below the diagonal and inside the sequence, so they need no causal mask and no mask for
    the end. begin and full_end are multiples of block_n. The last query belongs to the last key.
    window: a query sees that many keys, its own included. No tile that is seen may be left out, and
    no tile that needs one of these two masks may be before full_end (the mask of a window does not
    count). begin and end may not be wider than needed.

    Example: 10 queries, 10 keys, tiles of 4 × 4, causal; the queries 4 to 7:
        end = 8, full_end = 4 (keys 4 to 7 are the diagonal)                       -> (0, 4, 8)
        window 3: query 4 sees keys 2 to 4, so its first tile begins at 0         -> (0, 4, 8)

    The code below has four bugs. Delete the first line and find them.
    """
    raise NotImplementedError("Exercise 9.4: Find the bugs: which keys a tile visits")
    block_m, block_n = tiles.block_m, tiles.block_n
    first = start_m
    begin, full_end, end = 0, num_keys, num_keys
    if causal:
        end = min(end, max(0, first + block_m - 1))
        full_end = min(full_end, max(0, first + 1) // block_n * block_n)
    if window is not None:
        begin = min(max(0, first + block_m - window) // block_n * block_n, full_end)
    return begin, full_end, end
