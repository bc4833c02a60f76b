"""What fits, how fast at best, what a token costs; or the same for every known model.

    python -m lessons.l01_roofline --model llama-3-70b --gpu h200 --batch 32 --context 4096
    python -m lessons.l01_roofline --model all --gpu h100

Every figure is a prediction: a floor or a ceiling from the model's shape and the GPU's data sheet.
Nothing is measured (except that `--gpu cpu` measures this machine's ceilings first).
"""

import argparse
import sys

from rich.console import Console
from rich.table import Column, Table

from lessons.l01_roofline.calculators import (
    break_even_tokens_per_day,
    cost_per_million_tokens,
    positive,
)
from lessons.l01_roofline.models import MODELS, find_model
from lessons.l01_roofline.plan import Plan, make_plan, peak_flops
from lessons.toolbox.measure.hardware import CHIPS, lookup, ridge_point

ASSUMPTIONS = (
    "Predictions, not measurements: weights and KV cache split evenly over the GPUs, no "
    "communication, no "
    "activations, no copies of KV heads, experts chosen evenly; prices are assumptions."
)
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(value: float, unit: str = "") -> str:
    """Three digits and a prefix that counts in thousands: 141 GB, 4.8 TB/s, 26.3."""
    for scale, prefix in PREFIXES:
        if value >= scale * 0.9995:
            return (
                f"{value / scale:.3g} {prefix}{unit}"
                if value < 999.5 * scale
                else f"{value / scale:.0f} {prefix}{unit}"
            )
    return f"{value:.3g} {unit}".rstrip()


def duration(seconds: float) -> str:
    return (
        f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.3g} µs"
    )


def print_report(
    plan: Plan, dollars_per_gpu_hour: float, api_dollars: float, console: Console
) -> None:
    """The plan as four short tables. dollars: of one GPU for an hour; of 10⁶ generated tokens from
    an API.
    """
    model, chip, ridge = (
        plan.model,
        plan.chip,
        ridge_point(plan.prefill.peak, plan.prefill.bandwidth),
    )
    memory = Table(
        "memory",
        "",
        "how",
        title=f"{model.name} on {plan.gpus} x {chip.name}, {plan.batch} sequences of "
        f"{plan.context} tokens",
        title_justify="left",
    )
    memory.add_row(
        "weights",
        amount(plan.weight_bytes, "B"),
        f"{model.params / 1e9:.3g} billion parameters x {plan.bits_per_weight:g} bits",
    )
    memory.add_row(
        "KV cache of a token",
        f"{plan.kv_bytes_per_token / 1024:.4g} KiB",
        f"{model.kv_values_per_token} values x {plan.bits_per_kv:g} bits, all layers",
    )
    memory.add_row(
        "KV cache of a sequence",
        amount(plan.kv_bytes_per_token * plan.context, "B"),
        f"x {plan.context} tokens",
    )
    memory.add_row(
        "usable",
        amount(plan.usable_bytes, "B"),
        f"{plan.gpus} x {amount(chip.memory_bytes, 'B')}, {plan.memory_share:.0%} of it",
    )
    memory.add_row(
        "sequences that fit", str(plan.sequences), "(usable - weights) / KV cache of a sequence"
    )
    console.print(memory)
    if plan.running < plan.batch:
        console.print(
            f"[red]Only {plan.running} of {plan.batch} sequences fit at once; below, "
            f"{plan.running} run.[/]"
        )

    floors = Table("floor of", "bytes", "FLOPs", "FLOP/byte", "bound by", "at least")
    for name, floor in (
        (f"prefill of {plan.context} tokens", plan.prefill),
        (f"decode step of {plan.running}", plan.decode),
    ):
        floors.add_row(
            name,
            amount(floor.bytes_moved, "B"),
            amount(floor.flops, "FLOP"),
            f"{floor.intensity:.0f}",
            f"{floor.bound} (ridge {ridge:.0f})",
            duration(floor.seconds),
        )
    console.print(floors)

    hourly = plan.gpus * dollars_per_gpu_hour
    at_best = cost_per_million_tokens(hourly, plan.tokens_per_s)
    break_even = break_even_tokens_per_day(hourly, api_dollars)
    speed = Table("speed and money, at best", "", "how")
    speed.add_row(
        "time to first token", duration(plan.prefill.seconds), "one prompt alone, no queue"
    )
    speed.add_row(
        "time per output token",
        duration(plan.decode.seconds),
        f"{1 / plan.decode.seconds:.3g} tokens/s for each user",
    )
    speed.add_row(
        "decode ceiling",
        f"{plan.tokens_per_s:.0f} tokens/s",
        f"{plan.running} sequences, decode steps only",
    )
    speed.add_row(
        "10⁶ generated tokens",
        f"${at_best:.2f}",
        f"${hourly:.2f} an hour, all {plan.running} sequences busy all day",
    )
    speed.add_row("the same, busy half the day", f"${2 * at_best:.2f}", "utilisation decides")
    share = break_even / (plan.tokens_per_s * 86400)
    speed.add_row(
        "break-even with an API",
        f"{amount(break_even)} tokens/day",
        f"at ${api_dollars:.2f} per 10⁶: {share:.0%} of the ceiling" + ", so never" * (share > 1),
    )
    console.print(speed)
    console.print(
        f"{chip.name}: {amount(chip.memory_bytes_per_s, 'B/s')}, "
        f"{amount(peak_flops(chip), 'FLOP/s')}; {chip.source}. "
        f"{ASSUMPTIONS} Prices: --dollars-per-hour, --api-dollars.",
        style="dim",
    )


def print_all(plans: list[Plan], dollars_per_gpu_hour: float, console: Console) -> None:
    """One row per model."""
    first = plans[0]
    table = Table(
        Column("model", no_wrap=True),
        "params",
        "weights",
        "KV/token",
        "GPUs",
        "fit",
        "TTFT ≥",
        "TPOT ≥",
        "tokens/s ≤",
        "$/10⁶ ≥",
        title=f"{first.chip.name}, {first.batch} sequences of {first.context} tokens",
        title_justify="left",
    )
    for p in plans:
        cost = cost_per_million_tokens(p.gpus * dollars_per_gpu_hour, p.tokens_per_s)
        table.add_row(
            p.model.name,
            f"{p.model.params / 1e9:.3g} bn",
            amount(p.weight_bytes, "B"),
            f"{p.kv_bytes_per_token / 1024:.4g} KiB",
            str(p.gpus),
            str(p.sequences),
            duration(p.prefill.seconds),
            duration(p.decode.seconds),
            f"{p.tokens_per_s:.0f}",
            f"{cost:.2f}",
        )
    console.print(table)
    console.print(
        f"{first.chip.name}: {first.chip.source}. ${dollars_per_gpu_hour:.2f} per GPU hour. "
        f"{ASSUMPTIONS}",
        style="dim",
    )


def number(text: str) -> float:
    """A finite number above 0, for argparse."""
    try:
        return positive("it", float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: a number above 0") from None


def count(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: a whole number above 0")
    return int(text)


class OneLineParser(argparse.ArgumentParser):
    """Errors without the usage text in front of them."""

    def error(self, message: str) -> None:
        self.exit(2, f"roofline: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(
        prog="python -m lessons.l01_roofline",
        description=__doc__.split("\n")[0],
        epilog=f"models: "
        f"{', '.join(MODELS)}, all. GPUs: {', '.join(CHIPS)}, cpu (this machine, measured).",
    )
    parser.add_argument(
        "--model",
        default="llama-3-8b",
        help="a name from the list below, or all (default: %(default)s)",
    )
    parser.add_argument(
        "--gpu", default="h200", help="a name from the list below (default: %(default)s)"
    )
    parser.add_argument(
        "--gpus",
        type=count,
        help="how many (default: the fewest that hold the weights and the batch)",
    )
    parser.add_argument(
        "--batch", type=count, default=32, help="sequences at once (default: %(default)s)"
    )
    parser.add_argument(
        "--context", type=count, default=4096, help="tokens of each sequence (default: %(default)s)"
    )
    parser.add_argument("--bits-per-weight", type=number, default=16, help="default: %(default)s")
    parser.add_argument("--bits-per-kv", type=number, default=16, help="default: %(default)s")
    parser.add_argument(
        "--memory-share", type=number, default=0.9, help="of each GPU (default: %(default)s)"
    )
    parser.add_argument(
        "--dollars-per-hour",
        type=number,
        default=3.0,
        help="of one GPU; an assumption (default: %(default)s)",
    )
    parser.add_argument(
        "--api-dollars",
        type=number,
        default=0.5,
        help="of 10⁶ tokens; an assumption (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    console = Console(highlight=False, width=max(100, Console().width))
    try:
        models = list(MODELS.values()) if args.model == "all" else [find_model(args.model)]
        chip = lookup(args.gpu)
        plans = [
            make_plan(
                model,
                chip,
                args.batch,
                args.context,
                args.gpus,
                args.bits_per_weight,
                args.bits_per_kv,
                args.memory_share,
            )
            for model in models
        ]
    except ValueError as error:
        parser.error(str(error))
    if len(plans) == 1:
        print_report(plans[0], args.dollars_per_hour, args.api_dollars, console)
    else:
        print_all(plans, args.dollars_per_hour, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
