"""The run that the film shows: eight requests, four places, a pool of 27 blocks.

What the engine decides does not depend on the clock here, and every answer has the length that was
asked for. So each run gives the same record.
"""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from reference.trace.recorder import Trace, read_trace, traced

RECORD = Path(__file__).with_name("run.json")
ENGINE = dict(
    num_gpu_blocks_override=27,
    block_size=8,
    max_num_seqs=4,
    max_num_batched_tokens=24,
    max_model_len=128,
    enable_prefix_caching=True,
)
SHARED = (
    '"""Sorting, for people who like to see how it is done."""\nimport random\nimport time\n\n\n'
)
LONG = "class Stack:\n" + "".join(
    f"    def method_{n}(self, value):\n        return value + {n}\n\n" for n in range(4)
)
# (the step before which it arrives, prompt, tokens of the answer)
REQUESTS = [
    (0, SHARED + "def quicksort(items):", 30),
    (2, LONG, 24),
    (6, SHARED + "def mergesort(items):", 36),
    (8, "def fibonacci(n):", 40),
    (14, SHARED + "def heapsort(items):", 28),
    (18, "import os", 34),
    (30, SHARED + "def bubblesort(items):", 24),
    (36, LONG + "    def peek(self):", 18),
]


def run_traced(path: Path) -> None:
    """Run the engine, and write its trace."""
    from reference import LLM, SamplingParams

    engine = LLM("models/tiny", **ENGINE).engine
    waiting, step = list(enumerate(REQUESTS)), 0
    with traced(engine, path):
        while waiting or engine.has_unfinished_requests:
            while waiting and waiting[0][1][0] <= step:
                number, (_, prompt, count) = waiting.pop(0)
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                engine.add_request(str(number), prompt, params)
            engine.advance()
            step += 1


def record() -> dict:
    """Run the engine; returns what the film needs of its trace, without times."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        run_traced(path)
        return without_times(read_trace(path))


def without_times(trace: Trace) -> dict:
    """Of a trace of this run what does not depend on the clock."""
    from lessons.toolbox.model.arguments import one_line

    born = [e for e in trace.events if e["name"] == "answer" and e["ph"] == "b"]
    prompts = {e["id"]: REQUESTS[int(e["args"]["request"])][1] for e in born}
    requests = {
        str(e["id"]): dict(
            prompt=one_line(prompts[e["id"]].strip().splitlines()[-1]),
            prompt_tokens=e["args"]["prompt_tokens"],
            max_tokens=e["args"]["max_tokens"],
        )
        for e in born
    }
    kept = ("chunks", "waiting", "preempted", "tables", "remembered", "forgotten")
    steps = [{name: one[name] for name in kept} for one in trace.steps]
    about = {name: trace.about[name] for name in ("num_blocks", "block_size")}
    about["max_num_batched_tokens"] = ENGINE["max_num_batched_tokens"]
    return dict(about=about, requests=requests, steps=steps)


def written(found: dict) -> str:
    """The record as it is committed: a line for each step."""
    lines = [json.dumps(step, separators=(",", ":")) for step in found["steps"]]
    head = {"about": found["about"], "requests": found["requests"]}
    text = json.dumps(head, indent=1)[:-2]
    return text + ',\n "steps": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


# ---------------------------------------------------------------- what a step shows


@dataclass
class Frame:
    """What is seen after a step. By the rows of the engine, which are the film's requests."""

    computed: dict[int, int]  # tokens that are in the cache
    phase: dict[int, str]  # "", "waits", "prompt", "answer", "done"
    batch: list[int]  # the row of each token that ran in this step
    owners: list[tuple[int, ...]]  # of each block
    rows: list[int]  # of each block: how many of its places hold a token
    known: set[int]  # blocks that the prefix cache remembers
    notes: list[str] = field(default_factory=list)


def frames(found: dict) -> list[Frame]:
    """The record as pictures, one a step, and one of the end."""
    about, requests = found["about"], {int(row): r for row, r in found["requests"].items()}
    size, count = about["block_size"], about["num_blocks"]
    computed, tables, known, rows, films = {}, {}, set(), [0] * count, []
    seen: set[int] = set()
    last = {row: max(_ends(found["steps"], row)) for row in requests}
    for number, step in enumerate(found["steps"]):
        notes = [
            f"request {row} gives its blocks back: the pool is full" for row in step["preempted"]
        ]
        computed |= dict.fromkeys(step["preempted"], 0)
        known = (known | set(step["remembered"])) - set(step["forgotten"])
        tables |= {int(row): table for row, table in step["tables"].items()}
        tables = {row: table for row, table in tables.items() if table}
        for row, first, tokens in step["chunks"]:
            notes += _notes(row, first, tokens, requests[row], row not in seen)
            computed[row] = first + tokens
            seen.add(row)
            for at, block in enumerate(tables[row]):
                rows[block] = max(0, min(size, computed[row] - at * size))
        owners = [tuple(sorted(r for r, t in tables.items() if b in t)) for b in range(count)]
        running = {row for row, _, _ in step["chunks"]}
        phase = {}
        for row, request in requests.items():
            if number > last[row]:
                phase[row] = "done"
            elif row in step["waiting"]:
                phase[row] = "waits"
            elif row in running:
                within = computed[row] < request["prompt_tokens"]
                phase[row] = "prompt" if within else "answer"
            else:
                phase[row] = ""
        batch = [row for row, _, tokens in step["chunks"] for _ in range(tokens)]
        films.append(Frame(dict(computed), phase, batch, owners, list(rows), set(known), notes))
    done = dict.fromkeys(requests, "done")
    films.append(Frame(dict(computed), done, [], [()] * count, list(rows), set(known)))
    return films


def _ends(steps: list[dict], row: int) -> list[int]:
    """The steps in which a row ran."""
    return [n for n, step in enumerate(steps) for chunk in step["chunks"] if chunk[0] == row]


def _notes(row: int, first: int, tokens: int, request: dict, is_new: bool) -> list[str]:
    """What is worth saying of a row's part of a step."""
    if is_new and first:
        return [
            f"request {row} finds {first} of its {request['prompt_tokens']} prompt tokens cached"
        ]
    if is_new and tokens < request["prompt_tokens"]:
        return [f"request {row}: its prompt runs in chunks of what the batch has left"]
    return []
