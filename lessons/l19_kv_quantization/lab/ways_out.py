"""Seven ways out of memory, for one deployment: what each leaves room for, and what it makes of the
tokens a second. Lesson 1's planner with one thing changed at a time; nothing is measured.

    python -m lessons.l19_kv_quantization.lab.ways_out --model llama-3-70b --gpu h200 --gpus 2
"""

import argparse
import sys
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Column, Table

from lessons.l01_roofline.calculators import decode_floor, tokens_per_s
from lessons.l01_roofline.planner.formats import bits_of
from lessons.l01_roofline.planner.models import MODELS, find_model
from lessons.l01_roofline.planner.plan import Plan, make_plan, peak_flops
from lessons.l19_kv_quantization.formats import FORMATS, row_bytes
from lessons.toolbox.command import OneLineParser
from lessons.toolbox.measure.hardware import CHIPS, lookup

SCALE_BYTES = 2  # scales are stored in the model's dtype, of 16 bits
WEIGHTS = {"8-bit weights": "int8", "4-bit weights": "int4"}  # lesson 18's names


@dataclass(frozen=True)
class Way:
    """One way out. sequences: that fit; step_s: the least time of a decode step of all of them.

    A step of no sequence takes no time and gives no tokens.
    """

    name: str
    sequences: int
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_s(self.step_s, self.sequences) if self.sequences else 0.0


def bits_per_value(name: str, head_dim: int) -> float:
    """Bits of a cached number with its share of the scales. name: of FORMATS, or "bf16"."""
    if name == "bf16":
        return 16.0
    return 8 * row_bytes(FORMATS[name], head_dim, SCALE_BYTES) / head_dim


def way(name: str, plan: Plan, shared: int = 0) -> Way:
    """What fits of a plan. shared: tokens with which every context begins and which are stored once
    (lesson 13); a step still reads them for each sequence.
    """
    fixed = plan.weight_bytes + plan.activation_bytes + shared * plan.kv_bytes_per_token
    own = (plan.context - shared) * plan.kv_bytes_per_token
    sequences = max(0, int((plan.usable_bytes - fixed) // own))
    if not sequences:
        return Way(name, 0, 0.0)
    machine = plan.gpus * plan.chip.memory_bytes_per_s, plan.gpus * peak_flops(plan.chip)
    bits = plan.bits_per_weight, plan.bits_per_kv
    step = decode_floor(plan.model, sequences, plan.context, *machine, *bits)
    return Way(name, sequences, step.seconds)


def seven_ways(plan: Plan, shared: int) -> list[Way]:
    """The plan as it is, then each way alone, in the order of the list in the README."""
    ways = [way("as it is", plan)]
    for name, format in WEIGHTS.items():
        bits = bits_of(plan.model, format)
        ways.append(way(name, replace(plan, bits_per_weight=bits)))
    for name in ("fp8", "int4"):
        bits = bits_per_value(name, plan.model.head_dim)
        ways.append(way(f"{name} cache", replace(plan, bits_per_kv=bits)))
    ways.append(way("half the context", replace(plan, context=plan.context // 2)))
    ways.append(way(f"{2 * plan.gpus} GPUs", replace(plan, gpus=2 * plan.gpus)))
    ways.append(way(f"{shared} tokens shared", plan, shared))
    return ways


def table_of(plan: Plan, shared: int) -> Table:
    """The ways as a table; ratios are to the plan as it is."""
    title = f"{plan.model.name}, {plan.gpus} x {plan.chip.name}, contexts of {plan.context} tokens"
    names = Column("way out", no_wrap=True)
    table = Table(names, "fit", "", "step", "tokens/s", "", title=title, title_justify="left")
    ways = seven_ways(plan, shared)
    before = ways[0]
    for found in ways:
        more = found.sequences / before.sequences if before.sequences else 0.0
        faster = found.tokens_per_s / before.tokens_per_s if before.sequences else 0.0
        table.add_row(
            found.name,
            str(found.sequences),
            f"{more:.2f}x" if more else "",
            f"{1e3 * found.step_s:.1f} ms" if found.sequences else "does not fit",
            f"{found.tokens_per_s:.0f}",
            f"{faster:.2f}x" if faster else "",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = OneLineParser(
        prog="python -m lessons.l19_kv_quantization.lab.ways_out",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="llama-3-70b", choices=MODELS, metavar="MODEL")
    parser.add_argument("--gpu", default="h200", choices=CHIPS, metavar="GPU")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--context", type=int, default=8192, help="tokens of each sequence")
    parser.add_argument("--shared", type=int, default=2048, help="tokens of a common beginning")
    options = parser.parse_args(arguments)
    if not 0 <= options.shared < options.context:
        parser.error(f"--shared is {options.shared}; accepted: 0 to {options.context - 1}")
    try:
        plan = make_plan(
            find_model(options.model), lookup(options.gpu), 1, options.context, options.gpus
        )
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    console.print(table_of(plan, options.shared))
    console.print(
        "Predictions from the data sheet: step times are lower bounds, tokens/s upper bounds.",
        style="dim",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
