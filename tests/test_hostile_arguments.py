"""Every parameter of the public functions, given every kind of nonsense: one line that names the
parameter, the value and what is accepted. Never an error from deep inside.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from huggingface_hub import constants

from lessons.l02_naive_attention import naive as recompute
from lessons.l02_naive_attention import optimized as fused_softmax
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import generate
from lessons.l03_kv_cache.naive import ConcatCache
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.l11_cuda_graphs import naive as lockstep
from lessons.l11_cuda_graphs import optimized as graphs
from lessons.l12_paged_kv import generate as paged
from lessons.l12_paged_kv import naive as reserved
from lessons.l13_prefix_caching import generate as prefixes
from lessons.l14_continuous_batching import loop as continuous
from lessons.l14_continuous_batching import naive as static
from lessons.l15_chunked_prefill import generate as chunked
from lessons.toolbox.model.checkpoint import load_config, load_tokenizer
from lessons.toolbox.model.config import (
    FLAGS,
    GEMMA_NUMBERS,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    Multipliers,
    RopeScaling,
)
from reference.engine.model import load_model
from tests.test_generate import CONFIG, new_model

POOL = {
    "None": None,
    "True": True,
    "False": False,
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "'1'": "1",
    "''": "",
    "a NUL": "a\0b",
    "a megabyte": "x" * 10**6,
    "bytes": b"cpu",
    "[]": [],
    "[[]]": [[]],
    "[None]": [None],
    "[-1]": [-1],
    "[1.5]": [1.5],
    "{}": {},
    "nan": float("nan"),
    "inf": float("inf"),
    "2**63": 2**63,
    "10**5000": 10**5000,
    "an object": object(),
    "a class": slice,  # which may be called with a row and a token
    "float64": torch.float64,
    "int8": torch.int8,
    "meta": torch.device("meta"),
    "tensor [2, 3]": torch.ones(2, 3),
    "tensor []": torch.tensor(1),
    "meta tensor": torch.ones(4, device="meta"),
    "empty tensor": torch.ones(0, dtype=torch.int64),
}


class Entry(NamedTuple):
    """A function, arguments that work, and for each parameter the values of POOL that work too."""

    function: Callable
    arguments: dict
    accepted: dict[str, str]


PROMPTS = dict(prompts=[[1], [2, 3]], max_new_tokens=2, sampling=SamplingParams(temperature=0))
CALL = PROMPTS | dict(model=new_model(), on_token=lambda row, token: None)
CALL_ACCEPTS = dict(sampling="None", on_token="None|a class", max_new_tokens="0")
SIZES = dict(num_blocks=2, block_size=8)
POOL_ARGUMENTS = SIZES | dict(config=CONFIG, ops=LESSON_03_TORCH, dtype=torch.float32)
POOL_ARGUMENTS |= dict(device="cpu", layers=range(1), max_context_len=8)
MODEL = dict(name_or_path="models/tiny", device="cpu", dtype="float32")
SAMPLING = SamplingParams().__dict__ | dict(seed=1, stop_token_ids=(1,))
SHAPE = {name: value for name, value in vars(CONFIG).items() if name != "model_type"}
EXPERTS = MoEConfig(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
LATENTS = MLAConfig(8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
YARN = vars(RopeScaling("yarn", 4.0, attention_factor=1.5, mscale=1.0, mscale_all_dim=1.0))


def a_pool() -> KVPool:
    return KVPool(CONFIG, 2, 8, LESSON_03_TORCH)


ENTRIES = {
    "SamplingParams": Entry(
        SamplingParams,
        SAMPLING,
        dict(
            temperature="0|1.5|2**63",
            top_k="0|-1",
            min_p="0",
            repetition_penalty="1.5",
            presence_penalty="0|-1|1.5",
            frequency_penalty="0|-1|1.5",
            seed="None|0",
            stop_token_ids="None|[]",
            ignore_eos="True|False",
        ),
    ),
    "generate": Entry(generate, CALL | dict(rung=PREALLOCATED), CALL_ACCEPTS),
    "read_requests": Entry(partial(read_requests, CONFIG), PROMPTS, CALL_ACCEPTS),
    "new_batch": Entry(
        new_batch,
        dict(chunks=[([1, 2], 3)], block_size=8, device="cpu", block_tables=[[4]]),
        dict(block_tables="None", device="meta"),
    ),
    "KVPool": Entry(
        KVPool,
        POOL_ARGUMENTS,
        dict(layers="None", max_context_len="None", dtype="float64", device="meta"),
    ),
    "KVPool.for_model": Entry(
        KVPool.for_model, SIZES | dict(model=CALL["model"], ops=LESSON_03_TORCH), {}
    ),
    "KVPool.reserve": Entry(lambda tokens: a_pool().reserve(tokens), dict(tokens=4), {}),
    "KVPool.move": Entry(
        lambda source, target, tokens: a_pool().move(source, target, tokens),
        dict(source=1, target=0, tokens=2),
        dict(source="0", target="0", tokens="0"),
    ),
    "ConcatCache": Entry(
        ConcatCache, dict(config=CONFIG, max_tokens=8, device="cpu"), dict(device="meta")
    ),
    "load_model": Entry(
        load_model,
        MODEL | dict(quantization="int8"),
        dict(device="None", dtype="None|float64", quantization="None"),
    ),
    "Decoder.from_pretrained": Entry(Decoder.from_pretrained, MODEL, dict(dtype="float64")),
    "load_config": Entry(load_config, dict(name_or_path="models/tiny"), {}),
    "load_tokenizer": Entry(load_tokenizer, dict(name_or_path="models/tiny"), {}),
    "ModelConfig": Entry(
        lambda **fields: ModelConfig("llama", **fields),
        SHAPE,
        dict.fromkeys(FLAGS.split(), "True|False")
        | dict.fromkeys(["rms_norm_eps", "rope_theta"], "1.5|2**63")
        | dict.fromkeys(GEMMA_NUMBERS.split(), "None|1.5|2**63")
        | dict(rope_scaling="None", mla="None", moe="None", state="None", v_head_dim="0")
        | dict(sliding_windows="None")
        | dict(multipliers="None", variant="None")
        | dict(quantization_config="None"),
    ),
    "RopeScaling": Entry(
        RopeScaling,
        YARN,
        dict.fromkeys(["factor", "original_max_position_embeddings", "beta_fast"], "1.5|2**63")
        | dict(low_freq_factor="1.5", high_freq_factor="1.5|2**63", beta_slow="1.5")
        | dict.fromkeys(["mscale", "mscale_all_dim"], "None|0|False|1.5|2**63")
        | dict(attention_factor="None|1.5|2**63", truncate="True|False"),
    ),
    "MLAConfig": Entry(
        MLAConfig, vars(LATENTS), dict(q_lora_rank="None", rope_interleave="True|False")
    ),
    "MoEConfig": Entry(
        MoEConfig,
        vars(EXPERTS),
        dict(n_shared_experts="0", first_k_dense_replace="0", norm_topk_prob="True|False")
        | dict(are_stacked="True|False", routed_scaling_factor="1.5|2**63")
        | dict.fromkeys(["shared_expert_intermediate_size", "shared_intermediate_size"], "None"),
    ),
    "Multipliers": Entry(
        Multipliers, vars(Multipliers()), dict.fromkeys(vars(Multipliers()), "1.5|2**63")
    ),
}
GENERATES = {
    "lesson 2 naive": recompute.generate,
    "lesson 2 optimized": fused_softmax.generate,
    "lesson 11 naive": lockstep.generate,
    "lesson 11 optimized": graphs.generate,
    "lesson 12 naive": partial(reserved.generate, memory_tokens=8),
    "lesson 12 optimized": paged.generate,
    "lesson 13": prefixes.generate,
    "lesson 14 naive": static.generate,
    "lesson 14 optimized": continuous.generate,
    "lesson 15": chunked.generate,
}
ENTRIES |= {
    f"generate, {name}": Entry(function, CALL, CALL_ACCEPTS) for name, function in GENERATES.items()
}
# A checkpoint's refusals speak of the model.
CALLED = {"name_or_path": "model"}


@pytest.mark.parametrize("name", ENTRIES)
def test_nonsense_is_one_line_that_names_the_parameter(name, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    function, arguments, accepted = ENTRIES[name]
    function(**arguments)
    for parameter in arguments:
        works = accepted.get(parameter, "").split("|")
        for label, value in POOL.items():
            wrong = f"{name}({parameter}={label})"
            try:
                function(**arguments | {parameter: value})
            except ValueError as error:
                said = str(error)
                assert label not in works, f"{wrong}: {said}"
                assert said.isprintable() and len(said) <= 300, f"{wrong}: {said[:500]!r}"
                named = parameter in said or CALLED.get(parameter, parameter) in said
                assert named, f"{wrong}: {said}"
            except Exception as error:
                raise AssertionError(f"{wrong}: {error!r}") from error
            else:
                assert label in works, f"{wrong} was accepted"
