"""How much faster does the engine get by speculation: the same requests on held-out code, greedy,
in batches of 1 to 64, with each method and without any, all in one run.

    python -m reference.bench.speed_drafts --out build
    python -m reference.bench.speed_drafts --method eagle-tree --batch 1 --rounds 5

Each contender runs once a round, and a ratio compares two runs of one round. Answers have 200
tokens, as those that models/README.md judges: n-grams live on what repeats, and shorter answers
repeat less. Prints a table of tokens per pass of the target, the share of drafted tokens that stay,
and the ratios; writes speed_drafts.json. Exit code 1 if a contender's greedy tokens differ where
the model was not in doubt.
"""

# Nothing slow is imported here: it takes seconds, and Ctrl-C may come meanwhile.
import argparse
import os
import sys
import time
from pathlib import Path

from lessons.toolbox.command import check_writable, run_command
from reference.bench.speed_args import read_args, record_of

SCHEMA = 1
PLAIN = "no speculation"
BATCHES = (1, 4, 16, 64)
# name -> method, what is put behind the model's name to find what drafts, and how many tokens it
# drafts: as a chain, or as the tree that the heads' measured acceptance makes the best
METHODS = {
    "ngram": ("ngram", None, 4),
    "draft": ("draft", "-draft", 2),
    "medusa": ("medusa", "-medusa", 2),
    "eagle": ("eagle", "-eagle", 2),
    "medusa-tree": ("medusa", "-medusa", 7),
    "eagle-tree": ("eagle", "-eagle", 7),
}
TREE = "-tree"


def parse_args(argv) -> argparse.Namespace:
    return read_args(argv, "reference.bench.speed_drafts", __doc__, "--method", METHODS, 16, 200)


def config_of(method: str, model: str) -> dict | None:
    """The speculative_config of a method; None where its weights are not beside the model."""
    name, behind, count = METHODS[method]
    config = dict(method=name, num_speculative_tokens=count)
    if method.endswith(TREE):
        config["speculative_token_tree"] = "auto"
    if behind is None:
        return config
    folder = Path(f"{model}{behind}")
    return config | dict(model=str(folder)) if folder.is_dir() else None


def measure_batch(args: argparse.Namespace, configs: dict, prompts: list, batch: int) -> dict:
    """Each contender on all prompts, `batch` at once, once a round: seconds, tokens, counts."""
    from reference.engine.llm import LLM
    from reference.engine.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False
    )
    engines = {
        # No prefix cache, because every round asks the same.
        name: LLM(
            args.model,
            max_num_seqs=batch,
            speculative_config=config,
            enable_prefix_caching=False,
        )
        for name, config in configs.items()
    }
    found = {name: dict(wall_s=[], cpu_s=[]) for name in engines}
    for round in range(args.rounds + 1):
        for name, llm in engines.items():
            wall, cpu = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if round:  # the first warms up
                found[name]["wall_s"].append(time.perf_counter() - wall)
                found[name]["cpu_s"].append(time.process_time() - cpu)
            found[name]["tokens"] = [output.outputs[0].token_ids for output in outputs]
            speculation = llm.engine.speculation
            found[name]["counts"] = None if speculation is None else speculation.counts
    return found


def entries_of(found: dict, model, prompts: list[list[int]], batch: int) -> list[dict]:
    """Rows of the record. A ratio above 1 says that the method is faster than no speculation."""
    from reference.bench.speed_rows import band
    from reference.ladder.contest import Contender
    from reference.ladder.judging import judge

    entries, plain = [], found[PLAIN]
    reference = Contender(PLAIN, None, [], outputs=dict(enumerate(plain["tokens"])), runs=[1.0])
    for name, own in found.items():
        contender = Contender(name, None, [], outputs=dict(enumerate(own["tokens"])), runs=[1.0])
        judge(contender, [reference], model, prompts, reference=PLAIN)
        ratios = {
            kind: band([base / mine for base, mine in zip(plain[kind], own[kind])])
            for kind in ("wall_s", "cpu_s")
        }
        counts = own["counts"]
        entries.append(
            {
                "name": f"{name} at {batch}",
                "method": name,
                "batch": batch,
                "tokens_per_pass": 1.0 if counts is None else counts.tokens_per_pass,
                "acceptance_rate": None if counts is None else counts.acceptance_rate,
                "wall_s": band(own["wall_s"]),
                "faster_by_wall": ratios["wall_s"],
                "faster_by_cpu": ratios["cpu_s"],
                "identical": contender.identical,
                "verdict": contender.verdict,
            }
        )
    return entries


def run(args: argparse.Namespace) -> int:
    """Measure, judge, write, print; returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported
    from rich.console import Console

    from lessons.toolbox.measure.records import write_json
    from lessons.toolbox.model.checkpoint import load_tokenizer
    from reference.engine.model import load_model
    from reference.ladder.command import load_requests

    check_writable(args.out)
    console = Console(width=None if sys.stdout.isatty() else 110)
    methods = [args.method] if args.method else list(METHODS)
    configs = {PLAIN: None}
    for method in methods:
        if (config := config_of(method, args.model)) is None:
            console.print(f"{method}: not run, its weights are not beside {args.model}")
        else:
            configs[method] = config
    model = load_model(args.model)
    prompts, _ = load_requests(args.prompts, load_tokenizer(args.model))
    entries = []
    for batch in [args.batch] if args.batch else BATCHES:
        count = max(args.requests, batch)
        served = [prompts[index % len(prompts)] for index in range(count)]
        entries += entries_of(measure_batch(args, configs, served, batch), model, served, batch)
        print_table([entry for entry in entries if entry["batch"] == batch], console)
    # Trees behind all chains, because texts quote the others by their number.
    entries.sort(key=lambda entry: entry["method"].endswith(TREE))
    sizes = {"tokens": args.tokens, "rounds": args.rounds}
    record = record_of(args.model, SCHEMA, **sizes, configs=configs, entries=entries)
    write_json(args.out / "speed_drafts.json", record)
    console.print(f"data: {args.out / 'speed_drafts.json'}", markup=False)
    wrong = [
        f"{e['method']} at {e['batch']}: {e['verdict']}" for e in entries if not e["identical"]
    ]
    if wrong:
        print(f"speed_drafts: FAILED, {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def print_table(entries: list[dict], console) -> None:
    """A batch's rows."""
    from rich.table import Table

    from reference.bench.speed import shown

    table = Table(title=f"Speculation in the engine, {entries[0]['batch']} requests at once")
    for name in ("method", "tokens per pass", "accepted", "faster by (wall)", "by (cpu)", "tokens"):
        table.add_column(name, justify="left" if name in ("method", "tokens") else "right")
    for entry in entries:
        rate = entry["acceptance_rate"]
        table.add_row(
            entry["method"],
            f"{entry['tokens_per_pass']:.2f}",
            "" if rate is None else f"{100 * rate:.0f} %",
            shown(entry["faster_by_wall"], 2) + "x",
            shown(entry["faster_by_cpu"], 2) + "x",
            entry["verdict"] or "identical",
        )
    console.print(table)


def main(argv=None) -> int:
    """The command; every failure is one line."""
    return run_command("speed_drafts", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
