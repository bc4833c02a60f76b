"""Which engines have their layers in groups, and why the others have one group.

Models in which some layers have a window (gpt-oss, Gemma 2 and 3, Olmo 3, Cohere 2) or all of them
(Mistral's first) get groups, unless a feature needs a block to be the same tokens of all layers.
Then the engine works as if no layer had a window: nothing is refused, and no memory is saved.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lessons.l03_kv_cache.batch import Batch
from lessons.l12_paged_kv.runner import step_batch
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.window_groups import WindowGroups, blocks_for, first_page, groups_of
from reference.engine.engine_args import EngineArgs
from reference.features.windows.blocks import GONE, GroupBlocks, GroupTable
from reference.features.windows.caching import CachingGroupBlocks
from reference.features.windows.pool import batch_in_groups

if TYPE_CHECKING:
    from reference.engine.model_runner import ModelRunner

TRAVEL = "a block that travels holds all layers"


def one_group_because(args: EngineArgs, config: ModelConfig, max_model_len: int) -> str | None:
    """Why an engine has one group of layers, in one line; None: it has several kinds."""
    seen = [window for window in config.sliding_windows or () if window is not None]
    has_full = len(seen) < config.num_hidden_layers
    speculation = args.speculative_config
    reasons = {
        "no layer has a window": not seen,
        "no window is shorter than max_model_len": bool(seen) and min(seen) >= max_model_len,
        "disable_hybrid_kv_cache_manager asks for it": args.disable_hybrid_kv_cache_manager,
        "states have slots beside one group of blocks": config.state is not None,
        "latents are one row for all heads": config.mla is not None,
        "each process holds its own share of a block": args.has_workers,
        f"kv_offloading_size: {TRAVEL}": args.kv_offloading_size is not None,
        f"kv_transfer_config: {TRAVEL}": args.kv_transfer_config is not None,
        f"kv_events_config: {TRAVEL}": args.tells_blocks,
        "batch_invariant has a pool of its own": args.batch_invariant,
        "what drafts keeps K and V of all tokens, and no group of the model's does": (
            not has_full and speculation is not None and speculation.has_pool
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def groups_for(args: EngineArgs, config: ModelConfig, max_model_len: int) -> WindowGroups | None:
    """The groups of an engine's layers; None: one group of all."""
    if one_group_because(args, config, max_model_len) is not None:
        return None
    return groups_of(config.sliding_windows)


def at_the_end(runner: ModelRunner, chunks: list[tuple[list[int], int]], tokens: int) -> Batch:
    """The batch of a step that is only measured, as is the memory of its cache: each sequence has
    so many tokens in the end, and all groups of all sequences own the same pages.
    """
    size, tables = runner.pool.block_size, []
    for _, held in chunks:
        gone = [first_page(window, held, size) for window in runner.groups.windows]
        pages = blocks_for(tokens, size)
        tables.append(GroupTable([GONE] * first + [*range(pages - first)] for first in gone))
    return batch_in_groups(partial(step_batch, runner.pool), chunks, tables, size)


def group_blocks(args: EngineArgs, groups: WindowGroups, num_blocks: int) -> GroupBlocks:
    """Who owns which page, and with a prefix cache which of them are known."""
    kind = GroupBlocks if args.enable_prefix_caching is False else CachingGroupBlocks
    return kind(groups, args.max_num_batched_tokens, num_blocks, args.block_size)
