"""The tables of the lesson's text, computed: ways to all-reduce, one cut or two, and what does not
shrink with more GPUs.

    python -m lessons.l20_parallelism.lab.tables

Bytes and counts are exact, times are predictions.
"""

from lessons.l01_roofline.planner.models import find_model
from lessons.l20_parallelism.pipeline import bubble, decode_bubble
from lessons.l20_parallelism.planner.links import all_reduce_times, machine_of
from lessons.l20_parallelism.planner.planner import plan
from lessons.l20_parallelism.planner.shares import Layout
from lessons.l20_parallelism.processes.collectives import WAYS
from lessons.l20_parallelism.ring_attention import LAYOUTS, imbalance
from lessons.toolbox.measure.hardware import CHIPS

Row = list[str]
H100 = CHIPS["h100"]
SMALL, LARGE = 16 * 1024, 64 * 2**20  # bytes: one token of a 70B, and 4096 of them


def ways(size: int = 8) -> list[Row]:
    """Way, rounds, bytes of a rank over those of the tensor, and predicted µs of few and many
    bytes.
    """
    rows, machine = [["way", "rounds", "bytes sent", "16 KiB, µs", "64 MiB, µs"]], machine_of(H100)
    for name, way in WAYS.items():
        times = [
            min(seconds for seconds, found in all_reduce_times(n, size, machine) if found == name)
            for n in (SMALL, LARGE)
        ]
        micros = [f"{seconds * 1e6:.0f}" for seconds in times]
        rows.append([name, f"{way.rounds(size)}", f"{way.bytes_sent(size, 1):.2f} n", *micros])
    return rows


def one_cut_or_two() -> list[Row]:
    """Llama-3-405B in FP8 on eight H100: shards alone, and with stages."""
    rows = [["layout", "weights, GB", "KV, KiB", "step, ms", "messages", "prefill, tokens/s a GPU"]]
    model = find_model("llama-3-405b")
    for layout in (Layout(8), Layout(4, 2), Layout(2, 4), Layout(1, 8)):
        it = plan(model, H100, layout, batch=16, context=16384, bits_per_weight=8)
        rows.append(
            [
                str(layout),
                f"{it.fullest.weight_bytes / 1e9:.1f}",
                f"{it.fullest.kv_bytes_per_token / 1024:.0f}",
                f"{it.decode.seconds * 1e3:.1f}",
                f"{it.decode.communication_s / it.decode.seconds:.0%}",
                f"{it.prefill_tokens_per_s_per_gpu:.0f}",
            ]
        )
    return rows


def copies() -> list[Row]:
    """KiB of the cache of one token on each GPU, which does not fall for ever."""
    names, degrees = ("llama-3-70b", "qwen3-30b-a3b", "deepseek-v3"), (1, 2, 4, 8, 16)
    rows = [["model", *(f"TP{tp}" for tp in degrees)]]
    for name in names:
        plans = [plan(find_model(name), H100, Layout(tp)) for tp in degrees]
        rows.append([name, *(f"{it.fullest.kv_bytes_per_token / 1024:.3g}" for it in plans)])
    return rows


def bubbles(num_stages: int = 4) -> list[Row]:
    """Idle share of four stages over the number of micro-batches."""
    rows = [["micro-batches", "prefill", "decoding"]]
    for count in (1, 2, 4, 8, 16):
        shares = bubble(num_stages, count), decode_bubble(num_stages, count)
        rows.append([str(count), *(f"{share:.0%}" for share in shares)])
    return rows


def parts_of_a_prompt(num_tokens: int = 2**17) -> list[Row]:
    """The busiest rank's work over the mean, for each way to deal a long prompt out."""
    sizes = (2, 4, 8)
    rows = [["layout", *(f"{size} ranks" for size in sizes)]]
    for name, layout in LAYOUTS.items():
        rows.append([name, *(f"{imbalance(layout, num_tokens, size):.2f}" for size in sizes)])
    return rows


TABLES = (ways, one_cut_or_two, copies, bubbles, parts_of_a_prompt)


def markdown(rows: list[Row]) -> str:
    """The rows as a table of a README, the first one as its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def main() -> None:
    """Print all of them."""
    for table in TABLES:
        print(f"{table.__doc__.splitlines()[0]}\n\n{markdown(table())}\n")


if __name__ == "__main__":
    main()
