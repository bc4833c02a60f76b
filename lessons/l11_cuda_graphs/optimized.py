"""The decode step as CUDA graphs: captured once for each batch size of a short list, then launched
whole.

Read `GraphRunner`: buffers that never move, one graph per bucket, and a step that is copy in,
replay, copy out. `CudaGraphs` is all of PyTorch's API that it needs; simulator.py takes its place
where there is no GPU.

Sources: NVIDIA, CUDA C++ programming guide, section "CUDA Graphs"; PyTorch, CUDA semantics, section
"CUDA Graphs".
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken, check_call, read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.cache import KVPool
from lessons.l11_cuda_graphs.naive import (
    Setup,
    Step,
    decode_batch,
    decode_logits,
    eager_step,
    room_for,
    run_waves,
    set_up,
    unfinished,
)

# a column without a request: any token, any place, written nowhere, seeing nothing
PADDING = (0, 0, -1, 0)
# the first run compiles and fills caches, the second runs on what the first has set up
WARM_UPS = 2


def batch_buckets(max_batch: int) -> list[int]:
    """The batch sizes to capture: powers of two below `max_batch`, and `max_batch` itself. Raises
    ValueError below 1.
    """
    if max_batch < 1:
        raise ValueError(f"max_batch: got {max_batch}; accepted: 1 or more")
    powers = (max_batch - 1).bit_length()
    return [2**n for n in range(powers)] + [max_batch]


def bucket_for(batch: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `batch` sequences. Raises ValueError if none does."""
    largest = max(buckets)
    if not 1 <= batch <= largest:
        raise ValueError(f"batch: got {batch}; accepted: 1 to {largest}, the largest bucket")
    return min(bucket for bucket in buckets if bucket >= batch)


def padded(inputs: Tensor, bucket: int) -> Tensor:
    """inputs: [4, B] -> [4, bucket], PADDING after the columns that are asked for.

    Raises ValueError if the bucket is smaller than the batch.
    """
    batch = inputs.shape[1]
    if bucket < batch:
        raise ValueError(f"bucket: got {bucket}; accepted: {batch}, the batch, or more")
    column = torch.tensor(PADDING, device=inputs.device)[:, None]
    padding = column.expand(-1, bucket - batch)
    return torch.cat([inputs, padding], dim=1)


class GraphRunner:
    """A decode step that is launched whole: one captured graph for each bucket, all over the same
    weights and cache.

    graphs: CudaGraphs or SimulatedGraphs, an object with capture(step) -> (graph, output): it runs
    step() a few times, then records it; graph.replay() runs the recorded operations again, on the
    very tensors that they had, and refills `output`. buckets: batch sizes to capture, at most
    pool.num_blocks; default batch_buckets(pool.num_blocks). Raises ValueError.
    """

    @torch.inference_mode()
    def __init__(self, model: Decoder, pool: KVPool, graphs, buckets: Sequence[int] | None = None):
        most = pool.num_blocks
        self.buckets = sorted(set(buckets or batch_buckets(most)))
        if self.buckets[0] < 1 or self.buckets[-1] > most:
            accepted = f"batch sizes from 1 to {most}, the pool's blocks"
            raise ValueError(f"buckets: got {self.buckets}; accepted: {accepted}")
        # Kept, because a graph reads their memory again at every replay.
        self.model = model
        self.pool = pool
        self.inputs, self.graphs, self.logits = {}, {}, {}
        # The largest first, so that the others fit into the memory that it has taken.
        for bucket in reversed(self.buckets):
            # Nothing but padding: capturing writes into no block of the pool.
            nothing = torch.empty(4, 0, dtype=torch.int64)
            inputs = padded(nothing, bucket).to(model.device)
            # Python knows no length here, so a step may see all that a block holds.
            batch = decode_batch(inputs, max_context_len=pool.block_size)
            step = partial(decode_logits, model, pool, batch)
            self.graphs[bucket], self.logits[bucket] = graphs.capture(step)
            self.inputs[bucket] = inputs
        on_gpu = model.device.type == "cuda"
        self.pinned = PinnedCopies(self.inputs) if on_gpu else None

    @torch.inference_mode()
    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs: [4, B] int64, on the CPU -> logits: [B, V]. Raises ValueError for more sequences
        than the largest bucket.
        """
        batch = inputs.shape[1]
        bucket = bucket_for(batch, self.buckets)
        self.copy_in(padded(inputs, bucket), bucket)
        self.graphs[bucket].replay()
        # A clone, because the next replay overwrites the graph's own output.
        return self.logits[bucket][:batch].clone()

    def copy_in(self, inputs: Tensor, bucket: int) -> None:
        """inputs: [4, bucket], on the CPU, into the graph's buffer: it would never see another."""
        if self.pinned is None:
            self.inputs[bucket].copy_(inputs)
        else:
            self.pinned.copy_in(inputs, bucket)


class PinnedCopies:
    """Copies into buffers on a GPU, {bucket: [4, bucket]}, which the CPU does not wait for.

    A copy from ordinary memory makes the CPU wait for all work before it. The GPU reads pinned
    memory by itself, and later, so it must not be overwritten before the event says that it was
    read.
    """

    def __init__(self, buffers: dict[int, Tensor]):
        self.buffers = buffers
        self.staged = {}
        for bucket, buffer in buffers.items():
            self.staged[bucket] = torch.empty_like(buffer, device="cpu", pin_memory=True)
        self.has_read = torch.cuda.Event()

    def copy_in(self, inputs: Tensor, bucket: int) -> None:
        """inputs: [4, bucket], on the CPU."""
        buffer, staged = self.buffers[bucket], self.staged[bucket]
        self.has_read.synchronize()
        staged.copy_(inputs)
        buffer.copy_(staged, non_blocking=True)
        stream = torch.cuda.current_stream(buffer.device)
        self.has_read.record(stream)


class CudaGraphs:
    """PyTorch's CUDA graphs as one method. All of them share one memory pool, which only one of
    them uses at a time.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def capture(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Run step() WARM_UPS times, then record it. Returns the graph and its output, [...],
        garbage until the first replay.
        """
        with torch.cuda.device(self.device):
            # A side stream, because the default stream cannot be captured and warming up there
            # would order other work.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UPS):
                    step()
            torch.cuda.current_stream().wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                output = step()
        return graph, output


def graph_step(model: Decoder, pool: KVPool) -> Step:
    """The fastest step of this model: captured on a GPU; eager on a CPU, where nothing is launched.

    Some models stay eager (`can_be_captured`).
    """
    if not can_be_captured(model) or model.device.type != "cuda":
        return eager_step(model, pool)
    return GraphRunner(model, pool, CudaGraphs(model.device))


def can_be_captured(model: Decoder) -> bool:
    """Whether a step can become a CUDA graph. Not where Python asks the device what to run: a
    router for its experts (lesson 20 has a layer that does not), capped attention for its
    sequences' lengths.
    """
    waits = any(getattr(part, "waits_for_values", False) for part in model.modules())
    return not waits and not model.config.has_score_rules


# ---------------------------------------------------------------- captured once, used by every call

KEPT = WeakKeyDictionary()  # {model: (what it was captured for, Setup)}


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Waves of lockstep decoding, each step one launch on a GPU. Arguments, result and errors as in
    lesson 2's `generate`.

    Pool and graphs stay for the next call with this model, until the model is deleted or a call
    needs more room.
    """
    check_call(model, on_token)
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    if waiting := unfinished(requests):
        setup = kept_setup(model, *room_for(waiting))
        run_waves(setup, waiting, on_token)
        KEPT[model] = captured_for(model), setup
    return [request.output for request in requests]


def kept_setup(model: Decoder, num_blocks: int, block_size: int) -> Setup:
    """The setup of an earlier call where it is large enough, else a new one.

    It leaves KEPT until its call has ended, so a call inside another one gets its own setup.
    """
    made_for, setup = KEPT.pop(model, (None, None))
    if made_for == captured_for(model) and holds(setup.pool, num_blocks, block_size):
        # Zeros, as in a new pool, because what is masked is multiplied by 0, and 0 · NaN is NaN.
        setup.pool.k_slots.zero_()
        setup.pool.v_slots.zero_()
        return setup
    # Frees the old pool before a new one is made.
    setup = None
    # A shallow copy, because a value that holds its key would keep a deleted model alive.
    twin = copy(model)
    return set_up(graph_step, twin, num_blocks, block_size)


def holds(pool: KVPool, num_blocks: int, block_size: int) -> bool:
    """Whether the pool has that many blocks, and of that size."""
    enough_blocks = pool.num_blocks >= num_blocks
    return enough_blocks and pool.block_size >= block_size


def captured_for(model: Decoder) -> tuple:
    """What graphs of the model rely on: its config, and the address of each weight."""
    weights = [weight.data_ptr() for weight in model.parameters()]
    return model.config, model.dtype, model.device, weights
