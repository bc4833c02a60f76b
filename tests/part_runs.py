"""For each exercise that is a part of the ladder or the engine: a short run that needs the part,
and what comes out of it.
"""

import random
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from lessons.l03_kv_cache.generate import generate as one_by_one
from lessons.l06_mla.deepseek import DeepseekDecoder, decoder_class
from lessons.l06_mla.optimized import ABSORBED
from lessons.l15_chunked_prefill.generate import generate as chunked
from lessons.l16_speculative_sampling.generate import generate as speculative
from lessons.l17_tree_speculation.heads.heads import MedusaHeads
from lessons.l17_tree_speculation.trees.tree import Tree, ranks_of
from lessons.l20_parallelism.generate import generate as on_ranks
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links, Mesh
from lessons.l21_multi_lora.lab.testing import linears_of, random_adapter
from lessons.l21_multi_lora.peft.adapters import save_adapter
from lessons.l23_experts.grouped import grouped
from lessons.l25_one_step_ahead.generate import generate as ahead
from lessons.toolbox.model.config import MLAConfig, MoEConfig
from reference import LoRARequest, SamplingParams
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.features.block_events import BlockStored
from reference.router.args import RouterArgs
from reference.router.blocks import Stream
from reference.router.policies import Prompt
from reference.router.replicas import Replicas
from reference.weights.quantization import Settings, quantize_model
from tests.engine_cases import CONFIG, LONGEST, greedy, new_model, run

ONE_LAYER = replace(CONFIG, num_hidden_layers=1)  # for kernels, which are interpreted
RUNS: dict[str, Callable[[], object]] = {}


def part(exercise_id: str) -> Callable:
    """Register the run of an exercise."""

    def register(function: Callable[[], object]) -> Callable[[], object]:
        RUNS[exercise_id] = function
        return function

    return register


def prompts() -> list[list[int]]:
    """The same in every run: 9, 5 and 2 tokens."""
    source = random.Random(3)
    return [source.choices(range(60), k=length) for length in (9, 5, 2)]


def served(model, params: SamplingParams | None = None, again=(), **arguments) -> list[dict]:
    """What an engine answers to the prompts, and then to those of `again`."""
    small = dict(max_num_seqs=4, block_size=4, num_gpu_blocks_override=60, max_model_len=LONGEST)
    engine = engine_over(model, None, EngineArgs(**small | arguments))
    asked = [prompts(), again] if again else [prompts()]
    return [run(engine, each, [params or greedy(4)] * len(each)) for each in asked]


@part("6.2")
def latents():
    """Lesson 6's rung."""
    mla = MLAConfig(20, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10)
    wide = dict(num_key_value_heads=6, head_dim=12, v_head_dim=10)
    config = replace(CONFIG, model_type="deepseek_v3", mla=mla, **wide)
    torch.manual_seed(0)
    model = DeepseekDecoder(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)
    return one_by_one(model, prompts(), 4, rung=ABSORBED)


@part("15.3")
def preemption():
    """Lesson 15's rung, with too few blocks for all."""
    options = dict(num_blocks=5, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    return chunked(new_model(), prompts(), 10, **options)


@part("16.2")
def verification():
    """Lesson 16's rung: n-grams are drafted and sampled tokens verified."""
    from lessons.l02_naive_attention.sampling import SamplingParams as RowParams

    texts = [prompt * 3 for prompt in prompts()]
    wish = RowParams(temperature=0.8, seed=5)
    return speculative(new_model(), texts, 6, wish)


@part("17.4")
def tree_in_the_cache():
    """An engine whose drafts are trees, of which the second sibling stays."""
    from tests.test_tree_engine import SecondIsRight

    model, tree = new_model(), Tree((-1, 0, 0, 1, 1, 2, 4))
    heads = MedusaHeads(CONFIG.hidden_size, 3).eval().requires_grad_(False)
    config = dict(method="medusa", model="made here", num_speculative_tokens=len(tree) - 1)
    config |= dict(speculative_token_tree=str(ranks_of(tree)))
    small = dict(max_num_seqs=4, block_size=4, num_gpu_blocks_override=60, max_model_len=LONGEST)
    engine = engine_over(model, None, EngineArgs(speculative_config=config, **small), heads)
    proposer = engine.speculation.proposer
    proposer.drafter = SecondIsRight(model, proposer.drafter.choice)
    return run(engine, prompts(), [greedy(6)] * 3)


@part("18.2")
def packed_weights():
    """An engine over weights of 4 bits, with zero points and GPTQ's order of columns."""
    return served(quantize_model(new_model(), "int4", None, Settings(group_size=16)))


@part("19.4")
def four_bit_cache():
    """An engine whose cache has 4 bits."""
    return served(new_model(ONE_LAYER), kv_cache_dtype="int4", params=greedy(3))


class Exchange:
    """Where two threads that are ranks leave what they say, and find what the other said."""

    def __init__(self):
        self.barrier, self.said = threading.Barrier(2, timeout=60), [None, None]

    def __call__(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.said[rank] = x.clone()
        self.barrier.wait()
        found = list(self.said)
        self.barrier.wait()
        return found


class ThreadGroup(Group):
    """Two ranks that are threads of the test."""

    def __init__(self, rank: int, exchange: Exchange):
        super().__init__([0, 1], rank)
        self.exchange = exchange

    def all_reduce(self, x):
        return x.copy_(sum(self.exchange(self.rank, x)))

    def all_gather(self, x, dim=-1):
        return torch.cat(self.exchange(self.rank, x), dim)

    def broadcast(self, x, source=0):
        return x.copy_(self.exchange(self.rank, x)[source])


@part("20.2")
def local_logits():
    """Lesson 20's generation on two ranks, of which the last has fewer tokens."""
    exchange, model = Exchange(), new_model()

    def on_rank(rank: int) -> list[list[int]]:
        links = Links(Mesh(2, 1), rank, ThreadGroup(rank, exchange), Group.alone())
        try:
            return on_ranks(shard(model, links), links, prompts(), 4)
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(on_rank, range(2))
    assert first == second
    return first


@part("21.3")
def mixed_adapters():
    """An engine whose requests have two adapters and none."""
    model, args = new_model(ONE_LAYER), dict(enable_lora=True, max_loras=2, max_lora_rank=4)
    small = dict(max_num_seqs=4, block_size=4, num_gpu_blocks_override=60, max_model_len=LONGEST)
    engine, answers = engine_over(model, None, EngineArgs(**small | args)), {}
    with tempfile.TemporaryDirectory() as folder:
        wanted: list[LoRARequest | None] = [None]
        for number, rank in enumerate((2, 4), start=1):
            adapter = random_adapter(linears_of(model), str(number), rank, seed=rank)
            pairs = {name: (layer.a, layer.b) for name, layer in adapter.layers.items()}
            save_adapter(Path(folder, str(number)), pairs, lora_alpha=2 * rank)
            wanted.append(LoRARequest(str(number), number, str(Path(folder, str(number)))))
        for at, (prompt, adapter) in enumerate(zip(prompts(), wanted)):
            engine.add_request(str(at), prompt[:1], greedy(2), lora_request=adapter)
        while engine.has_unfinished_requests:
            for output in engine.step():
                answers[output.request_id] = output.outputs[0].token_ids
    return answers


@part("22.2")
def turns():
    """The order in which an engine with one place begins the requests of three users."""
    small = dict(max_num_seqs=1, block_size=4, num_gpu_blocks_override=60, max_model_len=LONGEST)
    args = EngineArgs(scheduling_policy="fair", **small)
    engine, order = engine_over(new_model(), None, args), []
    users = ["ann", "ann", "ann", "bob", "ann", "cy", "bob"]
    for at, user in enumerate(users):
        engine.add_request(str(at), [at, 1, 2], greedy(3), user=user)
        if at in (3, 5):
            order += [output.request_id for output in engine.step()]
    while engine.has_unfinished_requests:
        order += [output.request_id for output in engine.step()]
    return order


@part("23.1")
def experts_together():
    """An engine over a model whose experts are grouped, as on a GPU."""
    moe = MoEConfig(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    torch.manual_seed(0)
    config = replace(ONE_LAYER, model_type="mixtral", moe=moe)
    model = decoder_class(config)(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)
    return served(grouped(model), params=greedy(2))


@part("24.1")
def masks():
    """An engine whose answers have to fit grammars."""
    from tests.structured_cases import wish
    from tests.test_structured_outputs import answers_of, engine_of_tokens

    ask = [SamplingParams(max_tokens=7, seed=n, structured_outputs=wish(n)) for n in (0, 2, 3, 4)]
    return [[one.token_ids for one in each] for each in answers_of(engine_of_tokens(), *ask)]


@part("26.2")
def blocks_from_host_memory():
    """An engine whose second prompt leaves the pool for host memory and comes back. The first one
    takes the blocks whose numbers are those of their rows.
    """
    one, two, three = ([(7 * n + at) % 59 for n in range(16)] for at in (0, 20, 40))
    small = dict(max_num_seqs=1, block_size=4, num_gpu_blocks_override=6, max_model_len=LONGEST)
    args = EngineArgs(enable_prefix_caching=True, kv_offloading_size=0.001, **small)
    engine = engine_over(new_model(ONE_LAYER).float(), None, args)
    answers = [run(engine, [prompt], [greedy(3)]) for prompt in (one, two, three, two)]
    connector = engine.scheduler.blocks.connector
    connector.close()
    return answers, connector.loaded_blocks, dict(connector.faults)


@part("26.5")
def routes():
    """Where a router sends prompts of which two replicas hold parts, while all have work to do."""
    args = RouterArgs(["http://a", "http://b", "http://c"], policy="kv")
    replicas = Replicas(args, None)
    ids, found = list(range(64)), []
    for url in args.replicas:
        stream = replicas.blocks.streams[url] = Stream()
        stream.follower.is_behind, stream.block_size = False, 4
    for url, start, end in (("http://b", 0, 6), ("http://c", 0, 3)):
        keys = Prompt("x", ids).keys(4)[start:end]
        replicas.blocks.index.apply(url, [BlockStored(tuple(keys), "pool")])
    for one in replicas.all:
        one.is_ready = True
    for length in (30, 9, 60, 25, 14, 64, 40, 33):
        prompt = Prompt("x", ids[:length])
        replica = next(replicas.candidates(prompt))
        found.append(replica.url)
        share = replicas.begin(replica, prompt, b"")
        if length % 2:
            share.answers()
    return found


@part("25.2")
def one_step_ahead():
    """Lesson 25's rung, with fewer places than requests."""
    return ahead(new_model(), prompts(), [1, 6, 4], max_num_seqs=2, max_num_batched_tokens=4)
