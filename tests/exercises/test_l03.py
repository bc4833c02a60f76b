"""Checks of lesson 03's exercises. Each exists because it rejects a named wrong answer
(wrong/l03.py). Those of 3.1, 3.2 and 3.5 are in files of their own.
"""

import random
import time

import torch

from lessons.l03_kv_cache.cache import KVPool, bucket
from lessons.l03_kv_cache.naive import ConcatCache
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.toolbox.model.config import ModelConfig
from tests.exercises.checking import assert_equal, call, check
from tests.exercises.checks_l03_chunk import (  # noqa: F401 (pytest finds them here)
    test_example,
    test_keeps_bfloat16,
    test_no_loop_over_sequences,
    test_slices,
    test_unused_rows_hold_anything,
    test_values,
    test_very_negative_scores,
)
from tests.exercises.checks_l03_pool import (  # noqa: F401
    test_a_new_pool_holds_zeros,
    test_a_slot_of_minus_one_is_the_spare_one,
    test_a_step_copies_one_row,
    test_attends_as_if_recomputed,
    test_counts,
    test_forget_refuses,
    test_forgetting_a_sequence,
    test_forgetting_the_newest,
    test_growth_moves_every_block,
    test_several_sequences,
    test_what_the_ops_are_given,
)
from tests.exercises.checks_l03_values import (  # noqa: F401
    test_the_values_kernel_does_it,
    test_weighted_example,
    test_weighted_rows_far_apart,
    test_weighted_values,
)

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
    "prompt_fills_block": (
        (1, 1, 1, 64, torch.float32, 128, 2),
        (64.5, 64.0, 64.0),
        "a prompt of 128 tokens fills a block of 128, which then moves",
    ),
    "several_doublings": (
        (1, 1, 1, 64, torch.float32, 10, 500),
        (254.5, 64620.5, 224.0),
        "64, 128 and 256 slots moved",
    ),
}
NAMES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "dtype",
    "prompt_tokens",
    "new_tokens",
)


@check("3.3", {case: why for case, (*_, why) in TRAFFIC_CASES.items()}, seconds=5)
def test_traffic(impl, case, seed):
    numbers, want, _ = TRAFFIC_CASES[case]
    got = call(impl, dict(zip(NAMES, numbers)))
    assert isinstance(got, tuple) and len(got) == 3, (
        f"your result is {got!r}, expected a tuple of three numbers of KiB"
    )
    for what, mine, right in zip(("held", "copied by ConcatCache", "copied by KVPool"), got, want):
        assert_equal(mine, right, atol=1e-6, label=f"KiB {what}")


@check("3.3", seconds=10)
def test_counters_of_the_lessons_caches(impl, seed):
    """A random request, stored in both caches."""
    draw = random.Random(seed)
    layers, kv_heads = draw.randint(2, 3), draw.randint(2, 3)
    prompt, new = draw.randint(50, 100), draw.randint(100, 250)
    config = ModelConfig("llama", 11, 32, layers, 2 * kv_heads, kv_heads, 4, 4, 512)
    concat = ConcatCache(config, prompt + new)
    doubling = KVPool(config, 1, bucket(prompt), LESSON_03_TORCH)
    held = 0
    for count in [prompt] + [1] * (new - 1):
        held += count
        doubling.reserve(held)
        for layer in range(layers):
            concat.append(layer, *torch.zeros(2, count, kv_heads, 4))
    sizes = concat.written_bytes, concat.growth_copy_bytes, doubling.growth_copy_bytes
    want = tuple(size / 1024 for size in sizes)
    numbers = (layers, 2 * kv_heads, kv_heads, 4, torch.float32, prompt, new)
    got = call(impl, dict(zip(NAMES, numbers)))
    assert_equal(got, want, atol=1e-6, label="your KiB")


@check("3.3", seconds=10)
def test_no_loop_over_tokens(impl, seed):
    """A formula takes microseconds. The best of three times, because a computer has other work."""
    inputs = dict(zip(NAMES, (1, 1, 1, 64, torch.float32, 100, 5_000_000)))
    times = []
    while len(times) < 3 and min(times, default=1.0) > 0.02:
        start = time.process_time()
        call(impl, inputs)
        times.append(time.process_time() - start)
    assert min(times) <= 0.02, (
        f"five million tokens took {min(times):.2g} s: is there a loop over the tokens?"
    )


# ---------------------------------------------------------------- 3.4 the chat loop


class ToyCache:
    """One block of integers. attend gives each new token the sum over everything up to itself.

    fed: (token, position) of everything that ran, in order.
    """

    block_size = 1000

    def __init__(self):
        self.slots, self.fed = [0] * self.block_size, []

    def attending(self, batch):
        def attend(layer, q, k, v):
            positions = batch.positions.tolist()
            self.fed += zip(q.tolist(), positions)
            for token, position, slot in zip(q.tolist(), positions, batch.slot_mapping.tolist()):
                self.slots[slot] = (token + 1) * (2 * position + 1)
            return torch.tensor([sum(self.slots[: position + 1]) for position in positions])

        return attend


class ToyModel:
    """Its next token depends on every token and position that it was shown, so that a slip anywhere
    shows at once.
    """

    vocab_size = 101

    def __call__(self, tokens, attend):
        return attend(0, tokens, tokens, tokens)[:, None]

    def logits(self, hidden):
        logits = torch.nn.functional.one_hot(hidden[:, 0] % self.vocab_size, self.vocab_size)
        # the largest logit of all is neither in the first row nor in the last
        return logits * torch.tensor([1.0, 2.0, 1.0]).repeat(len(hidden))[: len(hidden), None]


def recomputed_chat(turns, max_new_tokens, stop_token_ids):
    """The same answers without a cache or a loop around a model."""
    told, answers = [], []
    for turn in turns:
        told, answer = told + turn, []
        while len(answer) < max_new_tokens and not set(answer) & stop_token_ids:
            total = sum((t + 1) * (2 * i + 1) for i, t in enumerate(told + answer))
            answer.append(total % ToyModel.vocab_size)
        told, answers = told + answer, [*answers, answer]
    return answers


def chat_inputs(lengths, limit, stops, seed):
    """Arguments of `chat`, and the answers that are right.

    lengths: of the turns; stops: None, "generated" (the third token of the first answer stops) or
    "user" (only tokens that the user said).
    """
    draw = random.Random(seed)
    turns = [[draw.randrange(ToyModel.vocab_size) for _ in range(n)] for n in lengths]
    free = recomputed_chat(turns, limit, set())
    stop = set()
    if stops == "generated":
        stop = {-1, free[0][2], 500}
    elif stops == "user":
        stop = set(turns[1]) - {token for answer in free for token in answer}
    inputs = dict(
        model=ToyModel(), cache=ToyCache(), turns=turns, max_new_tokens=limit, stop_token_ids=stop
    )
    return inputs, recomputed_chat(turns, limit, stop)


CHATS = {  # name: (lengths of the turns, max_new_tokens, which tokens stop, why)
    "first_token": ((4,), 1, None, "one step over the prompt"),
    "one_turn": ((4,), 6, None, "each later step has one token"),
    "two_turns": ((4, 3), 5, None, "the answer's last token opens the second turn's step"),
    "one_token_answers": ((3, 2, 4), 1, None, "its only token is also its last"),
    "stop_token": (
        (4, 3, 2),
        8,
        "generated",
        "any one of several ends an answer early, and this stays in the conversation",
    ),
    "stop_token_from_user": ((4, 3), 5, "user", "only a generated token ends an answer"),
}


def call_chat(impl, inputs):
    """`call`, for a cache that is meant to change."""
    cache = inputs.pop("cache")
    return call(lambda **rest: impl(cache=cache, **rest), inputs)


@check("3.4", {case: why for case, (*_, why) in CHATS.items()}, seconds=5)
def test_answers(impl, case, seed):
    inputs, want = chat_inputs(*CHATS[case][:3], seed)
    assert_equal(call_chat(impl, inputs), want, label="your answers")


@check("3.4", seconds=5)
def test_every_token_enters_the_cache_once(impl, seed):
    """In its order, at its position, and without the last one, from which nothing is computed."""
    inputs, answers = chat_inputs(*CHATS["two_turns"][:3], seed)
    cache, told = inputs["cache"], []
    for turn, answer in zip(inputs["turns"], answers):
        told += turn + answer
    call_chat(impl, inputs)
    tokens, positions = map(list, zip(*cache.fed))
    assert_equal(positions, list(range(len(told) - 1)), label="the positions that ran")
    assert_equal(tokens, told[:-1], label="the tokens that ran")
