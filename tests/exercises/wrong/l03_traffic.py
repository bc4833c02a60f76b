"""Wrong answers to exercise 3.3, what a cache holds and copies; l03.py registers them."""

from functools import partial

from lessons.l03_kv_cache.cache import bucket


def slipped_traffic(
    num_hidden_layers,
    num_attention_heads,
    num_key_value_heads,
    head_dim,
    dtype,
    prompt_tokens,
    new_tokens,
    *,
    k_and_v=2,
    all_layers=True,
    heads="kv",
    itemsize=None,
    kib=1024,
    last=0,
    last_held=0,
    copies="held_before",
    doubling="in_use",
    first=64,
):
    """The three numbers with one slip, spelled by a switch."""
    count = num_key_value_heads if heads == "kv" else num_attention_heads
    size = (
        k_and_v
        * (num_hidden_layers if all_layers else 1)
        * count
        * head_dim
        * (itemsize or dtype.itemsize)
        / kib
    )
    steps = new_tokens - 1 + last
    held = prompt_tokens + steps
    concat = {
        "held_before": range(prompt_tokens, held),
        "held_after": range(prompt_tokens + 1, held + 1),
        "new_alone": range(steps),
        "prompt_too": range(prompt_tokens, held + 1),
        "once": [prompt_tokens],
        "square": [held * held],
    }[copies]
    capacity, moved = max(first, 1 << (prompt_tokens - 1).bit_length()), 0
    if doubling == "prompt_too":
        capacity = first
    if doubling == "full_prompt":
        capacity = max(first, 1 << prompt_tokens.bit_length())
    while capacity < held or (doubling == "early" and capacity == held):
        moved += 2 * capacity if doubling == "new_capacity" else capacity
        capacity *= 2
        if doubling == "last_alone" and capacity < held:
            moved = 0
    copied = (concat[0] + concat[-1]) * len(concat) // 2 if concat else 0
    return (held + last_held) * size, copied * size, moved * size


SLIPS = [
    ("k_alone", dict(k_and_v=1), "You count K alone; V is kept as well."),
    ("one_layer", dict(all_layers=False), "Every layer keeps its own K and V."),
    ("query_heads", dict(heads="query"), "You count query heads. Only the KV heads are kept."),
    ("always_two_bytes", dict(itemsize=2), "You count 2 bytes a value whatever the dtype."),
    ("kilobytes", dict(kib=1000), "You divide by 1000: that is kB. A KiB has 1024 bytes."),
    ("bytes", dict(kib=1), "These are bytes; KiB are asked for."),
    (
        "last_token_enters",
        dict(last=1),
        "Nothing is computed from the last generated token: it never enters the cache.",
    ),
    (
        "last_token_held",
        dict(last_held=1),
        "Nothing is computed from the last generated token: it never enters the cache.",
    ),
    (
        "concat_after",
        dict(copies="held_after"),
        "A step copies what was there before it. Its own row is written, not copied.",
    ),
    (
        "concat_new_alone",
        dict(copies="new_alone"),
        "The prompt's rows are copied at every step too.",
    ),
    ("concat_one_more", dict(copies="prompt_too"), "You count one step too many."),
    (
        "concat_once",
        dict(copies="once"),
        "You count one step. Each of the others copies everything again.",
    ),
    (
        "concat_square",
        dict(copies="square"),
        "n² counts too much: early steps copy little. Sum what each step finds.",
    ),
    (
        "doubling_from_64",
        dict(doubling="prompt_too"),
        "Your block starts at 64 tokens. It starts with room for the prompt.",
    ),
    (
        "doubling_new_capacity",
        dict(doubling="new_capacity"),
        "You count the new block; only the old one is copied.",
    ),
    ("doubling_early", dict(doubling="early"), "A cache that is exactly full has not grown yet."),
    (
        "doubling_last_move",
        dict(doubling="last_alone"),
        "You count the last move alone. Sum all of them.",
    ),
    (
        "doubles_a_full_prompt",
        dict(doubling="full_prompt"),
        "A prompt that is a power of two fills its block; yours starts twice as large.",
    ),
    ("smallest_bucket_one", dict(first=1), "The first bucket has 64 tokens: no moves below that."),
]


def add_to(answers):
    """Register the wrong answers and another right one."""
    answers.wrong("3.3", "A loop over the tokens. The sum of n numbers in a row has a formula.")(
        step_by_step
    )
    for name, slip, hint in SLIPS:
        answers.wrong("3.3", hint, name)(partial(slipped_traffic, **slip))
    answers.alternative("3.3")(by_differences)


def step_by_step(
    num_hidden_layers,
    num_attention_heads,
    num_key_value_heads,
    head_dim,
    dtype,
    prompt_tokens,
    new_tokens,
):
    size = 2 * num_hidden_layers * num_key_value_heads * head_dim * dtype.itemsize / 1024
    held, concat, doubling, capacity = prompt_tokens, 0, 0, bucket(prompt_tokens)
    for _ in range(new_tokens - 1):
        concat += held
        if held == capacity:
            doubling, capacity = doubling + held, 2 * capacity
        held += 1
    return held * size, concat * size, doubling * size


def by_differences(
    num_hidden_layers,
    num_attention_heads,
    num_key_value_heads,
    head_dim,
    dtype,
    prompt_tokens,
    new_tokens,
):
    """Whatever is copied, from sums of which one is the beginning of the other."""
    size = 2 * num_hidden_layers * num_key_value_heads * head_dim * dtype.itemsize / 1024
    held = prompt_tokens + new_tokens - 1
    concat = (held * (held - 1) - prompt_tokens * (prompt_tokens - 1)) / 2
    return held * size, concat * size, (bucket(held) - bucket(prompt_tokens)) * size
