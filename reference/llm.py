"""The offline interface: `LLM(model).generate(prompts, params)`, as users of vLLM know it."""

import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tqdm.auto import tqdm

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l11_cuda_graphs.optimized import CudaGraphs, batch_buckets
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.swap import Lender, SwappingScheduler
from lessons.toolbox.model.arguments import refuse
from reference.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from reference.cache_memory import blocks_that_fit
from reference.drafting import Drafter, config_of_pool, load_drafter, new_proposer
from reference.engine import Engine
from reference.engine_args import EngineArgs
from reference.lookahead import LookaheadScheduler, LookaheadSwappingScheduler, PoolsSwap
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


def new_engine(args: EngineArgs) -> Engine:
    """An engine with its model, tokenizer, cache and scheduler. Raises ValueError."""
    dtype = None if args.dtype == "auto" else args.dtype
    model = load_model(args.model, args.device, dtype, args.quantization)
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    drafter = load_drafter(args.speculative_config, model, tokenizer)
    return engine_over(model, tokenizer, args, drafter)


def engine_over(model: Decoder, tokenizer, args: EngineArgs, drafter: Drafter = None) -> Engine:
    """An engine over models that are there already. tokenizer: None, if all prompts are token ids
    and nobody wants text. drafter: what speculative_config names, loaded. Raises ValueError.
    """
    most = model.config.max_position_embeddings
    max_model_len = args.max_model_len or most
    if max_model_len > most:
        raise ValueError(
            f"max_model_len: got {max_model_len}; accepted: at most {most}, the model's"
        )
    config = args.speculative_config
    if config is not None:
        config.check_context(max_model_len)
    adapters = Adapters(model, args) if args.enable_lora else None
    if adapters is not None:
        model = adapters.model
    num_blocks = blocks_that_fit(args, model, max_model_len, config_of_pool(drafter))
    if args.enable_prefix_caching and args.enable_lora:
        blocks = AdapterBlocks(num_blocks, args.block_size)
    elif args.enable_prefix_caching:
        cache = HashBlocks(args.block_size)
        blocks = CachingBlockManager(num_blocks, args.block_size, cache)
    else:
        blocks = BlockManager(num_blocks, args.block_size)
    new = partial(new_runner, args, num_blocks)
    runner = new(model, max_model_len, adapters)
    if config is None:
        scheduler = new_scheduler(args, runner, blocks)
        return Engine(runner, scheduler, tokenizer, max_model_len, args.seed)
    proposer = new_proposer(args, drafter, runner, new)
    scheduler = new_scheduler(args, runner, blocks, proposer)
    return SpeculativeEngine(runner, scheduler, tokenizer, max_model_len, args.seed)


def new_runner(
    args: EngineArgs,
    num_blocks: int,
    model: Decoder,
    max_model_len: int,
    adapters: Adapters | None = None,
) -> ModelRunner:
    """A model over a pool of its own, on a GPU with its decode steps as CUDA graphs."""
    size = num_blocks, args.block_size, max_model_len
    runner = ModelRunner(model, *size, args.kv_cache_dtype, adapters)
    if replays(args, model):
        # because everybody who decodes owns a block
        most = min(args.max_num_seqs, num_blocks) * args.rows_each
        runner.capture(CudaGraphs(model.device), batch_buckets(most), args.rows_each)
    return runner


def replays(args: EngineArgs, model: Decoder) -> bool:
    """Whether decode steps become CUDA graphs. On a CPU nothing is launched; a mixture of experts
    stays eager, because Python asks its router which experts to run, and so does Gemma 2. So do
    quantized latents, because no kernel reads them: they become numbers first.
    """
    can_replay = model.device.type == "cuda" and model.config.can_be_captured
    can_replay = can_replay and (model.config.mla is None or args.kv_cache_dtype == "auto")
    return can_replay and not args.enforce_eager


def new_scheduler(
    args: EngineArgs, runner: ModelRunner, blocks: BlockManager, proposer: Proposer | None = None
) -> ChunkedScheduler:
    """Who decides what runs in each step, and whose K and V wait on the host. proposer: None for an
    engine that does not speculate.
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
        limits |= dict(proposer=proposer, num_speculative_tokens=count)
        kinds, pools = (LookaheadScheduler, LookaheadSwappingScheduler), [*pools, *proposer.pools]
    if args.enable_lora:
        limits |= dict(max_loras=args.max_loras)
        kinds = AdapterScheduler, AdapterSwappingScheduler
    recomputing, swapping = kinds
    if args.preemption_mode == "recompute":
        return recomputing(blocks, **limits)
    block_bytes = sum(pool.bytes_per_token for pool in pools) * args.block_size
    host_blocks = int(args.swap_space * 2**30 // block_bytes)
    return swapping(PoolsSwap(Lender(runner.pool, blocks), pools), host_blocks, **limits)


class LLM:
    """A model that answers lists of prompts. The arguments are EngineArgs', vLLM's names."""

    def __init__(self, model: str = "models/tiny", **arguments):
        self.args = EngineArgs.read(model=model, **arguments)
        self.engine = new_engine(self.args)
        self.counter = itertools.count()

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
        prompts, searching = as_list(prompts), BeamSearch(self.engine, params)
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


@contextmanager
def interrupts_noted() -> Iterator[list]:
    """Inside it, the first Ctrl-C only fills the list, because half a step leaves blocks that nobody
    owns. A second one raises KeyboardInterrupt.
    """
    noted = []

    def note(number, frame):
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    # Python delivers signals to its main thread only. Another handler belongs to somebody else.
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def as_list(prompts) -> list:
    """One prompt, or a list of them. Raises ValueError for nothing."""
    is_list = isinstance(prompts, (list, tuple))
    if isinstance(prompts, (str, dict)) or (is_list and prompts and type(prompts[0]) is int):
        return [prompts]
    if not is_list or not prompts:
        refuse("prompts", prompts, "a prompt, or a list of them")
    return list(prompts)


def one_each(name: str, value, count: int) -> list:
    """`value` for each prompt, or the list as it is. Raises ValueError for another length."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(
            f"{name}: got {len(values)} for {count} prompts; accepted: one, or {count}"
        )
    return values
