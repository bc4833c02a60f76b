"""The engine over a quantized cache: whatever the scheduler does, every request gets the tokens of
naive generation with the same quantizer.

In float64, where two orders of the same sum differ by about 1e-15. A code differs if a number is
that close to the middle between two codes, which happens to one value in about 1e13, and a token
differs only if the two likeliest are nearly equal besides. The requests are the same in every run.
"""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import generate as alone
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l17_tree_speculation.heads.heads import EagleDraft, MTPDraft
from lessons.l19_kv_quantization.activations.attention.naive import FP8, Coded, products
from lessons.l19_kv_quantization.activations.attention.pool import ProductsPool
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.lab.testing import naive_answers
from lessons.l19_kv_quantization.pool import QuantizedPool
from reference import SamplingParams
from reference.engine.assembly import engine_over
from reference.engine.cache_memory import blocks_that_fit
from reference.engine.engine_args import EngineArgs
from tests.engine_cases import CONFIG, LONGEST, assert_clean, new_model, run

LIMITS = [9, 12, 5, 11, 8, 10]


@pytest.fixture(scope="module")
def model():
    model = new_model().cpu().double()
    for layer in model.layers:  # sharp attention, so that a code that differs changes a token
        layer.self_attn.q_proj.weight.mul_(3)
        layer.self_attn.o_proj.weight.mul_(3)
    return model


@pytest.fixture(scope="module")
def drafters(model):
    """What drafts for the model, by method: now and then it is right."""
    torch.manual_seed(1)
    draft = new_model().cpu()
    for parameter in draft.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter) * parameter.std())
    heads = [
        kind(CONFIG, 32).double().eval().requires_grad_(False) for kind in (EagleDraft, MTPDraft)
    ]
    return dict(ngram=None, draft=draft.double()) | {each.kind: each for each in heads}


def prompts() -> list[list[int]]:
    """Four begin alike, so that a prefix cache finds something; one is long."""
    rng = random.Random(19)
    head = rng.choices(range(60), k=13)
    own = [rng.choices(range(60), k=length) for length in (3, 5, 1, 8, 2, 21)]
    return [head + tokens if index < 4 else tokens for index, tokens in enumerate(own)]


@pytest.fixture(scope="module")
def expected(model):
    """{format: the answers}. No two formats agree in all of them, nor with a cache that is not
    quantized, so a cache of another format would show.
    """
    found = {name: naive_answers(model, prompts(), LIMITS, FORMATS[name]) for name in FORMATS}
    plain = alone(model, prompts(), LIMITS)
    assert len({str(answers) for answers in (*found.values(), plain)}) == len(FORMATS) + 1
    return found


def poison(engine) -> None:
    """No row may be read that was not written."""
    pools = [engine.runner.pool]
    if engine.scheduler.__class__.__name__.startswith("Lookahead"):
        pools += engine.speculation.proposer.pools
    for pool in pools:
        pool.k_scales.fill_(torch.nan)
        pool.v_scales.fill_(torch.nan)


def new_engine(model, name, method=None, drafter=None, **arguments):
    config = None
    if method is not None:
        drawn = None if method == "ngram" else "made here"
        config = dict(method=method, model=drawn, num_speculative_tokens=3)
    small = dict(max_num_seqs=4, block_size=4, num_gpu_blocks_override=60, max_model_len=LONGEST)
    args = EngineArgs(kv_cache_dtype=name, speculative_config=config, **small | arguments)
    engine = engine_over(model, None, args, drafter)
    poison(engine)
    return engine


def answers_of(engine, answers: int = 1) -> list[list[int]]:
    """What each request gets; they arrive in three steps."""
    params = [
        # The likeliest token; several answers are not allowed at temperature 0, which is all the
        # same.
        SamplingParams(temperature=1, top_k=1, max_tokens=limit, n=answers, detokenize=False)
        for limit in LIMITS
    ]
    found = run(engine, prompts(), params, [0, 0, 1, 3, 3, 4])
    for own in found.values():
        assert all(answer == own[0] for answer in own)
    return [found[str(index)][0] for index in range(len(LIMITS))]


HOUSES = {
    "pages of 1": dict(block_size=1, num_gpu_blocks_override=200),
    "pages of 3, chunks of 5": dict(block_size=3, max_num_batched_tokens=5),
    "one page": dict(block_size=64, enable_prefix_caching=False),
    "computes again": dict(num_gpu_blocks_override=12, enable_prefix_caching=False),
    "swaps": dict(num_gpu_blocks_override=12, preemption_mode="swap"),
}


@pytest.mark.parametrize("house", HOUSES)
@pytest.mark.parametrize("name", FORMATS)
def test_no_tokens_depend_on_the_scheduler(model, expected, name, house):
    engine = new_engine(model, name, **HOUSES[house])
    assert answers_of(engine) == expected[name]
    if house == "swaps":
        assert engine.scheduler.host.swap.swapped_bytes > 0


@pytest.mark.parametrize("name", FORMATS)
def test_answers_that_fork(model, expected, name):
    """Three answers to each prompt share its blocks and copy the one that they write into."""
    engine = new_engine(model, name, max_num_seqs=9)
    assert answers_of(engine, answers=3) == expected[name]


@pytest.mark.parametrize("method", ["ngram", "draft", "eagle", "mtp"])
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_rejected_drafts_leave_nothing_behind(model, drafters, expected, name, method):
    """The next token writes over codes and scale of a rejected one."""
    engine = new_engine(model, name, method, drafters[method], num_gpu_blocks_override=22)
    assert answers_of(engine) == expected[name]
    assert engine.speculation.counts.drafted > engine.speculation.counts.accepted


def test_prefixes_are_found_in_codes(model, expected):
    """A second round of the same requests reads codes that the first one wrote."""
    engine = new_engine(model, "int8")
    assert answers_of(engine) == expected["int8"]
    cached = []
    note = engine.note_scheduled

    def noted(step):
        note(step)
        cached.extend(chunk.sequence.request.num_cached_tokens for chunk in step.chunks)

    engine.note_scheduled = noted
    assert answers_of(engine) == expected["int8"] and max(cached) >= 12


# ---------------------------------------------------------------- planted slips


def swaps_codes_only(self):
    """PoolsSwap and HostSwap that forget the scales."""
    return self.runner.pool.k_slots, self.runner.pool.v_slots


def test_a_swap_without_scales_is_found(model, expected, monkeypatch):
    monkeypatch.setattr("lessons.l12_paged_kv.more.swap.HostSwap.slots", property(swaps_codes_only))
    monkeypatch.setattr("reference.features.swap.PoolsSwap.slots", property(swaps_codes_only))
    engine = new_engine(model, "int8", **HOUSES["swaps"])
    assert answers_of(engine) != expected["int8"]


def test_a_copy_without_scales_is_found(model, expected, monkeypatch):
    def copies_codes_only(pool, copies):
        for source, target in copies:
            for slots in (pool.k_slots, pool.v_slots):
                pool.blocks(slots)[:, target] = pool.blocks(slots)[:, source]

    monkeypatch.setattr("reference.engine.model_runner.copy_blocks", copies_codes_only)
    engine = new_engine(model, "int8", max_num_seqs=9)
    params = [SamplingParams(temperature=1, top_k=1, max_tokens=9, n=3, detokenize=False)] * 2
    with pytest.raises(ValueError, match=r"logits: the largest of row . is not finite"):
        run(engine, prompts()[:2], params)  # the copy's scales are those of unwritten rows


# ---------------------------------------------------------------- memory and arguments


@pytest.mark.parametrize("name, share", [("fp8", 0.3125), ("int8", 0.3125), ("int4", 0.25)])
def test_the_same_memory_has_room_for_more_blocks(name, share):
    """float32 and heads of 16 numbers: 16 codes and a scale of 4 bytes in the place of 64 bytes."""
    model = Decoder(replace(CONFIG, head_dim=16, v_head_dim=0))
    how = dict(kv_cache_memory_bytes=2**20, max_num_seqs=10_000, max_model_len=64)
    plain, small = (
        blocks_that_fit(EngineArgs(kv_cache_dtype=dtype, **how), model, 64)
        for dtype in ("auto", name)
    )
    assert abs(plain / small - share) < 1e-3
    engine = engine_over(model, None, EngineArgs(kv_cache_dtype=name, **how))
    assert engine.runner.pool.num_blocks == small
    assert engine.runner.pool.allocated_bytes <= 2**20 + engine.runner.pool.bytes_per_token


def test_the_longer_names_of_vllm():
    for longer, name in (("fp8_e4m3", "fp8"), ("int8_per_token_head", "int8")):
        assert EngineArgs(kv_cache_dtype=longer).kv_cache_dtype == name


@pytest.mark.parametrize("value", ["fp6", "int2", None, 8, "fp8_e5m2"])
def test_an_unknown_format_is_refused(value):
    with pytest.raises(
        ValueError, match=r"^kv_cache_dtype: got .*; accepted: auto or fp8"
    ) as error:
        EngineArgs.read(kv_cache_dtype=value)
    assert "\n" not in str(error.value)


def test_prompts_by_products_of_codes(model):
    """attention_config's choice reaches the pool, and a prompt in one chunk gets the first token
    of the definition: attention by products of codes.
    """
    wish = {"use_prefill_query_quantization": True}
    engine = new_engine(model, "fp8", block_size=16, attention_config=wish)
    assert type(engine.runner.pool) is ProductsPool
    firsts = [tokens[0] for tokens in answers_of(engine)]
    want = []
    for prompt in prompts():
        attend = whole_sequence(model, len(prompt), by_products)
        want.append(int(model.logits(model(torch.tensor(prompt), attend))[-1].argmax()))
    assert firsts == want
    plain = new_engine(model, "fp8", block_size=16, attention_config={"backend": "FLASH_ATTN"})
    assert type(plain.runner.pool) is QuantizedPool


def by_products(q, k, v, softmax_scale, window):
    """Lesson 2's attention, by products of codes."""
    return products(*(Coded(*FP8.quantize(x)) for x in (q, k, v)), softmax_scale, window)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(kv_cache_dtype="int8"), "got True; accepted: None unless kv_cache_dtype is fp8"),
        (dict(block_size=8), "got True; accepted: None unless block_size is a multiple of 16"),
        (dict(tensor_parallel_size=2), "got True; accepted: None where the model is in other"),
        (dict(batch_invariant=True), "got True; accepted: None with batch_invariant"),
        (
            dict(speculative_config=dict(method="ngram", num_speculative_tokens=2)),
            "got True; accepted: None with speculative_config",
        ),
        (dict(attention_config={"use_prefill": True}), "attention_config: got 'use_prefill'"),
        (dict(attention_config=[1]), "attention_config: got [1]; accepted: a dict of"),
        (dict(attention_config={"use_prefill_query_quantization": 1}), "got 1; accepted: True or"),
    ],
)
def test_products_that_cannot_be_are_refused_in_one_line(arguments, said):
    wish = dict(attention_config={"use_prefill_query_quantization": True}, kv_cache_dtype="fp8")
    with pytest.raises(ValueError) as error:
        EngineArgs(**(wish | arguments))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_clean_up(model):
    engine = new_engine(model, "fp8")
    answers_of(engine)
    assert_clean(engine)
