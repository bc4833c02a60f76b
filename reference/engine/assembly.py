"""An engine out of its parts: the model, pool, blocks, scheduler and drafter of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.placement import launching_on
from reference.checkpoints.any_checkpoint import llava_folder
from reference.engine.cache_memory import blocks_that_fit
from reference.engine.engine import Engine
from reference.engine.engine_args import EngineArgs
from reference.engine.model import load_model, load_tokenizer
from reference.engine.model_runner import ModelRunner
from reference.engine.request import ORDERS

if TYPE_CHECKING:  # each feature is imported where the arguments ask for it
    from lessons.l03_kv_cache.cache import KVPool
    from lessons.l17_tree_speculation.trees.tree import Tree
    from lessons.toolbox.model.window_groups import WindowGroups
    from reference.features.lora import Adapters
    from reference.speculation.drafting import Drafter
    from reference.speculation.protocol import Proposer
    from reference.vision.tower import Eyes


def new_engine(args: EngineArgs) -> Engine:
    """An engine with its model, tokenizer, cache and scheduler. Raises ValueError, and RankError
    for a worker that fails.
    """
    if args.has_workers:
        from reference.parallel.engine import new_parallel_engine  # here, because it builds on this

        return new_parallel_engine(args)
    dtype = None if args.dtype == "auto" else args.dtype
    where, eyes, folder = (args.device, dtype, args.quantization), None, llava_folder(args.model)
    if folder is None:
        model = load_model(args.model, *where)
    else:
        from reference.vision.checkpoint import load_llava

        model, eyes = load_llava(folder, *where)
    tokenizer, drafter = load_tokenizer(args.tokenizer or folder or args.model), None
    if model.config.state is not None:
        from reference.features.states.room import check_states  # here: before a draft is loaded

        check_states(args)
    if args.speculative_config is not None:
        from reference.speculation.drafting import load_drafter

        drafter = load_drafter(args.speculative_config, model, tokenizer)
    return engine_over(model, tokenizer, args, drafter, eyes)


def engine_over(
    model: Decoder, tokenizer, args: EngineArgs, drafter: Drafter = None, eyes: Eyes | None = None
) -> Engine:
    """An engine over models that are there already. tokenizer: None, if all prompts are token ids
    and no request wants text. drafter: what speculative_config names, loaded. eyes: of a model that
    sees pictures. Raises ValueError.
    """
    with launching_on(model.device):
        return ahead(engine_here(model, tokenizer, args, drafter, eyes), args)


def ahead(engine: Engine, args: EngineArgs) -> Engine:
    """The engine, one step ahead of its runner if the arguments ask for it."""
    if args.async_scheduling:
        from reference.features.ahead import Ahead

        engine.run = Ahead(engine).run  # in front of its class's
    return engine


def engine_here(
    model: Decoder, tokenizer, args: EngineArgs, drafter: Drafter, eyes: Eyes | None
) -> Engine:
    """`engine_over`, with kernels launched where the model is stored."""
    max_model_len = max_model_len_of(args, model.config)
    if model.config.state is not None:
        from reference.features.states.room import with_states

        args = with_states(args, model, max_model_len)
    if args.speculative_config is not None:
        args.speculative_config.check_context(max_model_len)
    sight = None
    if eyes is not None:
        if args.batch_invariant:
            from reference.features.composition import refuse_together

            accepted = "False with a model that sees pictures"
            refuse_together("batch_invariant", True, "batch invariant", "pictures", accepted)
        from reference.vision.sight import new_sight

        sight = new_sight(eyes, args, max_model_len)
        model = sight.over_embedding(model)
    adapters = None
    if args.enable_lora:
        from reference.features.lora import Adapters

        adapters = Adapters(model, args)
        model = adapters.model
    groups = None
    if any(model.config.sliding_windows):
        from reference.features.windows.room import groups_for

        groups = groups_for(args, model.config, max_model_len)
    # A draft with K and V of its own needs room for them, too.
    draft = getattr(drafter, "config", None)
    num_blocks = blocks_that_fit(args, model, max_model_len, draft, groups=groups)
    new = partial(new_runner, args, num_blocks)
    if args.speculative_config is None:
        runner = new(model, max_model_len, adapters, groups=groups)
        runner.sight = sight
        return engine_on(runner, tokenizer, args)
    from reference.speculation.drafting import new_proposer, tree_of

    tree = tree_of(args.speculative_config, drafter)
    runner = new(model, max_model_len, adapters, getattr(drafter, "taps", ()), tree, groups)
    runner.sight = sight
    proposer = new_proposer(args, drafter, runner, new)
    return engine_on(runner, tokenizer, args, proposer, tree)


def engine_on(
    runner: ModelRunner,
    tokenizer,
    args: EngineArgs,
    proposer: Proposer | None = None,
    tree: Tree | None = None,
) -> Engine:
    """An engine on a runner, or on what has its interface. proposer: who drafts; None: one token in
    a step. tree: the shape of its drafts; None: chains.
    """
    blocks = new_blocks(args, runner, [] if proposer is None else proposer.pools)
    scheduler, speculation = new_scheduler(args, runner, blocks, proposer, tree), None
    if proposer is not None:
        from reference.speculation.by_load import speculation_over

        speculation = speculation_over(runner, scheduler)
    if runner.model.config.state is not None:
        from reference.features.states.room import join_states

        join_states(args, runner, scheduler, speculation)
    engine = Engine(
        runner, scheduler, tokenizer, runner.max_model_len, args.seed, speculation=speculation
    )
    if args.kv_transfer_config is not None:
        from reference.features.kv_transfer.transfers import Transfers

        engine.transfers = Transfers(engine, args.kv_transfer_config)
    if args.scheduling_policy == "fair":
        from lessons.l22_serving.fair import FairQueue

        engine.fair = FairQueue()
    return engine


def max_model_len_of(args: EngineArgs, config: ModelConfig) -> int:
    """As many tokens as were asked for, or as the model can. Raises ValueError for more."""
    most = config.max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > most:
        refuse("max_model_len", args.max_model_len, f"at most {most}, the model's")
    return args.max_model_len or most


def new_blocks(args: EngineArgs, runner: ModelRunner, others: list[KVPool]) -> BlockManager:
    """Who owns which block, and with a prefix cache which of them are known. others: pools whose
    blocks have the same numbers.
    """
    config, moved = runner.model.config, (args.kv_offloading_size, args.kv_transfer_config)
    if moved != (None, None) or config.state is not None or runner.groups is not None:
        from reference.features.block_managers import feature_blocks

        return feature_blocks(args, runner, others, new_cache(args))
    if args.enable_prefix_caching is False:
        return BlockManager(runner.pool.num_blocks, args.tokens_per_block)
    return CachingBlockManager(runner.pool.num_blocks, args.tokens_per_block, new_cache(args))


def new_cache(args: EngineArgs) -> HashBlocks:
    """The prefix cache, which tells what it has if the arguments ask for it."""
    if not args.tells_blocks:
        return HashBlocks(args.tokens_per_block)
    from reference.features.kv_events import told_cache

    return told_cache(args)


def new_runner(
    args: EngineArgs,
    num_blocks: int,
    model: Decoder,
    max_model_len: int,
    adapters: Adapters | None = None,
    taps: tuple[int, ...] = (),
    tree: Tree | None = None,
    groups: WindowGroups | None = None,
    kind: Callable[..., ModelRunner] = ModelRunner,
) -> ModelRunner:
    """A model over a pool of its own, on a GPU with its decode steps as CUDA graphs. taps: where a
    draft reads it; tree: what its sequences run while they decode, None: one token, or a chain;
    groups: of its layers, None: one. kind: of the runner.
    """
    size, rung = (num_blocks, args.tokens_per_block, max_model_len), None
    if args.batch_invariant or args.attention_config is not None:
        from reference.features.attention import prepared_for

        model, rung = prepared_for(model, args, groups)
    how = args.kv_cache_dtype, adapters, tree is not None, rung, groups
    runner = kind(model, *size, *how)
    runner.taps = taps
    if model.config.state is not None:
        from reference.features.states.room import hold_states

        hold_states(runner, args)
    # Captured steps with drafts have no room for the slots of adapters.
    has_room = adapters is None or args.speculative_config is None
    # And a graph of trees has one table, so trees over groups of layers run eagerly.
    if has_room and (tree is None or groups is None) and replays(args, model, tree):
        from lessons.l11_cuda_graphs.optimized import CudaGraphs, batch_buckets

        # because every sequence that decodes owns a block
        places = min(args.max_num_seqs, num_blocks)
        # The states of drafted tokens follow each other, so such steps are not captured.
        rows_each = args.rows_each if model.config.state is None else 1
        graphs, buckets = CudaGraphs(model.device), batch_buckets(places * rows_each)
        if tree is None:
            runner.capture(graphs, buckets, rows_each)
        else:
            runner.capture_trees(graphs, buckets, most_nodes=len(tree), most_sequences=places)
    return runner


def replays(args: EngineArgs, model: Decoder, tree: Tree | None = None) -> bool:
    """Whether decode steps become CUDA graphs. On a CPU nothing is launched. Gemma 2 stays eager,
    and so do experts that cannot be grouped, because Python asks their router which ones to run. So
    does a cache that no kernel reads, and states in float64, which have no kernels.
    """
    if model.device.type != "cuda" or args.enforce_eager:
        return False
    from lessons.l11_cuda_graphs.optimized import can_be_captured
    from reference.engine.cache_arguments import read_by_kernels

    is_read = read_by_kernels(args, model, tree)
    is_read &= model.config.state is None or model.dtype.itemsize <= 4
    return is_read and can_be_captured(model)


def new_scheduler(
    args: EngineArgs,
    runner: ModelRunner,
    blocks: BlockManager,
    proposer: Proposer | None = None,
    tree: Tree | None = None,
) -> ChunkedScheduler:
    """Who decides what runs in each step, and whose K and V wait on the host. proposer: None for an
    engine that does not speculate. tree: the shape of its drafts; None: chains.
    """
    limits = dict(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_chunked_prefill=args.enable_chunked_prefill,
        order=ORDERS[args.scheduling_policy],
    )
    others = [] if proposer is None else proposer.pools
    if args.enable_lora:
        from reference.features.lora import at_most

        limits |= dict(may_join=at_most(args.max_loras))
    if args.preemption_mode == "swap":
        from reference.features.swap import new_host

        limits |= dict(host=new_host(args, runner, blocks, others))
    elif args.kv_offloading_size is not None:
        from reference.features.offload import elsewhere

        limits |= dict(host=elsewhere(blocks))
    elif args.kv_transfer_config is not None:
        from reference.features.kv_transfer.transfers import transfer_host

        limits |= dict(host=transfer_host(blocks))
    if proposer is None:
        return runner.new_scheduler(blocks, **limits)
    from reference.speculation.by_load import chooser_of
    from reference.speculation.lookahead import LookaheadScheduler

    limits |= dict(tree=tree, chooser=chooser_of(args.speculative_config))
    count = args.speculative_config.num_speculative_tokens
    return LookaheadScheduler(blocks, proposer=proposer, num_speculative_tokens=count, **limits)
