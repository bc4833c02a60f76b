"""Wrong answers to lesson 01's exercises: real slips, several of them printed in popular guides,
and the hint for each.
"""

import math
import statistics
import time
from functools import partial

import numpy as np

from lessons.l01_roofline import calculators
from lessons.l01_roofline.optimized import Timing
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 1.1 KV bytes


def slipped_kv_bytes(
    model,
    bits_per_value=16,
    *,
    heads="num_key_value_heads",
    head_dim="own",
    both=2,
    latent="both",
    bits=8,
    layers=True,
    experts=False,
    always_16=False,
    latent_twice=False,
    whole=False,
    latent_by="kv_lora_rank",
):
    """KV bytes with one slip. The keyword switches exist only here, to spell the wrong answers
    briefly.
    """
    width = model.head_dim if head_dim == "own" else model.hidden_size // model.num_attention_heads
    values = both * getattr(model, heads) * width
    if getattr(model, latent_by) and latent != "none":
        values = model.kv_lora_rank + (model.qk_rope_head_dim if latent == "both" else 0)
        values *= 2 if latent_twice else 1
    values *= model.num_hidden_layers if layers else 1
    values *= max(1, model.num_experts) if experts else 1
    bytes_ = values * (16 if always_16 else bits_per_value) / bits
    return float(math.floor(bytes_)) if whole else bytes_


for name, slip, hint in [
    (
        "query_heads",
        dict(heads="num_attention_heads"),
        "You count query heads. Only k and v are cached: which heads have them?",
    ),
    ("rounded_down", dict(whole=True), "You round to whole bytes. 4.25 bits may leave a fraction."),
    (
        "latent_by_its_rotary_part",
        dict(latent_by="qk_rope_head_dim"),
        "A model has MLA if kv_lora_rank is above 0. Others may name a rotary part too.",
    ),
    ("only_k", dict(both=1), "You count k or v, not both: a factor 2 is missing."),
    (
        "hidden_over_heads",
        dict(head_dim="ratio"),
        "hidden_size / heads is not head_dim in every model: the config has both.",
    ),
    ("bits_for_bytes", dict(bits=1), "Your result counts bits. A byte has 8."),
    ("values_not_bytes", dict(bits=16), "You count values, or take 16 bits for one byte."),
    ("one_layer", dict(layers=False), "That is one layer. Every layer has its own cache."),
    (
        "always_16_bits",
        dict(always_16=True),
        "You ignore bits_per_value and count 2 bytes a value.",
    ),
    (
        "no_latent",
        dict(latent="none"),
        "MLA caches no k and v of the heads, only the latent from which they are rebuilt.",
    ),
    (
        "no_rotary_key",
        dict(latent="kv"),
        "MLA caches the rotary key (qk_rope_head_dim) beside the latent.",
    ),
    (
        "latent_twice",
        dict(latent_twice=True),
        "k and v come from the same latent: it is cached once, without the factor 2.",
    ),
    (
        "per_expert",
        dict(experts=True),
        "Experts are MLPs; attention, and its cache, exist once a layer.",
    ),
]:
    answers.wrong("1.1", hint, name)(partial(slipped_kv_bytes, **slip))


@answers.wrong(
    "1.1", "Your bytes are rounded down too early: 4.25 bits make 0.53 bytes a value, not 0."
)
def whole_bytes(model, bits_per_value=16):
    return model.kv_values_per_token * (bits_per_value // 8)


@answers.alternative("1.1")
def from_the_lesson(model, bits_per_value=16):
    return calculators.kv_bytes_per_token(model, bits_per_value)


# ---------------------------------------------------------------- 1.2 a linear layer


def slipped_linear(
    tokens,
    in_features,
    out_features,
    bits_per_weight,
    bandwidth,
    peak,
    *,
    macs=2,
    combine=max,
    unit=1e3,
    y=True,
    x=True,
    reread=False,
    weight_bits=8,
    activation_bits=16,
    swap=False,
    strict=False,
):
    """The roofline with one slip, spelled by a switch."""
    weights = in_features * out_features * bits_per_weight / weight_bits * (tokens if reread else 1)
    activation = (bits_per_weight if activation_bits is None else activation_bits) / 8
    memory = (
        (weights + tokens * (in_features * x + out_features * y) * activation) / bandwidth * unit
    )
    compute = macs * tokens * in_features * out_features / peak * unit
    by_memory = (memory > compute if strict else memory >= compute) != swap
    return combine((memory, compute)), "memory" if by_memory else "compute"


for name, slip, hint in [
    ("one_flop_a_mac", dict(macs=1), "A multiply and an add are two FLOPs."),
    (
        "sum_of_both",
        dict(combine=sum),
        "You add the two times. They overlap: the longer one decides.",
    ),
    (
        "the_shorter",
        dict(combine=min),
        "You take the shorter time. The work is done when both are.",
    ),
    ("seconds", dict(unit=1), "Your time is in seconds, asked for are milliseconds."),
    ("microseconds", dict(unit=1e6), "Your time is in microseconds, asked for are milliseconds."),
    ("weights_only", dict(x=False, y=False), "x is read and y is written, too."),
    ("no_output", dict(y=False), "y has to be written."),
    (
        "weights_for_each_token",
        dict(reread=True),
        "You read the weights once per token. That is what batching avoids.",
    ),
    ("bits_for_bytes", dict(weight_bits=1), "You take bits for bytes. A byte has 8 bits."),
    (
        "activations_quantized",
        dict(activation_bits=None),
        "bits_per_weight is of W alone; x and y have 16 bits.",
    ),
    ("swapped", dict(swap=True), "The bound is what takes longer, not what is done first."),
    ("tie_is_compute", dict(strict=True), "On a tie the docstring asks for 'memory'."),
]:
    answers.wrong("1.2", hint, name)(partial(slipped_linear, **slip))


@answers.alternative("1.2")
def by_intensity(tokens, in_features, out_features, bits_per_weight, bandwidth, peak):
    flops = 2 * tokens * in_features * out_features
    moved = in_features * out_features * bits_per_weight / 8 + 2 * tokens * (
        in_features + out_features
    )
    reached = min(peak, flops / moved * bandwidth)
    return flops / reached * 1e3, "memory" if flops * bandwidth <= moved * peak else "compute"


# ---------------------------------------------------------------- 1.3 the timer


def slipped_timer(
    launch,
    synchronize,
    warmup=3,
    repetitions=20,
    clock=time.perf_counter,
    *,
    before=True,
    after=True,
    skip=True,
    middle="median",
    unit=1e3,
    refuse=True,
    band=(1, 7),
    in_one=False,
    extra=0,
    every_warmup=True,
):
    """The timer with some slips, spelled by switches."""
    if refuse and repetitions < 2:
        raise ValueError(f"repetitions is {repetitions}; accepted: 2 or more")
    for _ in range((warmup if every_warmup else min(warmup, 1)) if skip else 0):
        launch()
    times = []
    for _ in range(repetitions + extra + (0 if skip else warmup)):
        if before:
            synchronize()
        start = clock()
        launch()
        if after:
            synchronize()
        times.append((clock() - start) * unit)
    if in_one:
        times = [sum(times) / len(times)] * len(times)
    deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
    centre = {"median": deciles[4], "mean": sum(times) / len(times), "min": min(times)}[middle]
    low, high = (
        (min(times), max(times)) if band == "extremes" else (deciles[band[0]], deciles[band[1]])
    )
    return Timing(centre, low, high)


for name, slip, hint in [
    (
        "as_given",
        dict(before=False, after=False, skip=False, middle="mean"),
        "All four bugs are there. Does launch wait for anything?",
    ),
    (
        "never_waits",
        dict(before=False, after=False),
        "You stop the clock while the work is still in the queue.",
    ),
    (
        "no_wait_at_the_end",
        dict(after=False),
        "You stop the clock while the work is still in the queue.",
    ),
    (
        "no_wait_before",
        dict(before=False),
        "Work that was queued before your start is charged to you.",
    ),
    (
        "counts_warm_up",
        dict(skip=False),
        "The warm-up calls are among your times: the first one compiles.",
    ),
    (
        "mean",
        dict(middle="mean"),
        "You give the mean, which one hiccup moves. The median is asked for.",
    ),
    (
        "best_of",
        dict(middle="min"),
        "You give the fastest run: what the machine can, not what it does.",
    ),
    ("seconds", dict(unit=1), "Your times are in seconds, asked for are milliseconds."),
    ("no_refusal", dict(refuse=False), "One repetition has no spread: raise ValueError."),
    (
        "extremes",
        dict(band="extremes"),
        "Your band is minimum to maximum; asked for are the 20 % and 80 % quantiles.",
    ),
    (
        "off_by_one_decile",
        dict(band=(2, 8)),
        "deciles[0] is the 10 % quantile, so [1] is the 20 % one.",
    ),
    (
        "mean_over_the_loop",
        dict(in_one=True),
        "You time the whole loop and divide: the spread is lost.",
    ),
    ("one_too_many", dict(extra=1), "You run one repetition too many."),
    ("one_warm_up", dict(every_warmup=False), "You warm up once, whatever `warmup` says."),
    (
        "left_mean",
        dict(after=True, before=True, skip=False, middle="mean"),
        "Two bugs are left: the warm-up, and the mean.",
    ),
]:
    answers.wrong("1.3", hint, name)(partial(slipped_timer, **slip))


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


def slipped_cost(
    memory_gb,
    weights_gb,
    kv_kib_per_token,
    context,
    bandwidth_tb_per_s,
    dollars_per_hour,
    *,
    gb=1e9,
    kib=1024,
    whole=math.floor,
    cache=True,
    weights_each=False,
    sequences_at_once=True,
    seconds=3600,
    million=1e6,
    tb=1e12,
    weights_fit=True,
    none=math.inf,
    least=None,
):
    """The cost with one slip, spelled by a switch."""
    per_sequence = context * kv_kib_per_token * kib
    n = whole((memory_gb - (weights_gb if weights_fit else 0)) * gb / per_sequence)
    least = least or (1 if whole is math.floor else 0)
    if n <= 0 or n < least:
        return none
    moved = weights_gb * gb * (n if weights_each else 1) + (n * per_sequence if cache else 0)
    step_s = moved / (bandwidth_tb_per_s * tb)
    return dollars_per_hour / seconds * step_s / (n if sequences_at_once else 1) * million


for name, slip, hint in [
    (
        "gb_is_gib",
        dict(gb=2**30),
        "You count GB as 2^30 bytes; data sheets sell 10^9. (The cache is in KiB of 2^10.)",
    ),
    ("kib_is_1000", dict(kib=1000), "A KiB has 1024 bytes."),
    (
        "a_part_of_a_sequence",
        dict(whole=float),
        "Half a sequence generates nothing: round the number of sequences down.",
    ),
    (
        "a_part_of_a_sequence_beyond_one",
        dict(whole=float, least=1),
        "Half a sequence generates nothing: round the number of sequences down.",
    ),
    (
        "rounds_up",
        dict(whole=math.ceil),
        "You round the number of sequences up: the last one does not fit.",
    ),
    (
        "weights_not_in_memory",
        dict(weights_fit=False),
        "The weights take their part of the memory before any cache does.",
    ),
    (
        "cache_is_free",
        dict(cache=False),
        "Each step reads the cache of every sequence, not only the weights.",
    ),
    (
        "weights_for_each",
        dict(weights_each=True),
        "The weights are read once a step, for all sequences together.",
    ),
    (
        "one_user",
        dict(sequences_at_once=False),
        "A step gives every sequence a token: divide by their number.",
    ),
    ("per_minute", dict(seconds=60), "An hour has 3600 seconds."),
    ("per_thousand", dict(million=1e3), "Prices are asked for 10^6 tokens."),
    ("tebibytes", dict(tb=2**40), "A TB/s is 10^12 bytes a second."),
    (
        "free_if_none_fits",
        dict(none=0.0),
        "If nothing fits there are no tokens: the cost of one is infinite, not zero.",
    ),
]:
    answers.wrong("1.4", hint, name)(partial(slipped_cost, **slip))


@answers.wrong("1.4", "Not one sequence fits: there are no tokens to sell. Return math.inf.")
def at_least_one(
    memory_gb, weights_gb, kv_kib_per_token, context, bandwidth_tb_per_s, dollars_per_hour
):
    per_sequence = context * kv_kib_per_token * 1024
    n = max(1, int((memory_gb - weights_gb) * 1e9 / per_sequence))
    return (
        dollars_per_hour
        / 3600
        * (weights_gb * 1e9 + n * per_sequence)
        / bandwidth_tb_per_s
        / 1e12
        / n
        * 1e6
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
