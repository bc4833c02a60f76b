"""Checks of lesson 03's exercises. Each exists because it rejects a named wrong answer
(wrong/l03.py).
"""

import random

import torch

from lessons.l02_naive_attention import naive
from lessons.l03_kv_cache.cache import KVCache
from lessons.l03_kv_cache.naive import ConcatCache
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.traps import poison_
from tests.exercises.checking import assert_equal, assert_largest_tensor, call, check, compare

# ---------------------------------------------------------------- 3.1 a chunk over caches of different lengths


def chunk_inputs(
    seed, lengths=(9, 5, 12), queries=3, heads=2, kv_heads=2, dim=8, capacity=12, **options
):
    """Random q: [B, T, Hq, D]; caches: [B, capacity, Hkv, D] whose rows beyond `lengths` are zero;
    context_lens: [B].
    """
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(len(lengths), queries, heads, dim, generator=g)
    k, v = (torch.randn(len(lengths), capacity, kv_heads, dim, generator=g) for _ in range(2))
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = 0
    return dict(q=q, k_cache=k, v_cache=v, context_lens=torch.tensor(lengths), **options)


def one_by_one(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None):
    """Lesson 2's attention in float64 on the rows in use, sequence after sequence."""
    return torch.stack(
        [
            naive.attention(
                q[b].double(),
                k_cache[b, :n].double(),
                v_cache[b, :n].double(),
                softmax_scale,
                window=window,
            )
            for b, n in enumerate(context_lens.tolist())
        ]
    )


CHUNK_CASES = {
    "one_sequence": (
        dict(lengths=(9,), capacity=9),
        "a chunk of 3 behind 6 cached tokens, the buffer full",
    ),
    "spare_rows": (dict(lengths=(5,)), "7 rows of the buffer are not in use"),
    "different_lengths": (dict(), "each sequence has its own length"),
    "prefill": (
        dict(lengths=(4, 4), queries=4, capacity=6),
        "nothing was cached before: causal among the new tokens",
    ),
    "decode": (
        dict(lengths=(6, 1, 12), queries=1),
        "one query sees all that is in use, itself included",
    ),
    "shared_kv_heads": (dict(heads=6, kv_heads=2), "query heads 0, 1, 2 read KV head 0"),
    "window": (dict(window=4), "each query has its own window, and counts in it"),
    "given_scale": (dict(softmax_scale=0.4), "softmax_scale comes from the caller"),
}


@check("3.1", {case: why for case, (_, why) in CHUNK_CASES.items()})
def test_values(impl, case, seed):
    inputs = chunk_inputs(seed, **CHUNK_CASES[case][0])
    compare(impl, inputs, want=one_by_one(**inputs), atol=1e-5, dtype=torch.float32)


@check(
    "3.1",
    {
        "k_cache": "a masked score hides any key",
        "v_cache": "a weight of 0 does not hide NaN: 0 · NaN is NaN",
    },
)
def test_unused_rows_are_nan(impl, case, seed):
    inputs = chunk_inputs(seed)
    want = one_by_one(**inputs)
    for b, n in enumerate(inputs["context_lens"].tolist()):
        poison_(inputs[case][b, n:])
    compare(impl, inputs, want=want, atol=1e-5, dtype=torch.float32)


@check("3.1")
def test_keeps_bfloat16(impl, seed):
    """What models run in. The tolerance is that of its 8 bits."""
    inputs = {
        name: x.bfloat16() if x.is_floating_point() else x for name, x in chunk_inputs(seed).items()
    }
    compare(impl, inputs, want=one_by_one(**inputs), atol=6e-2, dtype=torch.bfloat16)


@check("3.1")
def test_example(impl, seed):
    q = torch.zeros(1, 2, 1, 1, dtype=torch.float64)
    v = torch.tensor([3, 6, 9, float("nan")], dtype=torch.float64).view(1, 4, 1, 1)
    inputs = dict(
        q=q,
        k_cache=torch.zeros_like(v),
        v_cache=v,
        context_lens=torch.tensor([3]),
        softmax_scale=1.0,
    )
    compare(
        impl, inputs, want=torch.tensor([4.5, 6.0], dtype=torch.float64).view(1, 2, 1, 1), atol=1e-9
    )


# ---------------------------------------------------------------- 3.2 a preallocated cache

CONFIG = ModelConfig(
    "llama",
    vocab_size=11,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=4,
    max_position_embeddings=512,
    sliding_windows=(None, 5),
)
BYTES_PER_TOKEN = CONFIG.kv_bytes_per_token(4)


class Streams:
    """Random q, k, v of every layer for `total` tokens, and what attention over all of them gives."""

    def __init__(self, seed, total):
        g = torch.Generator().manual_seed(seed)
        self.layers = [
            tuple(torch.randn(total, heads, 8, generator=g) for heads in (4, 2, 2))
            for _ in range(2)
        ]

    def whole(self, layer, order):
        """The layer's attention over the tokens `order`, in float64: [len(order), Hq, D]."""
        q, k, v = (x[order].double() for x in self.layers[layer])
        return naive.attention(q, k, v, CONFIG.softmax_scale, window=CONFIG.sliding_window(layer))

    def feed(self, cache, rows):
        """One pass of the tokens `rows` through both layers of a cache: [[len(rows), Hq, D]] * 2."""
        return [
            cache.attend(layer, *(x[rows] for x in qkv)) for layer, qkv in enumerate(self.layers)
        ]


def poisoned_cache(impl, capacity=40):
    """An empty cache whose rows hold NaN until they are written."""
    cache = impl(CONFIG, capacity)
    poison_(cache.keys)
    poison_(cache.values)
    return cache


STEP_CASES = {
    "prefill_then_decode": ([6, 1, 1, 1], 40, "the prompt at once, then token by token"),
    "one_by_one": ([1] * 8, 40, "each token finds those before it"),
    "chunks": ([5, 3, 1, 4, 1], 40, "a chunk's first token does not see its last one"),
    "exactly_full": ([4, 1, 1], 6, "the last row of the buffer is used"),
    "growth": ([5, 1, 60, 1], 3, "the rows in use move to the larger buffers"),
}


@check("3.2", {case: why for case, (*_, why) in STEP_CASES.items()})
def test_attends_as_if_recomputed(impl, case, seed):
    steps, capacity, _ = STEP_CASES[case]
    streams, cache, start = Streams(seed, sum(steps)), poisoned_cache(impl, capacity), 0
    for step in steps:
        assert cache.length == start, (
            f"before the token at position {start} your cache's length is {cache.length}"
        )
        rows = torch.arange(start, start + step)
        for layer, out in enumerate(streams.feed(cache, rows)):
            want = streams.whole(layer, torch.arange(start + step))[rows]
            assert_equal(
                out,
                want,
                atol=1e-5,
                dtype=torch.float32,
                label=f"layer {layer}, positions from {start}",
            )
        start += step


def filled(impl, steps, capacity=64):
    """A cache after passes of so many tokens each, through `append` alone, and what the last append
    returned.
    """
    cache, rows = impl(CONFIG, capacity), None
    for step in steps:
        for layer in range(2):
            rows = cache.append(layer, torch.zeros(step, 2, 8), torch.zeros(step, 2, 8))
    return cache, rows


# name: (steps, capacity to start with, (length, capacity, written, copied) in tokens, why)
COUNTED = {
    "fits": ([30, 1, 1], 64, (32, 64, 32, 0), "nothing is copied while there is room"),
    "exactly_full": ([64], 64, (64, 64, 64, 0), "64 rows fit into 64"),
    "one_more": (
        [64, 1],
        64,
        (65, 128, 65, 64),
        "the 65th row moves the 64 in use, not the 128 reserved",
    ),
    "twice": ([1] * 130, 64, (130, 256, 130, 64 + 128), "two moves"),
    "small_start": ([3, 1], 3, (4, 64, 4, 3), "a bucket is 64 tokens at least"),
    "long_prompt": ([300], 64, (300, 512, 300, 0), "an empty cache has no rows to move"),
}


@check("3.2", {case: why for case, (*_, why) in COUNTED.items()})
def test_counts(impl, case, seed):
    steps, capacity, want, _ = COUNTED[case]
    cache, returned = filled(impl, steps, capacity)
    assert_equal(returned, want[0], label="what append returned")
    got = (
        cache.length,
        cache.capacity,
        cache.written_bytes / BYTES_PER_TOKEN,
        cache.growth_copy_bytes / BYTES_PER_TOKEN,
    )
    for name, mine, right in zip(
        ("length", "capacity", "written_bytes, in tokens,", "growth_copy_bytes, in tokens,"),
        got,
        want,
    ):
        assert_equal(mine, type(mine)(right), label=f"your cache's {name}")


@check("3.2")
def test_a_step_copies_one_row(impl, seed):
    """A step that fits creates nothing as large as the cache, and the buffers stay where they are."""
    cache, _ = filled(impl, [100], 128)
    places = cache.keys.data_ptr(), cache.values.data_ptr()
    row = torch.ones(1, 2, 8)
    assert_largest_tensor(
        100 * 2 * 8, "write the new row into the buffer", lambda: cache.append(0, row, row)
    )
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == places, (
        "your append moved the buffers, although the row fits"
    )


@check(
    "3.2",
    {
        "edited": "other tokens take the place of the forgotten ones",
        "all": "everything forgotten: as good as new",
        "none": "rewind(0) changes nothing",
        "after_growth": "the rows that stay moved with the growth",
    },
)
def test_rewind(impl, case, seed):
    first, back, capacity = {
        "edited": (9, 4, 40),
        "all": (6, 6, 40),
        "none": (6, 0, 40),
        "after_growth": (70, 66, 8),
    }[case]
    streams, cache = Streams(seed, first + 5), poisoned_cache(impl, capacity)
    for rows in torch.arange(first).chunk(2):
        streams.feed(cache, rows)
    before = cache.capacity, cache.written_bytes, cache.growth_copy_bytes, cache.keys.data_ptr()
    cache.rewind(back)
    assert_equal(cache.length, first - back, label="the length after rewind")
    after = cache.capacity, cache.written_bytes, cache.growth_copy_bytes, cache.keys.data_ptr()
    assert after == before, "rewind changed the buffers or their counters; only the length moves"
    order = torch.cat([torch.arange(first - back), torch.arange(first, first + 5)])
    for layer, out in enumerate(streams.feed(cache, order[-5:])):
        assert_equal(
            out,
            streams.whole(layer, order)[-5:],
            atol=1e-5,
            dtype=torch.float32,
            label=f"layer {layer} after rewind",
        )


@check(
    "3.2",
    {"too_many": "more than the cache holds", "negative": "a negative number would invent tokens"},
)
def test_rewind_refuses(impl, case, seed):
    cache, _ = filled(impl, [7])
    try:
        cache.rewind(8 if case == "too_many" else -1)
    except ValueError:
        assert cache.length == 7, f"after the refusal the length is {cache.length}, not 7"
    else:
        raise AssertionError("expected a ValueError")


# ---------------------------------------------------------------- 3.3 predict

TRAFFIC_CASES = {  # name: (arguments, the answer in KiB, why)
    "example": ((1, 4, 2, 128, torch.float16, 63, 3), (65.0, 127.0, 64.0), "the docstring's"),
    "llama_3_8b": (
        (32, 32, 8, 128, torch.bfloat16, 1000, 7000),
        (1023872.0, 4030528128.0, 917504.0),
        "1 GiB held; concatenating copies 3.75 TiB, doubling less than 1 GiB",
    ),
    "prompt_alone": (
        (2, 4, 4, 64, torch.float32, 200, 1),
        (800.0, 0.0, 0.0),
        "one new token: nothing enters after the prompt",
    ),
    "exactly_full": (
        (1, 2, 1, 64, torch.bfloat16, 1, 64),
        (16.0, 504.0, 0.0),
        "64 tokens fit into the first bucket",
    ),
    "several_doublings": (
        (1, 1, 1, 64, torch.float32, 10, 500),
        (254.5, 64620.5, 224.0),
        "64, 128 and 256 rows moved",
    ),
}


@check("3.3", {case: why for case, (*_, why) in TRAFFIC_CASES.items()}, seconds=5)
def test_traffic(impl, case, seed):
    numbers, want, _ = TRAFFIC_CASES[case]
    names = (
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "dtype",
        "prompt_tokens",
        "new_tokens",
    )
    got = call(impl, dict(zip(names, numbers)))
    assert isinstance(got, tuple) and len(got) == 3, (
        f"your result is {got!r}, expected a tuple of three numbers of KiB"
    )
    for what, mine, right in zip(("held", "copied by ConcatCache", "copied by KVCache"), got, want):
        assert_equal(mine, right, atol=1e-6, label=f"KiB {what}")


@check("3.3", seconds=10)
def test_counters_of_the_lessons_caches(impl, seed):
    """A random request, run through both caches."""
    draw = random.Random(seed)
    layers, kv_heads, prompt, new = (
        draw.randint(2, 3),
        draw.randint(2, 3),
        draw.randint(50, 100),
        draw.randint(100, 250),
    )
    config = ModelConfig("llama", 11, 32, layers, 2 * kv_heads, kv_heads, 4, 4, 512)
    concat, doubling = ConcatCache(config), KVCache(config)
    for step in [prompt] + [1] * (new - 1):
        for cache in (concat, doubling):
            for layer in range(layers):
                cache.append(layer, *torch.zeros(2, step, kv_heads, 4))
    want = tuple(
        size / 1024
        for size in (doubling.used_bytes, concat.growth_copy_bytes, doubling.growth_copy_bytes)
    )
    got = call(
        impl,
        dict(
            num_hidden_layers=layers,
            num_attention_heads=2 * kv_heads,
            num_key_value_heads=kv_heads,
            head_dim=4,
            dtype=torch.float32,
            prompt_tokens=prompt,
            new_tokens=new,
        ),
    )
    assert_equal(got, want, atol=1e-6, label="your KiB")


# ---------------------------------------------------------------- 3.4 the chat loop


class ToyCache:
    """Remembers keys and positions; attend gives each new token the sum over everything up to
    itself.
    """

    def __init__(self):
        self.rows, self.positions = [], []

    @property
    def length(self):
        return len(self.rows)

    def attend(self, layer, q, k, v):
        self.rows += k.tolist()
        self.positions += v.tolist()
        return torch.tensor(self.rows).cumsum(0)[-len(k) :]


class ToyModel:
    """Its next token depends on every token and position that it was shown, so that a slip anywhere
    shows at once.
    """

    vocab_size = 101

    def __call__(self, tokens, positions, attend):
        assert len(tokens) == len(positions), f"{len(tokens)} tokens at {len(positions)} positions"
        return attend(0, tokens, (tokens + 1) * (2 * positions + 1), positions)[:, None]

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[:, 0] % self.vocab_size, self.vocab_size).float()


def recomputed_chat(turns, max_new_tokens, stop_token_ids):
    """The same answers without a cache or a loop around a model."""
    told, answers = [], []
    for turn in turns:
        told, answer = told + turn, []
        while len(answer) < max_new_tokens and not set(answer) & stop_token_ids:
            answer.append(
                sum((t + 1) * (2 * i + 1) for i, t in enumerate(told + answer))
                % ToyModel.vocab_size
            )
        told, answers = told + answer, [*answers, answer]
    return answers


CHAT_CASES = {  # name: (lengths of the turns, max_new_tokens, why)
    "first_token": ((4,), 1, "one pass over the prompt"),
    "one_turn": ((4,), 6, "each later pass has one token"),
    "two_turns": ((4, 3), 5, "the answer's last token opens the second turn's pass"),
    "one_token_answers": ((3, 2, 4), 1, "its only token is also its last"),
    "stop_token": (
        (4, 3, 2),
        8,
        "an answer ends early, and its stop token stays in the conversation",
    ),
    "stop_token_from_user": ((4, 3), 5, "only a generated token ends an answer"),
}


def chat_inputs(case, seed):
    """Arguments of `chat` for a case, and the answers that are right."""
    lengths, limit, _ = CHAT_CASES[case]
    draw = random.Random(seed)
    turns = [[draw.randrange(ToyModel.vocab_size) for _ in range(n)] for n in lengths]
    free = recomputed_chat(turns, limit, set())
    stop = set()
    if case == "stop_token":
        stop = {free[0][2]}
    elif case == "stop_token_from_user":
        stop = set(turns[1]) - {token for answer in free for token in answer}
    return dict(
        model=ToyModel(), cache=ToyCache(), turns=turns, max_new_tokens=limit, stop_token_ids=stop
    ), recomputed_chat(turns, limit, stop)


@check("3.4", {case: why for case, (*_, why) in CHAT_CASES.items()}, seconds=5)
def test_answers(impl, case, seed):
    inputs, want = chat_inputs(case, seed)
    assert_equal(call_chat(impl, inputs), want, label="your answers")


def call_chat(impl, inputs):
    """`call`, for a cache that is meant to change."""
    cache = inputs.pop("cache")
    return call(lambda **rest: impl(cache=cache, **rest), inputs)


@check("3.4", seconds=5)
def test_every_token_enters_the_cache_once(impl, seed):
    """In its order, at its position, and without the last one, from which nothing is computed."""
    inputs, answers = chat_inputs("two_turns", seed)
    cache, told = inputs["cache"], []
    for turn, answer in zip(inputs["turns"], answers):
        told += turn + answer
    call_chat(impl, inputs)
    assert_equal(
        cache.positions, list(range(len(told) - 1)), label="the positions that entered the cache"
    )
    tokens = [row // (2 * i + 1) - 1 for i, row in enumerate(cache.rows)]
    assert_equal(tokens, told[:-1], label="the tokens that entered the cache")
