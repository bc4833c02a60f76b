"""Seconds of 128 tokens for each request of a batch: one token a pass, and with heads that fill a
tree. All give the same greedy tokens. Then the attention alone: a tree in one launch, path by path.

    python -m lessons.toolbox.measure.bench 17
"""

from dataclasses import replace

import torch

from lessons.l02_naive_attention.sampling import GREEDY
from lessons.l03_kv_cache.lab.workload import ON_GPU, read_floor_s
from lessons.l12_paged_kv.lab.testing import paged
from lessons.l14_continuous_batching import loop
from lessons.l17_tree_speculation import stand_ins
from lessons.l17_tree_speculation.generate import generate
from lessons.l17_tree_speculation.lab.experiments import recorded
from lessons.l17_tree_speculation.lab.workload import (
    TIMED_TOKENS,
    embedded_heads,
    embedded_pair,
    held_out_prompts,
)
from lessons.l17_tree_speculation.naive import path_attention
from lessons.l17_tree_speculation.optimized import tree_attention
from lessons.l17_tree_speculation.trees.tree import Tree, full_tree
from lessons.toolbox.measure.bench import Benchmark, Unavailable

EXACT = replace(GREEDY, ignore_eos=True)  # so that every answer has 128 tokens
SHAPE = "models/tiny" + ("" if ON_GPU else f" · threads {torch.get_num_threads()}")
TREE = full_tree([3, 2, 2, 1])  # 34 nodes
HEADS = (8, 2, 64, 64) if not ON_GPU else (32, 8, 128, 128)


def requests(batch: int, device: torch.device) -> tuple:
    """(prompts,)"""
    return (held_out_prompts(batch),)


def plain(prompts):
    """Lesson 14's loop: one token of each request a pass."""
    target = embedded_pair()[0]
    return lambda: loop.generate(target, prompts, TIMED_TOKENS, EXACT)


def with_heads(kind: str):
    """The best tree for these heads, as it was counted."""

    def provider(prompts):
        target, heads, _ = embedded_heads(kind)
        tree = Tree(tuple(recorded()["kinds"][kind]["tree"]))
        return lambda: generate(target, prompts, TIMED_TOKENS, EXACT, heads=heads, tree=tree)

    return provider


def floor_s(batch: int) -> float:
    """Seconds to read the target's weights as often as a perfect draft of 4 tokens needs."""
    target = embedded_pair()[0]
    weights = sum(p.numel() for p in target.parameters()) * target.dtype.itemsize
    return -(-TIMED_TOKENS // 5) * read_floor_s(weights)


# ---------------------------------------------------------------- attention alone


def tree_of(context_len: int, device: torch.device) -> tuple:
    """A tree of 34 nodes after a context of so many tokens: the arguments of tree_attention."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    length = context_len + len(TREE)
    inputs = paged([length], [len(TREE)], block_size=16, heads=HEADS, dtype=dtype)
    return (*(x.to(device) for x in inputs), TREE.table.to(device))


def path_by_path(*inputs):
    """Each node's path as its own sequence."""
    return lambda: path_attention(*inputs).float()


def in_pytorch(q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, tree):
    """Gather the blocks, then PyTorch's attention with a mask."""

    class Step:
        pass

    step = Step()
    step.tree, step.block_table = tree, block_table
    step.cu_seqlens_q, step.context_lens = cu_seqlens_q, context_lens
    step.max_seqlen_q, step.max_context_len = len(q), int(context_lens[0])
    scale = q.shape[-1] ** -0.5
    return lambda: stand_ins.prefill(q, k_cache, v_cache, step, scale, None).float()


def in_one_launch(*inputs):
    """The kernel."""
    if not ON_GPU:
        raise Unavailable("an interpreted kernel takes seconds")
    longest = int(inputs[5].max())
    return lambda: tree_attention(*inputs, max_seqlen_q=len(TREE), max_context_len=longest).float()


def attention_floor_s(context_len: int) -> float:
    """Seconds to read K and V once."""
    _, num_kv_heads, head_dim, v_head_dim = HEADS
    itemsize = 2 if ON_GPU else 4
    row_bytes = num_kv_heads * (head_dim + v_head_dim) * itemsize
    return read_floor_s((context_len + len(TREE)) * row_bytes)


BENCHMARKS = [
    Benchmark(
        name="l17_batch",
        title=(
            "{x} requests: EAGLE's tree of 16 nodes is {speedup:.2f}x as fast as one token a pass"
        ),
        x_name="requests of a batch",
        x_values=[1, 2, 4, 8, 16],
        quick_x_values=[1, 8],
        inputs=requests,
        providers={
            "one token a pass": ("naive", plain),
            "EAGLE, 16 nodes": ("optimized", with_heads("eagle")),
            "Medusa, 16 nodes": ("optimized", with_heads("medusa")),
        },
        ylabel=f"time for {TIMED_TOKENS} tokens of each request",
        floor_s=floor_s,
        floor_label="weights once for 5 tokens",
        dtype="float32",
        shape=SHAPE,
        tolerance=0.0,
    ),
    Benchmark(
        name="l17_attention",
        title="A tree of 34 nodes after {x} tokens: one pass is {speedup:.0f}x as fast as paths",
        x_name="context",
        x_values=[64, 256, 1024, 4096] + ([16384] if ON_GPU else []),
        quick_x_values=[64, 1024],
        inputs=tree_of,
        providers={
            "path by path": ("naive", path_by_path),
            "PyTorch, masked": ("optimized" if not ON_GPU else "naive", in_pytorch),
            "one launch": ("optimized", in_one_launch),
        },
        ylabel="time of one layer's attention",
        floor_s=attention_floor_s,
        floor_label="K and V once",
        dtype="bfloat16" if ON_GPU else "float32",
        shape=f"{HEADS[0]} heads, {HEADS[1]} KV heads of {HEADS[2]}"
        + ("" if ON_GPU else " · threads 1"),
    ),
]
