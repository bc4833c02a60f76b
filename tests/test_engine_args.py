"""What the engine's arguments and a request's wishes may be, and what is said of all others."""

from dataclasses import fields
from pathlib import Path

import pytest

from lessons.l19_kv_quantization.formats import FORMATS
from reference import LLM, SamplingParams
from reference.engine.engine_args import KV_FORMATS, EngineArgs

MODEL = str(Path(__file__).resolve().parents[1] / "models/tiny")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(max_num_seqs=0), "max_num_seqs: got 0"),
        (dict(max_num_seqs=True), "max_num_seqs: got True"),
        (dict(block_size=257), "block_size: got 257; accepted: 1 to 256"),
        (dict(max_model_len=10**6), "accepted: at most 2048, the model's"),
        (dict(max_num_seqs=8, max_num_batched_tokens=4), "a token for each of max_num_seqs"),
        (dict(gpu_memory_utilization=1.5), "gpu_memory_utilization: got 1.5"),
        (dict(dtype="int7"), "dtype: got 'int7'"),
        (dict(scheduling_policy="best"), "fcfs or priority"),
        (dict(enable_prefix_caching=1), "True or False"),
        (
            dict(kv_cache_memory_bytes=10),
            "max_model_len: got 2048; accepted: at most 0, the tokens",
        ),
        (dict(quantization="int5"), "quantization: got 'int5'; accepted: None, int8, int4, fp8"),
        (dict(quantization="fbgemm_fp8"), "quantization: got 'fbgemm_fp8'; accepted: int8, int4"),
        (dict(max_num_seq=3), "unknown argument; did you mean max_num_seqs?"),
        (dict(zzz=3), "unknown argument; accepted: model"),
        (dict(device="cuda:7"), "device: got 'cuda:7'"),
        (dict(device=7), "device: got 7"),
        (dict(tokenizer="no/such/folder"), "unknown model 'no/such/folder'"),
    ],
)
def test_arguments_that_cannot_work(arguments, said):
    with pytest.raises(ValueError) as error:
        LLM(MODEL, **arguments)
    assert said in str(error.value) and "\n" not in str(error.value)


A_LIST = [1]
STRANGE = (-1, 1.5, float("nan"), "x", A_LIST, True, 10**400, object(), None)
# What of STRANGE an argument takes. model, tokenizer and device are checked where they are used.
TAKES = {
    EngineArgs: dict(
        dict.fromkeys(("model", "tokenizer", "device"), STRANGE),
        seed=(None,),
        max_model_len=(None,),
        max_num_batched_tokens=(None,),
        num_gpu_blocks_override=(None,),
        kv_cache_memory_bytes=(None,),
        swap_space=(1.5,),
        kv_offloading_size=(None, 1.5),
        kv_offloading_folder=(None,),
        kv_offloading_folder_size=(1.5,),
        kv_transfer_config=(None,),
        kv_events_config=(None,),
        attention_config=(None,),
        enable_prefix_caching=(None, True),
        enable_chunked_prefill=(True,),
        async_scheduling=(True,),
        disable_hybrid_kv_cache_manager=(True,),
        batch_invariant=(True,),
        enforce_eager=(True,),
        quantization=(None,),
        limit_mm_per_prompt=(None,),
        mm_processor_cache_gb=(1.5,),
        speculative_config=(None,),
        enable_lora=(True,),
        max_cpu_loras=(None,),
        mamba_block_size=(None,),
        enable_expert_parallel=(True,),
        eplb_config=(None,),
        compilation_config=(None,),
        distributed_executor_backend=(None,),
    ),
    SamplingParams: dict(
        best_of=(None,),
        temperature=(1.5,),
        top_k=(-1,),
        presence_penalty=(-1, 1.5),
        frequency_penalty=(-1, 1.5),
        repetition_penalty=(1.5,),
        seed=(None, -1),
        stop=(None, "x"),
        stop_token_ids=(None, A_LIST),
        include_stop_str_in_output=(True,),
        ignore_eos=(True,),
        max_tokens=(None,),
        logprobs=(None, -1),
        prompt_logprobs=(None, -1),
        flat_logprobs=(True,),
        logit_bias=(None,),
        allowed_token_ids=(None, A_LIST),
        bad_words=(None, "x"),
        skip_reading_prefix_cache=(None, True),
        detokenize=(True,),
        skip_special_tokens=(True,),
        structured_outputs=(None,),
        guided_decoding=(None,),
        extra_args=(None,),
    ),
}


@pytest.mark.parametrize("kind", TAKES)
def test_strange_values_of_every_argument_are_refused_in_one_line(kind):
    for field in fields(kind):
        for value in STRANGE:
            if any(value is taken for taken in TAKES[kind].get(field.name, ())):
                kind(**{field.name: value})
                continue
            with pytest.raises(ValueError) as error:
                kind(**{field.name: value})
            assert str(error.value).startswith(f"{field.name}: got "), field.name
            assert "\n" not in str(error.value) and len(str(error.value)) < 250


def test_an_unknown_wish_is_named():
    with pytest.raises(ValueError, match="temprature: unknown argument; did you mean temperature"):
        SamplingParams(temprature=1)


@pytest.mark.parametrize("name", ["use_v2_block_manager", "disable_log_requests", "worker_use_ray"])
def test_arguments_of_older_guides_are_accepted(name):
    with pytest.warns(UserWarning, match=f"{name}: accepted without effect, because"):
        EngineArgs.read(model=MODEL, **{name: True})


@pytest.mark.parametrize(
    "wishes, said",
    [
        (dict(n=0), "n: got 0"),
        (dict(n=3, best_of=2), "best_of: got 2; accepted: n (3) or more"),
        (dict(n=2, temperature=0), "all answers would be equal"),
        (dict(max_tokens=0), "max_tokens: got 0; accepted: None, or"),
        (dict(min_tokens=9, max_tokens=3), "at most max_tokens (3)"),
        (dict(stop=["a", ""]), "none empty"),
        (dict(stop="a", detokenize=False), "text is searched"),
        (dict(logprobs=-2), "logprobs: got -2"),
        (dict(logit_bias={1: 1000}), "from -100 to 100"),
        (dict(temperature=-1), "temperature: got -1"),
        (dict(top_p=0), "top_p: got 0"),
        (dict(seed=-2), "seed: got -2"),
        (dict(detokenize=1), "True or False"),
    ],
)
def test_wishes_that_cannot_work(wishes, said):
    with pytest.raises(ValueError) as error:
        SamplingParams(**wishes)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_every_format_of_lesson_19_is_accepted():
    assert tuple(FORMATS) == KV_FORMATS
