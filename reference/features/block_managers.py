"""Who owns which block, where a feature or a model asks for more than lesson 13's manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.naive import HashBlocks
from reference.engine.engine_args import EngineArgs

if TYPE_CHECKING:
    from lessons.l03_kv_cache.cache import KVPool
    from reference.engine.model_runner import ModelRunner


def feature_blocks(
    args: EngineArgs, runner: ModelRunner, others: Sequence[KVPool], cache: HashBlocks
) -> BlockManager:
    """Of this runner's pool, for one of the reasons below. others: pools whose blocks have the same
    numbers. cache: which blocks the pool knows.
    """
    if args.kv_offloading_size is not None:
        from reference.features.offload import tiered_blocks

        return tiered_blocks(args, runner, others, cache)
    if args.kv_transfer_config is not None:
        from reference.features.kv_transfer.transfers import transfer_blocks

        return transfer_blocks(args, runner, others, cache)
    if runner.model.config.state is not None:
        from reference.features.states.room import slot_blocks

        return slot_blocks(args, runner, cache)
    from reference.features.windows.room import group_blocks

    return group_blocks(args, runner.groups, runner.pool.num_blocks)
