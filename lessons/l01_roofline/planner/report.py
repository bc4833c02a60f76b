"""A plan as tables in the terminal: what fits, the floors of its two phases, speed and money."""

from rich.console import Console
from rich.table import Column, Table

from lessons.l01_roofline.calculators import (
    break_even_tokens_per_day,
    cost_per_million_tokens,
    tokens_per_dollar,
)
from lessons.l01_roofline.planner.plan import Plan, peak_flops, ways_out
from lessons.toolbox.measure.hardware import ridge_point

ASSUMPTIONS = (
    "Predictions, not measurements: weights and KV cache split evenly over the GPUs, no "
    "communication, no copies of KV heads, experts chosen evenly; prices are assumptions."
)
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(value: float, unit: str = "") -> str:
    """Three digits and a prefix that counts in thousands: 141 GB, 4.8 TB/s, 26.3."""
    for scale, prefix in PREFIXES:
        if value >= scale * 0.9995:
            digits = f"{value / scale:.3g}" if value < 999.5 * scale else f"{value / scale:.0f}"
            return f"{digits} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Three digits and a unit: 1.5 s, 19 ms, 320 µs."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"


# ---------------------------------------------------------------- one plan


def print_report(
    plan: Plan, dollars_per_gpu_hour: float, api_dollars: float, console: Console
) -> None:
    """The plan as three short tables. dollars: of one GPU for an hour; of 10⁶ generated tokens from
    an API.
    """
    console.print(memory_table(plan))
    if plan.running < plan.batch:
        console.print(
            f"[red]Only {plan.running} of {plan.batch} sequences fit at once; below, "
            f"{plan.running} run.[/]"
        )
        for way in ways_out(plan):
            console.print(f"  would do: {way}")
    console.print(floor_table(plan))
    console.print(speed_table(plan, plan.gpus * dollars_per_gpu_hour, api_dollars))
    chip = plan.chip
    rates = f"{amount(chip.memory_bytes_per_s, 'B/s')}, {amount(peak_flops(chip), 'FLOP/s')}"
    console.print(
        f"{chip.name}: {rates}; {chip.source}. {ASSUMPTIONS} Prices: --dollars-per-hour, "
        "--api-dollars.",
        style="dim",
    )


def memory_table(plan: Plan) -> Table:
    """What weights and cache take, and how many sequences fit."""
    model, chip = plan.model, plan.chip
    title = f"{model.name} on {plan.gpus} x {chip.name}, {plan.batch} sequences of "
    table = Table("memory", "", "how", title=f"{title}{plan.context} tokens", title_justify="left")
    params = f"{model.params / 1e9:.3g} billion parameters x {plan.bits_per_weight:.4g} bits"
    values = f"{model.kv_values_per_token} values x {plan.bits_per_kv:g} bits, all layers"
    usable = f"{plan.gpus} x {amount(chip.memory_bytes, 'B')}, {plan.memory_share:.0%} of it"
    sequence_bytes, kept_as = plan.cache_bytes, f"x {plan.context} tokens"
    if model.num_window_layers:
        full = model.num_kv_layers - model.num_window_layers
        kept_as += f" in {full} layers, of a window of {model.window} in {model.num_window_layers}"
    table.add_row("weights", amount(plan.weight_bytes, "B"), params)
    table.add_row("KV cache of a token", f"{plan.kv_bytes_per_token / 1024:.4g} KiB", values)
    table.add_row("KV cache of a sequence", amount(sequence_bytes, "B"), kept_as)
    if model.state_bytes:
        kept = f"{model.num_state_layers} layers, whatever the context"
        table.add_row("states of a sequence", amount(model.state_bytes, "B"), kept)
    pass_of = f"one pass of {plan.batched_tokens} tokens, logits of {plan.batch}, on each GPU"
    table.add_row("activations", amount(plan.activation_bytes, "B"), pass_of)
    kept = "CUDA context, graphs, communication, gaps"
    table.add_row("system reserve", amount(plan.reserve_bytes, "B"), kept)
    table.add_row("usable", amount(plan.usable_bytes, "B"), usable)
    each = "KV cache and states" if model.state_bytes else "KV cache"
    fit = f"(usable - weights - activations) / {each} of a sequence"
    table.add_row("sequences that fit", str(plan.sequences), fit)
    return table


def floor_table(plan: Plan) -> Table:
    """Bytes, FLOPs and least time of a prefill and of a decode step."""
    ridge = ridge_point(plan.prefill.peak, plan.prefill.bandwidth)
    table = Table("floor of", "bytes", "FLOPs", "FLOP/byte", "bound by", "at least")
    floors = {
        f"prefill of {plan.context} tokens": plan.prefill,
        f"decode step of {plan.running}": plan.decode,
    }
    for name, floor in floors.items():
        table.add_row(
            name,
            amount(floor.bytes_moved, "B"),
            amount(floor.flops, "FLOP"),
            f"{floor.intensity:.0f}",
            f"{floor.bound} (ridge {ridge:.0f})",
            duration(floor.seconds),
        )
    return table


def speed_table(plan: Plan, dollars_per_hour: float, api_dollars: float) -> Table:
    """TTFT, TPOT and prices at best. dollars_per_hour: of all GPUs."""
    step_s, rate = plan.decode.seconds, plan.tokens_per_s
    at_best = cost_per_million_tokens(dollars_per_hour, rate)
    break_even = break_even_tokens_per_day(dollars_per_hour, api_dollars)
    share = break_even / (rate * 86400)
    never = ", so never" if share > 1 else ""
    busy = f"${dollars_per_hour:.2f} an hour, all {plan.running} sequences busy all day"
    rows = [
        ("time to first token", duration(plan.prefill.seconds), "one prompt alone, no queue"),
        (
            "time per output token",
            duration(step_s),
            f"{1 / step_s:.3g} tokens/s for each user",
        ),
        (
            "decode ceiling",
            f"{rate:.0f} tokens/s",
            f"{plan.running} sequences, decode steps only",
        ),
        ("10⁶ generated tokens", f"${at_best:.2f}", busy),
        (
            "tokens for a dollar",
            amount(tokens_per_dollar(dollars_per_hour, rate)),
            "the same the other way round",
        ),
        ("10⁶ tokens, busy half the day", f"${2 * at_best:.2f}", "utilisation decides"),
        (
            "break-even with an API",
            f"{amount(break_even)} tokens/day",
            f"at ${api_dollars:.2f} per 10⁶: {share:.0%} of the ceiling{never}",
        ),
    ]
    table = Table("speed and money, at best", "", "how")
    for row in rows:
        table.add_row(*row)
    return table


# ---------------------------------------------------------------- all models


def print_all(plans: list[Plan], dollars_per_gpu_hour: float, console: Console) -> None:
    """One row per model."""
    first = plans[0]
    table = Table(
        Column("model", no_wrap=True),
        "10⁹ params",
        "weights",
        "KV KiB",
        "GPUs",
        "fit",
        "TTFT ms",
        "TPOT ms",
        Column("tokens/s", min_width=8),
        "$/10⁶",
        title=f"{first.chip.name}, {first.batch} sequences of {first.context} tokens; times and "
        "prices at least, tokens/s at most",
        title_justify="left",
    )
    for plan in plans:
        cost = cost_per_million_tokens(plan.gpus * dollars_per_gpu_hour, plan.tokens_per_s)
        table.add_row(
            plan.model.name,
            f"{plan.model.params / 1e9:.3g}",
            amount(plan.weight_bytes, "B"),
            f"{plan.kv_bytes_per_token / 1024:.4g}",
            str(plan.gpus),
            str(plan.sequences),
            f"{plan.prefill.seconds * 1e3:.0f}",
            f"{plan.decode.seconds * 1e3:.1f}",
            f"{plan.tokens_per_s:.0f}",
            f"{cost:.2f}",
        )
    console.print(table)
    console.print(
        f"{first.chip.name}: {first.chip.source}. ${dollars_per_gpu_hour:.2f} per GPU hour. "
        f"{ASSUMPTIONS}",
        style="dim",
    )
