"""DeepSeek-V3 on 8 to 320 GPUs: what each holds, what a token sends, how long a step takes; beside
what others published.

    python -m lessons.l23_experts.lab.large            prints the tables
    python -m lessons.l23_experts.lab.large --write    writes results/counted/l23_large.json, too

All of ours is predicted from bytes and FLOPs, for H800s (ranks/large.py says what is left out).
What is published was measured by those who are named, or computed by them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

from lessons.l01_roofline.planner.models import find_model
from lessons.l20_parallelism.planner.links import LL
from lessons.l23_experts.ranks.large import (
    H800,
    Wide,
    WideStep,
    decode,
    direct,
    forwarded,
    prefill,
    row_bytes,
)
from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.model.arguments import check_whole

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "results" / "counted" / "l23_large.json"
MODEL = find_model("deepseek-v3")
GPUS = (8, 16, 32, 64, 144, 320)
BATCH, CONTEXT = 128, 4096  # DeepSeek's profile of decoding (github.com/deepseek-ai/profile-data)
PREFILL_GPUS, PREFILL_TOKENS, PROMPT = 32, 16384, 4096  # and of prefill
PER_NODE = 8


class Published(NamedTuple):
    """What somebody printed. value: in `unit`."""

    value: float
    unit: str
    source: str


OVERVIEW = "DeepSeek-V3/R1 Inference System Overview (open-infra-index, 2025-03-01)"
LMSYS = "lmsys.org/blog/2025-05-05-large-scale-ep"
LEGACY = "DeepEP docs/legacy.md, low-latency kernels, 128 tokens, H800"
INSIGHTS = "Insights into DeepSeek-V3 (arXiv 2505.09343), section 2.3.2"
INPUT = Published(73.7e3, "input tokens/s a node, 56.3 % of them from a cache", OVERVIEW)
OUTPUT = Published(14.8e3, "output tokens/s a node", OVERVIEW)
CACHE_HITS, TOKENS_PER_S_A_USER = 0.563, 21  # the overview; it says 20 to 22
LMSYS_INPUT = Published(50302, "input tokens/s a node, prompts of 4096", LMSYS)
LMSYS_OUTPUT = Published(22.3e3, "output tokens/s a node, after 2000 tokens", LMSYS)
# ranks -> µs of dispatch and of combine
LATENCIES_US = {
    8: (77, 114),
    16: (118, 195),
    32: (155, 273),
    64: (173, 314),
    128: (192, 369),
    256: (194, 360),
}
DISPATCH_AND_COMBINE_US, STEP_MS = 120.96, 14.76  # section 2.3.2: of 32 tokens; of 61 layers


def layout_of(gpus: int) -> dict:
    """What a GPU holds and sends."""
    wide = Wide(MODEL, H800, gpus)
    fits = wide.tokens_that_fit() // CONTEXT
    out, back = row_bytes(MODEL.hidden_size)
    kinds = {"once a node": forwarded(wide), "once an expert": direct(wide)}
    return {
        "slots_per_gpu": wide.slots_per_gpu,
        "weights_gb": wide.weight_bytes / 1e9,
        "sequences": fits,
        "gpus_reached": wide.reached(gpus),
        "nodes_reached": wide.reached(wide.nodes),
        "compute_bound_batch": wide.compute_bound_batch,
        **{
            f"{name}, {link} kb": rows * (out + back) / 1e3
            for name, traffic in kinds.items()
            for link, rows in zip(("nvlink", "rdma"), traffic)
        },
    }


def told(step: WideStep) -> dict:
    """A step for the record."""
    return {
        "ms": 1e3 * step.seconds,
        "compute_ms": 1e3 * step.compute_s,
        "network_ms": 1e3 * step.network_s,
        "tokens_per_s": step.tokens_per_s,
    }


def decode_of(gpus: int, batch: int = BATCH) -> dict:
    """A decode step of `batch` sequences a GPU, or as many as fit; nothing where none fits."""
    wide = Wide(MODEL, H800, gpus)
    batch = min(batch, wide.tokens_that_fit() // CONTEXT)
    if not batch:
        return {"batch": 0}
    one, two = (told(decode(wide, batch, CONTEXT, halves)) for halves in (1, 2))
    return {"batch": batch, "one": one, "two": two, "gain": one["ms"] / two["ms"]}


def latencies() -> dict:
    """DeepEP's table beside ours: one exchange of 128 tokens a GPU, once for each expert."""
    found = {}
    for gpus, published in LATENCIES_US.items():
        traffic = direct(Wide(MODEL, H800, gpus, redundant=0))
        link = H800.between if gpus > PER_NODE else H800.inside
        for name, row, us in zip(("dispatch", "combine"), row_bytes(MODEL.hidden_size), published):
            ours = 1e6 * (LL.base_s + link.ll_hop_s + BATCH * traffic.seconds(row, H800))
            found.setdefault(str(gpus), {})[name] = {
                "predicted_us": ours,
                "published_us": us,
                "share": ours / us,
            }
    return found


def insights() -> dict:
    """DeepSeek's own arithmetic with our formula: 32 tokens, 9 rows each (to the shared expert,
    too), rows of 7000 values in 1 and 2 bytes, 50 GB/s; two half batches in each of 61 layers.
    """
    exchange_s = 32 * 9 * (1 + 2) * 7000 / H800.between.bytes_per_s
    return {"exchange_us": 1e6 * exchange_s, "step_ms": 1e3 * 2 * exchange_s * 61}


def checks() -> dict:
    """Ours beside what is published, in tokens/s of a node; share: published / ours."""
    pass_of_32 = prefill(Wide(MODEL, H800, PREFILL_GPUS), PREFILL_TOKENS, PROMPT)
    ours = PER_NODE * pass_of_32.tokens_per_s
    computed = INPUT.value * (1 - CACHE_HITS)
    batch = round(OUTPUT.value / PER_NODE / TOKENS_PER_S_A_USER)
    wide = Wide(MODEL, H800, 144)
    step = decode(wide, batch, CONTEXT)
    nine_nodes = Wide(MODEL, H800, 72)
    out, back = row_bytes(MODEL.hidden_size)
    row_s = direct(nine_nodes).seconds(out + back, H800)
    network = PER_NODE / (row_s * nine_nodes.moe_layers)
    rows = {
        "prefill, DeepSeek": (ours, computed),
        "prefill, SGLang": (ours, LMSYS_INPUT.value),
        "decode, DeepSeek": (PER_NODE * step.tokens_per_s, OUTPUT.value),
        "decode, SGLang, the network alone": (network, LMSYS_OUTPUT.value),
    }
    return {
        "batch": batch,
        "step_ms": 1e3 * step.seconds,
        "published_step_ms": 1e3 / TOKENS_PER_S_A_USER,
        "rows": {
            name: {"predicted": mine, "published": theirs, "share": theirs / mine}
            for name, (mine, theirs) in rows.items()
        },
    }


def record_of() -> dict:
    """All tables."""
    wide = Wide(MODEL, H800, PREFILL_GPUS)
    passes = {str(halves): told(prefill(wide, PREFILL_TOKENS, PROMPT, halves)) for halves in (1, 2)}
    return {
        "what": "predicted by lessons/l23_experts/ranks/large.py for H800s, nothing was measured",
        "command": "python -m lessons.l23_experts.lab.large --write",
        "layouts": {str(gpus): layout_of(gpus) for gpus in GPUS},
        "decode": {str(gpus): decode_of(gpus) for gpus in GPUS},
        "prefill": passes,
        "deepep": latencies(),
        "insights": insights(),
        "checks": checks(),
    }


def show(record: dict) -> None:
    """The tables as text."""
    print(
        f"{MODEL.name} on H800s, PREDICTED. Decoding {BATCH} sequences of {CONTEXT} tokens a GPU,"
    )
    print("or as many as fit; kB: of a token, a layer, there and back, over RDMA\n")
    print("GPUs  experts  weights  sequences  GPUs, nodes  kB by node,  bound by      ms in one,")
    print("        a GPU       GB   that fit    of a token    by expert  computing    two halves")
    for gpus, own in record["layouts"].items():
        found = record["decode"][gpus]
        times = "nothing fits"
        if found["batch"]:
            times = f"{found['one']['ms']:5.1f} {found['two']['ms']:6.1f}"
        print(
            f"{gpus:>4} {own['slots_per_gpu']:8} {own['weights_gb']:8.1f} {own['sequences']:10} "
            f"{own['gpus_reached']:6.1f} {own['nodes_reached']:6.1f} "
            f"{own['once a node, rdma kb']:6.0f} {own['once an expert, rdma kb']:5.0f} "
            f"{own['compute_bound_batch']:10.0f}   {times}"
        )
    print("\nranks   dispatch µs: predicted, DeepEP   combine µs: predicted, DeepEP")
    for gpus, row in record["deepep"].items():
        cells = [f"{c['predicted_us']:15.0f} {c['published_us']:7}" for c in row.values()]
        print(f"{gpus:>5}  " + "          ".join(cells))
    print("\ntokens/s of a node                    predicted  published  share")
    for name, row in record["checks"]["rows"].items():
        numbers = f"{row['predicted']:10.0f} {row['published']:10.0f} {100 * row['share']:5.0f} %"
        print(f"{name:36} {numbers}")
    for source in sorted({INPUT.source, LMSYS_INPUT.source, LEGACY}):
        print(f"published: {source}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser(
        prog="python -m lessons.l23_experts.lab.large", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help="the record, too")
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences that a GPU wants")
    given = parser.parse_args(arguments)
    return run_command("large", lambda: run(given))


def run(given: argparse.Namespace) -> int:
    """Predict, write if asked, and print."""
    check_whole(batch=given.batch)
    record = record_of()
    if given.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if given.batch != BATCH:
        record["decode"] = {str(gpus): decode_of(gpus, given.batch) for gpus in GPUS}
    show(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
