"""How many blocks the cache gets: on a GPU all memory that the largest step of the model leaves.

Source: which step is measured, and that its peak is kept free: vLLM, gpu_worker.py,
determine_available_memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l12_paged_kv.runner import step_batch
from lessons.toolbox.model.config import ModelConfig
from reference.engine.engine_args import EngineArgs
from reference.engine.model_runner import ModelRunner

if TYPE_CHECKING:
    from lessons.toolbox.model.window_groups import WindowGroups

CPU_CACHE_BYTES = 2**30


def blocks_that_fit(
    args: EngineArgs,
    model: Decoder,
    max_model_len: int,
    draft: ModelConfig | None = None,
    new_runner: Callable[..., ModelRunner] = ModelRunner,
    groups: WindowGroups | None = None,
) -> int:
    """As many blocks as were asked for, or as memory holds, but no more than max_num_seqs of the
    longest sequences can fill. draft: the shape of what has K and V in blocks of the same numbers.
    new_runner: makes what runs the model, of ModelRunner's arguments. groups: of the layers, each
    with blocks of its own. Of a model that is a stage of a pipeline its layers count. Raises
    ValueError if memory does not hold one such sequence.
    """
    if args.kv_cache_dtype == "fp8_ds_mla":
        from lessons.l19_kv_quantization.kernels.latents.naive import rows_of

        rows_of(model.config, model.dtype)  # is refused without latents
    if args.num_gpu_blocks_override:
        # As many bytes in groups, so what fits into blocks of all layers always fits.
        return args.num_gpu_blocks_override * (1 if groups is None else len(groups.windows))
    per_token = partial(bytes_per_token, kv_cache_dtype=args.kv_cache_dtype)
    itemsize, in_block = model.dtype.itemsize, len(model.stage_layers)
    if groups is not None:
        in_block = groups.layers_each
    # a layer is as large as another
    block_bytes = per_token(model.config, itemsize=itemsize) * in_block // len(model.layers)
    if draft is not None:
        block_bytes += per_token(draft, itemsize=itemsize)
    block_bytes *= args.block_size
    if groups is not None:
        new_runner = partial(new_runner, groups=groups)
    memory = args.kv_cache_memory_bytes or cache_memory(args, model, max_model_len, new_runner)
    num_blocks = max(0, int(memory // block_bytes))

    def needed(tokens: int) -> int:
        if groups is None:
            return -(-tokens // args.tokens_per_block)
        return groups.most_pages(tokens, args.block_size, args.max_num_batched_tokens)

    longest = needed(max_model_len)
    if num_blocks < longest:
        fits = bisect_right(range(1, max_model_len), num_blocks, key=needed)
        raise ValueError(
            f"max_model_len: got {max_model_len}; accepted: at most "
            f"{fits}, the tokens that {memory / 1e6:.1f} MB of cache hold, "
            "or more memory for it (kv_cache_memory_bytes, gpu_memory_utilization nearer to 1, a "
            "smaller max_num_batched_tokens)"
        )
    return min(num_blocks, args.max_num_seqs * longest)


def bytes_per_token(config: ModelConfig, kv_cache_dtype: str, itemsize: int) -> int:
    """K and V of one token in all layers. itemsize: bytes of a number in the model's dtype."""
    if kv_cache_dtype == "auto":
        return config.kv_bytes_per_token(itemsize)
    from reference.engine.cache_arguments import cache_dtype_of  # here: a plain cache asks nothing

    kv_cache_dtype = cache_dtype_of(config, kv_cache_dtype)
    if kv_cache_dtype == "fp8_ds_mla":
        from lessons.l19_kv_quantization.kernels.latents.naive import row_bytes_of

        return config.num_kv_layers * row_bytes_of(config, itemsize)
    from lessons.l19_kv_quantization.formats import FORMATS, kv_bytes_per_token

    return kv_bytes_per_token(config, FORMATS[kv_cache_dtype], itemsize)


def cache_memory(
    args: EngineArgs,
    model: Decoder,
    max_model_len: int,
    new_runner: Callable[..., ModelRunner] = ModelRunner,
) -> float:
    """Bytes for the cache, on this machine. Raises ValueError, as memory_left."""
    if model.device.type != "cuda":
        return CPU_CACHE_BYTES
    step = partial(run_largest_step, args, model, max_model_len, new_runner)
    return memory_left(args, model.device, step)


def memory_left(args: EngineArgs, device: torch.device, step: Callable[[], int]) -> float:
    """Of a GPU's memory the share that may be used, less what is used, and less what step(), the
    largest one, takes on top while it runs. step returns how many bytes of that were a cache, whose
    place the real one takes. Raises ValueError if it does not fit.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        cache_bytes = step()
    except torch.OutOfMemoryError:
        raise ValueError(
            f"max_num_batched_tokens: got {args.max_num_batched_tokens}; accepted: fewer, or a "
            "smaller max_model_len, because the GPU has no room for the activations of such a step "
            "and the cache of one sequence beside the weights"
        ) from None
    torch.cuda.synchronize(device)
    on_top = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    on_top -= cache_bytes
    torch.cuda.empty_cache()
    # Asked after the step, because the kernels that it loaded stay.
    free, total = torch.cuda.mem_get_info(device)
    return free - on_top - (1 - args.gpu_memory_utilization) * total


@torch.inference_mode()
def run_largest_step(
    args: EngineArgs,
    model: Decoder,
    max_model_len: int,
    new_runner: Callable[..., ModelRunner] = ModelRunner,
) -> int:
    """max_num_batched_tokens tokens of as many sequences as there are places, each at the end of
    max_model_len, and a token sampled for each sequence. Returns the bytes of the cache that it ran
    over.
    """
    # here, because only a GPU is measured
    from lessons.l02_naive_attention.batched.batch_sampling import batch_probabilities
    from lessons.l02_naive_attention.batched.requests import sampling_batch
    from lessons.l02_naive_attention.request import read_requests
    from lessons.l02_naive_attention.sampling import SamplingParams
    from lessons.l14_continuous_batching.loop import StepSampler

    tokens = args.max_num_batched_tokens
    places = min(args.max_num_seqs, tokens)
    # All own the same blocks, because what is written does not matter, and few are in the way.
    size = args.tokens_per_block
    longest = -(-max_model_len // size)
    runner = new_runner(model, longest, size, max_model_len, args.kv_cache_dtype)
    counts = [tokens // places + (place < tokens % places) for place in range(places)]
    counts = [min(count, max_model_len) for count in counts]
    chunks = [([0] * count, max_model_len - count) for count in counts]
    if runner.groups is None:
        batch = step_batch(runner.pool, chunks, [list(range(longest))] * places)
    else:
        from reference.features.windows.room import at_the_end

        batch = at_the_end(runner, chunks, max_model_len)
    if model.config.state is not None:
        from reference.features.states.room import in_one_slot

        batch = in_one_slot(runner.pool, batch, chunks)
    hidden = runner.forward(batch.tokens, runner.pool.attending(batch))
    if hidden is None:
        return runner.pool.allocated_bytes  # because only the last stage of a pipeline has logits
    # A row for each place, or with speculation several: those of the newest and the drafted tokens.
    rows = min(places * args.rows_each, tokens)
    logits = runner.model.logits(hidden[-rows:]).float()
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    requests = read_requests(model.config, [[0]] * rows, 1, drawn)
    StepSampler()(logits, requests)
    if args.rows_each > 1:
        p = batch_probabilities(logits, sampling_batch(requests, logits.device))
        p - torch.empty_like(p)  # beside p lie q and what is left of p
    return runner.pool.allocated_bytes
