"""What do fewer bits gain and cost on this CPU: the same requests, greedy, in batches of 1 to 64,
with weights and caches in each format, all in one run.

    python -m reference.bench.speed_formats --out build
    python -m reference.bench.speed_formats --format int4 --batch 1 --rounds 5

Each contender runs once a round, and a ratio compares two runs of one round. Beside the speed
stands the share of each answer before its first token that float32 would not have written. Prints a
table, writes speed_formats.json.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from lessons.toolbox.command import check_writable, run_command
from reference.bench.speed_args import read_args, record_of

SCHEMA = 1
PLAIN = "float32"
BATCHES = (1, 16, 64)
# The engine's arguments. PyTorch multiplies packed integers fast in bfloat16 alone (lesson 18).
FORMATS = {
    PLAIN: dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
    **{
        name: dict(dtype="bfloat16", quantization=name)
        for name in ("int8", "int4", "fp8", "nf4", "mxfp4")
    },
    "int8 in float32": dict(dtype="float32", quantization="int8"),
    "Q8_0": dict(dtype="float32", gguf="Q8_0"),
    "Q4_K_M": dict(dtype="float32", gguf="Q4_K_M"),
    "cache in int8": dict(dtype="float32", kv_cache_dtype="int8"),
    "cache in fp8": dict(dtype="float32", kv_cache_dtype="fp8"),
}


def parse_args(argv) -> argparse.Namespace:
    return read_args(
        argv, "reference.bench.speed_formats", __doc__, "--format", [*FORMATS][1:], 4, 48
    )


def new_llm(model: str, arguments: dict, folder: Path):
    """An LLM with these arguments of FORMATS. folder: where GGUF files are written."""
    from lessons.l06_mla.deepseek import load_decoder
    from lessons.toolbox.model.checkpoint import load_tokenizer
    from reference.checkpoints.gguf.gguf_model import save_gguf
    from reference.engine.llm import LLM

    arguments = dict(arguments)
    if mixture := arguments.pop("gguf", None):
        file = folder / f"{mixture}.gguf"
        if not file.exists():
            save_gguf(file, load_decoder(model), load_tokenizer(model), mixture)
        model = str(file)
    # No prefix cache, because every round asks the same.
    return LLM(model, max_num_seqs=max(BATCHES), enable_prefix_caching=False, **arguments)


def measure_batch(args: argparse.Namespace, llms: dict, prompts: list, batch: int) -> dict:
    """Each contender on all prompts, `batch` at once, once a round: processor seconds and
    tokens.
    """
    from reference.engine.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False
    )
    found = {name: dict(cpu_s=[], tokens=[]) for name in llms}
    for round in range(args.rounds + 1):
        for name, llm in llms.items():
            began, tokens = time.process_time(), []
            for start in range(0, len(prompts), batch):
                outputs = llm.generate(prompts[start : start + batch], params, use_tqdm=False)
                tokens += [output.outputs[0].token_ids for output in outputs]
            if round:  # the first warms up, and packs matrices
                found[name]["cpu_s"].append(time.process_time() - began)
            found[name]["tokens"] = tokens
    return found


def entries_of(found: dict, batch: int) -> list[dict]:
    """Rows of the record. A ratio above 1 says that the format is faster than float32."""
    from lessons.l18_weight_quantization.lab.quality import agreed
    from reference.bench.speed_rows import band

    plain = found[PLAIN]
    return [
        {
            "format": name,
            "batch": batch,
            "cpu_s": band(own["cpu_s"]),
            "tokens_per_cpu_s": sum(map(len, own["tokens"])) / band(own["cpu_s"])["median"],
            "faster_by_cpu": band(
                [base / mine for base, mine in zip(plain["cpu_s"], own["cpu_s"])]
            ),
            "agreement": sum(map(agreed, own["tokens"], plain["tokens"])) / len(plain["tokens"]),
        }
        for name, own in found.items()
    ]


def run(args: argparse.Namespace) -> int:
    """Measure, write, print; returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported
    import torch
    from rich.console import Console

    from lessons.toolbox.measure.records import write_json
    from lessons.toolbox.model.checkpoint import load_tokenizer
    from reference.ladder.command import load_requests

    torch.set_num_threads(1)
    check_writable(args.out)
    console = Console(width=None if sys.stdout.isatty() else 110)
    prompts, _ = load_requests(args.prompts, load_tokenizer(args.model))
    names = [PLAIN, args.format] if args.format else list(FORMATS)
    entries = []
    with tempfile.TemporaryDirectory() as folder:
        llms = {name: new_llm(args.model, FORMATS[name], Path(folder)) for name in names}
        for batch in [args.batch] if args.batch else BATCHES:
            count = max(args.requests, batch)
            served = [prompts[index % len(prompts)] for index in range(count)]
            entries += entries_of(measure_batch(args, llms, served, batch), batch)
            print_table([entry for entry in entries if entry["batch"] == batch], console)
    asked = dict(tokens=args.tokens, rounds=args.rounds)
    record = record_of(args.model, SCHEMA, **asked, entries=entries)
    write_json(args.out / "speed_formats.json", record)
    console.print(f"data: {args.out / 'speed_formats.json'}", markup=False)
    return 0


def print_table(entries: list[dict], console) -> None:
    """A batch's rows."""
    from rich.table import Table

    from reference.bench.speed import shown

    table = Table(title=f"Formats in the engine, {entries[0]['batch']} requests at once")
    for name in ("format", "tokens/s", "faster by (cpu)", "agreement"):
        table.add_column(name, justify="left" if name == "format" else "right")
    for entry in entries:
        table.add_row(
            entry["format"],
            f"{entry['tokens_per_cpu_s']:.0f}",
            shown(entry["faster_by_cpu"], 2) + "x",
            f"{100 * entry['agreement']:.0f} %",
        )
    console.print(table)


def main(argv=None) -> int:
    """The command; every failure is one line."""
    return run_command("speed_formats", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
