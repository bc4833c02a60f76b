"""The offline interface: `LLM(model).generate(prompts, params)`, as users of vLLM know it."""

import itertools

import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l14_continuous_batching.sequence import Sequence
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler, by_arrival
from reference.engine import Engine
from reference.engine_args import EngineArgs
from reference.model import load_model
from reference.model_runner import ModelRunner
from reference.outputs import RequestOutput
from reference.sampling_params import SamplingParams

CPU_CACHE_BYTES = 2**30


def by_priority(sequence: Sequence) -> tuple:
    """The smallest priority first, then the order of arrival."""
    return (sequence.priority, sequence.row)


def new_engine(args: EngineArgs) -> Engine:
    """An engine with its model, tokenizer, cache and scheduler. Raises ValueError."""
    dtype = None if args.dtype == "auto" else args.dtype
    model = load_model(args.model, args.device, dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
    most = model.config.max_position_embeddings
    max_model_len = args.max_model_len or most
    if max_model_len > most:
        raise ValueError(
            f"max_model_len: got {max_model_len}; accepted: at most {most}, the model's"
        )
    num_blocks = blocks_that_fit(args, model, max_model_len)
    if args.enable_prefix_caching:
        cache = HashBlocks(args.block_size)
        blocks = CachingBlockManager(num_blocks, args.block_size, cache)
    else:
        blocks = BlockManager(num_blocks, args.block_size)
    scheduler = ChunkedScheduler(
        blocks,
        args.max_num_seqs,
        args.max_num_batched_tokens,
        args.enable_chunked_prefill,
        by_priority if args.scheduling_policy == "priority" else by_arrival,
    )
    runner = ModelRunner(model, num_blocks, args.block_size, max_model_len)
    return Engine(runner, scheduler, tokenizer, max_model_len)


def blocks_that_fit(args: EngineArgs, model: Decoder, max_model_len: int) -> int:
    """How many blocks the cache gets: as many as asked for, or as memory holds, but no more than
    max_num_seqs of the longest sequences can fill.
    """
    if args.num_gpu_blocks_override:
        return args.num_gpu_blocks_override
    block_bytes = args.block_size * model.config.kv_bytes_per_token(model.dtype.itemsize)
    memory = args.kv_cache_memory_bytes or cache_memory(args, model.device)
    useful = args.max_num_seqs * -(-max_model_len // args.block_size)
    if (num_blocks := min(useful, int(memory // block_bytes))) < 1:
        raise ValueError(
            f"kv_cache_memory_bytes: {memory:.0f} bytes hold no block of {block_bytes}; accepted: "
            f"more, or a smaller block_size or gpu_memory_utilization nearer to 1"
        )
    return num_blocks


def cache_memory(args: EngineArgs, device: torch.device) -> float:
    """Bytes for the cache: of a GPU's memory the share that may be used, less what is used."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return free - (1 - args.gpu_memory_utilization) * total


class LLM:
    """A model that answers lists of prompts. The arguments are EngineArgs', vLLM's names."""

    def __init__(self, model: str = "models/tiny", **arguments):
        self.args = EngineArgs.read(model=model, **arguments)
        self.engine = new_engine(self.args)
        self.counter = itertools.count()

    def get_tokenizer(self):
        return self.engine.tokenizer

    def generate(
        self,
        prompts: str | list[str] | list[int] | list[list[int]] | None = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        prompt_token_ids: list[list[int]] | None = None,
        use_tqdm: bool = True,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """The answers, in the order of the prompts. Interrupted by Ctrl-C, it returns what it has;
        what has not ended is marked "abort".
        """
        prompts = as_list(prompts if prompt_token_ids is None else prompt_token_ids)
        params = one_each("sampling_params", sampling_params or SamplingParams(), len(prompts))
        priorities = one_each("priority", 0 if priority is None else priority, len(prompts))
        ids = [str(next(self.counter)) for _ in prompts]
        queued = []
        try:
            for id, prompt, wishes, rank in zip(ids, prompts, params, priorities):
                self.engine.add_request(id, prompt, wishes, rank)
                queued.append(id)
        except ValueError as error:
            for id in queued:
                self.engine.abort_request(id)
            raise ValueError(f"prompts[{len(queued)}]: {error}") from None
        outputs = self.run(ids, use_tqdm)
        return [outputs[id] for id in ids]

    def run(self, ids: list[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        """Step until these requests have ended."""
        outputs: dict[str, RequestOutput] = {}
        waiting = set(ids)
        with tqdm(total=len(ids), desc="requests", disable=not use_tqdm) as bar:
            try:
                while waiting:
                    for output in self.engine.step():
                        if output.finished and output.request_id in waiting:
                            waiting.remove(output.request_id)
                            outputs[output.request_id] = output
                            bar.update()
            except KeyboardInterrupt:
                for id in waiting:
                    outputs[id] = self.engine.abort_request(id)
        return outputs

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations by the tokenizer's own template. Raises ValueError without one."""
        tokenizer = self.engine.tokenizer
        if not tokenizer.chat_template:
            raise ValueError("messages: this tokenizer has no chat template; accepted: generate()")
        many = messages if messages and isinstance(messages[0], list) else [messages]
        prompts = [
            tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)
            for m in many
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)


def as_list(prompts) -> list:
    """One prompt, or a list of them. Raises ValueError for nothing."""
    if isinstance(prompts, str) or (
        isinstance(prompts, list) and prompts and type(prompts[0]) is int
    ):
        return [prompts]
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise ValueError(f"prompts: got {prompts!r:.80}; accepted: a prompt, or a list of them")
    return list(prompts)


def one_each(name: str, value, count: int) -> list:
    """`value` for each prompt, or the list as it is. Raises ValueError for another length."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(
            f"{name}: got {len(values)} for {count} prompts; accepted: one, or {count}"
        )
    return values
