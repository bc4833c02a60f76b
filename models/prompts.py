"""Write models/prompts.json: the 32 requests that every rung of the ladder serves.

    python -m models.prompts

Real code prefixes from the held-out modules, 16 to 384 tokens long, asking for 8 to 96 new tokens,
drawn once with a fixed seed and committed, so that every machine and every Python version serves
the same requests.
"""

import json
import math
import random
import sysconfig
from pathlib import Path

from lessons.toolbox.model.checkpoint import load_tokenizer
from lessons.toolbox.model.corpus import HELD_OUT

HERE = Path(__file__).resolve().parent
COUNT, SHORTEST, LONGEST = 32, 16, 384


def requests() -> list[dict]:
    """Prompts cut at line ends near log-uniform lengths; output lengths log-uniform too: many
    short, few long, as in traffic.
    """
    rng, tokenizer = random.Random(2), load_tokenizer("models/tiny")
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for i in range(COUNT):
        module = HELD_OUT[i % len(HELD_OUT)]
        lines = (root / f"{module}.py").read_text(encoding="utf-8").splitlines(keepends=True)
        starts = [
            n for n, line in enumerate(lines) if line.startswith(("def ", "class ", "    def "))
        ]
        start = rng.choice(starts[:-3])
        length = round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST))))
        text = ""
        for line in lines[start:]:
            ids = tokenizer(text + line, add_special_tokens=False)["input_ids"]
            if text and len(ids) > length:
                break
            text += line
        found.append(
            {
                "module": module,
                "prompt": text.rstrip("\n"),
                "max_new_tokens": round(math.exp(rng.uniform(math.log(8), math.log(96)))),
            }
        )
    return found


if __name__ == "__main__":
    (HERE / "prompts.json").write_text(json.dumps(requests(), indent=1) + "\n")
    print(f"{COUNT} requests written to models/prompts.json")
