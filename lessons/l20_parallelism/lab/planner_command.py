"""The planner's command line: one layout in detail, or all layouts on a number of GPUs as a
table.
"""

import argparse
import math

from rich.console import Console
from rich.table import Column, Table

from lessons.l01_roofline.__main__ import count, number
from lessons.l01_roofline.planner.models import MODELS, find_model
from lessons.l01_roofline.planner.report import amount, duration
from lessons.l20_parallelism.planner.links import LINKS, machine_of
from lessons.l20_parallelism.planner.planner import Plan, plan, search
from lessons.l20_parallelism.planner.shares import Layout
from lessons.toolbox.command import OneLineParser
from lessons.toolbox.measure.hardware import CHIPS, lookup
from lessons.toolbox.model.arguments import named

NAME = "python -m lessons.l20_parallelism.planner"
NOTE = (
    "Predictions, not measurements: floors of each GPU's part, plus latency and bytes of every "
    "message; experts chosen evenly."
)


def new_parser() -> OneLineParser:
    """Every option, with its default."""
    parser = OneLineParser(
        prog=NAME,
        description="What fits and how fast, in one layout (--tp, --pp, --dp, --ep) or, with "
        "--gpus alone, in all of them.",
        epilog=f"models: {', '.join(MODELS)}. Chips: {', '.join(CHIPS)}. "
        f"Links: {', '.join(LINKS)}.",
    )

    def option(name: str, default, text: str, kind: type = str) -> None:
        shown = "" if default is None else " (default: %(default)s)"
        parser.add_argument(name, default=default, type=kind, help=text + shown)

    option("--model", "llama-3-70b", "a name from the list below")
    option("--chip", "h100", "a name from the list below")
    option("--gpus", None, "how many, to search all layouts", count)
    for name, text in {"tp": "shards of a layer", "pp": "stages", "dp": "replicas"}.items():
        option(f"--{name}", None, text, count)
    option("--ep", None, "GPUs that share the experts: 1, tp or tp · dp", count)
    option("--batch", None, "sequences of a replica (a search: the fewest)", count)
    option("--context", 4096, "tokens of each sequence", count)
    option("--bits-per-weight", 16, "of the weights", number)
    option("--bits-per-kv", 16, "of the cache", number)
    option("--memory-share", 0.9, "of each GPU", number)
    option("--batched-tokens", 2048, "new tokens of one pass", count)
    option("--inside", None, "the link between GPUs of a box (default: the chip's)")
    option("--between", "ndr", "the link between boxes")
    option("--gpus-per-box", 8, "how many the inner link joins", count)
    option("--most-ms", math.inf, "a search keeps layouts whose decode step is not longer", number)
    option("--most-sequences", 256, "that a search runs on all GPUs together", count)
    option("--rows", 12, "of the table of a search", count)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = new_parser()
    args = parser.parse_args(arguments)
    console = Console(highlight=False, width=max(118, Console().width))
    try:
        _run(args, console)
    except ValueError as error:
        parser.error(str(error))
    return 0


def _run(args: argparse.Namespace, console: Console) -> None:
    model = find_model(args.model)
    machine = machine_of(lookup(args.chip), args.inside, args.between, args.gpus_per_box)
    rest = named(args, "context bits_per_weight bits_per_kv memory_share batched_tokens")
    sizes = {name: getattr(args, name) for name in ("tp", "pp", "dp", "ep")}
    if any(sizes.values()):
        layout = Layout(**{name: size or 1 for name, size in sizes.items()})
        if args.gpus not in (None, layout.size):
            raise ValueError(f"--gpus: got {args.gpus}; accepted: {layout.size}, as {layout} needs")
        print_plan(plan(model, machine, layout, args.batch or 32, **rest), console)
        return
    gpus = args.gpus or 8
    found = search(
        model, machine, gpus, args.most_ms / 1e3, args.batch or 1, args.most_sequences, **rest
    )
    if not found:
        wanted = f"{args.batch or 1} × {args.context} tokens"
        raise ValueError(
            f"--gpus: got {gpus}; {model.name} at {args.bits_per_weight:g} bits and {wanted} fit "
            f"in no layout on {machine.chip.name}; accepted: more GPUs, fewer bits, a "
            "longer --most-ms"
        )
    print_search(found[: args.rows], console)


def print_plan(it: Plan, console: Console) -> None:
    """One layout: each stage's GPU, and two times."""
    title = f"{it.model.name} on {it.layout.size} x {it.machine.chip.name}, {it.layout}"
    table = Table(
        "GPU of layers", "weights", "buffers", "left", "KV of a token", title=title, width=98
    )
    for share in it.shares:
        left = it.usable_bytes - share.weight_bytes - share.buffer_bytes
        table.add_row(
            f"{share.stage.start} to {share.stage.stop - 1}",
            amount(share.weight_bytes, "B"),
            amount(share.buffer_bytes, "B"),
            amount(left, "B") if left > 0 else "does not fit",
            f"{share.kv_bytes_per_token / 1024:.4g} KiB",
        )
    console.print(table)
    fit, bare = it.sequences_that_fit(), it.sequences_that_fit(with_buffers=False)
    console.print(
        f"Of each GPU {amount(it.usable_bytes, 'B')} are usable. Sequences of {it.context} tokens "
        f"that fit a replica: {fit} ({bare} beside the weights alone), wanted {it.batch}."
    )
    if fit:
        decode, ttft = it.decode, it.prefill
        console.print(
            f"Decode step of {it.running}: {duration(decode.seconds)}, of these "
            f"{duration(decode.communication_s)} messages. First token of a prompt of "
            f"{it.context}: {duration(ttft.seconds)}. At most {it.tokens_per_s_per_gpu:.0f} "
            "tokens/s a GPU."
        )
    console.print(NOTE, style="dim")


def print_search(plans: list[Plan], console: Console) -> None:
    """One row a layout."""
    it = plans[0]
    title = f"{it.model.name} on {it.layout.size} x {it.machine.chip.name}, context {it.context}"
    names = ("weights", "KiB/token", "fit", "run", "step", "talk", "TTFT", "prefill", "decode")
    columns = Column("layout", no_wrap=True), *names
    table = Table(*columns, title=title, title_justify="left")
    for it in plans:
        table.add_row(
            str(it.layout),
            amount(it.fullest.weight_bytes, "B"),
            f"{it.fullest.kv_bytes_per_token / 1024:.4g}",
            str(it.sequences_that_fit() * it.layout.dp),
            str(it.running * it.layout.dp),
            duration(it.decode.seconds),
            f"{it.decode.communication_s / it.decode.seconds:.0%}",
            duration(it.prefill.seconds),
            f"{it.prefill_tokens_per_s_per_gpu:.0f}",
            f"{it.tokens_per_s_per_gpu:.0f}",
        )
    console.print(table)
    words = (
        "fit, run: sequences of all replicas. talk: share of messages. prefill, decode: tokens/s"
    )
    console.print(f"{words} of a GPU, at most. {NOTE}", style="dim")
