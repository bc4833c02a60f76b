"""Measure models/tiny-hybrid beside a control of the same size and models/tiny, and write
models/HYBRID.md.

    python -m models.hybrid_card                    # minutes; figures go to models/hybrid.json
    python -m models.hybrid_card attention          # of some models alone; the others' stay
    python -m models.hybrid_card --write            # the page alone, from hybrid.json

The controls are in build/ after `python -m models.train_hybrid attention`.
"""

import argparse
import json
import math
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.corpus import corpus
from models.hybrid_measures import (
    BEGINNING,
    COPIED,
    DIGITS,
    FADING,
    NEW_TOKENS,
    SEQUENCES,
    TRIALS,
    copied,
    digits_read,
    kept_shares,
    sequence_bytes,
    stream,
    tokens_a_second,
)
from models.networks import MIXES
from models.text import PHASES
from models.tokenizer import HERE
from models.train import held_out_loss
from models.train_hybrid import CHUNK, folder_of

FIGURES, PAGE = HERE / "hybrid.json", HERE / "HYBRID.md"
NAMES = {  # of the page's columns
    "hybrid": "`models/tiny-hybrid`",
    "attention": "control: attention in all layers",
    "states": "control: states alone",
    "tiny": "`models/tiny`",
    "slow": "as the first, decays begin slowly",  # its curve alone
}
SERVED = ("hybrid", "tiny")  # our engine takes no Qwen3-Next without a state, or with states alone
DISTANCES = (32, 128, 512, 1536)  # tokens between the two copies
WATCHED = 16384  # held-out tokens that a training looks at on its way
CONTEXTS = (512, 4096, 32768)
PROMPTS = (64, 1536)  # tokens that are there before an answer


# ---------------------------------------------------------------- the record


def measured(name: str, text: np.ndarray) -> dict:
    """Everything of one model."""
    folder = folder_of(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    found = {"parameters": model.num_parameters(), "layers": model.config.num_hidden_layers}
    found |= {"weight_bytes": (folder / "model.safetensors").stat().st_size}
    found |= {key: facts[key] for key in ("tokens_seen", "steps", "minutes", "device")}
    found["curve"] = facts.get("curve", [])
    found["held_out_loss_nats"] = round(held_out_loss(model, text, "cpu"), 4)
    found["copies"] = {str(d): copied(model, text, d) for d in DISTANCES}
    found["digits"] = {str(d): digits_read(model, text, d) for d in DISTANCES}
    return found


def measure(names: list[str]) -> None:
    """Measure these models, and write what hybrid.json holds of them; of others it stays."""
    torch.set_num_threads(1)
    text, texts = stream(), corpus()[1]
    figures = {"models": {}, "sequence_bytes": {}, "tokens_a_second": {}}
    if FIGURES.exists():
        figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    figures["bytes_per_token"] = round(sum(len(t.encode()) for t in texts) / len(text), 4)
    for name in names:
        figures["models"][name] = measured(name, text)
        print(name, figures["models"][name], flush=True)
        if name in SERVED:
            folder = str(folder_of(name))
            figures["sequence_bytes"][name] = {str(n): sequence_bytes(folder, n) for n in CONTEXTS}
            found = {str(n): tokens_a_second(folder, n) for n in PROMPTS}
            figures["tokens_a_second"][name] = found
            print(found, flush=True)
        keep(figures)
    if "hybrid" in names:
        config = load_config(str(folder_of("hybrid")))
        a_layer = 2 * config.num_key_value_heads * config.head_dim * 2  # the one that attends
        every = len(MIXES["attention"]) * a_layer
        figures["sequence_bytes"]["attention"] = {str(n): every * n for n in CONTEXTS}
        figures["kept_shares"] = kept_shares(folder_of("hybrid"), text)
        keep(figures)


def keep(figures: dict) -> None:
    """Write hybrid.json, models in the order of the page."""
    for of_models in ("models", "sequence_bytes", "tokens_a_second"):
        held = figures[of_models]
        figures[of_models] = {name: held[name] for name in NAMES if name in held}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- the page


def table(head: list[str], rows: list[list[str]]) -> str:
    """As Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def of_models(figures: dict, rows: dict[str, Callable[[dict], str]]) -> str:
    """A table with a column for each model. rows: {what a row has: how it is read}."""
    models = figures["models"].values()
    head = ["", *(NAMES[name] for name in figures["models"])]
    return table(head, [[what, *map(read, models)] for what, read in rows.items()])


def facts(figures: dict) -> str:
    """What each model is, and its loss."""
    bits = math.log(2) * figures["bytes_per_token"]
    rows = {
        "parameters": lambda m: f"{m['parameters'] / 1e6:.2f} M",
        "layers": lambda m: str(m["layers"]),
        "weights (bfloat16)": lambda m: f"{m['weight_bytes'] / 1e6:.1f} MB",
        "tokens seen": lambda m: f"{m['tokens_seen'] / 1e6:.1f} M",
        "steps": lambda m: str(m["steps"]),
        "minutes": lambda m: str(m["minutes"]),
        "held-out loss (nats per token)": lambda m: f"{m['held_out_loss_nats']:.3f}",
        "held-out bits per byte": lambda m: f"{m['held_out_loss_nats'] / bits:.3f}",
    }
    return of_models(figures, rows)


def known(figures: dict) -> str:
    """What each model still knows."""
    rows = {}
    for d in map(str, DISTANCES):
        rows[f"copy after {d} tokens"] = lambda m, d=d: f"{m['copies'][d]['right']:.0%}"
    for d in map(str, DISTANCES):
        rows[f"its loss, {d} tokens"] = lambda m, d=d: f"{m['copies'][d]['loss']:.2f}"
    for d in map(str, DISTANCES):
        rows[f"digits after {d} tokens"] = lambda m, d=d: f"{m['digits'][d]:.0%}"
    return of_models(figures, rows)


def on_the_way(figures: dict) -> str:
    """The loss of each training after as many tokens."""
    curves = {n: dict(m["curve"]) for n, m in figures["models"].items() if m["curve"]}
    curves["slow"] = dict(figures["slow_curve"])
    rows = [
        [f"{seen / 1e6:.1f} M", *(place(curve, seen) for curve in curves.values())]
        for seen in list(curves["hybrid"])[1:]  # the first one is after ten steps
    ]
    return table(["tokens seen", *(NAMES[name] for name in curves)], rows)


def place(curve: dict[int, float], seen: int) -> str:
    """A loss, or nothing where a training was ended earlier."""
    return f"{curve[seen]:.2f}" if seen in curve else ""


def fading(figures: dict) -> str:
    """What stays of a state after a token, a row for each layer."""
    shares = figures["kept_shares"]
    rows = [[str(layer), *(f"{each:.0%}" for each in row)] for layer, row in enumerate(shares)]
    return table(["layer", *(f"head {head}" for head in range(len(shares[0])))], rows)


def kept(figures: dict) -> str:
    """Bytes of a sequence."""
    rows = [
        [NAMES[name], *(f"{sizes[str(context)] / 1e6:.2f} MB" for context in CONTEXTS)]
        for name, sizes in figures["sequence_bytes"].items()
    ]
    return table(["tokens", *(f"{context:,}" for context in CONTEXTS)], rows)


def rates(figures: dict) -> str:
    """Tokens a second."""
    rows = [
        [NAMES[name], *(f"{found[str(tokens)]:.0f}" for tokens in PROMPTS)]
        for name, found in figures["tokens_a_second"].items()
    ]
    return table(
        ["context before the answers", *(f"{tokens:,} tokens" for tokens in PROMPTS)], rows
    )


def comparison(figures: dict) -> str:
    """What may be compared, and how the models were trained."""
    hybrid, tiny = figures["models"]["hybrid"], figures["models"]["tiny"]
    tokens = hybrid["tokens_seen"]
    return f"""- **What it may be compared with.** A control has the same width, MLPs, text, order
  of batches, optimizers and number of tokens ({tokens / 1e6:.1f} M). Only its layers differ.
  `models/tiny` is
  larger, has seen {tiny["tokens_seen"] / tokens:.0f} times as many tokens and has learned to leave
  its loops. So its column says what a longer training gives, and nothing about kinds of layers.
  Each was trained once, with one seed: a few hundredths of a nat say nothing.
- **Text and recipe**: those of `models/tiny` ([README.md](README.md)), with 4096 tokens a step
  instead of 8192, because a short training needs many steps more than large ones.
- **Training**: {hybrid["device"]}, one thread, transformers' own layers in chunks of {CHUNK}
  tokens. The machine was busy with other work, so tokens say how far a training went, not minutes.
  Train again: `python -m models.train_hybrid hybrid --tokens 8`, then `attention`."""


def card(figures: dict) -> str:
    """models/HYBRID.md, every number in it from hybrid.json."""
    return f"""# A small hybrid: three layers with a state, one with attention

`models/tiny-hybrid` is a Qwen3-Next of four layers: Gated DeltaNet in the first three, gated
attention in the last, dense MLPs (lesson 27). It is an ordinary Hugging Face checkpoint, with the
tokenizer of `models/tiny`. `python -m models.hybrid_card` measures every figure on this page, from
`models/hybrid.json`.

{facts(figures)}

{comparison(figures)}

## On the way

{on_the_way(figures)}

Loss on the first {WATCHED:,} held-out tokens. All have the same schedule, so rows may be compared.
The last column's training was ended before its last row. Of `models/tiny` no such curve was kept.

## What each still knows

{known(figures)}

- **Copies**: {COPIED} random tokens, then held-out code, then the same tokens again. Share of its
  last {COPIED - BEGINNING} tokens that the model finds likeliest, and their loss. A model that
  knows nothing and says so loses {math.log(4096):.1f} nats.
- **Digits**: `SECRET_KEY =` and {DIGITS} digits, then held-out code, then the name again. Chance is
  10 %.
- **The hybrid copies better than its control**, although their losses are nearly equal. A likely
  reason: to find what followed a token the last time, a key has to know the token before it. A
  convolution mixes it in, and a model of attention alone needs a layer for that.
- {TRIALS} trials of each, the same ones for all models. Windows longer than 512 tokens were the
  last {1 - PHASES[-2].until:.0%} of a training, so the longest distance was hardly practised.

## How fast its states fade

{fading(figures)}

What decay leaves of a state after one token, the median of {FADING} held-out tokens. **Most heads
forget everything at each token.** transformers begins with decays like that, and this training was
too short to change them: only two heads of the last of these layers remember for several tokens. So
here most states do no more than the convolution, and what the model knows from far away is its
attention layer's. `python -m models.train_hybrid slow` begins with the slow decays of the paper's
authors.

## Bytes of a sequence

{kept(figures)}

K and V in 16 bits, states in 32. The models were trained for 2048 tokens; longer contexts are only
counted.

## Tokens a second in our engine

{rates(figures)}

{SEQUENCES} sequences side by side, {NEW_TOKENS} tokens each, of one thread's CPU time, prompts not
counted. Our engine's states run in PyTorch on a CPU, so this is no figure of the kernels. The two
models differ in size: compare how a row changes with the context.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; none: all that are there")
    parser.add_argument("--write", action="store_true", help="the page alone, from hybrid.json")
    args = parser.parse_args()
    if not args.write:
        there = [name for name in NAMES if (folder_of(name) / "training.json").exists()]
        measure(args.names or there)
    PAGE.write_text(card(json.loads(FIGURES.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
