"""What remembering saves, and what it does not.

A decode step, a whole answer, a prompt alone, and attention of more and more sequences.

    python -m lessons.toolbox.measure.bench 03
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention import naive as lesson2
from lessons.l02_naive_attention.decoder import Attend
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.optimized import attention_for
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.generate import Rung, generate
from lessons.l03_kv_cache.lab.workload import (
    CONFIG,
    CONTEXT,
    DTYPE,
    ON_GPU,
    SHAPE,
    TOLERANCE,
    batch_bytes,
    batch_inputs,
    context_of,
    model_of,
    random_tokens,
    read_floor_s,
    step_bytes,
    weight_bytes,
)
from lessons.l03_kv_cache.naive import CONCATENATED
from lessons.l03_kv_cache.optimized import PREALLOCATED, decode_attention
from lessons.l03_kv_cache.stand_ins import decode_attention_torch
from lessons.toolbox.measure.bench import Benchmark, Unavailable, needs
from lessons.toolbox.measure.hardware import measured_ceilings, time_floor_s

# tokens: the scores of a layer grow with their square
LONGEST_RECOMPUTED = 8192 if ON_GPU else 2048
# tokens before the answer whose whole time is measured
PROMPT = 16


# ---------------------------------------------------------------- one decode step


def last_logits(tokens: Tensor, attend: Attend) -> Tensor:
    """Logits after the last token: [1, V]. tokens: [T]."""
    model = model_of(DTYPE)
    with torch.inference_mode():
        return model.logits(model(tokens, attend)[-1:])


def without_a_cache(tokens: Tensor) -> Attend:
    """attend for all tokens from the first on: [T]. It remembers nothing."""
    return whole_sequence(model_of(DTYPE), len(tokens), attention_for(tokens.device))


def recompute(tokens: Tensor, past):
    """Every token through the model again."""
    if len(tokens) > LONGEST_RECOMPUTED:
        raise Unavailable(f"beyond {LONGEST_RECOMPUTED} tokens its score matrices fill the memory")
    attend = without_a_cache(tokens)
    return lambda: last_logits(tokens, attend)


def one_more(tokens: Tensor):
    """The step that runs the last token after all others. tokens: [T]."""
    return new_batch([(tokens[-1:].tolist(), len(tokens) - 1)], len(tokens), tokens.device)


def concat(tokens: Tensor, past):
    """One token; its cache copies all that it holds."""
    batch = one_more(tokens)
    cache = CONCATENATED.new_cache(model_of(DTYPE), 1, len(tokens))

    def step():
        for layer, (k, v) in enumerate(past):  # takes the step before back
            cache.keys[layer] = k
            cache.values[layer] = v
        return last_logits(batch.tokens, cache.attending(batch))

    return step


def preallocated(tokens: Tensor, past):
    """One token; its cache writes one row."""
    batch = one_more(tokens)
    pool = PREALLOCATED.new_cache(model_of(DTYPE), 1, len(tokens))
    k_cache, v_cache = pool.blocks(pool.k_slots), pool.blocks(pool.v_slots)
    for layer, (k, v) in enumerate(past):
        k_cache[layer, 0, : len(k)] = k
        v_cache[layer, 0, : len(v)] = v
    # Every repetition writes the same row again.
    return lambda: last_logits(batch.tokens, pool.attending(batch))


def library(kind: str):
    """transformers' step with its "dynamic" or "static" cache."""

    def make(tokens: Tensor, past):
        with needs("transformers"):
            from lessons.l03_kv_cache.lab import peers as peer
        return peer.step(model_of(DTYPE), kind, tokens, past)

    return make


# ---------------------------------------------------------------- a whole answer, a prompt alone


EVERYTHING = SamplingParams(temperature=0.0, ignore_eos=True)


def recomputed_answer(prompt: list[int], count: int):
    """All tokens of one request, greedy. float32 everywhere, so that rounding changes no token."""
    model = model_of(torch.float32)
    return lambda: lesson2.generate(model, [prompt], count, EVERYTHING)[0]


def answer(rung: Rung):
    """The same on a rung with a cache."""

    def make(prompt: list[int], count: int):
        model = model_of(torch.float32)
        return lambda: generate(model, [prompt], count, EVERYTHING, rung=rung)[0]

    return make


def answer_floor_s(count: int) -> float:
    """Seconds to read the weights, and the prompt's K and V, once for each of `count` tokens."""
    return count * read_floor_s(step_bytes(PROMPT, torch.float32))


def prompt_floor_s(count: int) -> float:
    """Seconds that this machine's ceilings allow for `count` tokens through all layers and the last
    one through the head.
    """
    embedding = CONFIG.vocab_size * CONFIG.hidden_size
    body = weight_bytes(DTYPE) // DTYPE.itemsize - embedding
    return time_floor_s(
        step_bytes(count), 2 * (count * body + embedding), measured_ceilings(), DTYPE
    )


def prompt_without_a_cache(tokens: Tensor):
    """The logits after a prompt that no cache holds. tokens: [T]."""
    return lambda: last_logits(tokens, without_a_cache(tokens))


def prompt_into_a_cache(tokens: Tensor):
    """The logits after a prompt whose K and V are kept. tokens: [T]."""
    batch = new_batch([(tokens.tolist(), 0)], len(tokens), tokens.device)

    def first_token():
        pool = PREALLOCATED.new_cache(model_of(DTYPE), 1, len(tokens))
        return last_logits(batch.tokens, pool.attending(batch))

    return first_token


# ---------------------------------------------------------------- attention of a batch


def repeated_heads(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """K and V copied for each query head, then lesson 2's expression. Shapes as in batch_inputs."""
    group = q.shape[1] // k.shape[2]

    def attend():
        keys = k.repeat_interleave(group, dim=2)
        values = v.repeat_interleave(group, dim=2)
        scores = torch.einsum("bhd,bnhd->bhn", q, keys) * CONFIG.softmax_scale
        return torch.einsum("bhn,bnhd->bhd", torch.softmax(scores, dim=-1), values)

    return attend


def own_decode(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """The lesson's: one kernel on a GPU, sequence after sequence on a CPU. Shapes as in
    batch_inputs.
    """
    if ON_GPU:
        return lambda: decode_attention(q, k, v, context_lens)

    def attend():
        outs = []
        for one, keys, values in zip(q.split(1), k, v):
            outs.append(decode_attention_torch(one, keys, values, CONFIG.softmax_scale))
        return torch.cat(outs)

    return attend


def library_decode(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """PyTorch's scaled_dot_product_attention. Shapes as in batch_inputs."""
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


DTYPE_NAME = str(DTYPE).removeprefix("torch.")
BENCHMARKS = [
    Benchmark(
        name="l03_decode_step",
        title="At {x} tokens a step with a cache is {speedup:.0f}x faster than recomputing",
        x_name="tokens in the context",
        # to 16384 on a GPU, the longest row that lesson 2's softmax takes
        x_values=[2**n for n in range(7, 15 if ON_GPU else 13)],
        quick_x_values=[128, 512],
        inputs=context_of,
        providers={
            "recompute": ("naive", recompute),
            "concatenate": ("naive", concat),
            "preallocated": ("optimized", preallocated),
            "transformers DynamicCache": ("library", library("dynamic")),
            "transformers StaticCache": ("library", library("static")),
        },
        ylabel="time of one decode step",
        bytes_moved=step_bytes,
        floor_s=lambda n: read_floor_s(step_bytes(n)),
        floor_label="weights and KV read once",
        dtype=DTYPE_NAME,
        shape=SHAPE,
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l03_answer",
        title="{x} tokens cost {naive_growth:.0f}x as much as {first} when recomputed, "
        "{optimized_growth:.0f}x with a cache",
        x_name="tokens in the answer",
        x_values=[1, 2, 4, 8, 16, 32, 64],
        quick_x_values=[1, 16],
        inputs=lambda n, device: (random_tokens(PROMPT, device).tolist(), n),
        providers={
            "recompute": ("naive", recomputed_answer),
            "concatenate": ("naive", answer(CONCATENATED)),
            "preallocated": ("optimized", answer(PREALLOCATED)),
        },
        ylabel="time of the whole answer",
        floor_s=answer_floor_s,
        floor_label="weights read once a token",
        dtype="float32",
        shape=f"prompt {PROMPT} tokens, {SHAPE}",
    ),
    Benchmark(
        name="l03_prompt_alone",
        title="A prompt without an answer gains nothing from a cache: {speedup:.2f}x at {x} tokens",
        x_name="tokens in the prompt",
        x_values=[64, 128, 256, 512, 1024],
        quick_x_values=[64, 256],
        inputs=lambda n, device: (random_tokens(n, device),),
        providers={
            "no cache": ("naive", prompt_without_a_cache),
            "preallocated": ("optimized", prompt_into_a_cache),
        },
        ylabel="time until the first token",
        floor_s=prompt_floor_s,
        floor_label="matrix products alone",
        dtype=DTYPE_NAME,
        shape=SHAPE,
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l03_batch",
        title="{x} sequences cost {optimized_growth:.0f}x as much as {first}: weights are shared, "
        "caches are not",
        x_name="sequences in the batch",
        x_values=[1, 2, 4, 8, 16, 32, 64],
        quick_x_values=[1, 8],
        inputs=batch_inputs,
        providers={
            "K and V repeated": ("naive", repeated_heads),
            "K and V read in groups": ("optimized", own_decode),
            "PyTorch SDPA": ("library", library_decode),
        },
        ylabel="decode attention of one layer",
        bytes_moved=batch_bytes,
        floor_s=lambda n: read_floor_s(batch_bytes(n)),
        floor_label="KV read once",
        dtype=DTYPE_NAME,
        shape=f"context {CONTEXT}, {SHAPE}",
        tolerance=TOLERANCE,
    ),
]
