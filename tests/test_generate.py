"""Every rung of the ladder gives the tokens of transformers' generate and of recomputing."""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import random
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from lessons.l02_naive_attention import naive as recompute
from lessons.l02_naive_attention import optimized as fused
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import recompute_loop, whole_sequence
from lessons.l02_naive_attention.request import read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache import generate as loop
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.generate import generate, run_request
from lessons.l03_kv_cache.lab.testing import randomise
from lessons.l03_kv_cache.naive import CONCATENATED, ConcatCache
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.l06_mla.deepseek import load_decoder
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig
from reference.ladder.rungs import rungs_of

CONFIG = ModelConfig(
    "llama",
    vocab_size=97,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_position_embeddings=64,
)
RUNGS = {rung.name: rung.run for rung in rungs_of(CONFIG)}
SMALL = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
    eos_token_id=None,
    bos_token_id=None,
)
LATENT = SMALL | dict(
    num_key_value_heads=6,
    kv_lora_rank=32,
    q_lora_rank=20,
    qk_rope_head_dim=16,
    qk_nope_head_dim=8,
    v_head_dim=12,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
)
THEIRS = {
    "llama": LlamaConfig(**SMALL),
    "mistral, window 5": MistralConfig(**SMALL, sliding_window=5),
    "qwen3": Qwen3Config(**SMALL, head_dim=12),
    "deepseek v2": DeepseekV2Config(**LATENT | dict(q_lora_rank=None)),
    "deepseek v3": DeepseekV3Config(**LATENT),
}
# two tokens whose logits differ by less may change places between two orders of summation
TIE = 1e-4


pytestmark = pytest.mark.usefixtures("seed")


def new_model(**changes) -> Decoder:
    return randomise(Decoder(replace(CONFIG, **changes)))


def new_prompts(*lengths) -> list[list[int]]:
    return [random.choices(range(97), k=length) for length in lengths]


def assert_same_tokens(model: Decoder, prompts, expected, got) -> None:
    """Equal, or at the first difference the two tokens tie. What follows is not compared then."""
    assert [len(row) for row in got] == [len(row) for row in expected]
    for row, (prompt, ours, theirs) in enumerate(zip(prompts, got, expected)):
        at = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
        if at is None:
            continue
        tokens = torch.tensor(prompt + theirs[:at], device=model.device)
        logits = model.logits(model(tokens, whole_sequence(model, len(tokens))))[-1]
        gap = abs(float(logits[ours[at]] - logits[theirs[at]]))
        assert gap < TIE and logits[ours[at]] > logits.max() - TIE, (
            f"row {row}: token {at} is {ours[at]}, expected {theirs[at]}; their logits differ by "
            f"{gap:.3g}"
        )


# ---------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("family", THEIRS)
@pytest.mark.sample(1)
def test_the_tokens_of_transformers(family, tmp_path):
    theirs = AutoModelForCausalLM.from_config(THEIRS[family], attn_implementation="eager")
    theirs = randomise(theirs.float())
    theirs.save_pretrained(tmp_path)
    model, prompts = load_decoder(tmp_path), [[0], *new_prompts(2, 7, 31)]
    greedy = dict(max_new_tokens=17, do_sample=False, pad_token_id=0)
    expected = []
    for prompt in prompts:
        # The mask is given, because without one transformers hides every token of the prompt that
        # equals pad_token_id.
        mask = torch.ones(1, len(prompt))
        whole = theirs.generate(torch.tensor([prompt]), attention_mask=mask, **greedy)
        expected.append(whole[0, len(prompt) :].tolist())
    assert all(len(row) == 17 for row in expected)
    assert len({token for row in expected for token in row}) > 10
    for rung in rungs_of(model.config):
        assert_same_tokens(model, prompts, expected, rung.run(model, prompts, 17))


@pytest.mark.parametrize("windows", [(), (1, 1, 1), (4, None, 7)])
@pytest.mark.sample(1)
def test_all_rungs_agree_in_float64(windows):
    """Where nothing ties, so that every token must be equal; sequences that fill the context to its
    last position.
    """
    model, prompts = new_model(sliding_windows=windows).double(), new_prompts(1, 3, 20, 63)
    limits = [63, 1, 30, 1]
    expected = recompute.generate(model, prompts, limits)
    assert [len(row) for row in expected] == limits
    for name, run in RUNGS.items():
        assert run(model, prompts, limits) == expected, name


@pytest.mark.parametrize("family", ["deepseek v2", "deepseek v3"])
@pytest.mark.sample(1)
def test_all_rungs_of_a_model_with_latents_agree_in_float64(family, tmp_path):
    """Caches that keep k and v of all heads, caches that keep latents, and batches."""
    theirs = randomise(AutoModelForCausalLM.from_config(THEIRS[family]).float())
    theirs.save_pretrained(tmp_path)
    model, prompts = load_decoder(tmp_path).double(), new_prompts(1, 9, 30)
    limits = [40, 1, 17]
    expected = recompute.generate(model, prompts, limits)
    ladder = rungs_of(model.config)
    assert {rung.keeps_latents for rung in ladder if rung.has_cache} == {True, False}
    for rung in ladder:
        assert rung.run(model, prompts, limits) == expected, rung.name


def test_the_rungs_with_kernels():
    """What a GPU runs, in the interpreter where there is none: few tokens."""
    model = new_model(num_hidden_layers=2, sliding_windows=(None, 3)).to(default_device())
    prompts = new_prompts(1, 4)
    expected = recompute.generate(model, prompts, 3)
    rung = replace(PREALLOCATED, stand_ins=PREALLOCATED.kernels)
    assert_same_tokens(model, prompts, expected, generate(model, prompts, 3, rung=rung))
    assert_same_tokens(model, prompts, expected, recompute_loop(fused.attention, model, prompts, 3))


class Roomy(ConcatCache):
    """With a table of rotations that a position too far does not leave."""

    @classmethod
    def for_model(cls, model, num_blocks, block_size, ops):
        return super().for_model(model, num_blocks, 2 * block_size, ops)


class TwiceInTheCache(Roomy):
    """Every token but those of the first step is stored twice."""

    def append(self, layer, k, v):
        again = layer in self.keys
        super().append(layer, k, v)
        if again:
            super().append(layer, k, v)


WRONG_STEPS = {
    "position restarts at 0": lambda step: replace(step, positions=0 * step.positions),
    "position one too far": lambda step: replace(step, positions=step.positions + 1),
    "logits of the first row": lambda step: replace(step, logits_at=0 * step.logits_at),
}


@pytest.mark.parametrize("wrong", [*WRONG_STEPS, "runs a token twice"])
def test_a_wrong_loop_is_rejected(wrong, monkeypatch):
    def wrong_batch(chunks, block_size, device):
        step = new_batch(chunks, block_size, device)
        is_prompt = step.max_seqlen_q > 1
        if wrong not in WRONG_STEPS or (is_prompt and wrong.startswith("position")):
            return step
        return WRONG_STEPS[wrong](step)

    model, prompts = new_model(), new_prompts(2, 9, 30)
    expected = recompute.generate(model, prompts, 20)
    monkeypatch.setattr(loop, "new_batch", wrong_batch)
    rung = replace(CONCATENATED, cache=Roomy if wrong in WRONG_STEPS else TwiceInTheCache)
    got = generate(model, prompts, 20, rung=rung)
    with pytest.raises(AssertionError):
        assert_same_tokens(model, prompts, expected, got)


@pytest.mark.parametrize("name", RUNGS)
def test_one_prompt_at_a_time_gives_the_same(name):
    model, prompts = new_model(), new_prompts(4, 1, 9)
    together = RUNGS[name](model, prompts, [5, 9, 2])
    assert together == [
        RUNGS[name](model, [prompt], limit)[0] for prompt, limit in zip(prompts, [5, 9, 2])
    ]


# Lesson 16 has more than one random number for a token, so only its distribution is the same.
WITH_THE_SAME_DRAWS = [name for name in RUNGS if name != "n-grams, verified"]


@pytest.mark.parametrize("name", WITH_THE_SAME_DRAWS)
def test_sampled_tokens_are_the_same_on_every_rung(name):
    """With a seed a rung draws the same tokens, alone and in a batch, whatever the other rows ask
    for and whenever they end.
    """
    model, prompts, limits = new_model().double(), new_prompts(4, 1, 9, 2), [12, 3, 9, 5]
    params = [
        SamplingParams(
            temperature=0.8,
            top_p=0.95,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            seed=17,
        ),
        SamplingParams(temperature=0),
        SamplingParams(top_k=5, repetition_penalty=1.2, frequency_penalty=0.3, seed=3),
        SamplingParams(temperature=0.8, top_p=0.9, seed=random.randrange(2**40)),
    ]
    expected = recompute.generate(model, prompts, limits, params)
    assert RUNGS[name](model, prompts, limits, params) == expected
    for row in (0, 3):
        alone = RUNGS[name](model, [prompts[row]], limits[row], params[row])
        assert alone == [expected[row]]


# ---------------------------------------------------------------- what a step costs


def test_tokens_that_each_loop_feeds_to_the_model():
    """Recompute: n, n + 1, …; a cache: n, then one at a time. And logits of one position only."""
    model, fed, asked = new_model(), [], []
    forward, logits = model.forward, model.logits
    model.forward = lambda tokens, attend: fed.append(len(tokens)) or forward(tokens, attend)
    model.logits = lambda hidden: asked.append(len(hidden)) or logits(hidden)
    recompute.generate(model, new_prompts(7), 5)
    assert fed == [7, 8, 9, 10, 11]
    fed.clear()
    generate(model, new_prompts(7), 5, rung=PREALLOCATED)
    assert fed == [7, 1, 1, 1, 1]
    assert asked == [1] * 10


@pytest.mark.parametrize("rung, copied", [(CONCATENATED, 7 + 8 + 9 + 10), (PREALLOCATED, 0)])
@torch.inference_mode()
def test_bytes_that_each_cache_copies(rung, copied):
    """A prompt of 7 and 5 tokens: the last one is never fed back, so 11 tokens are held."""
    model = new_model()
    (request,) = read_requests(model.config, new_prompts(7), 5)
    cache = rung.new_cache(model, 1, request.most_cached)
    run_request(model, cache, request)
    one = model.config.kv_bytes_per_token(4)
    assert len(request.output) == 5 and cache.block_size == 11
    assert (cache.written_bytes, cache.growth_copy_bytes) == (11 * one, copied * one)
