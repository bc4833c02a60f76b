"""What reading a row less often saves, over longer and longer rows; and what merging the states of
splits costs.

    python -m lessons.toolbox.measure.bench 08

On a CPU the kernels would be interpreted and are not timed: `softmax_torch` and
`merge_states_torch` stand for them.
"""

import math

import torch
from torch import Tensor

from lessons.l08_online_softmax import cuda_softmax, naive, optimized, partials
from lessons.l08_online_softmax.lab.traffic import softmax_bytes
from lessons.toolbox.measure.bench import Benchmark, Unavailable, compiled, on_gpu
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.measure.hardware import measured_ceilings, time_floor_s

ON_GPU = default_device().type == "cuda"
DTYPE = default_dtype()
# of all rows together, beyond the caches: half a GiB, 32 MiB
SCORES = 2**28 if ON_GPU else 2**23
# vocabularies among them: Llama 2's, Llama 3's
COLUMNS = [1024, 4096, 16384, 32000, 65536, 128256, 262144]
VOCABULARY = 151936  # Qwen's
STATE_ROWS, HEAD_DIM = (4096 if ON_GPU else 512), 128  # tokens times query heads, of each state


def logits(rows: int, columns: int, device: torch.device) -> tuple[Tensor]:
    """[rows, columns] scores."""
    return (4 * torch.randn(rows, columns, device=device, dtype=DTYPE),)


def logits_bytes(rows: int, columns: int) -> float:
    """Each score read once, each probability written once: what any softmax moves."""
    return softmax_bytes(rows, columns, DTYPE.itemsize, "one block")


def logits_floor_s(rows: int, columns: int) -> float:
    """Seconds for those bytes at this machine's bandwidth."""
    return time_floor_s(logits_bytes(rows, columns), 0, measured_ceilings(), DTYPE)


def in_tiles(softmax):
    """A version of naive.py over tiles large enough that Python's loop costs nothing, small enough
    for a CPU's cache.
    """

    def make(scores: Tensor):
        block = max(naive.BLOCK, (2**24 if ON_GPU else optimized.CACHE_SCORES) // len(scores))
        return lambda: softmax(scores, block)

    return make


def row_by_row(scores: Tensor):
    """What stands in for the kernel on a CPU. On a GPU it would be thousands of launches."""
    if ON_GPU:
        raise Unavailable("stands in for the kernel where there is no GPU")
    return lambda: optimized.softmax_torch(scores)[0]


def flashinfer(name: str):
    """A function of FlashInfer, "module.function". Raises Unavailable where it is not installed or
    has no such function.
    """
    if not ON_GPU:
        raise Unavailable("needs a GPU")
    try:
        import flashinfer as library

        module, _, function = name.partition(".")
        return getattr(getattr(library, module), function)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"needs flashinfer-python: {error}") from None


def flashinfer_softmax(scores: Tensor):
    """FlashInfer's online softmax, which gives float32."""
    softmax = flashinfer("sampling.softmax")
    return lambda: softmax(scores, temperature=1.0)


def cuda_twin(scores: Tensor):
    """optimized.cu."""
    try:
        cuda_softmax.softmax(scores[:1])
    except (RuntimeError, ValueError) as error:
        raise Unavailable(str(error)) from None
    return lambda: cuda_softmax.softmax(scores)[0]


def states(num_splits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """outs: [S, STATE_ROWS, HEAD_DIM], lses: [S, STATE_ROWS], float32 as splits leave them."""
    return (
        torch.randn(num_splits, STATE_ROWS, HEAD_DIM, device=device),
        3 * torch.randn(num_splits, STATE_ROWS, device=device),
    )


def states_bytes(num_splits: int) -> float:
    """Every state read once, one written."""
    return 4 * (num_splits + 1) * STATE_ROWS * (HEAD_DIM + 1)


def flashinfer_merge(outs: Tensor, lses: Tensor):
    """FlashInfer's merge of states: [tokens, S, heads, D], logarithms in base 2; put in its layout
    before the clock starts.
    """
    merge = flashinfer("cascade.merge_states")
    theirs = (
        outs.transpose(0, 1)[:, :, None].contiguous(),
        lses.T[:, :, None].contiguous() * math.log2(math.e),
    )
    return lambda: merge(*theirs)[0][:, 0]


DTYPE_NAME = str(DTYPE).removeprefix("torch.")
THREADS = "" if ON_GPU else f" · threads {torch.get_num_threads()}"
TOLERANCE = 2e-2 if DTYPE.itemsize == 2 else 1e-4
SOFTMAXES = {
    "three passes": ("naive", in_tiles(naive.softmax_three_passes)),
    "online, two passes": ("naive", in_tiles(naive.softmax_online)),
    "Triton: one block or online": ("optimized", on_gpu(lambda x: lambda: optimized.softmax(x)[0])),
    "CUDA C++ twin": ("optimized", on_gpu(cuda_twin)),
    "row by row, PyTorch": ("optimized", row_by_row),
    "torch.softmax": ("library", lambda x: lambda: torch.softmax(x, -1)),
    "torch.compile": ("library", compiled(lambda x: torch.softmax(x, -1))),
    "FlashInfer": ("library", flashinfer_softmax),
}
BENCHMARKS = [
    Benchmark(
        name="l08_softmax",
        title="Rows of {x} scores, read once or twice: {speedup:.1f}x as fast as in three passes",
        x_name="columns of a row",
        x_values=COLUMNS,
        quick_x_values=[1024, 65536],
        inputs=lambda n, device: logits(SCORES // n, n, device),
        providers=SOFTMAXES,
        metric="bandwidth",
        ylabel="useful bandwidth",
        bytes_moved=lambda n: logits_bytes(SCORES // n, n),
        floor_s=lambda n: logits_floor_s(SCORES // n, n),
        floor_label="measured copy or read",
        dtype=DTYPE_NAME,
        shape=f"{SCORES} scores{THREADS}",
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l08_rows",
        title="{x} rows of a vocabulary of 151936: {speedup:.1f}x as fast as in three passes",
        x_name="rows: sequences that sample a token",
        x_values=[2**n for n in range(10 if ON_GPU else 7)],
        quick_x_values=[1, 16],
        inputs=lambda rows, device: logits(rows, VOCABULARY, device),
        providers=SOFTMAXES,
        metric="bandwidth",
        ylabel="useful bandwidth",
        bytes_moved=lambda rows: logits_bytes(rows, VOCABULARY),
        floor_s=lambda rows: logits_floor_s(rows, VOCABULARY),
        floor_label="measured copy or read",
        dtype=DTYPE_NAME,
        shape=f"{VOCABULARY} columns{THREADS}",
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l08_merge",
        title="Merging {x} states at once is {speedup:.1f}x as fast as one by one",
        x_name="states to merge",
        x_values=[2, 4, 8, 16, 32, 64, 128],
        quick_x_values=[2, 16],
        inputs=states,
        providers={
            "one by one": ("naive", lambda outs, lses: lambda: naive.merge_states(outs, lses)[0]),
            "merge kernel": (
                "optimized",
                on_gpu(lambda outs, lses: lambda: partials.merge_states(outs, lses)[0]),
            ),
            "all at once, PyTorch": (
                "optimized",
                lambda outs, lses: lambda: partials.merge_states_torch(outs, lses)[0],
            ),
            "FlashInfer": ("library", flashinfer_merge),
        },
        ylabel="time",
        bytes_moved=states_bytes,
        floor_s=lambda n: time_floor_s(states_bytes(n), 0, measured_ceilings(), DTYPE),
        floor_label="states read once",
        dtype="float32",
        shape=f"{STATE_ROWS} rows, head_dim {HEAD_DIM}{THREADS}",
    ),
]
