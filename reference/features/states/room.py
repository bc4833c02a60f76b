"""Models with layers that keep a state a sequence (lesson 27): what the engine does for them.

A place of the scheduler is a slot for a state, so a request is admitted only where one is free. The
states get their memory first, because a sequence without one cannot run; blocks get the rest. A
place has a second slot for a snapshot where prefixes are cached, and one more where tokens are
drafted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import Batch
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig
from reference.engine.cache_memory import bytes_per_token, cache_memory
from reference.engine.engine_args import EngineArgs
from reference.engine.model_runner import ModelRunner
from reference.features.composition import refuse_together
from reference.features.states.pool import HybridPool, with_slots
from reference.features.states.slots import SlotBlocks, SlotTable

if TYPE_CHECKING:  # it imports the engine's runner, as this does, and few engines draft
    from reference.speculation.speculation import Speculation


def check_states(args: EngineArgs) -> None:
    """Raise ValueError for a feature that does not work with states."""
    speculation = args.speculative_config
    asked = [
        ("kv_offloading_size", "offloading", args.kv_offloading_size is not None, "None"),
        ("kv_transfer_config", "transfer", args.kv_transfer_config is not None, "None"),
        ("batch_invariant", "batch invariant", args.batch_invariant, "False"),
        ("enable_lora", "LoRA", args.enable_lora, "False"),
        ("tensor_parallel_size", "tensor parallel", args.tensor_parallel_size > 1, "1"),
        ("pipeline_parallel_size", "pipeline parallel", args.pipeline_parallel_size > 1, "1"),
        ("data_parallel_size", "data parallel", args.data_parallel_size > 1, "1"),
        ("distributed_executor_backend", "processes", args.has_workers, "None"),
    ]
    if speculation is not None:
        asked.append(("speculative_config", speculation.method, True, "None"))
    for name, feature, is_asked, accepted in asked:
        if is_asked:
            accepted = f"{accepted} for a model with states"
            refuse_together(name, getattr(args, name), feature, "states", accepted)
    if args.tells_blocks and not caches_prefixes(args):
        accepted = "None for a model with states, unless enable_prefix_caching is True"
        refuse("kv_events_config", args.kv_events_config, accepted)
    every = args.mamba_block_size
    if every is not None and every % args.block_size:
        refuse("mamba_block_size", every, f"a multiple of block_size ({args.block_size})")


def caches_prefixes(args: EngineArgs) -> bool:
    """Whether an engine over states looks for known prefixes: only where it is asked to."""
    return args.enable_prefix_caching is True


def slots_each(args: EngineArgs) -> int:
    """Slots for each place: of its state, of a snapshot, of a state that drafts may need again."""
    return 1 + caches_prefixes(args) + (args.speculative_config is not None)


def dtype_of(args: EngineArgs) -> torch.dtype | None:
    """Of the matrices of states; None: float32 at least."""
    name = args.mamba_ssm_cache_dtype
    return None if name == "auto" else getattr(torch, name)


def slot_bytes(args: EngineArgs, config: ModelConfig, itemsize: int) -> int:
    """Of one sequence's states. itemsize: bytes of a number in the model's dtype."""
    dtype = dtype_of(args)
    return config.state.bytes_per_sequence(itemsize, dtype and dtype.itemsize)


def with_states(args: EngineArgs, model: Decoder, max_model_len: int) -> EngineArgs:
    """The arguments with as many places as memory has slots for, and as much memory for blocks as
    is left. Raises ValueError for a feature that does not work with states.
    """
    check_states(args)
    if args.num_gpu_blocks_override:
        return args
    config, itemsize = model.config, model.dtype.itemsize
    place_bytes = slots_each(args) * slot_bytes(args, config, itemsize)
    memory = args.kv_cache_memory_bytes or cache_memory(args, model, max_model_len)
    longest = -(-max_model_len // args.block_size) * args.block_size
    blocks_bytes = longest * bytes_per_token(config, args.kv_cache_dtype, itemsize)
    places = max(1, min(args.max_num_seqs, int((memory - blocks_bytes) // place_bytes)))
    left = max(1, int(memory - places * place_bytes))
    return replace(args, max_num_seqs=places, kv_cache_memory_bytes=left)


def hold_states(runner: ModelRunner, args: EngineArgs) -> None:
    """Make room for a state in every place."""
    runner.pool.hold(args.max_num_seqs * slots_each(args), dtype_of(args))


def join_states(
    args: EngineArgs,
    runner: ModelRunner,
    scheduler: ChunkedScheduler,
    speculation: Speculation | None,
) -> None:
    """What the parts of an engine have to know of states: where steps end so that one can be
    copied, and what becomes of one whose drafts are rejected.
    """
    if caches_prefixes(args):
        from reference.features.states.stops import StopsAtSnapshots

        StopsAtSnapshots(scheduler)
    if speculation is not None:
        from reference.features.states.drafted import DraftedStates

        speculation.states = DraftedStates(runner.pool, scheduler.blocks)


def in_one_slot(pool: HybridPool, batch: Batch, chunks: list[tuple[list[int], int]]) -> Batch:
    """The batch of a step that is only measured, as is the memory of its cache: all its sequences
    write the same state. chunks: of each its new tokens, and how many it holds.
    """
    pool.hold(1)
    return with_slots(batch, chunks, [SlotTable((), 0) for _ in chunks])


def slot_blocks(args: EngineArgs, runner: ModelRunner, cache: HashBlocks) -> SlotBlocks:
    """Who owns which block, and which slot. cache: which blocks are known, if that is asked for."""
    states, size = runner.pool.states, args.block_size
    what = runner.pool.num_blocks, size, states.num_slots, states.copy
    if not caches_prefixes(args):
        return SlotBlocks(*what)
    from reference.features.states.snapshots import SHORTEST, CachingSlotBlocks

    every = args.mamba_block_size or -(-SHORTEST // size) * size
    config, itemsize = runner.model.config, runner.model.dtype.itemsize
    worth = worth_tokens(args, config, itemsize)
    return CachingSlotBlocks(*what, cache, every, worth)


def worth_tokens(args: EngineArgs, config: ModelConfig, itemsize: int) -> float:
    """Tokens of which K and V are as large as a state. itemsize: bytes of a number in the model's
    dtype.
    """
    of_token = bytes_per_token(config, args.kv_cache_dtype, itemsize)
    return slot_bytes(args, config, itemsize) / of_token
