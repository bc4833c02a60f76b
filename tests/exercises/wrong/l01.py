"""Wrong answers to lesson 01's exercises: real slips, several of them printed in popular guides,
and the hint for each.
"""

import math
import time

import numpy as np

from lessons.l01_roofline import calculators
from lessons.l01_roofline.optimized import Timing
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 1.1 KV bytes

answers.slips(
    "1.1",
    """
    query_heads: You count query heads. Only k and v are cached: which heads have them?
    - 2 * model.num_key_value_heads * model.head_dim
    + 2 * model.num_attention_heads * model.head_dim

    rounded_down: You round to whole bytes. 4.25 bits may leave a fraction.
    - return model.num_hidden_layers * values_per_layer * bits_per_value / 8
    + return float(math.floor(model.num_hidden_layers * values_per_layer * bits_per_value / 8))

    latent_by_its_rotary_part: A model has MLA if kv_lora_rank is above 0. Others may name a rotary
        part too.
    - if model.kv_lora_rank:
    + if model.qk_rope_head_dim:

    only_k: You count k or v, not both: a factor 2 is missing.
    - 2 * model.num_key_value_heads * model.head_dim
    + model.num_key_value_heads * model.head_dim

    hidden_over_heads: hidden_size / heads is not head_dim in every model: the config has both.
    - 2 * model.num_key_value_heads * model.head_dim
    + 2 * model.num_key_value_heads * (model.hidden_size // model.num_attention_heads)

    bits_for_bytes: Your result counts bits. A byte has 8.
    - bits_per_value / 8
    + bits_per_value

    values_not_bytes: You count values, or take 16 bits for one byte.
    - bits_per_value / 8
    + bits_per_value / 16

    one_layer: That is one layer. Every layer has its own cache.
    - model.num_hidden_layers * values_per_layer
    + values_per_layer

    always_16_bits: You ignore bits_per_value and count 2 bytes a value.
    - bits_per_value / 8
    + 16 / 8

    no_latent: MLA caches no k and v of the heads, only the latent from which they are rebuilt.
    - if model.kv_lora_rank:
    -     values_per_layer = model.kv_lora_rank + model.qk_rope_head_dim

    no_rotary_key: MLA caches the rotary key (qk_rope_head_dim) beside the latent.
    - values_per_layer = model.kv_lora_rank + model.qk_rope_head_dim
    + values_per_layer = model.kv_lora_rank

    latent_twice: k and v come from the same latent: it is cached once, without the factor 2.
    - values_per_layer = model.kv_lora_rank + model.qk_rope_head_dim
    + values_per_layer = 2 * (model.kv_lora_rank + model.qk_rope_head_dim)

    per_expert: Experts are MLPs; attention, and its cache, exist once a layer.
    - return model.num_hidden_layers *
    + return max(1, model.num_experts) * model.num_hidden_layers *

    whole_bytes: Your bytes are rounded down too early: 4.25 bits make 0.53 bytes a value, not 0.
    - values_per_layer * bits_per_value / 8
    + values_per_layer * (bits_per_value // 8)
    """,
)


@answers.alternative("1.1")
def from_the_lesson(model, bits_per_value=16):
    return calculators.kv_bytes_per_token(model, bits_per_value)


# ---------------------------------------------------------------- 1.2 a linear layer

answers.slips(
    "1.2",
    """
    one_flop_a_mac: A multiply and an add are two FLOPs.
    - 2 * tokens * in_features * out_features / peak
    + tokens * in_features * out_features / peak

    sum_of_both: You add the two times. They overlap: the longer one decides.
    - max(memory_ms, compute_ms)
    + memory_ms + compute_ms

    the_shorter: You take the shorter time. The work is done when both are.
    - max(memory_ms, compute_ms)
    + min(memory_ms, compute_ms)

    seconds: Your time is in seconds, asked for are milliseconds.
    - / bandwidth * 1e3
    + / bandwidth
    - / peak * 1e3
    + / peak

    microseconds: Your time is in microseconds, asked for are milliseconds.
    - / bandwidth * 1e3
    + / bandwidth * 1e6
    - / peak * 1e3
    + / peak * 1e6

    weights_only: x is read and y is written, too.
    - (weight_bytes + activation_bytes)
    + weight_bytes

    no_output: y has to be written.
    - 2 * tokens * (in_features + out_features)
    + 2 * tokens * in_features

    weights_for_each_token: You read the weights once per token. That is what batching avoids.
    - (weight_bytes + activation_bytes)
    + (tokens * weight_bytes + activation_bytes)

    bits_for_bytes: You take bits for bytes. A byte has 8 bits.
    - in_features * out_features * bits_per_weight / 8
    + in_features * out_features * bits_per_weight

    activations_quantized: bits_per_weight is of W alone; x and y have 16 bits.
    - 2 * tokens * (in_features + out_features)
    + bits_per_weight / 8 * tokens * (in_features + out_features)

    swapped: The bound is what takes longer, not what is done first.
    - memory_ms >= compute_ms
    + memory_ms < compute_ms

    tie_is_compute: On a tie the docstring asks for 'memory'.
    - memory_ms >= compute_ms
    + memory_ms > compute_ms
    """,
)


@answers.alternative("1.2")
def by_intensity(tokens, in_features, out_features, bits_per_weight, bandwidth, peak):
    flops = 2 * tokens * in_features * out_features
    moved = in_features * out_features * bits_per_weight / 8 + 2 * tokens * (
        in_features + out_features
    )
    reached = min(peak, flops / moved * bandwidth)
    return flops / reached * 1e3, "memory" if flops * bandwidth <= moved * peak else "compute"


# ---------------------------------------------------------------- 1.3 the timer

answers.slips(
    "1.3",
    """
    as_given: All four bugs are there. Does launch wait for anything?
    - for _ in range(warmup):
    -     launch()
    - times = []
    - for _ in range(repetitions):
    -     synchronize()
    -     start = clock()
    -     launch()
    -     synchronize()
    + times = []
    + for _ in range(warmup + repetitions):
    +     start = clock()
    +     launch()
    - median=deciles[4]
    + median=sum(times) / len(times)

    never_waits: You stop the clock while the work is still in the queue.
    - synchronize()
    - start = clock()
    - launch()
    - synchronize()
    + start = clock()
    + launch()

    no_wait_at_the_end: You stop the clock while the work is still in the queue.
    - launch()
    - synchronize()
    - times
    + launch()
    + times

    no_wait_before: Work that was queued before your start is charged to you.
    - synchronize()
    - start
    + start

    counts_warm_up: The warm-up calls are among your times: the first one compiles.
    - for _ in range(warmup):
    -     launch()
    - times = []
    - for _ in range(repetitions):
    + times = []
    + for _ in range(warmup + repetitions):

    mean: You give the mean, which one hiccup moves. The median is asked for.
    - median=deciles[4]
    + median=sum(times) / len(times)

    best_of: You give the fastest run: what the machine can, not what it does.
    - median=deciles[4]
    + median=min(times)

    seconds: Your times are in seconds, asked for are milliseconds.
    - (clock() - start) * 1e3
    + clock() - start

    no_refusal: One repetition has no spread: raise ValueError.
    - if repetitions < 2:
    -     raise ValueError(f"repetitions is {repetitions}; accepted: 2 or more")
    +
    - deciles = quantiles(times, n=10, method="inclusive")
    + deciles = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9

    extremes: Your band is minimum to maximum; asked for are the 20 % and 80 % quantiles.
    - p20=deciles[1], p80=deciles[7]
    + p20=min(times), p80=max(times)

    off_by_one_decile: deciles[0] is the 10 % quantile, so [1] is the 20 % one.
    - p20=deciles[1], p80=deciles[7]
    + p20=deciles[2], p80=deciles[8]

    mean_over_the_loop: You time the whole loop and divide: the spread is lost.
    - deciles = quantiles(times,
    + deciles = quantiles([sum(times) / len(times)] * len(times),

    one_too_many: You run one repetition too many.
    - for _ in range(repetitions):
    + for _ in range(repetitions + 1):

    one_warm_up: You warm up once, whatever `warmup` says.
    - for _ in range(warmup):
    + for _ in range(min(warmup, 1)):

    left_mean: Two bugs are left: the warm-up, and the mean.
    = counts_warm_up, mean
    """,
)


@answers.alternative("1.3")
def with_numpy(launch, synchronize, warmup=3, repetitions=20, clock=time.perf_counter):
    if repetitions < 2:
        raise ValueError("one repetition has no spread")
    times = []
    for i in range(warmup + repetitions):
        synchronize()
        start = clock()
        launch()
        synchronize()
        if i >= warmup:
            times.append(clock() - start)
    p20, median, p80 = (np.percentile(times, [20, 50, 80]) * 1e3).tolist()
    return Timing(median, p20, p80)


# ---------------------------------------------------------------- 1.4 cost

answers.slips(
    "1.4",
    """
    gb_is_gib: You count GB as 2^30 bytes; data sheets sell 10^9. (The cache is in KiB of 2^10.)
    - (memory_gb - weights_gb) * 1e9
    + (memory_gb - weights_gb) * 2**30
    - (weights_gb * 1e9 +
    + (weights_gb * 2**30 +

    kib_is_1000: A KiB has 1024 bytes.
    - context * kv_kib_per_token * 2**10
    + context * kv_kib_per_token * 1000

    a_part_of_a_sequence: Half a sequence generates nothing: round the number of sequences down.
    - math.floor((memory_gb - weights_gb) * 1e9 / sequence_bytes)
    - if sequences < 1:
    + (memory_gb - weights_gb) * 1e9 / sequence_bytes
    + if sequences <= 0:

    a_part_of_a_sequence_beyond_one: Half a sequence generates nothing: round the number of
        sequences down.
    - math.floor((memory_gb - weights_gb) * 1e9 / sequence_bytes)
    + (memory_gb - weights_gb) * 1e9 / sequence_bytes

    rounds_up: You round the number of sequences up: the last one does not fit.
    - math.floor(
    + math.ceil(

    weights_not_in_memory: The weights take their part of the memory before any cache does.
    - (memory_gb - weights_gb) * 1e9 /
    + memory_gb * 1e9 /

    cache_is_free: Each step reads the cache of every sequence, not only the weights.
    - (weights_gb * 1e9 + sequences * sequence_bytes)
    + weights_gb * 1e9

    weights_for_each: The weights are read once a step, for all sequences together.
    - (weights_gb * 1e9 + sequences * sequence_bytes)
    + sequences * (weights_gb * 1e9 + sequence_bytes)

    one_user: A step gives every sequence a token: divide by their number.
    - step_s / sequences
    + step_s

    per_minute: An hour has 3600 seconds.
    - / 3600 * step_s
    + / 60 * step_s

    per_thousand: Prices are asked for 10^6 tokens.
    - step_s / sequences * 1e6
    + step_s / sequences * 1e3

    tebibytes: A TB/s is 10^12 bytes a second.
    - (bandwidth_tb_per_s * 1e12)
    + (bandwidth_tb_per_s * 2**40)

    free_if_none_fits: If nothing fits there are no tokens: the cost of one is infinite, not zero.
    - return math.inf
    + return 0.0

    at_least_one: Not one sequence fits: there are no tokens to sell. Return math.inf.
    - sequences = math.floor((memory_gb - weights_gb) * 1e9 / sequence_bytes)
    - if sequences < 1:
    -     return math.inf
    + sequences = max(1, math.floor((memory_gb - weights_gb) * 1e9 / sequence_bytes))
    """,
)


@answers.alternative("1.4")
def from_the_calculators(
    memory_gb, weights_gb, kv_kib_per_token, context, bandwidth_tb_per_s, dollars_per_hour
):
    kv = kv_kib_per_token * 1024
    n = calculators.sequences_that_fit(memory_gb * 1e9, weights_gb * 1e9, kv, context)
    if not n:
        return math.inf
    step_s = (weights_gb * 1e9 + n * context * kv) / (bandwidth_tb_per_s * 1e12)
    return calculators.cost_per_million_tokens(
        dollars_per_hour, calculators.tokens_per_s(step_s, n)
    )
