"""What structured outputs cost: masks of the embedded model's vocabulary, and the engine's tokens a
second with a JSON schema on every row, beside the same engine without.

    python -m reference.structured_speed > results/cpu/l22_structured.json

Times are CPU seconds of this process, the median of several rounds.
"""

import json
import statistics
import time
from collections.abc import Callable

from lessons.l22_serving.grammar import naive
from lessons.l22_serving.grammar.optimized import TokenMasks
from lessons.toolbox.measure.bench import fingerprint
from reference import LLM, SamplingParams, StructuredOutputsParams
from reference.structured import Structures

ROWS, TOKENS, ROUNDS = 32, 64, 3
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


def cpu_s(function: Callable) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def mask_costs(structures: Structures, texts: dict[str, list[list[int]]]) -> dict[str, dict]:
    """Microseconds of a mask along the answers `texts`, for each wish: by trying every token, by the
    trie in a new state, and on average along the texts, with masks that are kept.
    """
    found = {}
    for name, wish in WISHES.items():
        masks = TokenMasks(structures.compile(wish).matcher.automaton, structures.vocabulary)
        cold, warm, tried, places = [], 0.0, [], 0
        for tokens in texts[name]:
            state = masks.start
            for token in tokens:
                is_new = state not in masks.masks
                taken = cpu_s(lambda state=state: masks.mask(state))
                if is_new:
                    cold.append(taken)
                    every = structures.vocabulary.tokens
                    if len(tried) < 10:
                        tried.append(
                            cpu_s(lambda s=state: naive.token_mask(masks.matcher, s, every))
                        )
                warm, places = warm + taken, places + 1
                state = masks.advance(state, token) or state
        found[name] = {
            "compile_ms": 1e3 * cpu_s(lambda wish=wish: structures.compile(wish)),
            "every_token_us": 1e6 * statistics.median(tried),
            "new_state_us": 1e6 * statistics.median(cold),
            "a_token_us": 1e6 * warm / places,
            "new_states": len(cold),
            "places": places,
        }
    return found


def engine_costs(llm: LLM) -> tuple[dict[str, float], dict[str, list[list[int]]]]:
    """Tokens a CPU second of ROWS rows, without a structure and with each of WISHES; and the answers."""
    speed, texts = {}, {}
    prompts = [f"def f{row}(x):\n" for row in range(ROWS)]
    for name, wish in {"none": None, **WISHES}.items():
        rates = []
        for seed in range(ROUNDS):
            params = [
                SamplingParams(max_tokens=TOKENS, seed=seed * ROWS + row, structured_outputs=wish)
                for row in range(ROWS)
            ]
            outputs = []
            seconds = cpu_s(
                lambda params=params, outputs=outputs: outputs.extend(
                    llm.generate(prompts, params, use_tqdm=False)
                )
            )
            answers = [output.outputs[0].token_ids for output in outputs]
            rates.append(sum(map(len, answers)) / seconds)
        speed[name], texts[name] = statistics.median(rates), answers
    return speed, texts


def main() -> None:
    llm = LLM(model="models/tiny", max_num_seqs=ROWS)
    speed, texts = engine_costs(llm)
    structures = llm.engine.structures
    print(
        json.dumps(
            {
                "fingerprint": fingerprint(),
                "rows": ROWS,
                "tokens": TOKENS,
                "vocabulary": len(structures.vocabulary),
                "masks": mask_costs(structures, texts),
                "engine_tokens_per_cpu_s": speed,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
