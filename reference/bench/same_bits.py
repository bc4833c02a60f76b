"""How many answers change when their neighbours do, and what it costs that none does: the same
requests one at a time, all together, and eight at a time in chunks of a few tokens, with
batch_invariant and without.

    python -m reference.bench.same_bits --out build
    python -m reference.bench.same_bits --dtype bfloat16 --rounds 5

An answer has other bits if one of its tokens has another log-probability. Prints a table and writes
same_bits.json. Exit code 1 if an answer changed with batch_invariant.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import os
import sys
import time

from lessons.toolbox.command import check_writable, run_command
from reference.bench.speed_args import read_args, record_of

SCHEMA = 1
DTYPES = ("float32", "bfloat16")
COMPANIES = {
    "alone": dict(max_num_seqs=1),
    "together": dict(max_num_seqs=32),
    "chunks": dict(max_num_seqs=8, max_num_batched_tokens=16),
}


def parse_args(argv) -> argparse.Namespace:
    return read_args(argv, "reference.bench.same_bits", __doc__, "--dtype", DTYPES, 32, 64)


def measure(args: argparse.Namespace, dtype: str, prompts: list[list[int]]) -> dict:
    """{(batch_invariant, company): answers, and processor seconds of each round}."""
    from reference.engine.llm import LLM
    from reference.engine.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False, logprobs=1
    )
    engines = {
        (invariant, name): LLM(
            args.model,
            dtype=dtype,
            batch_invariant=invariant,
            **company,
            # No prefix cache, because every round asks the same.
            enable_prefix_caching=False,
        )
        for name, company in COMPANIES.items()
        for invariant in (False, True)
    }
    found = {key: dict(cpu_s=[]) for key in engines}
    for round in range(args.rounds + 1):
        for key, llm in engines.items():
            cpu = time.process_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if round:  # the first warms up
                found[key]["cpu_s"].append(time.process_time() - cpu)
            found[key]["answers"] = [answer_of(output.outputs[0]) for output in outputs]
    return found


def answer_of(answer) -> tuple[list[int], list[float]]:
    """The tokens of an answer, and the log-probability of each."""
    chosen = zip(answer.token_ids, answer.logprobs)
    return list(answer.token_ids), [row[token].logprob for token, row in chosen]


def entry_of(dtype: str, found: dict) -> dict:
    """A row of the record. Prices are processor seconds, as a multiple of the usual engine's."""
    from reference.bench.speed_rows import band

    entry = {"name": dtype, "requests": len(found[True, "alone"]["answers"])}
    for invariant, name in ((False, "usual"), (True, "invariant")):
        alone = found[invariant, "alone"]["answers"]
        for company in ("together", "chunks"):
            pairs = list(zip(alone, found[invariant, company]["answers"]))
            entry[f"{name}_{company}"] = {
                "other_bits": sum(a != b for a, b in pairs),
                "other_tokens": sum(a[0] != b[0] for a, b in pairs),
            }
    for company in COMPANIES:
        usual, fixed = (found[invariant, company]["cpu_s"] for invariant in (False, True))
        entry[f"price_{company}"] = band([b / a for a, b in zip(usual, fixed)])
    return entry


def run(args: argparse.Namespace) -> int:
    """Measure, write, print; returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported
    from rich.console import Console

    from lessons.toolbox.measure.records import write_json
    from lessons.toolbox.model.checkpoint import load_tokenizer
    from reference.ladder.command import load_requests

    check_writable(args.out)
    console = Console(width=None if sys.stdout.isatty() else 110)
    prompts, _ = load_requests(args.prompts, load_tokenizer(args.model))
    prompts = [prompts[index % len(prompts)] for index in range(args.requests)]
    entries = []
    for dtype in [args.dtype] if args.dtype else DTYPES:
        entries.append(entry_of(dtype, measure(args, dtype, prompts)))
    print_table(entries, console)
    sizes = {"tokens": args.tokens, "rounds": args.rounds, "companies": COMPANIES}
    write_json(args.out / "same_bits.json", record_of(args.model, SCHEMA, **sizes, entries=entries))
    console.print(f"data: {args.out / 'same_bits.json'}", markup=False)
    wrong = [
        f"{entry['name']}, {company}"
        for entry in entries
        for company in ("together", "chunks")
        if entry[f"invariant_{company}"]["other_bits"]
    ]
    if wrong:
        print(f"same_bits: FAILED, answers changed: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def print_table(entries: list[dict], console) -> None:
    """A row for each dtype."""
    from rich.table import Table

    from reference.bench.speed import shown

    table = Table(title=f"{entries[0]['requests']} requests, whose answers alone are compared")
    for name in ("dtype", "company", "other bits", "other tokens", "batch_invariant", "price"):
        table.add_column(name, justify="left" if name in ("dtype", "company") else "right")
    for entry in entries:
        for company in COMPANIES:
            counts = ("", "", "")
            if company != "alone":
                usual, fixed = (entry[f"{name}_{company}"] for name in ("usual", "invariant"))
                counts = usual["other_bits"], usual["other_tokens"], fixed["other_bits"]
            price = shown(entry[f"price_{company}"], 2) + "x"
            table.add_row(entry["name"], company, *map(str, counts), price)
    console.print(table)


def main(argv=None) -> int:
    """The command; every failure is one line."""
    return run_command("same_bits", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
