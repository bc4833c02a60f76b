"""Rotating q and k and writing k and v: step by step, compiled, by the libraries, and in one
kernel. And what it is of a step.

    python -m lessons.toolbox.measure.bench 04

On a CPU the kernel would be interpreted and is not timed: stand_ins.py stands for it.
"""

from functools import lru_cache, partial

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.lab.workload import (
    DTYPE,
    ON_GPU,
    SHAPE,
    TOLERANCE,
    model_of,
    read_floor_s,
    step_bytes,
)
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.l04_positions import naive, optimized, stand_ins
from lessons.l04_positions.lab.traffic import fused_bytes
from lessons.l04_positions.optimized import ROTATED_ON_THE_WAY
from lessons.toolbox.measure.bench import Benchmark, Unavailable, needs, on_gpu
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.measure.hardware import copy_bandwidth, default_working_set_bytes

HEADS, KV_HEADS, HEAD_DIM = (32, 8, 128) if ON_GPU else (6, 2, 64)  # Llama-3-8B's; models/tiny's
# one decode step of a batch, up to a long prefill
TOKENS = [2**n for n in (range(4, 16) if ON_GPU else range(4, 15))]
LAST = max(TOKENS)


# ---------------------------------------------------------------- one layer's rotation and write


def new_tokens(count: int, device: torch.device) -> tuple[Tensor, ...]:
    """q: [T, HEADS, D]; k, v: [T, KV_HEADS, D]; the caches: [LAST, KV_HEADS, D]; positions, the
    slots too: [T]; cos_sin_cache.
    """
    q, k, v = (
        torch.randn(count, heads, HEAD_DIM, dtype=DTYPE, device=device)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    caches = [torch.zeros(LAST, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device) for _ in range(2)]
    inv_freq = naive.inverse_frequencies(HEAD_DIM).float().to(device)
    return (
        q,
        k,
        v,
        *caches,
        torch.arange(LAST - count, LAST, device=device),
        naive.new_cos_sin_cache(inv_freq, LAST),
    )


def provider(prepare):
    """A provider: prepare(positions, cos_sin_cache) -> rotate_write(q, k, v, k_cache, v_cache) ->
    the turned q.

    What it prepares is not timed, as a model does it once for all layers. It gets copies, because
    some turn q in place, again at every run (a rotation keeps lengths, so the values stay sound);
    what the first run gave is compared by the harness.
    """

    def make(q, k, v, k_cache, v_cache, positions, cos_sin_cache):
        rotate_write, inputs, compared = (
            prepare(positions, cos_sin_cache),
            [x.clone() for x in (q, k, v, k_cache, v_cache)],
            [],
        )

        def run():
            turned = rotate_write(*inputs)
            if not compared:  # heads of q, then of K and V as the cache holds them
                compared.append(torch.cat([turned, *(x[positions] for x in inputs[3:])], dim=1))
                return compared[0]
            return turned

        return run

    return make


def step_by_step(q, k, v, k_cache, v_cache, positions, cos_sin_cache):
    """naive.py's: gather the table's rows, rotate into new tensors, write by index."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    q, k = naive.rotate_half(q, cos, sin), naive.rotate_half(k, cos, sin)
    k_cache[positions], v_cache[positions] = k, v
    return q


def in_place(positions, cos_sin_cache):
    """As stand_ins.py: q in place, k in its rows, which are neighbours."""
    rows = slice(LAST - len(positions), LAST)

    def rotate_write(q, k, v, k_cache, v_cache):
        cos, sin = cos_sin_cache[rows, None].to(q.dtype).chunk(2, dim=-1)
        stand_ins.turn_(q, cos, sin)
        k_cache[rows], v_cache[rows] = k, v  # k itself stays, because others get it too
        stand_ins.turn_(k_cache[rows], cos, sin)
        return q

    return rotate_write


def one_kernel(positions, cos_sin_cache):
    """optimized.py's."""

    def rotate_write(q, k, v, k_cache, v_cache):
        optimized.rope_cache(
            q, k, v, k_cache, v_cache, positions, positions, cos_sin_cache, LAST - 1
        )
        return q

    return rotate_write


def naive_compiled(positions, cos_sin_cache):
    """What torch.compile makes of step_by_step, for this size."""
    # because it compiles a function for eight sizes at most, and then falls back without a word
    torch.compiler.reset()
    fast = torch.compile(step_by_step, dynamic=False)

    def rotate_write(*inputs):
        try:
            return fast(*inputs, positions, cos_sin_cache)
        except Exception as error:
            # any failure of the compiler's, which needs a C++ compiler on a CPU, means: not here
            raise Unavailable(
                f"torch.compile: {type(error).__name__}: {str(error).splitlines()[0]}"
            ) from None

    return rotate_write


def batched(positions, cos_sin_cache):
    """cos and sin as the libraries want them, [1, T, D] each, and their rotation of [1, H, T, D]
    around [T, H, D].
    """
    cos, sin = (
        torch.cat([x, x], dim=-1)[None].to(DTYPE) for x in cos_sin_cache[positions].chunk(2, dim=-1)
    )

    def around(rotation, q, k, v, k_cache, v_cache):
        turned, k = (
            x[0].transpose(0, 1)
            for x in rotation(*(x.transpose(0, 1)[None] for x in (q, k)), cos, sin)[:2]
        )
        k_cache[positions], v_cache[positions] = k, v
        return turned

    return around


def transformers_rotation(positions, cos_sin_cache):
    """transformers' function, and the two writes that it leaves to its caller."""
    with needs("transformers"):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    return partial(batched(positions, cos_sin_cache), apply_rotary_pos_emb)


def liger_rotation(positions, cos_sin_cache):
    """Liger-Kernel's kernel, which turns q and k in place, and the two writes that it leaves to its
    caller.
    """
    with needs("liger-kernel"):
        from liger_kernel.ops.rope import LigerRopeFunction
    return partial(batched(positions, cos_sin_cache), LigerRopeFunction.apply)


# ---------------------------------------------------------------- a decode step


def decode_step(rung: Rung):
    """A provider: the logits of one token after `count` - 1 cached ones."""

    def make(count: int):
        model = model_of(DTYPE)
        pool = rung.new_cache(model, 1, count)
        for slots in (pool.k_slots, pool.v_slots):
            values = torch.linspace(-1, 1, slots.numel(), device=model.device)
            slots.copy_(values.view(slots.shape))
        batch = new_batch([([1], count - 1)], count, model.device)

        @torch.inference_mode()
        def step():
            return model.logits(model(batch.tokens, pool.attending(batch)))

        return step

    return make


# ---------------------------------------------------------------- floors


@lru_cache
def copy_rate(working_set_bytes: int) -> float:
    """Bytes/s at which this machine copies so much, reads and writes counted."""
    return copy_bandwidth(default_device(), working_set_bytes)


def copy_floor_s(tokens: int) -> float:
    """Seconds to copy q, k and v once: from memory on a GPU; from the caches where they fit on a
    CPU, whose caches stay warm.
    """
    moved = 2 * tokens * (HEADS + 2 * KV_HEADS) * HEAD_DIM * DTYPE.itemsize
    return moved / copy_rate(default_working_set_bytes(default_device()) if ON_GPU else moved)


DTYPE_NAME = str(DTYPE).removeprefix("torch.")
BENCHMARKS = [
    Benchmark(
        name="l04_rope_cache",
        title="At {x} tokens in place is {speedup:.1f}x as fast as step by step",
        x_name="new tokens",
        x_values=TOKENS,
        quick_x_values=[64, 1024],
        inputs=new_tokens,
        providers={
            "step by step": ("naive", provider(lambda *at: lambda *x: step_by_step(*x, *at))),
            "one kernel": ("optimized", on_gpu(provider(one_kernel))),
            "in place, PyTorch": ("optimized", provider(in_place)),
            "transformers": ("library", provider(transformers_rotation)),
            "torch.compile": ("library", provider(naive_compiled)),
            "Liger-Kernel": ("library", on_gpu(provider(liger_rotation))),
        },
        metric="bandwidth",
        ylabel="bandwidth",
        bytes_moved=lambda n: fused_bytes(n, HEADS, KV_HEADS, HEAD_DIM, DTYPE.itemsize),
        floor_s=copy_floor_s,
        floor_label="a copy of q, k, v",
        dtype=DTYPE_NAME,
        shape=f"heads {HEADS}/{KV_HEADS}, head_dim {HEAD_DIM}"
        + ("" if ON_GPU else f" · threads {torch.get_num_threads()}"),
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l04_decode_step",
        title="A whole decode step at {x} tokens gains {speedup:.2f}x",
        x_name="tokens in the context",
        x_values=[2**n for n in range(7, 16 if ON_GPU else 13)],
        quick_x_values=[128, 1024],
        inputs=lambda n, device: (n,),
        providers={
            "rotate, then write": ("naive", decode_step(PREALLOCATED)),
            "one pass": ("optimized", decode_step(ROTATED_ON_THE_WAY)),
        },
        ylabel="time of one decode step",
        bytes_moved=step_bytes,
        floor_s=lambda n: read_floor_s(step_bytes(n)),
        floor_label="weights and KV read once",
        dtype=DTYPE_NAME,
        shape=SHAPE,
        tolerance=TOLERANCE,
    ),
]
