"""What holds of the engine on a GPU. test_engine_graphs.py runs these in a process of their own,
which pretends to have one where there is none.
"""

import pickle
import random
import re
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from lessons.l02_naive_attention.naive import generate as alone
from lessons.l02_naive_attention.sampling import SamplingParams as RowParams
from lessons.l06_mla.deepseek import load_decoder
from lessons.l11_cuda_graphs.optimized import CudaGraphs
from lessons.l17_tree_speculation.lab.testing import random_heads
from lessons.l18_weight_quantization.linear import dequantized
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.lab.testing import naive_answers
from lessons.l20_parallelism.processes.mesh import Mesh, new_links
from lessons.l21_multi_lora.lab.testing import linears_of, random_adapter
from lessons.l21_multi_lora.layers import merged
from lessons.l21_multi_lora.peft.adapters import save_adapter
from lessons.l23_experts.grouped import GroupedMoE
from lessons.l24_structured_outputs.vocabulary import Vocabulary
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig
from reference import LoRARequest
from reference.checkpoints.gguf.gguf_model import save_gguf
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.engine.model import load_model
from reference.features.structured import StructuredOutputsParams
from reference.parallel.engine import config_for, engine_over_workers
from reference.parallel.worker import Worker
from reference.weights.quantization import quantize_model
from tests.engine_cases import assert_clean, greedy, new_model, random_prompts, run
from tests.parallel_cases import write_checkpoint

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(scope="module")
def model():
    return new_model().to(default_device())


def new_engine(model, **arguments):
    small = dict(max_num_seqs=4, block_size=4, num_gpu_blocks_override=40, max_model_len=40)
    engine = engine_over(model, None, EngineArgs(**small | arguments))
    for slots in engine.runner.pool.tensors:
        if slots.is_floating_point():
            slots.fill_(torch.nan)  # no row may be read that was not written
    return engine


def count_replays(engine) -> list[int]:
    """Fills with the bucket of each replay from now on, whichever of its graphs."""
    captured, buckets = engine.runner.captured, []

    class Noted:
        def __init__(self, bucket, graph):
            self.bucket, self.graph = bucket, graph

        def replay(self):
            buckets.append(self.bucket)
            self.graph.replay()

    captured.graphs = {key: Noted(key[0], graph) for key, graph in captured.graphs.items()}
    return buckets


def test_decode_steps_are_replayed_and_every_request_gets_the_same_tokens(model):
    engine = new_engine(model)
    buckets = count_replays(engine)
    prompts, limits = random_prompts(6), [random.randint(2, 7) for _ in range(6)]
    got = run(engine, prompts, [greedy(limit) for limit in limits], [0, 0, 0, 0, 3, 4])
    assert [got[str(at)][0] for at in range(6)] == alone(model, prompts, limits)
    assert buckets and set(buckets) <= {1, 2, 4}
    assert_clean(engine)


def test_replayed_steps_that_are_scheduled_ahead_give_the_same_tokens(model):
    """Greedy and drawn. The third request comes while the others run, and waits for a place."""
    prompts, limits = [[1, 2, 3], [4, 5], [6]], [2, 4, 2]
    rows = [RowParams(temperature=0), RowParams(temperature=0.8, seed=5), RowParams(temperature=0)]
    engine = new_engine(model, async_scheduling=True, max_num_seqs=2)
    params = [greedy(limit) for limit in limits]
    params[1] = replace(params[1], temperature=0.8, seed=5)
    got = run(engine, prompts, params, [0, 0, 1])
    assert [got[str(at)][0] for at in range(3)] == alone(model, prompts, limits, rows)


class Inline:
    """In the place of Talk: one worker, in this process."""

    def __init__(self, worker):
        self.worker, self.close = worker, lambda: None

    def ask_later(self, method, *arguments) -> Future:
        reply = Future()
        told = pickle.loads(pickle.dumps(arguments))
        reply.set_result([getattr(self.worker, method)(*told)])
        return reply

    def ask(self, method, *arguments) -> list:
        return self.ask_later(method, *arguments).result()

    def check(self):
        pass

    tell, wait_until_ready = ask, check


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_worker_replays_its_steps(enforce_eager, tmp_path):
    """And samples on the GPU, greedy and drawn."""
    small = dict(max_num_seqs=4, block_size=4, num_gpu_blocks_override=40, max_model_len=40)
    args = EngineArgs(
        write_checkpoint(tmp_path, "llama", 3),
        device="cuda",
        dtype="float32",
        distributed_executor_backend="mp",
        enforce_eager=enforce_eager,
        **small,
    )
    worker = Worker(args, new_links(Mesh()), "cuda")
    engine = engine_over_workers(Inline(worker), config_for(args), None, args)
    assert (worker.runner.captured is None) is enforce_eager
    buckets = [] if enforce_eager else count_replays(worker)
    prompts, limits = random_prompts(3), [5, 3, 4]
    params = [greedy(limit) for limit in limits]
    params[1] = replace(params[1], temperature=0.9, seed=4, logit_bias={3: 2.0}, logprobs=1)
    whole = new_engine(load_model(args.model, "cuda", "float32"), enforce_eager=True)
    assert run(engine, prompts, params) == run(whole, prompts, params)
    assert enforce_eager or (set(buckets) <= {1, 2, 4} and len(buckets) >= 4)


def test_an_eager_engine_captures_nothing(model, monkeypatch):
    monkeypatch.setattr(CudaGraphs, "capture", lambda *_: 1 / 0)
    engine = new_engine(model, enforce_eager=True)
    assert engine.runner.captured is None
    got = run(engine, [[1, 2, 3]], [greedy(4)])
    assert got["0"] == alone(model, [[1, 2, 3]], 4)


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts_are_verified_in_replayed_steps(model, method):
    name = None if method == "ngram" else "made here"
    config = dict(method=method, model=name, num_speculative_tokens=2)
    small = dict(max_num_seqs=2, block_size=4, num_gpu_blocks_override=24, max_model_len=32)
    drafter = None if method == "ngram" else new_model().to(default_device())
    args = EngineArgs(speculative_config=config, **small)
    engine = engine_over(model, None, args, drafter)
    buckets = count_replays(engine)
    prompts, limits = [[7, 8, 9] * 3, [5, 6] * 3], [6, 5]
    got = run(engine, prompts, [greedy(limit) for limit in limits])
    assert [got[str(at)][0] for at in range(2)] == alone(model, prompts, limits)
    assert engine.speculation.counts.accepted and max(buckets) > 2


@pytest.mark.parametrize(
    "kind, tree", [("medusa", "[(0,), (1,)]"), ("eagle3", "[(0,), (1,), (0, 0)]")]
)
def test_trees_are_verified_in_replayed_steps(model, kind, tree):
    """EAGLE-3 reads the target at three depths, so it needs what a graph has tapped."""
    heads = random_heads(model, kind)
    method = "medusa" if kind == "medusa" else "eagle"
    config = dict(method=method, model="made here", speculative_token_tree=tree)
    small = dict(max_num_seqs=2, block_size=4, num_gpu_blocks_override=12, max_model_len=24)
    engine = engine_over(model, None, EngineArgs(speculative_config=config, **small), heads)
    buckets = count_replays(engine)
    prompts, limits = [[7, 8, 9], [5, 6]], [5, 3]
    got = run(engine, prompts, [greedy(limit) for limit in limits])
    assert [got[str(at)][0] for at in range(2)] == alone(model, prompts, limits)
    assert engine.speculation.counts.drafted and max(buckets) > 2


def test_swapped_blocks_come_back_from_the_host(model):
    engine = new_engine(model, num_gpu_blocks_override=6, preemption_mode="swap", max_model_len=16)
    buckets = count_replays(engine)
    prompts = [random.choices(range(60), k=7) for _ in range(2)]
    got = run(engine, prompts, [replace(greedy(7), ignore_eos=True)] * 2)
    rows = RowParams(temperature=0, ignore_eos=True)
    assert [got[str(at)][0] for at in range(2)] == alone(model, prompts, 7, rows)
    assert engine.scheduler.host.swap.swapped_bytes > 0 and buckets


def test_the_largest_step_is_run_before_the_cache_is_made(model, monkeypatch):
    asked = []
    info = torch.cuda.mem_get_info
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(1) or info(device))
    how = dict(num_gpu_blocks_override=None, max_num_batched_tokens=9, enforce_eager=True)
    engine = new_engine(model, max_model_len=16, **how)
    assert asked and engine.scheduler.blocks.num_blocks == 4 * 4  # places · blocks of the longest


# ---------------------------------------------------------------- experts, fewer bits

PROMPT = [[1, 2, 3]]
RANKS = {"a": 2, "b": 5}
# the inputs of q, k, v, gate and up are too few for NF4's kernel
SMALL = ModelConfig("llama", 61, 32, 1, 2, 1, 16, 64, 96, eos_token_ids=(60,))


def answered_in_replayed_steps(model, **arguments) -> list[int]:
    """What one request gets from an engine whose only graph has one row: a token of the
    prompt's step, and one of a replayed step.
    """
    few = dict(max_num_seqs=1, num_gpu_blocks_override=2, max_model_len=5)
    engine = new_engine(model, **few | arguments)
    buckets = count_replays(engine)
    (got,) = run(engine, PROMPT, [greedy(2)])["0"]
    assert buckets == [1]
    return got


def test_a_mixture_of_experts_in_replayed_steps(tmp_path):
    """Loaded as a checkpoint is: its experts are grouped, so that nothing waits for the router."""
    theirs = MixtralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=64,
        pad_token_id=None,
    )
    AutoModelForCausalLM.from_config(theirs).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="float32")
    assert type(model.layers[0].mlp) is GroupedMoE
    expected = alone(load_decoder(str(tmp_path)), PROMPT, 2)[0]
    assert answered_in_replayed_steps(model) == expected


@pytest.mark.parametrize("weights, cache", [("int4", "fp8"), ("fp8", "int8"), ("nf4", "fp8")])
def test_quantized_weights_and_cache_in_replayed_steps(weights, cache):
    model = quantize_model(new_model(SMALL), weights, None)
    got = answered_in_replayed_steps(model, kv_cache_dtype=cache)
    assert got == naive_answers(dequantized(model), PROMPT, [2], FORMATS[cache])[0]


def test_trees_over_a_cache_of_codes():
    """No kernel reads codes for trees: they become numbers first, and no step is captured."""
    model = new_model(SMALL)
    config = dict(method="medusa", model="made here", speculative_token_tree="[(0,), (1,)]")
    few = dict(max_num_seqs=1, num_gpu_blocks_override=4, max_model_len=12, block_size=4)
    args = EngineArgs(speculative_config=config, kv_cache_dtype="int8", **few)
    engine = engine_over(model, None, args, random_heads(model, "medusa"))
    assert engine.runner.captured is None
    got = run(engine, PROMPT, [greedy(4)])["0"]
    assert got == naive_answers(model, PROMPT, [4], FORMATS["int8"])
    assert engine.speculation.counts.drafted


def test_a_gguf_file_in_replayed_steps(tmp_path):
    file = tmp_path / "small.gguf"
    save_gguf(file, new_model(SMALL), None, "Q4_0")
    model = load_model(file, dtype="float32")
    assert model.device.type == "cuda"
    assert answered_in_replayed_steps(model) == alone(dequantized(model), PROMPT, 2)[0]


# ---------------------------------------------------------------- adapters, structured outputs


def test_adapters_in_replayed_steps(tmp_path):
    """Two adapters and the base in one replayed step, each with the tokens of its merged
    matrices.
    """
    model = new_model(SMALL)
    linears = linears_of(model)
    adapters = {
        name: random_adapter(linears, name, rank, seed=rank) for name, rank in RANKS.items()
    }
    requests = {None: None}
    for number, (name, adapter) in enumerate(adapters.items(), start=1):
        pairs = {key: (layer.a, layer.b) for key, layer in adapter.layers.items()}
        save_adapter(tmp_path / name, pairs, lora_alpha=2 * adapter.rank)  # its scaling is 2
        requests[name] = LoRARequest(name, number, str(tmp_path / name))
    few = dict(max_num_seqs=3, num_gpu_blocks_override=6, max_model_len=8)
    engine = new_engine(model, enable_lora=True, max_loras=2, max_lora_rank=8, **few)
    buckets = count_replays(engine)
    for name, request in requests.items():
        engine.add_request(str(name), PROMPT[0], greedy(2), lora_request=request)
    got = {}
    while engine.has_unfinished_requests:
        got |= {out.request_id: out.outputs[0].token_ids for out in engine.step() if out.finished}
    merged_models = {name: merged(model, adapter) for name, adapter in adapters.items()}
    for name, own in (merged_models | {None: model}).items():
        assert got[str(name)] == alone(own, PROMPT, 2)[0], name
    assert len(set(map(tuple, got.values()))) == 3, "the adapters make a difference"
    assert set(buckets) == {4} or set(buckets) == {3}, buckets
    assert_clean(engine)


def test_a_structure_is_kept_to_on_a_gpu():
    """By the kernel of lesson 24: the mask is applied between two replays."""
    engine = new_engine(new_model(SMALL), max_num_seqs=2)
    buckets = count_replays(engine)
    tokens = [bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz"]
    engine.structures.vocabulary = Vocabulary([*tokens, *[None] * (61 - len(tokens))])
    wanted = StructuredOutputsParams(regex="(ab|ba){3}")
    params = replace(greedy(9), structured_outputs=wanted)
    got = run(engine, [[1, 2], [3, 4, 5]], [params, greedy(5)])
    said = bytes(b"".join(tokens[token] for token in got["0"][0] if token != 60))
    assert re.fullmatch(b"(ab|ba){3}", said), got
    assert got["1"] == alone(new_model(SMALL), [[3, 4, 5]], 5) and buckets
