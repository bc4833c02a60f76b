"""The arguments that say how ranks share the tokens of the cache, and the rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons.toolbox.model.arguments import is_whole

if TYPE_CHECKING:
    from reference.engine.engine_args import EngineArgs

DCP, INTERLEAVE = "decode_context_parallel_size", "cp_kv_cache_interleave_size"


def check_parallel(args: EngineArgs) -> None:
    """What the arguments alone show of both. Raises ValueError."""
    check_context(args)
    if args.compilation_config is not None:
        check_rows(args)


def check_context(args: EngineArgs) -> None:
    """Whose tokens are whose. Raises ValueError."""
    tp, dcp = args.tensor_parallel_size, args.decode_context_parallel_size
    args.require(DCP, tp % dcp == 0, f"a divisor of tensor_parallel_size, {tp}")
    fits = args.block_size % args.cp_kv_cache_interleave_size == 0
    args.require(INTERLEAVE, fits, f"a divisor of block_size, {args.block_size}")
    fits = dcp == 1 or args.kv_transfer_config is None
    args.require(DCP, fits, "1 with kv_transfer_config, whose blocks have all tokens of a head")


def check_rows(args: EngineArgs) -> None:
    """What of compilation_config has an effect. Raises ValueError."""
    config = args.compilation_config
    accepted = 'a dict of vLLM\'s keys, such as {"pass_config": {"enable_sp": True}}, or 0 to 3'
    passes = config.get("pass_config", {}) if isinstance(config, dict) else {}
    is_read = (isinstance(config, dict) or is_whole(config, 0, 3)) and isinstance(passes, dict)
    args.require("compilation_config", is_read, accepted)
    if args.splits_rows:
        where = 'with compilation_config {"pass_config": {"enable_sp": True}}'
        accepted = f"1 {where}, because a stage hands on all rows"
        args.require("pipeline_parallel_size", args.pipeline_parallel_size == 1, accepted)
        accepted = f"1 {where} and enable_expert_parallel, where shards cut the rows already"
        args.require("data_parallel_size", not args.shares_experts, accepted)
