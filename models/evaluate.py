"""Measure the embedded models on held-out modules and write models/figures.json and
models/README.md.

    python -m models.evaluate

Every figure on the page is measured by this command or recorded by the training run.
"""

import json
import math

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from lessons.toolbox.model.checkpoint import load_tokenizer
from lessons.toolbox.model.corpus import END, HELD_OUT, LIBRARIES, corpus, token_stream
from models.answers import (
    goes_round,
    greedy_answers,
    parses,
    parses_so_far,
    real_answers,
    repeats_a_line,
    sampled_functions,
    share,
)
from models.tokenizer import FOLDERS, HERE, VOCAB_SIZE
from models.train import SHAPES, held_out_loss


@torch.no_grad()
def greedy_agreement(tiny, draft, stream: np.ndarray, device: str, length: int = 512) -> float:
    """Share of held-out positions at which draft and target have the same likeliest next token."""
    rows = torch.from_numpy(
        np.stack([stream[i : i + length] for i in range(0, len(stream) - length, length)])
    ).to(device)
    same = [
        (tiny(input_ids=r).logits.argmax(-1) == draft(input_ids=r).logits.argmax(-1)).float().mean()
        for r in rows.split(4)
    ]
    return float(torch.stack(same).mean())


def evaluate(samples: int = 60) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(FOLDERS["tiny"])
    texts = corpus()[1]
    stream = token_stream(texts)
    bytes_per_token = sum(len(t.encode()) for t in texts) / len(stream)
    loaded, figures = {}, {}
    for name, folder in FOLDERS.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        loaded[name] = model
        loss = held_out_loss(model, stream, device)
        figures[name] = {
            "parameters": model.num_parameters(),
            "weight_bytes": (folder / "model.safetensors").stat().st_size,
            "held_out_loss_nats": round(loss, 4),
            "held_out_bits_per_byte": round(loss / math.log(2) / bytes_per_token, 4),
            **json.loads((folder / "training.json").read_text()),
        }
    functions = sampled_functions(loaded["tiny"], tokenizer, samples, device)
    figures["tiny"]["sampled_functions"] = samples
    figures["tiny"]["sampled_functions_that_parse"] = share(parses, functions)
    greedy = greedy_answers(loaded["tiny"], tokenizer, device)
    figures["tiny"]["greedy_answers_that_parse"] = share(parses_so_far, greedy)
    figures["tiny"]["greedy_answers_that_repeat_a_line"] = share(repeats_a_line, greedy)
    figures["tiny"]["greedy_answers_that_go_round"] = share(goes_round, greedy)
    figures["draft"]["greedy_agreement_with_tiny"] = round(
        greedy_agreement(loaded["tiny"], loaded["draft"], stream, device), 4
    )
    real = real_answers(tokenizer, texts)
    figures["held_out"] = {
        "modules": list(HELD_OUT),
        "answers_that_repeat_a_line": share(repeats_a_line, real),
        "answers_that_go_round": share(goes_round, real),
        "tokens": len(stream),
        "bytes_per_token": round(bytes_per_token, 3),
    }
    figures["samples"] = functions[:3]
    (HERE / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    (HERE / "README.md").write_text(model_card(figures))
    print(model_card(figures))


def table_of(figures: dict) -> str:
    """The table of both models, as Markdown: shapes, then what was measured."""
    rows = [("", "`models/tiny`", "`models/tiny-draft`"), ("---", "---", "---")]
    for name in SHAPES["tiny"]:
        rows.append((name.replace("_", " "), str(SHAPES["tiny"][name]), str(SHAPES["draft"][name])))
    for label, key, show in MEASURED:
        both = (figures["tiny"], figures["draft"])
        rows.append((label, *(show(figure[key]) if key in figure else "" for figure in both)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# label, key of figures.json, how it is written
MEASURED = (
    ("parameters", "parameters", lambda n: f"{n / 1e6:.2f} M"),
    ("weights (bfloat16)", "weight_bytes", lambda n: f"{n / 1e6:.1f} MB"),
    ("trained on", "device", str),
    ("minutes", "minutes", str),
    ("tokens seen", "tokens_seen", lambda n: f"{n / 1e6:.1f} M"),
    ("held-out loss (nats per token)", "held_out_loss_nats", str),
    ("held-out bits per byte", "held_out_bits_per_byte", str),
    (
        "sampled functions that `ast.parse` accepts",
        "sampled_functions_that_parse",
        lambda share: f"{share:.0%}",
    ),
    (
        "greedy answers of 200 tokens that are Python",
        "greedy_answers_that_parse",
        lambda share: f"{share:.0%}",
    ),
    (
        "greedy answers that repeat a line three times",
        "greedy_answers_that_repeat_a_line",
        lambda share: f"{share:.0%}",
    ),
    (
        "greedy answers that repeat a piece of a line four times in a row",
        "greedy_answers_that_go_round",
        lambda share: f"{share:.0%}",
    ),
    (
        "greedy agreement with the target, held-out code",
        "greedy_agreement_with_tiny",
        lambda share: f"{share:.1%}",
    ),
)


def training_text(tiny: dict) -> str:
    """What the weights that are here were trained on, from their training.json."""
    tokens, own = tiny["training_tokens"] / 1e6, tiny["own_tokens"] / 1e6
    return f"""{tokens:.1f} M tokens: {own:.1f} M of the standard library of
  Python {tiny["python_source"]} (PSF licence), tests included, tables of encodings and the like
  left out; the rest of the libraries named below."""


def phases_text(tiny: dict) -> str:
    """Windows of how many tokens it read, and of which text."""
    begins = [0.0, *(until for until, _, _ in tiny["phases"])]
    owns = [f"{own:.0%}" for _, own, _ in tiny["phases"]]
    lengths = [str(length) for _, _, length in tiny["phases"]]
    return f"""Tokens in a window: {steps_text(begins, lengths)}. Windows of
  the standard library alone: {steps_text(begins, owns)}; the others are of all the text"""


def steps_text(begins: list[float], values: list[str]) -> str:
    """Values, and from which part of the training on."""
    first, *later = [
        (begin, value)
        for begin, value, before in zip(begins, values, [None, *values])
        if value != before
    ]
    return ", ".join([first[1], *(f"{value} from {begin:.0%} on" for begin, value in later)])


def loops_text(figures: dict) -> str:
    """What was done about repeated lines, and what is left of them."""
    tiny, held = figures["tiny"], figures["held_out"]
    return f"""{tiny["loop_updates"]} updates behind the training ({tiny["loop_minutes"]} minutes)
  taught it that the third copy of a line is less likely than the second (`models/loops.py`). A
  model of this size still repeats itself: {tiny["greedy_answers_that_repeat_a_line"]:.0%} of its
  greedy answers repeat a line three times, where {held["answers_that_repeat_a_line"]:.0%} of what
  the modules' authors wrote behind the same prompts do"""


def acceptance_text(draft: dict) -> str:
    """What the draft learned behind its distillation."""
    return f"""Then {draft["acceptance_tokens"] / 1e6:.1f} M tokens of the standard library
  ({draft["acceptance_minutes"]} minutes) taught it what speculation lives on: the probability that
  a token that it drafts is accepted, Σ min(p, q), became larger (`acceptance_loss` in
  `models/steps.py`)."""


def model_card(figures: dict) -> str:
    """models/README.md, every number in it taken from `figures`."""
    samples = "\n\n".join(f"```python\n{s}\n```" for s in figures["samples"])
    held, tiny = figures["held_out"], figures["tiny"]
    return f"""# The embedded models

Two Llama models, small enough to live in the repository and to run on any laptop, and real: trained
on the source of Python's standard library and of the libraries that the course installs, so that
they complete Python code. They are ordinary Hugging Face checkpoints:
`AutoModelForCausalLM.from_pretrained("models/tiny")` works, and so does our loader.
`python -m models.evaluate` writes this page and measures every figure on it.

{table_of(figures)}

- **Data**: {training_text(tiny)}
  Held out, with their tests ({held["tokens"]} tokens, {held["bytes_per_token"]} bytes each):
  {", ".join(f"`{m}`" for m in held["modules"])}.
- **Tokenizer**: byte-level BPE with {VOCAB_SIZE} entries. A newline and the indentation after it
  can be one token, and digits stay single. `{END}` (id 0) begins every document and ends
  every generation. The tokenizer puts it before a text by its own rule, in tokenizer.json, so
  transformers, vLLM and this course's engine make the same prompt of the same text.
- **Target**: next-token cross-entropy, Muon for the hidden matrices and AdamW for the rest. GQA,
  RoPE, SwiGLU, RMSNorm, tied embeddings, head dimension 64. {phases_text(tiny)}.
- **Loops**: {loops_text(figures)}.
- **Draft**: the same recipe, but trained on the target's probabilities (distillation) instead of on
  the text. {acceptance_text(figures["draft"])}
- **Sampling**: temperature 0.8, top-p 0.95, {tiny["sampled_functions"]} functions of at most
  160 tokens. One that this limit cuts off counts as a failure unless it parses.
- **Greedy answers**: 200 tokens behind each of the 32 prompts of the ladder, which are held-out
  code. One is Python if it parses up to its last whole line, or would if it went on. Only lines of
  12 characters or more count as repeated. What the modules' authors wrote behind the same prompts
  repeats a line in {held["answers_that_repeat_a_line"]:.0%} of them, and a piece of one in
  {held["answers_that_go_round"]:.0%}.

How far the training went is said by the tokens seen, not by the minutes, because the machine may
have been busy with other work too.

Train them again: `python -m models.train tokenizer`, then `tiny --tokens 150` (millions), then
`python -m models.loops`, then `python -m models.train draft --tokens 150` and
`acceptance --tokens 16`, and `python -m models.evaluate`.
`python -m models.retrain` does all of it and the heads, in runs of a few minutes. That recipe also
reads the libraries that the course installs
({", ".join(f"{name}, {to}" for name, to in LIBRARIES.items())}), without what they copied from
held-out modules. More tokens give better models of the same shape. The heads of lesson 17
([HEADS.md](HEADS.md)), the adapters of lesson 21 ([ADAPTERS.md](ADAPTERS.md)) and the eyes of
`models/tiny-vision` ([VISION.md](VISION.md)) belong to these weights and have to be trained again
as well, and what is recorded under `results/` was recorded with them.
`models/tiny-hybrid` ([HYBRID.md](HYBRID.md)) has only the tokenizer from here:
`python -m models.train_hybrid hybrid` trains it.

## Samples

The first three of them, unselected. The prompt is the first line of each.

{samples}
"""


if __name__ == "__main__":
    evaluate()
