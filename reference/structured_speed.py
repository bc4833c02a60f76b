"""What structured outputs cost: masks of the embedded model's vocabulary, and the engine's tokens a
second with a JSON schema on every row, beside the same engine without.

    python -m reference.structured_speed > results/cpu/l22_structured.json

Times are CPU seconds of this process, the median of several rounds.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from lessons.l22_serving.grammar import naive
from lessons.toolbox.measure.device import fingerprint
from reference import LLM, SamplingParams, StructuredOutputsParams
from reference.structured import Structures

ROWS, TOKENS, ROUNDS = 32, 64, 3
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


def engine_costs(llm: LLM, wish) -> tuple[float, list[list[int]]]:
    """Tokens a CPU second of ROWS rows that all have this wish, None for no structure; and the last
    round's answers.
    """
    prompts, rates = [f"def f{row}(x):\n" for row in range(ROWS)], []
    for seed in range(ROUNDS):
        params = [
            SamplingParams(max_tokens=TOKENS, seed=seed * ROWS + row, structured_outputs=wish)
            for row in range(ROWS)
        ]
        seconds, outputs = cpu_s(llm.generate, prompts, params, None, False)
        answers = [output.outputs[0].token_ids for output in outputs]
        rates.append(sum(map(len, answers)) / seconds)
    return statistics.median(rates), answers


def main() -> None:
    """Print the record."""
    llm = LLM(model="models/tiny", max_num_seqs=ROWS)
    structures = llm.engine.structures
    speed, masks = {"none": engine_costs(llm, None)[0]}, {}
    for name, wish in WISHES.items():
        speed[name], texts = engine_costs(llm, wish)
        masks[name] = mask_costs(structures, wish, texts)
    record = {
        "fingerprint": fingerprint(),
        "rows": ROWS,
        "tokens": TOKENS,
        "vocabulary": len(structures.vocabulary),
        "masks": masks,
        "engine_tokens_per_cpu_s": speed,
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
