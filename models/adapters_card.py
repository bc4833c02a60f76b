"""Measure the three adapters of lesson 21 on held-out text, and write models/ADAPTERS.md.

python -m models.adapters_card            # a few minutes; figures go to adapters.json
python -m models.adapters_card --write    # the page alone, from adapters.json
"""

import argparse
import json

import torch
import torch.nn.functional as F

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import generate, whole_sequence
from lessons.l21_multi_lora.layers import merged
from lessons.l21_multi_lora.peft.adapters import Adapter, load_adapter
from lessons.toolbox.model.checkpoint import load_tokenizer
from models.adapter_text import STYLES, examples
from models.tokenizer import HERE
from models.train_adapters import ALPHA, LEARNING_RATE, RANK, ROWS, TARGETS, WINDOW, folder_of

FIGURES = HERE / "adapters.json"
HELD_OUT_EXAMPLES = 24  # of each style, for the loss
ANSWERS, NEW_TOKENS = 8, 12  # of each style, for what an answer begins with
# What an answer looks like in a style, behind the first line of an example.
LOOKS = {
    "sql": lambda text: text.lstrip().startswith("SELECT"),
    "docstring": lambda text: text.lstrip().startswith('"""'),
    "tests": lambda text: "assert " in text and "self." not in text,
}
LOOK_SAID = {
    "sql": "begins with SELECT",
    "docstring": 'begins with `"""`',
    "tests": "has a bare assert and no self",
}


@torch.inference_mode()
def loss_of(model: Decoder, tokenizer, texts: list[str]) -> float:
    """Nats per token, behind an end-of-text token as in training."""
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        hidden = model(ids[:-1], whole_sequence(model, len(ids) - 1))
        total += float(F.cross_entropy(model.logits(hidden), ids[1:], reduction="sum"))
        count += len(ids) - 1
    return total / count


def looks_like(model: Decoder, tokenizer, style: str, texts: list[str]) -> int:
    """Of greedy answers behind the first lines of examples, how many have the style's look."""
    prompts = [tokenizer(text.splitlines()[0])["input_ids"] for text in texts]
    answers = generate(model, prompts, NEW_TOKENS)
    return sum(LOOKS[style](tokenizer.decode(answer)) for answer in answers)


def measure() -> dict:
    """{adapter: {style: loss and looks}}, "base" first."""
    model, tokenizer = Decoder.from_pretrained("models/tiny"), load_tokenizer("models/tiny")
    held_out = {style: examples(style)[1] for style in STYLES}
    adapters: dict[str, Adapter | None] = {"base": None}
    adapters |= {style: load_adapter(folder_of(style)) for style in STYLES}
    found = {}
    for name, adapter in adapters.items():
        one = model if adapter is None else merged(model, adapter)
        found[name] = {
            style: {
                "loss": round(loss_of(one, tokenizer, texts[:HELD_OUT_EXAMPLES]), 4),
                "looks": looks_like(one, tokenizer, style, texts[:ANSWERS]),
            }
            for style, texts in held_out.items()
        }
        print(name, found[name], flush=True)
    return {"examples": HELD_OUT_EXAMPLES, "answers": ANSWERS, "adapters": found}


def card(figures: dict) -> str:
    """models/ADAPTERS.md, every number in it from adapters.json, training.json or the files."""
    found, rows, losses = figures["adapters"], [], []
    for style in STYLES:
        folder = folder_of(style)
        facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        size = (folder / "adapter_model.safetensors").stat().st_size
        before, after = found["base"][style], found[style][style]
        rows.append(
            f"| `models/tiny-lora-{style}` | {size / 1e3:.0f} kB | {facts['examples']} "
            f"| {facts['tokens_seen'] / 1e3:.0f} k | {before['loss']:.3f} → {after['loss']:.3f} "
            f"| {LOOK_SAID[style]} | {before['looks']} → {after['looks']} |"
        )
    for name, of_styles in found.items():
        cells = " | ".join(f"{of_styles[style]['loss']:.3f}" for style in STYLES)
        losses.append(f"| {name} | {cells} |")
    columns = ["folder", "size (bfloat16)", "examples", "tokens seen"]
    columns += ["held-out loss, base → adapter", "an answer in the style"]
    columns += [f"of {figures['answers']} answers, base → adapter"]
    return f"""# Adapters for the embedded model

Three LoRA adapters on `models/tiny` (lesson 21), as PEFT saves them: `PeftModel.from_pretrained`
reads them, and so does our loader. `python -m models.adapters_card` writes this page and measures
every figure on it.

| {" | ".join(columns)} |
| {" | ".join("---" for _ in columns)} |
{chr(10).join(rows)}

Held-out loss (nats per token) of every model on every style: each adapter is best at its own.

| model | {" | ".join(STYLES)} |
| --- | {" | ".join("---" for _ in STYLES)} |
{chr(10).join(losses)}

- **Text**: *sql* is made by `models/adapter_text.py` from a small grammar: a comment that asks, and
  the query. *docstring* is functions of Python's standard library (PSF licence) as their first line
  and their docstring. *tests* is methods of its unittest tests, rewritten as functions with bare
  asserts.
- **Held out**: {figures["examples"]} examples of each style. Those of sql are about tables that no
  training text names; the others come from the modules that the base model was not trained on
  either (models/README.md).
- **Answers**: greedy, {NEW_TOKENS} tokens behind the first line of an example.
- **Training**: rank {RANK}, alpha {ALPHA}, on {", ".join(f"`{target}`" for target in TARGETS)} of
  all layers; AdamW at {LEARNING_RATE:g}, {ROWS} windows of {WINDOW} tokens a step, seed
  {facts["seed"]}, on a CPU, PyTorch {facts["torch"]}. `python -m models.train_adapters` trains them
  again.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="measure nothing")
    if not parser.parse_args().write:
        FIGURES.write_text(json.dumps(measure(), indent=2) + "\n", encoding="utf-8")
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    (HERE / "ADAPTERS.md").write_text(card(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
