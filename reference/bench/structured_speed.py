"""What structured outputs cost: masks of a model's vocabulary, and the engine's tokens a second
when every row has to obey one, beside the same engine with answers of the same lengths and no
masks.

    python -m reference.bench.structured_speed --out results/cpu

Times are CPU seconds of this process, the median of several rounds. Prints a table and writes
structured_speed.json.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lessons.l24_structured_outputs import naive
from lessons.toolbox.command import OneLineParser, check_writable, run_command
from lessons.toolbox.measure.device import fingerprint
from lessons.toolbox.measure.records import write_json
from reference import LLM, SamplingParams, StructuredOutputsParams
from reference.features.structured import Structures
from reference.ladder.command import place_of

ROWS, TOKENS, ROUNDS = 32, 64, 5
TRIED = 10  # states in which every token is tried
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "parent": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "size", "tags", "parent"],
}
WISHES = {
    "regex": StructuredOutputsParams(regex=r"[a-z_]+\(([a-z]+(, [a-z]+)*)?\)"),
    "json schema": StructuredOutputsParams(json=SCHEMA),
    "json object": StructuredOutputsParams(json_object=True),
}


def cpu_s(function: Callable, *args) -> tuple[float, Any]:
    """CPU seconds of a call, and what it returns."""
    start = time.process_time()
    found = function(*args)
    return time.process_time() - start, found


def mask_costs(structures: Structures, wish, texts: list[list[int]]) -> dict[str, float]:
    """Microseconds of a mask along the answers `texts`: by trying every token, by the trie in a new
    state, and on average along the texts, because masks are kept.
    """
    compile_s, masks = cpu_s(structures.compile, wish)
    new, tried, total, places = [], [], 0.0, 0
    for tokens in texts:
        state = masks.start
        for token in tokens:
            is_new = state not in masks.masks
            taken, _ = cpu_s(masks.mask, state)
            total, places = total + taken, places + 1
            if is_new:
                new.append(taken)
                if len(tried) < TRIED:
                    every = masks.vocabulary.tokens
                    tried.append(cpu_s(naive.token_mask, masks.matcher, state, every)[0])
            state = masks.advance(state, token) or state
    return {
        "compile_ms": 1e3 * compile_s,
        "every_token_us": 1e6 * statistics.median(tried),
        "new_state_us": 1e6 * statistics.median(new),
        "a_token_us": 1e6 * total / places,
        "new_states": len(new),
        "places": places,
    }


def generate(llm: LLM, params: list[SamplingParams]) -> tuple[float, list[list[int]]]:
    """CPU seconds, and the answers to one prompt for each of `params`."""
    prompts = [f"def f{row}(x):\n" for row in range(len(params))]
    seconds, outputs = cpu_s(llm.generate, prompts, params, None, False)
    return seconds, [output.outputs[0].token_ids for output in outputs]


def engine_costs(llm: LLM, wish, rows: int) -> tuple[dict[str, float], list[list[int]]]:
    """Tokens a CPU second of rows that all have this wish, and of rows without one whose answers
    have the same lengths, because answers that end early leave small batches; and the answers.
    """
    free, bound, answers = [], [], []
    for turn in range(ROUNDS):
        seeds = range(turn * rows, (turn + 1) * rows)
        params = [
            SamplingParams(max_tokens=TOKENS, seed=seed, structured_outputs=wish) for seed in seeds
        ]
        bound_s, answers = generate(llm, params)
        lengths = [len(tokens) for tokens in answers]
        params = [
            SamplingParams(max_tokens=length, seed=seed, ignore_eos=True)
            for length, seed in zip(lengths, seeds)
        ]
        free_s, _ = generate(llm, params)
        bound.append(sum(lengths) / bound_s)
        free.append(sum(lengths) / free_s)
    costs = {
        "tokens_per_cpu_s": statistics.median(bound),
        "without_per_cpu_s": statistics.median(free),
        "slower": statistics.median(1 - one / other for one, other in zip(bound, free)),
        "tokens": sum(map(len, answers)),
    }
    return costs, answers


def measure(model: str) -> dict:
    """The record."""
    rows = ROWS
    llm = LLM(model=model, max_num_seqs=rows)
    structures = llm.engine.structures
    generate(llm, [SamplingParams(max_tokens=TOKENS)] * rows)  # memory and threads are there now
    engine, masks = {}, {}
    for name, wish in WISHES.items():
        engine[name], texts = engine_costs(llm, wish, rows)
        masks[name] = mask_costs(structures, wish, texts)
    return {
        "fingerprint": fingerprint(),
        "model": model,
        "rows": rows,
        "max_tokens": TOKENS,
        "vocabulary": len(structures.vocabulary),
        "masks": masks,
        "engine": engine,
    }


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit code."""
    check_writable(args.out)
    record = measure(str(args.model))
    for name, masks in record["masks"].items():
        engine = record["engine"][name]
        print(
            f"{name:<12} {engine['tokens_per_cpu_s']:6.0f} tokens per CPU second, "
            f"{100 * engine['slower']:.0f} % fewer than without; a mask {masks['a_token_us']:.1f} "
            f"us on average, {masks['new_state_us']:.0f} us in a new state, "
            f"{masks['every_token_us']:.0f} us by trying every token"
        )
    write_json(args.out / "structured_speed.json", record)
    print(args.out / "structured_speed.json")
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    description = " ".join(__doc__.split("\n\n")[0].split())
    parser = OneLineParser(
        prog="python -m reference.bench.structured_speed", description=description
    )
    parser.add_argument("--model", default="models/tiny", help="folder or hub name of a checkpoint")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the record")
    args = parser.parse_args(argv)
    args.model = place_of(args.model)
    return run_command("structured_speed", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
