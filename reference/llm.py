"""The offline interface: `LLM(model).generate(prompts, params)`, as users of vLLM know it."""

import itertools
from functools import partial

from tqdm.auto import tqdm

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l11_cuda_graphs.optimized import CudaGraphs, batch_buckets, can_be_captured
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.swap import SwappingScheduler
from lessons.l17_tree_speculation.tree import Tree
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig
from reference.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from reference.cache_memory import blocks_that_fit
from reference.calls import as_list, interrupts_noted, one_each
from reference.drafting import Drafter, config_of_pool, load_drafter, new_proposer, tree_of
from reference.engine import Engine
from reference.engine_args import EngineArgs
from reference.lookahead import LookaheadScheduler, LookaheadSwappingScheduler
from reference.lora import (
    AdapterBlocks,
    Adapters,
    AdapterScheduler,
    AdapterSwappingScheduler,
    LoRARequest,
)
from reference.model import load_model, load_tokenizer
from reference.model_runner import ModelRunner
from reference.outputs import RequestOutput
from reference.request import ORDERS, EngineRequest
from reference.sampling_params import SamplingParams
from reference.speculation import Proposer
from reference.speculative_engine import SpeculativeEngine
from reference.vision.checkpoint import llava_folder, load_llava
from reference.vision.prompt import inputs_for
from reference.vision.sight import PictureBlocks, Sight
from reference.vision.tower import Eyes


def new_engine(args: EngineArgs) -> Engine:
    """An engine with its model, tokenizer, cache and scheduler. Raises ValueError, and RankError for a
    worker that fails.
    """
    if args.has_workers:
        from reference.parallel.engine import new_parallel_engine  # here, because it builds on this

        return new_parallel_engine(args)
    dtype = None if args.dtype == "auto" else args.dtype
    where, eyes, folder = (args.device, dtype, args.quantization), None, llava_folder(args.model)
    if folder is None:
        model = load_model(args.model, *where)
    else:
        model, eyes = load_llava(folder, *where)
    tokenizer = load_tokenizer(args.tokenizer or folder or args.model)
    drafter = load_drafter(args.speculative_config, model, tokenizer)
    return engine_over(model, tokenizer, args, drafter, eyes)


def engine_over(
    model: Decoder, tokenizer, args: EngineArgs, drafter: Drafter = None, eyes: Eyes | None = None
) -> Engine:
    """An engine over models that are there already. tokenizer: None, if all prompts are token ids
    and nobody wants text. drafter: what speculative_config names, loaded. eyes: of a model that sees
    pictures. Raises ValueError.
    """
    max_model_len = max_model_len_of(args, model.config)
    config, sight = args.speculative_config, None
    if config is not None:
        if eyes is not None:  # because a draft would not see them
            refuse("speculative_config", config, "None with a model that sees pictures")
        config.check_context(max_model_len)
    if eyes is not None:
        inputs = inputs_for(eyes.config, args, max_model_len)
        sight = Sight(eyes, inputs, int(args.mm_processor_cache_gb * 2**30))
        model = sight.over_embedding(model)
    adapters = Adapters(model, args) if args.enable_lora else None
    if adapters is not None:
        model = adapters.model
    num_blocks = blocks_that_fit(args, model, max_model_len, config_of_pool(drafter))
    new = partial(new_runner, args, num_blocks)
    tree = None if config is None else tree_of(config, drafter)
    runner = new(model, max_model_len, adapters, getattr(drafter, "taps", ()), tree)
    runner.sight = sight
    if config is None:
        return engine_on(runner, tokenizer, args)
    proposer = new_proposer(args, drafter, runner, new)
    scheduler = new_scheduler(args, runner, new_blocks(args, num_blocks), proposer, tree)
    return SpeculativeEngine(runner, scheduler, tokenizer, max_model_len, args.seed)


def engine_on(runner: ModelRunner, tokenizer, args: EngineArgs) -> Engine:
    """An engine that does not speculate, on a runner or on what has its interface."""
    blocks = new_blocks(args, runner.pool.num_blocks, runner.sight)
    scheduler = new_scheduler(args, runner, blocks)
    return Engine(runner, scheduler, tokenizer, runner.max_model_len, args.seed)


def max_model_len_of(args: EngineArgs, config: ModelConfig) -> int:
    """As many tokens as were asked for, or as the model can. Raises ValueError for more."""
    most = config.max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > most:
        raise ValueError(
            f"max_model_len: got {args.max_model_len}; accepted: at most {most}, the model's"
        )
    return args.max_model_len or most


def new_blocks(args: EngineArgs, num_blocks: int, sight: Sight | None = None) -> BlockManager:
    """Who owns which block, and with a prefix cache which of them are known."""
    if not args.enable_prefix_caching:
        return BlockManager(num_blocks, args.block_size)
    if sight is not None:
        return PictureBlocks(num_blocks, args.block_size, sight.inputs.config.tokens_per_image)
    if args.enable_lora:
        return AdapterBlocks(num_blocks, args.block_size)
    return CachingBlockManager(num_blocks, args.block_size, HashBlocks(args.block_size))


def new_runner(
    args: EngineArgs,
    num_blocks: int,
    model: Decoder,
    max_model_len: int,
    adapters: Adapters | None = None,
    taps: tuple[int, ...] = (),
    tree: Tree | None = None,
) -> ModelRunner:
    """A model over a pool of its own, on a GPU with its decode steps as CUDA graphs. taps: where a
    draft reads it; tree: what its sequences run while they decode, None: one token, or a chain.
    """
    size = num_blocks, args.block_size, max_model_len
    runner = ModelRunner(model, *size, args.kv_cache_dtype, adapters)
    runner.taps = taps
    if replays(args, model, tree):
        # because everybody who decodes owns a block
        places = min(args.max_num_seqs, num_blocks)
        graphs, buckets = CudaGraphs(model.device), batch_buckets(places * args.rows_each)
        if tree is None:
            runner.capture(graphs, buckets, args.rows_each)
        else:
            runner.capture_trees(graphs, buckets, most_nodes=len(tree), most_sequences=places)
    return runner


def replays(args: EngineArgs, model: Decoder, tree: Tree | None = None) -> bool:
    """Whether decode steps become CUDA graphs. On a CPU nothing is launched. Gemma 2 stays eager, and
    so do experts that cannot be grouped, because Python asks their router which ones to run. So do
    quantized latents, and trees over a quantized cache, because no kernel reads them: they become
    numbers first.
    """
    can_replay = model.device.type == "cuda" and can_be_captured(model)
    is_read = args.kv_cache_dtype == "auto" or (model.config.mla is None and tree is None)
    return can_replay and is_read and not args.enforce_eager


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
    kinds, pools = (ChunkedScheduler, SwappingScheduler), [runner.pool]
    if proposer is not None:
        count = args.speculative_config.num_speculative_tokens
        limits |= dict(proposer=proposer, num_speculative_tokens=count, tree=tree)
        kinds, pools = (LookaheadScheduler, LookaheadSwappingScheduler), [*pools, *proposer.pools]
    if args.enable_lora:
        limits |= dict(max_loras=args.max_loras)
        kinds = AdapterScheduler, AdapterSwappingScheduler
    recomputing, swapping = kinds
    if args.preemption_mode == "recompute":
        return recomputing(blocks, **limits)
    block_bytes = sum(pool.bytes_per_token for pool in pools) * args.block_size
    host_blocks = int(args.swap_space * 2**30 // block_bytes)
    return swapping(runner.new_swap(blocks, pools[1:]), host_blocks, **limits)


class LLM:
    """A model that answers lists of prompts. The arguments are EngineArgs', vLLM's names."""

    def __init__(self, model: str = "models/tiny", **arguments):
        self.args = EngineArgs.read(model=model, **arguments)
        self.engine = new_engine(self.args)
        self.counter = itertools.count()

    def shutdown(self) -> None:
        """End the processes that hold the model, if there are any. They end with this object, too."""
        self.engine.close()

    def get_tokenizer(self):
        """The checkpoint's, as transformers' AutoTokenizer."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: str | list[str] | list[int] | list[list[int]] | None = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        prompt_token_ids: list[list[int]] | None = None,
        use_tqdm: bool = True,
        priority: list[int] | None = None,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The answers, in the order of the prompts. Interrupted by Ctrl-C, it returns what it has;
        what has not ended is marked "abort". lora_request: the adapter that answers, or one for each
        prompt; None: the base model.
        """
        if prompts is not None and prompt_token_ids is not None:
            refuse("prompts, prompt_token_ids", (prompts, prompt_token_ids), "one of them")
        prompts = as_list(prompts if prompt_token_ids is None else prompt_token_ids)
        params = one_each("sampling_params", sampling_params, len(prompts))
        priorities = one_each("priority", 0 if priority is None else priority, len(prompts))
        adapters = one_each("lora_request", lora_request, len(prompts))
        ids, requests = [str(next(self.counter)) for _ in prompts], []
        try:
            for id, *wishes in zip(ids, prompts, params, priorities, adapters):
                self.engine.add_request(id, *wishes)
                requests.append(self.engine.requests[id])
        except ValueError as error:
            self.abort(requests)
            raise ValueError(f"prompts[{len(requests)}]: {error}") from None
        self.run(requests, use_tqdm)
        return [request.output() for request in requests]

    def run(self, requests: list[EngineRequest], use_tqdm: bool) -> None:
        """Step until these requests have ended; Ctrl-C, or a step that raises, ends them sooner."""
        waiting = {request.request_id for request in requests}
        try:
            with (
                interrupts_noted() as interrupts,
                tqdm(total=len(requests), desc="requests", disable=not use_tqdm) as bar,
            ):
                while waiting and not interrupts:
                    # not `step`, because nobody looks at an answer before it has ended
                    for request in self.engine.advance():
                        if request.finished and request.request_id in waiting:
                            waiting.remove(request.request_id)
                            bar.update()
        except KeyboardInterrupt:
            pass  # as if it had been noted
        finally:
            self.abort(requests)

    def abort(self, requests: list[EngineRequest]) -> None:
        """End those that have not ended."""
        for request in requests:
            self.engine.abort_request(request.request_id)

    def beam_search(
        self, prompts: str | list, params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest answers that a search of this width finds, in the order of the prompts.

        Raises ValueError for a prompt that cannot be served, or while requests are unfinished.
        """
        # One of the replicas, if there are several, because beams share blocks.
        engine = getattr(self.engine, "engines", [self.engine])[0]
        prompts, searching = as_list(prompts), BeamSearch(engine, params)
        searches = []
        for prompt in prompts:
            try:
                searches.append(searching.new_search(prompt))
            except ValueError as error:
                raise ValueError(f"prompts[{len(searches)}]: {error}") from None
        waiting = searches
        with tqdm(total=len(searches), desc="searches", disable=not use_tqdm) as bar:
            while group := searching.next_group(waiting):
                searching.run(group)
                waiting = waiting[len(group) :]
                bar.update(len(group))
        return [search.output(self.engine.tokenizer) for search in searches]

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations by the tokenizer's own template. lora_request: as in generate. Raises
        ValueError without a template.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            refuse("messages", messages, "a conversation, or a list of them")
        tokenizer = self.engine.tokenizer
        if not tokenizer.chat_template:
            raise ValueError("messages: this tokenizer has no chat template; accepted: generate()")
        many = messages if isinstance(messages[0], list) else [messages]
        prompts = [
            tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)
            for m in many
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)
