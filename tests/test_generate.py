"""Every rung of the ladder gives the tokens of transformers' generate, stops where it should,
refuses the same mistakes.
"""

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from lessons.l02_naive_attention import naive as recompute
from lessons.l02_naive_attention import optimized as fused
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention, recompute_loop
from lessons.l02_naive_attention.request import read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache import optimized as preallocated
from lessons.l03_kv_cache.cache import KVCache
from lessons.l03_kv_cache.naive import ConcatCache, cached_loop
from lessons.l03_kv_cache.optimized import KernelKVCache
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig
from reference import rungs

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
RUNGS = {rung.name: rung.generate for rung in rungs.RUNGS if rung.serves(CONFIG)}
THEIRS = {
    "llama": LlamaConfig(**SMALL),
    "mistral, window 5": MistralConfig(**SMALL, sliding_window=5),
    "qwen3": Qwen3Config(**SMALL, head_dim=12),
}
# two tokens whose logits differ by less may change places between two orders of summation
TIE = 1e-4


pytestmark = pytest.mark.usefixtures("seed")


def randomise(model):
    """Weights under which attention is sharp, so that a wrong mask or position changes the tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1)
            if name.endswith("norm.weight"):
                parameter.add_(1)
            if "q_proj" in name:
                parameter.mul_(3)
    return model.eval().requires_grad_(False)


def new_model(**changes) -> Decoder:
    return randomise(Decoder(replace(CONFIG, **changes)))


def new_prompts(*lengths) -> list[list[int]]:
    return [random.choices(range(97), k=length) for length in lengths]


def assert_same_tokens(model: Decoder, prompts, expected, got) -> None:
    """Equal, or at the first difference the two tokens tie (then what follows cannot be compared)."""
    assert [len(row) for row in got] == [len(row) for row in expected]
    for row, (prompt, ours, theirs) in enumerate(zip(prompts, got, expected)):
        at = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
        if at is None:
            continue
        tokens = torch.tensor(prompt + theirs[:at], device=model.device)
        logits = model.logits(
            model(tokens, torch.arange(len(tokens), device=model.device), plain_attend(model))
        )[-1]
        gap = abs(float(logits[ours[at]] - logits[theirs[at]]))
        assert gap < TIE and logits[ours[at]] > logits.max() - TIE, (
            f"row {row}: token {at} is {ours[at]}, expected {theirs[at]}; their logits differ by "
            f"{gap:.3g}"
        )


def plain_attend(model):
    return lambda layer, q, k, v: attention(q, k, v, window=model.config.sliding_window(layer))


# ---------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("family", THEIRS)
def test_the_tokens_of_transformers(family, tmp_path):
    theirs = randomise(
        AutoModelForCausalLM.from_config(THEIRS[family], attn_implementation="eager").float()
    )
    theirs.save_pretrained(tmp_path)
    model, prompts = Decoder.from_pretrained(tmp_path), [[0], *new_prompts(2, 7, 31)]
    greedy = dict(max_new_tokens=17, do_sample=False, pad_token_id=0)
    # The mask is given, because without one transformers hides every token of the prompt that
    # equals pad_token_id.
    expected = [
        theirs.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), **greedy)[
            0, len(p) :
        ].tolist()
        for p in prompts
    ]
    assert (
        all(len(row) == 17 for row in expected)
        and len({token for row in expected for token in row}) > 10
    )
    for generate in RUNGS.values():
        assert_same_tokens(model, prompts, expected, generate(model, prompts, 17))


@pytest.mark.parametrize("windows", [(), (1, 1, 1), (4, None, 7)])
def test_all_rungs_agree_in_float64(windows):
    """Where nothing ties, so that every token must be equal; sequences that fill the context to its
    last position.
    """
    model, prompts = new_model(sliding_windows=windows).double(), new_prompts(1, 3, 20, 63)
    limits = [63, 1, 30, 1]
    expected = recompute.generate(model, prompts, limits)
    assert [len(row) for row in expected] == limits
    for name, generate in RUNGS.items():
        assert generate(model, prompts, limits) == expected, name


def test_the_rungs_with_kernels():
    """What a GPU runs, in the interpreter where there is none: few tokens."""
    model, prompts = (
        new_model(num_hidden_layers=2, sliding_windows=(None, 3)).to(default_device()),
        new_prompts(1, 4),
    )
    expected = recompute.generate(model, prompts, 3)

    def new_cache(model, tokens):
        return KernelKVCache(model.config, tokens, device=model.device)

    assert_same_tokens(model, prompts, expected, cached_loop(new_cache, model, prompts, 3))
    assert_same_tokens(model, prompts, expected, recompute_loop(fused.attention, model, prompts, 3))


@pytest.mark.parametrize(
    "wrong",
    [
        "position restarts at 0",
        "position one too far",
        "logits of the first row",
        "runs a token twice",
    ],
)
def test_a_wrong_loop_is_rejected(wrong):
    class Wrong(ConcatCache):
        @property
        def length(self):
            held = ConcatCache.length.fget(self)
            return max(held - 1, 0) if wrong == "runs a token twice" else held

    class WrongDecoder(Decoder):
        def forward(self, tokens, positions, attend):
            if wrong == "position restarts at 0" and len(tokens) == 1:
                positions = torch.zeros_like(positions)
            if wrong == "position one too far" and len(tokens) == 1:
                positions = positions + 1
            hidden = super().forward(tokens, positions, attend)
            return hidden.flip(0) if wrong == "logits of the first row" else hidden

    model, prompts = new_model(), new_prompts(2, 9, 30)
    other = WrongDecoder(model.config).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    with pytest.raises(AssertionError):
        expected = recompute.generate(model, prompts, 20)
        assert_same_tokens(
            model,
            prompts,
            expected,
            cached_loop(lambda model, tokens: Wrong(model.config), other, prompts, 20),
        )


@pytest.mark.parametrize("name", RUNGS)
def test_one_prompt_at_a_time_gives_the_same(name):
    model, prompts = new_model(), new_prompts(4, 1, 9)
    together = RUNGS[name](model, prompts, [5, 9, 2])
    assert together == [
        RUNGS[name](model, [prompt], limit)[0] for prompt, limit in zip(prompts, [5, 9, 2])
    ]


@pytest.mark.parametrize("name", RUNGS)
def test_sampled_tokens_are_the_same_on_every_rung(name):
    """With a seed a rung draws the same tokens, whatever the other rows ask for."""
    model, prompts = new_model().double(), new_prompts(4, 1, 9)
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=random.randrange(2**40)),
        SamplingParams(temperature=0),
        SamplingParams(top_k=5, repetition_penalty=1.2, frequency_penalty=0.3, seed=3),
    ]
    expected = recompute.generate(model, prompts, 12, params)
    assert RUNGS[name](model, prompts, 12, params) == expected
    assert RUNGS[name](model, prompts[:1], 12, params[0]) == expected[:1]


# ---------------------------------------------------------------- stops and callbacks


@pytest.mark.parametrize("name", RUNGS)
def test_stop_tokens(name):
    """A stop token ends its row and is included: the model's own, unless ignored, and the
    request's.
    """
    generate, model, prompts = RUNGS[name], new_model(), new_prompts(3, 8)
    free = generate(model, prompts, 20)
    stop = free[0][6]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert len(cut[0]) <= 7
    assert (
        generate(model, prompts, 20, SamplingParams(temperature=0, stop_token_ids=(stop,))) == cut
    )
    model.config = replace(model.config, eos_token_ids=(stop, 96))
    cut = [
        row[: next((i for i, token in enumerate(row) if token in (stop, 96)), 19) + 1]
        for row in free
    ]
    assert generate(model, prompts, 20) == cut
    assert generate(model, prompts, 20, SamplingParams(temperature=0, ignore_eos=True)) == free
    both = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(stop, 96))
    # ignore_eos says nothing about the request's own stop tokens
    assert generate(model, prompts, 20, both) == cut
    one = [SamplingParams(temperature=0, ignore_eos=True), SamplingParams(temperature=0)]
    assert generate(model, prompts, 20, one) == [free[0], cut[1]]


@pytest.mark.parametrize("name", RUNGS)
def test_on_token_reports_each_token_once_in_order(name):
    seen = [[], [], []]
    out = RUNGS[name](
        new_model(),
        new_prompts(2, 5, 1),
        [4, 0, 6],
        on_token=lambda row, token: seen[row].append(token),
    )
    assert seen == out and [len(row) for row in out] == [4, 0, 6]


@pytest.mark.parametrize("name", RUNGS)
def test_nothing_asked_nothing_computed(name):
    model = new_model()
    model.forward = None  # would fail if it were called
    assert RUNGS[name](model, [[1], [2, 3]], 0) == [[], []]


def test_prompts_are_left_alone():
    prompts = new_prompts(3, 5)
    before = [list(prompt) for prompt in prompts]
    for generate in RUNGS.values():
        generate(new_model(), prompts, 4)
    assert prompts == before


# ---------------------------------------------------------------- what a step costs


def test_tokens_that_each_loop_feeds_to_the_model():
    """Recompute: n, n + 1, …; a cache: n, then one at a time. And logits of one position only."""
    model, fed, asked = new_model(), [], []
    forward, logits = model.forward, model.logits
    model.forward = lambda tokens, positions, attend: (
        fed.append(len(tokens)) or forward(tokens, positions, attend)
    )
    model.logits = lambda hidden: asked.append(len(hidden)) or logits(hidden)
    recompute.generate(model, new_prompts(7), 5)
    assert fed == [7, 8, 9, 10, 11]
    fed.clear()
    preallocated.generate(model, new_prompts(7), 5)
    assert fed == [7, 1, 1, 1, 1]
    assert asked == [1] * 10


def test_bytes_that_each_cache_copies():
    """A prompt of 7 and 5 tokens: the last one is never fed back, so 11 tokens are held."""
    model, caches = new_model(), []
    for new_cache in (lambda model, tokens: ConcatCache(model.config), preallocated.new_kv_cache):
        cached_loop(
            lambda *args, new=new_cache: caches.append(new(*args)) or caches[-1],
            model,
            new_prompts(7),
            5,
        )
    one = model.config.kv_bytes_per_token(4)
    assert [cache.length for cache in caches] == [11, 11]
    assert [cache.written_bytes for cache in caches] == [11 * one, 11 * one]
    assert [cache.growth_copy_bytes for cache in caches] == [(7 + 8 + 9 + 10) * one, 0]
    assert isinstance(caches[1], KVCache) and caches[1].capacity == 11


# ---------------------------------------------------------------- bad input

BAD = {
    "no prompts": (dict(prompts=[]), r"prompts: got \[\]; accepted: a list of one or more prompts"),
    "text": (dict(prompts="abc"), "prompts: got 'abc'; accepted"),
    "one flat prompt": (
        dict(prompts=[1, 2]),
        r"prompts\[0\]: got 1; accepted: a list of one or more token ids",
    ),
    "empty prompt": (
        dict(prompts=[[1], []]),
        r"prompts\[1\]: got \[\]; accepted: a list of one or more token ids",
    ),
    "token too large": (
        dict(prompts=[[1, 97]]),
        r"prompts\[0\]\[1\]: got 97; accepted: a token id from 0 to 96",
    ),
    "negative token": (dict(prompts=[[-1]]), r"prompts\[0\]\[0\]: got -1; accepted"),
    "token that is no integer": (dict(prompts=[[1.0]]), r"prompts\[0\]\[0\]: got 1.0; accepted"),
    "too long": (
        dict(prompts=[[1] * 60], max_new_tokens=5),
        r"prompts\[0\]: 60 tokens and 5 new ones make 65; accepted: at",
    ),
    "prompt alone too long": (
        dict(prompts=[[1] * 65], max_new_tokens=0),
        r"prompts\[0\]: 65 tokens and 0 new",
    ),
    "negative count": (
        dict(max_new_tokens=-1),
        "max_new_tokens: got -1 for prompt 0; accepted: 0 or more",
    ),
    "one negative count": (dict(max_new_tokens=[1, -2]), "max_new_tokens: got -2 for prompt 1"),
    "too few counts": (
        dict(max_new_tokens=[1]),
        "max_new_tokens: got 1 for 2 prompts; accepted: one int, or one per prompt",
    ),
    "count that is no integer": (
        dict(max_new_tokens=2.5),
        "max_new_tokens: got 2.5; accepted: int",
    ),
    "too many params": (
        dict(sampling=[SamplingParams()] * 3),
        "sampling: got 3 for 2 prompts; accepted: one SamplingParams",
    ),
    "params of another kind": (dict(sampling=0.7), "sampling: got 0.7; accepted: SamplingParams"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    change, message = BAD[name]
    arguments = dict(prompts=[[1], [2, 3]], max_new_tokens=2) | change
    for generate in RUNGS.values():
        with pytest.raises(ValueError, match=message) as error:
            generate(new_model(), **arguments)
        assert "\n" not in str(error.value)


def test_the_longest_request_that_fits():
    (request,) = read_requests(CONFIG, [[1] * 60], 4)
    assert len(request.prompt) + request.max_new_tokens == CONFIG.max_position_embeddings
