"""Each chain against its one kernel, PyTorch's compiler, Liger-Kernel and a copy; and a decode step
with and without fusing.

    python -m lessons.toolbox.measure.bench 07

On a CPU a kernel would be interpreted, so it is not timed: torch.compile of the naive chain, fused
C++, stands in its place.
"""

import torch

from lessons.l07_kernel_fusion import epilogue, naive, optimized
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l07_kernel_fusion.lab.peers import (
    CONTEXT,
    DTYPE,
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    ON_GPU,
    THREADS,
    TOLERANCE,
    VALUES,
    compiled,
    copy_floor_s,
    eager,
    liger_add_rms_norm,
    liger_rms_norm,
    liger_silu_mul,
    read_floor_s,
    rows,
    step,
    weight,
    weight_bytes,
)
from lessons.toolbox.measure.bench import Benchmark, on_gpu
from lessons.toolbox.measure.hardware import measured_ceilings, time_floor_s

FUSED_ROLE = "library" if ON_GPU else "optimized"  # on a CPU the compiler stands for the kernel
COMPILED = "torch.compile" if ON_GPU else "torch.compile, for the kernel"
DTYPE_NAME, SIZE = str(DTYPE).removeprefix("torch."), DTYPE.itemsize


def providers(name: str, **library) -> dict:
    """The chain, its kernel and its compiled form, then the libraries."""
    return {
        "eager chain": ("naive", eager(getattr(naive, name))),
        "one kernel": ("optimized", on_gpu(eager(getattr(optimized, name)))),
        COMPILED: (FUSED_ROLE, compiled(getattr(naive, name))),
        **{label: ("library", make) for label, make in library.items()},
    }


def library_rms_norm(x, weight, eps):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def qk_inputs(tokens, device):
    q, k = (
        rows(tokens, heads * HEAD_DIM, device).unflatten(-1, (heads, HEAD_DIM))
        for heads in (HEADS, KV_HEADS)
    )
    return q, k, weight(HEAD_DIM, device), weight(HEAD_DIM, device), EPS


def product_then_kernel(x, gate_weight, up_weight):
    """What most engines do: the library's products, then this lesson's kernel for silu · up."""
    return optimized.silu_mul(x @ gate_weight.T, x @ up_weight.T)


def mlp_inputs(count, device):
    """x: [count, HIDDEN], gate and up: [INNER, HIDDEN], scaled so that products stay around 1."""
    x, gate, up = (rows(n, HIDDEN, device) for n in (count, INNER, INNER))
    return x, gate * HIDDEN**-0.5, up * HIDDEN**-0.5


def mlp_floor_s(count):
    """Seconds for both products at this machine's matrix rate, or for reading both weights."""
    moved = bytes_of(1, count * (HIDDEN + INNER), 2 * INNER * HIDDEN)
    return time_floor_s(moved, 4 * count * INNER * HIDDEN, measured_ceilings(), DTYPE)


def first_of(make):
    """A provider of two tensors, of which the harness compares one."""

    def made(*inputs):
        run = make(*inputs)
        return lambda: run()[0]

    return made


def bytes_of(tensors: int, values: int, weights: int = 0) -> int:
    """What `tensors` of `values` each and the weights hold, in bytes."""
    return SIZE * (tensors * values + weights)


ROW_COUNTS = [1, 16, 256, 4096, 16384] if ON_GPU else [1, 4, 16, 64, 256]
BENCHMARKS = [
    Benchmark(
        name="l07_rms_norm",
        title="RMSNorm in one pass: {speedup:.1f}x as fast as the eager chain at rows of {x}",
        x_name=f"values in a row, {VALUES / 2**20:g}M in all",
        x_values=[2**n for n in range(9, 15)],
        quick_x_values=[1024, 8192],
        inputs=lambda n, device: (rows(VALUES // n, n, device), weight(n, device), EPS),
        providers=providers(
            "rms_norm", **{"F.rms_norm": eager(library_rms_norm), "Liger-Kernel": liger_rms_norm}
        ),
        ylabel="bandwidth",
        metric="bandwidth",
        bytes_moved=lambda n: bytes_of(2, VALUES, n),
        floor_s=lambda n: copy_floor_s(bytes_of(2, VALUES, n)),
        floor_label="a copy",
        dtype=DTYPE_NAME,
        shape=f"{VALUES} values{THREADS}",
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l07_add_rms_norm",
        title="Add and RMSNorm in one pass: {speedup:.1f}x as fast as eager at {x} rows",
        x_name=f"rows of {HIDDEN} values",
        x_values=ROW_COUNTS,
        quick_x_values=[1, 256],
        inputs=lambda n, device: (
            rows(n, HIDDEN, device),
            rows(n, HIDDEN, device),
            weight(HIDDEN, device),
            EPS,
        ),
        providers=providers("add_rms_norm", **{"Liger-Kernel": liger_add_rms_norm}),
        ylabel="time",
        bytes_moved=lambda n: bytes_of(4, n * HIDDEN, HIDDEN),
        floor_s=lambda n: copy_floor_s(bytes_of(4, n * HIDDEN, HIDDEN)),
        floor_label="a copy of as many bytes",
        dtype=DTYPE_NAME,
        shape=f"rows of {HIDDEN}{THREADS}",
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l07_silu_mul",
        title="SwiGLU in one pass: {speedup:.1f}x as fast as eager at {x} rows",
        x_name=f"rows of {INNER} values",
        x_values=ROW_COUNTS,
        quick_x_values=[1, 256],
        inputs=lambda n, device: (rows(n, INNER, device), rows(n, INNER, device)),
        providers=providers("silu_mul", **{"Liger-Kernel": liger_silu_mul}),
        ylabel="time",
        bytes_moved=lambda n: bytes_of(3, n * INNER),
        floor_s=lambda n: copy_floor_s(bytes_of(3, n * INNER)),
        floor_label="a copy of as many bytes",
        dtype=DTYPE_NAME,
        shape=f"rows of {INNER}{THREADS}",
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l07_qk_norm",
        title="QK-norm in one launch: {speedup:.1f}x as fast as eager at {x} tokens",
        x_name=f"tokens, {HEADS} + {KV_HEADS} heads of {HEAD_DIM}",
        x_values=ROW_COUNTS,
        quick_x_values=[1, 256],
        inputs=qk_inputs,
        providers={
            label: (role, first_of(make)) for label, (role, make) in providers("qk_norm").items()
        },
        ylabel="time",
        bytes_moved=lambda n: bytes_of(2, n * (HEADS + KV_HEADS) * HEAD_DIM, 2 * HEAD_DIM),
        floor_s=lambda n: copy_floor_s(
            bytes_of(2, n * (HEADS + KV_HEADS) * HEAD_DIM, 2 * HEAD_DIM)
        ),
        floor_label="a copy of as many bytes",
        dtype=DTYPE_NAME,
        shape=f"{HEADS} + {KV_HEADS} heads of {HEAD_DIM}{THREADS}",
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l07_epilogue",
        # on a CPU the compiler fuses silu · up after the products, not into them
        title=f"SwiGLU {'inside' if ON_GPU else 'fused after'} its products: "
        "{speedup:.2f}x as fast as eager at {x} rows",
        x_name=f"rows, {HIDDEN} values in, {INNER} out",
        x_values=[1, 16, 256, 4096] if ON_GPU else [1, 16, 128],
        quick_x_values=[1, 16],
        inputs=mlp_inputs,
        providers={
            "products, eager chain": ("naive", eager(naive.swiglu)),
            "products, one kernel": ("library", on_gpu(eager(product_then_kernel))),
            "epilogue": ("optimized", on_gpu(eager(epilogue.swiglu))),
            COMPILED: (FUSED_ROLE, compiled(naive.swiglu)),
        },
        ylabel="time",
        bytes_moved=lambda n: bytes_of(1, n * (HIDDEN + INNER), 2 * INNER * HIDDEN),
        floor_s=mlp_floor_s,
        floor_label="products alone",
        dtype=DTYPE_NAME,
        shape=f"{HIDDEN} to {INNER}, twice{THREADS}",
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l07_decode_step",
        title="A decode step at hidden size {x} is {speedup:.2f}x as fast with the fused twin",
        x_name="hidden size",
        x_values=[64, 128, 256, 512, 1024] if not ON_GPU else [512, 1024, 2048, 4096],
        quick_x_values=[64, 256],
        inputs=lambda n, device: (torch.tensor([7], device=device), n),
        providers={
            "plain decoder": ("naive", step(lambda model: model)),
            "fused twin": ("optimized", step(fused)),
        },
        ylabel="time of one decode step",
        bytes_moved=weight_bytes,
        floor_s=read_floor_s,
        floor_label="weights read once",
        dtype=DTYPE_NAME,
        shape=f"{LAYERS} layers, heads of 64, context {CONTEXT}{THREADS}",
        tolerance=TOLERANCE,
    ),
]
