"""Attention through a table over the batch and the block size; and what the same memory serves in
reservations and in blocks.

    python -m lessons.toolbox.measure.bench 12

On a CPU the work list of stand_ins.py replaces the kernel, which is interpreted and not timed.
"""

import random
from itertools import chain

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.lab.workload import CONFIG, DTYPE, ON_GPU, THREADS, read_floor_s
from lessons.l11_cuda_graphs.lab.workload import TINY, model_of, step_floor_s
from lessons.l12_paged_kv import naive
from lessons.l12_paged_kv.generate import generate
from lessons.l12_paged_kv.kernels import stand_ins
from lessons.l12_paged_kv.kernels.cuda_paged import paged_decode_cuda
from lessons.l12_paged_kv.naive import gathered_attention
from lessons.l12_paged_kv.optimized import paged_decode
from lessons.toolbox.measure.bench import Benchmark, Unavailable, needs, on_gpu

HEADS, KV_HEADS, HEAD_DIM = (32, 8, 128) if ON_GPU else (6, 2, 64)
CONTEXT = 4096 if ON_GPU else 512  # tokens of the longest sequence
BATCHES = [1, 4, 16, 64, 256] if ON_GPU else [1, 4, 16, 64]
BLOCK_SIZES = [1, 4, 16, 64, 256]
SIXTEEN = 16  # tokens of a block
SCALE = HEAD_DIM**-0.5
# In this order: with a mask, fewer KV heads are known to cuDNN, and otherwise only to the slow
# "math".
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
TOLERANCE = 3e-2 if ON_GPU else 1e-4
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
REQUESTS, LONGEST_ANSWER = (64, 128) if ON_GPU else (24, 64)

# ---------------------------------------------------------------- a step


def ragged_lengths(count: int) -> list[int]:
    """Lengths from an eighth of CONTEXT to all of it, in a fixed random order."""
    rng = random.Random(12)
    lengths = [CONTEXT - n * (CONTEXT * 7 // 8) // max(1, count - 1) for n in range(count)]
    return rng.sample(lengths, count)


def inputs_of(count: int, block_size: int, device: torch.device) -> tuple:
    """q: [B, Hq, D], k_cache, v_cache: [blocks, block_size, Hkv, D] and the step's batch, whose
    blocks are in random order.
    """
    lengths = ragged_lengths(count)
    counts = [-(-n // block_size) for n in lengths]
    order = random.Random(1).sample(range(sum(counts)), sum(counts))
    tables = [[order.pop() for _ in range(n)] for n in counts]
    shape = (sum(counts), block_size, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
    q = torch.randn(count, HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    chunks = [([0], length - 1) for length in lengths]
    make = new_batch if ON_GPU else stand_ins.paged_batch
    args = (block_size, device, tables) if ON_GPU else (block_size, tables, device)
    return q, k_cache, v_cache, make(chunks, *args)


def gather(q, k_cache, v_cache, batch):
    """Copy each sequence's blocks, then attend."""
    table, starts, lens = batch.block_table, batch.cu_seqlens_q, batch.context_lens
    return lambda: gathered_attention(q, k_cache, v_cache, table, starts, lens)


def through_the_table(q, k_cache, v_cache, batch):
    """The kernel on a GPU, the work list on a CPU."""
    if ON_GPU:
        table, lens, most = batch.block_table, batch.context_lens, batch.max_context_len
        return lambda: paged_decode(q, k_cache, v_cache, table, lens, max_context_len=most)
    return lambda: stand_ins.decode(q, k_cache, v_cache, batch, SCALE, None)


@on_gpu
def cuda_twin(q, k_cache, v_cache, batch):
    """optimized.cu."""
    table, lens, most = batch.block_table, batch.context_lens, batch.max_context_len
    try:
        paged_decode_cuda(q[:1], k_cache, v_cache, table[:1], lens[:1], max_context_len=most)
    except (RuntimeError, ValueError) as error:
        raise Unavailable(str(error)) from None
    return lambda: paged_decode_cuda(q, k_cache, v_cache, table, lens, max_context_len=most)


def contiguous(q, k_cache, v_cache, batch):
    """PyTorch's attention over caches that are padded side by side, which the table is compared
    with. The copy is made before the clock runs.
    """
    keys, values = (padded(cache, batch) for cache in (k_cache, v_cache))
    row = torch.arange(keys.shape[2], device=q.device)
    sees = (row < batch.context_lens[:, None])[:, None, None]

    def run():
        with sdpa_kernel(BACKENDS, set_priority=True):
            return scaled_dot_product_attention(
                q[:, :, None], keys, values, attn_mask=sees, enable_gqa=True
            )[:, :, 0]

    return run


def padded(cache: Tensor, batch) -> Tensor:
    """[blocks, block_size, Hkv, D] -> [B, Hkv, longest, D], zeros after the shorter ones."""
    lens = batch.context_lens.tolist()
    rows = [naive.gathered(cache, batch.block_table[b], n) for b, n in enumerate(lens)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2).contiguous()


@on_gpu
def flashinfer(q, k_cache, v_cache, batch):
    """FlashInfer's paged decode, which plans its splits on the host."""
    with needs("flashinfer-python"):
        import flashinfer as library
    size, lens = k_cache.shape[1], batch.context_lens
    counts = -(-lens // size)
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=q.device)
    indptr[1:] = counts.cumsum(0)
    rows = [row[:n] for row, n in zip(batch.block_table, counts.tolist())]
    last = ((lens - 1) % size + 1).int()
    space = torch.empty(128 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(space, "NHD")
    heads = HEADS, KV_HEADS, HEAD_DIM
    wrapper.plan(indptr, torch.cat(rows), last, *heads, size, q_data_type=q.dtype)
    return lambda: wrapper.run(q, (k_cache, v_cache))


def kv_bytes(count: int) -> int:
    """K and V of all sequences in one layer."""
    return 2 * sum(ragged_lengths(count)) * KV_HEADS * HEAD_DIM * DTYPE.itemsize


STEP = {
    "gather, then attend": ("naive", gather),
    "through the table": ("optimized", through_the_table),
    "CUDA C++ twin": ("optimized", cuda_twin),
    "PyTorch SDPA, contiguous, padded": ("library", contiguous),
    "FlashInfer": ("library", flashinfer),
}
SHAPE = f"heads {HEADS}/{KV_HEADS}, head_dim {HEAD_DIM}{THREADS}"


# ---------------------------------------------------------------- the same memory


def load_of(places: int, device: torch.device) -> tuple:
    """A model, prompts, how long each answer becomes, and a memory of `places` reservations."""
    rng = random.Random(7)
    # float32 everywhere, so that rounding changes no token
    model = model_of(TINY, torch.float32)
    prompts = [rng.choices(range(TINY.vocab_size), k=rng.randint(8, 32)) for _ in range(REQUESTS)]
    # Many short answers and few long ones.
    limits = [round(LONGEST_ANSWER ** rng.uniform(0.3, 1)) for _ in prompts]
    longest = max(len(prompt) + n - 1 for prompt, n in zip(prompts, limits))
    return model, prompts, limits, -(-places * longest // SIXTEEN) * SIXTEEN


def as_tensor(outputs: list[list[int]]) -> Tensor:
    return torch.tensor(list(chain.from_iterable(outputs)), dtype=torch.float32)


def in_reservations(model, prompts, limits, memory_tokens):
    """Waves of as many as have room for the longest, side by side."""
    return lambda: as_tensor(naive.generate(model, prompts, limits, memory_tokens=memory_tokens))


def in_blocks(model, prompts, limits, memory_tokens):
    """Waves of as many prompts as there are blocks for."""
    blocks = memory_tokens // SIXTEEN
    return lambda: as_tensor(generate(model, prompts, limits, num_blocks=blocks))


def load_floor_s(places: int) -> float:
    """The longest answer alone, a step a token: no server can be faster than that."""
    *_, limits, _ = load_of(places, torch.device("cpu"))
    return max(limits) * step_floor_s(TINY, 1, 1, torch.float32)


BENCHMARKS = [
    Benchmark(
        name="l12_batch",
        title="Reading through the table is {speedup:.1f}x faster than gathering at {x} sequences",
        x_name="sequences in the batch",
        x_values=BATCHES,
        quick_x_values=[1, 4],
        inputs=lambda count, device: inputs_of(count, SIXTEEN, device),
        providers=STEP,
        ylabel="decode attention of one layer",
        bytes_moved=kv_bytes,
        floor_s=lambda count: read_floor_s(kv_bytes(count)),
        floor_label="KV read once",
        dtype=DTYPE_NAME,
        shape=f"contexts up to {CONTEXT}, blocks of {SIXTEEN}, {SHAPE}",
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l12_block_size",
        title="Blocks of {x} tokens take {optimized_growth:.2f}x the time of blocks of {first}, "
        "and waste more",
        x_name="tokens in a block",
        x_values=BLOCK_SIZES,
        quick_x_values=[4, 16],
        inputs=lambda size, device: inputs_of(BATCHES[-2], size, device),
        providers=STEP,
        ylabel="decode attention of one layer",
        bytes_moved=lambda size: kv_bytes(BATCHES[-2]),
        floor_s=lambda size: read_floor_s(kv_bytes(BATCHES[-2])),
        floor_label="KV read once",
        dtype=DTYPE_NAME,
        shape=f"batch {BATCHES[-2]}, contexts up to {CONTEXT}, {SHAPE}",
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l12_memory",
        title="In a memory of {x} reservations, blocks serve the same requests {speedup:.2f}x as "
        "fast",
        x_name="reservations that the memory holds",
        x_values=[1, 2, 4, 8, 16] if not ON_GPU else [2, 4, 8, 16, 32],
        quick_x_values=[8, 16],
        inputs=load_of,
        providers={
            "reservations": ("naive", in_reservations),
            "blocks of 16": ("optimized", in_blocks),
        },
        ylabel=f"time of {REQUESTS} requests",
        floor_s=load_floor_s,
        floor_label="the longest answer alone",
        dtype="float32",
        shape=f"{CONFIG.num_hidden_layers} layers, prompts of 8 to 32, answers up to "
        f"{LONGEST_ANSWER}{THREADS}",
        tolerance=0,
    ),
]
