"""The decode step as CUDA graphs: captured once for each batch size of a short list, then launched
whole.

Read `GraphRunner`: buffers that never move, one graph per bucket, and a step that is copy in,
replay, copy out. `CudaGraphs` is all of PyTorch's API that it needs; simulator.py stands in for it
where there is no GPU.

Sources: NVIDIA, CUDA C++ programming guide, section "CUDA Graphs"; PyTorch, CUDA semantics, section
"CUDA Graphs".
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import OnToken
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.cache import KVPool
from lessons.l11_cuda_graphs.naive import Step, batch_loop, decode_batch, decode_logits, eager_step

# a column that nobody asked for: any token, any place, written nowhere, seeing nothing
PADDING = (0, 0, -1, 0)
# the first run compiles and fills caches, the second runs on what the first has set up
WARM_UPS = 2


def batch_buckets(max_batch: int) -> list[int]:
    """The batch sizes to capture: powers of two below `max_batch`, and `max_batch` itself. Raises
    ValueError below 1.
    """
    if max_batch < 1:
        raise ValueError(f"max_batch: got {max_batch}; accepted: 1 or more")
    return [1 << n for n in range((max_batch - 1).bit_length())] + [max_batch]


def bucket_for(batch: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `batch` sequences. Raises ValueError if none does."""
    fitting = [bucket for bucket in buckets if bucket >= batch]
    if batch < 1 or not fitting:
        raise ValueError(f"batch: got {batch}; accepted: 1 to {max(buckets)}, the largest bucket")
    return min(fitting)


def padded(inputs: Tensor, bucket: int) -> Tensor:
    """inputs: [4, B] -> [4, bucket], PADDING behind the columns that are asked for."""
    padding = torch.tensor(PADDING, device=inputs.device)[:, None]
    return torch.cat([inputs, padding.expand(-1, bucket - inputs.shape[1])], dim=1)


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
        self.buckets = sorted(set(buckets or batch_buckets(pool.num_blocks)))
        if not 1 <= self.buckets[0] <= self.buckets[-1] <= pool.num_blocks:
            raise ValueError(
                f"buckets: got {self.buckets}; accepted: batch sizes from 1 to {pool.num_blocks}, "
                f"the pool's blocks"
            )
        # Kept, because a graph reads their memory again at every replay.
        self.model, self.pool = model, pool
        self.inputs, self.graphs, self.logits = {}, {}, {}
        # the largest first, so that the others fit into the memory that it has taken
        for bucket in reversed(self.buckets):
            # Nothing but padding: capturing writes into no block of the pool.
            nothing = torch.empty(4, 0, dtype=torch.int64)
            self.inputs[bucket] = padded(nothing, bucket).to(model.device)
            # no length that Python knows: a step may see all that a block holds
            batch = decode_batch(self.inputs[bucket], max_context_len=pool.block_size)
            step = partial(decode_logits, model, pool, batch)
            self.graphs[bucket], self.logits[bucket] = graphs.capture(step)

    @torch.inference_mode()
    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs: [4, B] int64, on the CPU -> logits: [B, V]. Raises ValueError for more sequences
        than the largest bucket.
        """
        batch = inputs.shape[1]
        bucket = bucket_for(batch, self.buckets)
        # into the buffer: another tensor the graph would never see
        self.inputs[bucket].copy_(padded(inputs, bucket))
        self.graphs[bucket].replay()
        # the next replay overwrites the graph's own
        return self.logits[bucket][:batch].clone()


class CudaGraphs:
    """PyTorch's CUDA graphs behind one method. All of them share one memory pool, which only one of
    them uses at a time.
    """

    def __init__(self, device: torch.device):
        self.device, self.pool, self.stream = (
            device,
            torch.cuda.graph_pool_handle(),
            torch.cuda.Stream(device),
        )

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
    """The fastest step of the model's device: captured on a GPU; eager on a CPU, where nothing is
    launched.
    """
    if model.device.type != "cuda":
        return eager_step(model, pool)
    return GraphRunner(model, pool, CudaGraphs(model.device))


def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Waves of lockstep decoding, each step one launch on a GPU. Arguments, result and errors as in
    lesson 2's `generate`.
    """
    return batch_loop(graph_step, model, prompts, max_new_tokens, sampling, on_token)
