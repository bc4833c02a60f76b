"""Checks of lesson 02's exercises. Each exists because it rejects a named wrong answer
(wrong/l02.py).
"""

import math

import torch

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities
from tests.exercises.checking import (
    assert_equal,
    assert_same_work,
    call,
    check,
    compare,
    in_wider_memory,
)

# ---------------------------------------------------------------- 2.1 attention


def attention_inputs(seed, queries=5, keys=5, heads=2, kv_heads=2, dim=8, **options):
    """q: [queries, heads, dim]; k, v: [keys, kv_heads, dim], normally distributed, and the options
    of a call.
    """
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(n, h, dim, generator=g)
        for n, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    return dict(q=q, k=k, v=v, **options)


def oracle(q, k, v, **options):
    """The lesson's function in float64."""
    return naive.attention(q.double(), k.double(), v.double(), **options)


ATTENTION_CASES = {
    "square": (dict(), "as many queries as keys"),
    "fewer_queries": (dict(queries=3, keys=7), "the last query belongs to the last key"),
    "one_query": (dict(queries=1, keys=6), "decoding: the one query sees everything"),
    "more_queries": (dict(queries=6, keys=4), "the first two queries see no key and get zeros"),
    "shared_kv_heads": (dict(heads=6, kv_heads=2), "query heads 0, 1, 2 read KV head 0"),
    "window": (dict(queries=4, keys=9, window=3), "a window of 3 counts the query's own key"),
    "window_of_one": (dict(window=1), "each query sees itself alone"),
    "not_causal": (dict(queries=3, keys=5, causal=False), "every query sees every key"),
    "given_scale": (dict(softmax_scale=0.5), "softmax_scale comes from the caller"),
    "scale_of_zero": (dict(softmax_scale=0.0), "0 is a scale too: all weights are equal"),
    "one_dim": (dict(dim=1), "√D is 1: only the mask and the softmax are left"),
}


@check("2.1", {case: why for case, (_, why) in ATTENTION_CASES.items()})
def test_values(impl, case, seed):
    inputs = attention_inputs(seed, **ATTENTION_CASES[case][0])
    compare(impl, inputs, want=oracle(**inputs), atol=1e-5, dtype=torch.float32)


@check("2.1")
def test_example(impl, seed):
    column = [
        torch.tensor(x, dtype=torch.float64)[:, None, None]
        for x in ([1, 1], [0, math.log(3)], [4, 8])
    ]
    inputs = dict(zip("qkv", column), softmax_scale=1.0)
    compare(
        impl, inputs, want=torch.tensor([4.0, 7.0], dtype=torch.float64)[:, None, None], atol=1e-9
    )


@check("2.1")
def test_large_scores(impl, seed):
    """exp overflows float32 above 88: softmax has to subtract each row's largest score."""
    inputs = attention_inputs(seed)
    inputs["q"], inputs["k"] = 20 * inputs["q"], 20 * inputs["k"]
    compare(impl, inputs, want=oracle(**inputs), atol=1e-3, dtype=torch.float32)


@check("2.1")
def test_very_negative_scores(impl, seed):
    """All scores are near -32768: a mask or a first maximum of -10000 is larger than all of
    them.
    """
    inputs = attention_inputs(seed, queries=3, keys=6, softmax_scale=0.5)
    for x, first in ((inputs["q"], 256), (inputs["k"], -256)):
        x.copy_((8 * x).round() / 8)[..., 0] = first  # every product is exact in float32
    compare(impl, inputs, want=oracle(**inputs), dtype=torch.float32)


@check("2.1")
def test_slices(impl, seed):
    """q, k and v are slices of wider tensors, as of the result of one large projection."""
    inputs = attention_inputs(seed, queries=3, keys=6)
    inputs = {name: in_wider_memory(x) for name, x in inputs.items()}
    compare(impl, inputs, want=oracle(**inputs), dtype=torch.float32)


# with the tolerance of each
DTYPES = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float64: 1e-12}


@check(
    "2.1",
    {
        "bfloat16": "what models run in",
        "float16": "what older GPUs run in",
        "float64": "what oracles run in",
    },
)
def test_keeps_dtype(impl, case, seed):
    dtype = getattr(torch, case)
    inputs = {name: x.to(dtype) for name, x in attention_inputs(seed).items()}
    compare(impl, inputs, want=oracle(**inputs), atol=DTYPES[dtype], dtype=dtype)


# ---------------------------------------------------------------- 2.2 sampling for a batch


def sampling_inputs(seed, settings, vocab_size=12, peak=2.0):
    """Logits for one row per entry of settings: (temperature, top_k, top_p)."""
    logits = peak * torch.randn(
        len(settings), vocab_size, generator=torch.Generator().manual_seed(seed)
    )
    temperature, top_k, top_p = zip(*settings)
    return dict(
        logits=logits,
        temperature=torch.tensor(temperature, dtype=torch.float64),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p, dtype=torch.float64),
    )


def row_by_row(inputs):
    """What the lesson's one-row function says. -> [B, V] float64."""
    settings = zip(
        inputs["temperature"].tolist(), inputs["top_k"].tolist(), inputs["top_p"].tolist()
    )
    return torch.stack(
        [
            probabilities(row, SamplingParams(temperature=t, top_k=k, top_p=p), [], [])
            for row, (t, k, p) in zip(inputs["logits"], settings)
        ]
    )


SAMPLING_CASES = {
    "softmax_only": ([(1, 0, 1.0)], "top_k=0 and top_p=1 are off"),
    "temperature": ([(0.5, 0, 1.0), (2, 0, 1.0)], "below 1 sharpens, above 1 flattens"),
    "top_k": ([(1, 3, 1.0), (1, 1, 1.0)], "each row keeps its own k"),
    "top_k_beyond_vocabulary": ([(1, 50, 1.0)], "k may exceed the vocabulary"),
    "top_p": ([(1, 0, 0.7), (1, 0, 0.3), (1, 0, 0.95)], "the token that reaches p stays"),
    "tiny_top_p": ([(1, 0, 1e-6)], "the likeliest token always stays"),
    "same_settings": ([(1, 3, 1.0)] * 4, "rows with equal settings still choose their own tokens"),
    "temperature_and_top_p": (
        [(2, 0, 0.6), (0.5, 0, 0.9)],
        "p is a share of the mass after the temperature",
    ),
    "top_k_and_top_p": ([(1, 3, 0.6), (2, 5, 0.8), (1, 4, 0.9)], "p is a share of what top-k left"),
    "low_temperature": (
        [(0.001, 0, 1.0), (1, 0, 1.0)],
        "exp(4000) overflows float64: subtract each row's own maximum",
    ),
    "all_at_once": (
        [(1, 0, 1.0), (0.7, 4, 0.9), (1.5, 0, 0.5), (1, 2, 1.0)],
        "a batch as a server sees it",
    ),
}


@check("2.2", {case: why for case, (_, why) in SAMPLING_CASES.items()})
def test_distribution(impl, case, seed):
    inputs = sampling_inputs(seed, SAMPLING_CASES[case][0])
    compare(impl, inputs, want=row_by_row(inputs), atol=1e-12)


@check(
    "2.2",
    {
        "top_k": "every token as likely as the k-th stays",
        "top_p": "among equals the smallest ids stay",
        "almost": "a token 0.00001 % less likely than the k-th goes",
        "exact_top_p": "two of four equal tokens reach p = 0.5: no third one",
    },
)
def test_ties(impl, case, seed):
    setting = {"top_p": (1, 0, 0.6), "exact_top_p": (1, 0, 0.5)}.get(case, (1, 2, 1.0))
    inputs = sampling_inputs(seed, [setting])
    inputs["logits"] = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    if case == "almost":
        inputs["logits"][0, 2] = inputs["logits"][0, 1].nextafter(torch.tensor(-2.0))
    if case == "exact_top_p":
        inputs["logits"] = torch.zeros(1, 4)
    want = {"top_k": [5, 2, 2, 0], "exact_top_p": [1, 1, 0, 0]}.get(case, [5, 2, 0, 0])
    want = torch.tensor([want], dtype=torch.float64)
    compare(impl, inputs, want=want / want.sum(), atol=1e-6)


@check("2.2")
def test_padded_vocabulary(impl, seed):
    """The logits are a slice of a wider matrix, because a vocabulary is often padded."""
    inputs = sampling_inputs(seed, [(1, 3, 1.0), (2, 0, 0.6)])
    inputs["logits"] = in_wider_memory(inputs["logits"])
    compare(impl, inputs, want=row_by_row(inputs), atol=1e-12)


@check("2.2")
def test_no_loop_over_rows(impl, seed):
    few, many = (sampling_inputs(seed, [(1, 3, 0.9)] * rows) for rows in (2, 20))
    assert_same_work(
        "for ten times as many rows", lambda: call(impl, few), lambda: call(impl, many)
    )


@check("2.2")
def test_improbable_tokens_survive_top_p_1(impl, seed):
    """Their mass is below the rounding of the sum, and still top_p=1 keeps them."""
    inputs = sampling_inputs(seed, [(1, 0, 1.0)])
    inputs["logits"] = torch.tensor([[0.0, -1.0, -60.0, -60.0]])
    got = call(impl, inputs)
    compare(lambda **_: got, inputs, want=row_by_row(inputs), atol=1e-12)
    assert (got > 0).all(), f"top_p=1 keeps every token, yours gave {got[0].tolist()}"


# ---------------------------------------------------------------- 2.3 the generation loop


class ToyModel:
    """Its next token depends on every token and on every position, so that a slip anywhere shows at
    once.
    """

    vocab_size = 101

    def attending(self, positions):
        """Its `attend` knows nothing but the positions."""
        assert positions.dtype == torch.int64, (
            f"attending() takes positions: [T] int64, yours are {positions.dtype}"
        )
        return positions

    def __call__(self, tokens, attend):
        assert tokens.dtype == torch.int64, (
            f"model() takes tokens: [T] int64, yours are {tokens.dtype}"
        )
        positions = attend
        weighted = (tokens + 1) * (2 * positions + 1)
        return weighted.cumsum(0)[:, None]  # [T, 1]

    def logits(self, hidden):
        logits = torch.nn.functional.one_hot(hidden[:, 0] % self.vocab_size, self.vocab_size)
        # the largest logit of all is neither in the first row nor in the last
        return logits * torch.tensor([1.0, 2.0, 1.0]).repeat(len(hidden))[: len(hidden), None]

    def greedy(self, prompt, max_new_tokens, stop_token_ids):
        """The same numbers without tensors or a loop around a model."""
        tokens, total = list(prompt), sum((t + 1) * (2 * i + 1) for i, t in enumerate(prompt))
        while len(tokens) < len(prompt) + max_new_tokens and not (
            len(tokens) > len(prompt) and tokens[-1] in stop_token_ids
        ):
            tokens.append(total % self.vocab_size)
            total += (tokens[-1] + 1) * (2 * len(tokens) - 1)
        return tokens[len(prompt) :]


@check(
    "2.3",
    {
        "first_token": "the last row predicts it",
        "second_token": "its logits come from a longer sequence",
        "many_tokens": "positions go on counting after the prompt",
        "none": "max_new_tokens=0",
        "stop_token": "any one of several ends the row and is returned",
        "stop_token_in_prompt": "only a generated one ends the row",
        "stop_token_first": "the very first token may end the row",
    },
    seconds=5,
)
def test_tokens(impl, case, seed):
    model = ToyModel()
    prompt = torch.randint(
        model.vocab_size, (6,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    count = {"first_token": 1, "second_token": 2, "none": 0}.get(case, 12)
    free = model.greedy(prompt, 12, set())
    stop = {
        "stop_token": {-1, free[4], free[7], 500},
        "stop_token_first": {free[0]},
        "stop_token_in_prompt": {*prompt} - {*free},
    }.get(case, set())
    inputs = dict(
        model=model,
        prompt=prompt,
        max_new_tokens=count,
        stop_token_ids=stop,
        attending=model.attending,
    )
    assert_equal(call(impl, inputs), model.greedy(prompt, count, stop), label="your list of tokens")


# ---------------------------------------------------------------- 2.4 predict

FITS_CASES = {  # name: (memory_gib, num_heads, num_kv_heads, dtype), the answer, why
    "example": ((1, 8, 2, torch.float16), 8192, "the docstring's"),
    "h100": (
        (80, 32, 8, torch.bfloat16),
        36635,
        "a whole H100 and less than 37k tokens of ONE layer's scores",
    ),
    "float32": ((1, 8, 8, torch.float32), 5792, "four bytes an element"),
    "one_head": ((2, 1, 1, torch.float16), 32768, "the roof of one head"),
    "half_a_gib": ((0.5, 16, 4, torch.bfloat16), 4096, "memory need not be whole"),
}


@check("2.4", {case: why for case, (_, _, why) in FITS_CASES.items()}, seconds=5)
def test_tokens_that_fit(impl, case, seed):
    (memory_gib, num_heads, num_kv_heads, dtype), want, _ = FITS_CASES[case]
    inputs = dict(
        memory_gib=memory_gib, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype
    )
    assert_equal(call(impl, inputs), want, label="your number of tokens")
