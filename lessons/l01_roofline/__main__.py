"""What fits, how fast at best, what a token costs; or the same for every known model.

    python -m lessons.l01_roofline --model llama-3-70b --gpu h200 --batch 32 --context 4096
    python -m lessons.l01_roofline --model all --gpu h100
    python -m lessons.l01_roofline --gpu h100 --context 8192 --host-gb 200 --disk-gb 2000 --link 100

Every figure is a prediction: a floor or a ceiling from the model's shape and the GPU's data sheet.
Nothing is measured (except that `--gpu cpu` measures this machine's ceilings first).
"""

import argparse
import sys

from rich.console import Console

from lessons.l01_roofline.calculators import positive
from lessons.l01_roofline.planner.elsewhere import DISK_LINK, HOST_LINK, places, places_table
from lessons.l01_roofline.planner.formats import NAMES, bits_of
from lessons.l01_roofline.planner.models import MODELS, find_model
from lessons.l01_roofline.planner.plan import make_plan
from lessons.l01_roofline.planner.report import print_all, print_report
from lessons.toolbox.command import OneLineParser
from lessons.toolbox.measure.hardware import CHIPS, lookup


def number(text: str) -> float:
    """A finite number above 0, for argparse."""
    try:
        return positive("it", float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: a number above 0") from None


def size(text: str) -> float:
    """A finite number, 0 or more, for argparse."""
    return 0.0 if text.strip() in ("0", "0.0") else number(text)


def count(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: a whole number above 0")
    return int(text)


def new_parser() -> OneLineParser:
    """Every option, with its default."""
    parser = OneLineParser(
        prog="python -m lessons.l01_roofline",
        description=__doc__.split("\n")[0],
        epilog=f"models: {', '.join(MODELS)}, all. GPUs: {', '.join(CHIPS)}, cpu (this machine, "
        "measured).",
    )

    def option(name: str, default, text: str, kind: type = str) -> None:
        parser.add_argument(name, default=default, type=kind, help=f"{text} (default: %(default)s)")

    option("--model", "llama-3-8b", "a name from the list below, or all")
    option("--gpu", "h200", "a name from the list below")
    parser.add_argument(
        "--gpus",
        type=count,
        help="how many (default: the fewest that hold the weights and the batch)",
    )
    option("--batch", 32, "sequences at once", count)
    option("--context", 4096, "tokens of each sequence", count)
    option("--bits-per-weight", 16, "of the weights", number)
    parser.add_argument(
        "--quantization",
        help=f"the weights' format (lesson 18), in place of --bits-per-weight: {', '.join(NAMES)}",
    )
    option("--bits-per-kv", 16, "of the cache", number)
    option("--memory-share", 0.9, "of each GPU", number)
    option("--batched-tokens", 2048, "new tokens of one pass", count)
    option("--host-gb", 0.0, "host memory of each GPU for sequences that pause", size)
    option("--disk-gb", 0.0, "of a disk below it", size)
    option("--host-link", HOST_LINK, "GB/s between a GPU and host memory", number)
    option("--disk-link", DISK_LINK, "GB/s of a disk", number)
    parser.add_argument("--link", type=number, help="Gb/s from a GPU to another machine")
    option("--dollars-per-hour", 3.0, "of one GPU; an assumption", number)
    option("--api-dollars", 0.5, "of 10⁶ tokens; an assumption", number)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = new_parser()
    args = parser.parse_args(arguments)
    console = Console(highlight=False, width=max(100, Console().width))
    try:
        models = list(MODELS.values()) if args.model == "all" else [find_model(args.model)]
        chip = lookup(args.gpu)
        sizes = args.batch, args.context, args.gpus
        rest = args.bits_per_kv, args.memory_share, args.batched_tokens
        name, bits = args.quantization, args.bits_per_weight
        plans = [
            make_plan(model, chip, *sizes, bits if name is None else bits_of(model, name), *rest)
            for model in models
        ]
    except ValueError as error:
        parser.error(str(error))
    if len(plans) == 1:
        print_report(plans[0], args.dollars_per_hour, args.api_dollars, console)
        links = args.host_link, args.disk_link
        if found := places(plans[0], args.host_gb, args.disk_gb, args.link, *links):
            console.print(places_table(plans[0], found))
    else:
        print_all(plans, args.dollars_per_hour, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
