"""The arguments that say how ranks share the tokens of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lessons.toolbox.model.arguments import refuse

if TYPE_CHECKING:
    from lessons.toolbox.model.config import ModelConfig
    from reference.engine.engine_args import EngineArgs

DCP, INTERLEAVE = "decode_context_parallel_size", "cp_kv_cache_interleave_size"


def check_context(args: EngineArgs) -> None:
    """What the arguments alone show. Raises ValueError."""
    tp, dcp = args.tensor_parallel_size, args.decode_context_parallel_size
    args.require(DCP, tp % dcp == 0, f"a divisor of tensor_parallel_size, {tp}")
    fits = args.block_size % args.cp_kv_cache_interleave_size == 0
    args.require(INTERLEAVE, fits, f"a divisor of block_size, {args.block_size}")
    fits = dcp == 1 or args.kv_transfer_config is None
    args.require(DCP, fits, "1 with kv_transfer_config, whose blocks have all tokens of a head")


def check_share(args: EngineArgs, config: ModelConfig) -> None:
    """Whether ranks would hold copies of a KV head, and can share its tokens. config: of the whole
    model. Raises ValueError.
    """
    dcp, tp = args.decode_context_parallel_size, args.tensor_parallel_size
    heads = 1 if config.mla is not None else config.num_key_value_heads
    copies = tp // heads
    if not copies or copies % dcp:
        of = "MLA's latent" if config.mla is not None else f"each of {heads} KV heads"
        accepted = f"a divisor of {max(copies, 1)}, the ranks of {tp} that have {of}"
        refuse(DCP, dcp, accepted)
    if any(config.sliding_windows):
        refuse(DCP, dcp, "1 for a model with sliding windows, whose tokens are too near to share")
    if config.has_score_rules:
        refuse(DCP, dcp, "1 for a model whose scores have a soft-cap or sinks")
