"""Models with layers that keep a state a sequence (lesson 27): what the engine does for them.

A place of the scheduler is a slot for a state, so a request is admitted only where one is free. The
states get their memory first, because a sequence without one cannot run; blocks get the rest.
"""

from dataclasses import replace

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import Batch
from reference.engine.cache_memory import bytes_per_token, cache_memory
from reference.engine.engine_args import EngineArgs
from reference.engine.model_runner import ModelRunner
from reference.features.composition import refuse_together
from reference.features.states.pool import HybridPool, with_slots
from reference.features.states.slots import SlotBlocks, SlotTable


def check_states(args: EngineArgs) -> None:
    """Raise ValueError for a feature that does not work with states."""
    speculation = args.speculative_config
    asked = [
        ("kv_offloading_size", "offloading", args.kv_offloading_size is not None, "None"),
        ("kv_transfer_config", "transfer", args.kv_transfer_config is not None, "None"),
        ("kv_events_config", "prefix cache", args.tells_blocks, "None"),
        ("preemption_mode", "swap", args.preemption_mode == "swap", "recompute"),
        ("enable_prefix_caching", "prefix cache", args.enable_prefix_caching, "None or False"),
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


def with_states(args: EngineArgs, model: Decoder, max_model_len: int) -> EngineArgs:
    """The arguments with as many places as memory has slots for, and as much memory for blocks as
    is left. Raises ValueError for a feature that does not work with states.
    """
    check_states(args)
    if args.num_gpu_blocks_override:
        return args
    config, itemsize = model.config, model.dtype.itemsize
    slot_bytes = config.state.bytes_per_sequence(itemsize)
    memory = args.kv_cache_memory_bytes or cache_memory(args, model, max_model_len)
    longest = -(-max_model_len // args.block_size) * args.block_size
    blocks_bytes = longest * bytes_per_token(config, args.kv_cache_dtype, itemsize)
    slots = max(1, min(args.max_num_seqs, int((memory - blocks_bytes) // slot_bytes)))
    left = max(1, int(memory - slots * slot_bytes))
    return replace(args, max_num_seqs=slots, kv_cache_memory_bytes=left)


def hold_states(runner: ModelRunner, args: EngineArgs) -> None:
    """Make room for a state in every place. Raises ValueError for a draft with states."""
    check_states(args)
    runner.pool.hold(args.max_num_seqs)


def in_one_slot(pool: HybridPool, batch: Batch, chunks: list[tuple[list[int], int]]) -> Batch:
    """The batch of a step that is only measured, as is the memory of its cache: all its sequences
    write the same state. chunks: of each its new tokens, and how many it holds.
    """
    pool.hold(1)
    return with_slots(batch, chunks, [SlotTable((), 0) for _ in chunks])


def slot_blocks(args: EngineArgs, runner: ModelRunner) -> SlotBlocks:
    """Who owns which block, and which slot."""
    states = runner.pool.states
    return SlotBlocks(runner.pool.num_blocks, args.block_size, states.num_slots, states.copy)
