"""Measure models/tiny-vision on held-out pictures, and write models/VISION.md.

python -m models.vision_card            # a minute; figures go to vision.json
python -m models.vision_card --write    # the page alone, from vision.json
"""

import argparse
import json
from itertools import islice

from models.tokenizer import HERE
from models.train_vision import BOTH, EYES, ROWS, SEED, WORDS
from models.vision_folder import FOLDER, QUESTIONS, VISION, prompt_of
from models.vision_pictures import COLOURS, FONTS, MOST_DIGITS, UNSEEN_FONT, pictures
from reference.engine.llm import LLM
from reference.engine.sampling_params import SamplingParams
from reference.vision.checkpoint import EYES as WEIGHTS

FIGURES = HERE / "vision.json"
HELD_OUT = 200  # pictures of each kind
HELD_OUT_SEED = 10_000  # the training's are SEED and SEED + 1
UNSEEN_QUESTION = "What colour is this, and which digits?"


def measure() -> dict:
    """Shares of answers that are right, of each kind of pictures."""
    llm = LLM(str(FOLDER), max_num_seqs=16, kv_cache_memory_bytes=50_000_000)
    kinds = {
        "the fonts of the training": (None, QUESTIONS[0]),
        f"a font that it never saw ({UNSEEN_FONT})": (UNSEEN_FONT, QUESTIONS[0]),
        "a question that it never saw": (None, UNSEEN_QUESTION),
    }
    found = {}
    for kind, (font, question) in kinds.items():
        drawn = list(islice(pictures(HELD_OUT_SEED, font), HELD_OUT))
        prompts = [
            {"prompt": prompt_of(question), "multi_modal_data": {"image": picture}}
            for picture, _ in drawn
        ]
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False
        )
        pairs = [(out.outputs[0].text, name) for out, (_, name) in zip(outputs, drawn)]
        found[kind] = {
            "whole": share(said == name for said, name in pairs),
            "colour": share(said.split("(")[0] == name.split("(")[0] for said, name in pairs),
        }
        for digits in range(MOST_DIGITS + 1):
            some = [pair for pair in pairs if sum(map(str.isdigit, pair[1])) == digits]
            found[kind][str(digits)] = share(said == name for said, name in some)
        print(kind, found[kind], flush=True)
    return {"pictures": HELD_OUT, "seed": HELD_OUT_SEED, "right": found}


def share(are_right) -> float:
    """Of some answers."""
    are_right = list(are_right)
    return round(sum(are_right) / len(are_right), 4)


def card(figures: dict) -> str:
    """models/VISION.md, every number in it from vision.json, training.json or the files."""
    facts = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    size = (FOLDER / WEIGHTS).stat().st_size
    rows = []
    for kind, right in figures["right"].items():
        names = ("whole", "colour", *map(str, range(MOST_DIGITS + 1)))
        cells = " | ".join(f"{right[name]:.1%}" for name in names)
        rows.append(f"| {kind} | {cells} |")
    counts = " | ".join(f"{n} digits" for n in range(MOST_DIGITS + 1))
    return f"""# A model that sees

`models/tiny-vision` is a vision transformer and a projector in front of `models/tiny`, whose
weights it shares. Asked about a picture, it says what it shows as a call: `red(4, 7)`, or `red()`
for a colour alone.
`python -m models.vision_card` writes this page and measures every figure on it.

| {figures["pictures"]} held-out pictures, greedy answers | all right | the colour | {counts} |
| --- | --- | --- | {" | ".join("---" for _ in range(MOST_DIGITS + 1))} |
{chr(10).join(rows)}

- **Pictures**: drawn by `models/vision_pictures.py`: a shade of {", ".join(COLOURS)}; up to
  {MOST_DIGITS} digits in cells from left to right, of three sizes, shifted by at most two pixels;
  {len(FONTS)} fonts of DejaVu. It can read nothing else: no photograph, no letter, no digit far
  from its cell.
- **Size**: {size / 1e6:.1f} MB in bfloat16. Tower: {VISION.num_hidden_layers} layers of
  {VISION.hidden_size}, patches of {VISION.patch_size} x {VISION.patch_size} of {VISION.image_size}
  x {VISION.image_size} pixels, so a picture takes {VISION.tokens_per_image} places of a prompt.
- **Prompt**: `{prompt_of(QUESTIONS[0])!r}`, which the chat template makes of a question. Questions
  of the training: {", ".join(QUESTIONS)} What is asked makes no difference to the answer.
- **Decoder**: `models/tiny`, frozen. It was trained on Python alone, and could not be talked into
  naming pictures by the usual order, tower first and then both through the decoder: the colours
  came, the digits did not. So the rows that make it say a name were learnt first, without pictures
  ({facts["words_seen"]} names, {WORDS[2]:g}), then eyes that give them ({facts["eyes_seen"]}
  pictures, {EYES[2]:g}, and {facts["rows_seen"]}, {ROWS[2]:g}), then both through the decoder
  ({facts["both_seen"]} pictures, {BOTH[2]:g}). The numbers behind the commas are AdamW's learning
  rates.
- **Training**: {facts["processor_minutes"]} minutes of one core ({facts["threads"]} thread), seed
  {SEED}, PyTorch {facts["torch"]}. `python -m models.train_vision` trains it again.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="measure nothing")
    if not parser.parse_args().write:
        FIGURES.write_text(json.dumps(measure(), indent=2) + "\n", encoding="utf-8")
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    (HERE / "VISION.md").write_text(card(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
