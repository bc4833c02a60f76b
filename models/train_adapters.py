"""Train the three adapters of lesson 21 on the embedded model, a few CPU minutes each.

    python -m models.train_adapters              # all three; or name some: sql docstring tests
    python -m models.adapters_card               # held-out figures -> ADAPTERS.md

The results are ordinary PEFT checkpoints: `PeftModel.from_pretrained(model,
"models/tiny-lora-sql")` works, and so does our loader. The base model does not change.
"""

import argparse
import json
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lessons.l21_multi_lora.peft.adapters import save_adapter
from lessons.toolbox.measure.device import device_name
from lessons.toolbox.model.corpus import token_stream
from models.adapter_text import STYLES, examples
from models.text import windows
from models.tokenizer import FOLDERS, HERE

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj")
STEPS, ROWS, WINDOW = 120, 4, 256
LEARNING_RATE = 4e-3
SEED = 0


def folder_of(style: str):
    return HERE / f"tiny-lora-{style}"


class LearningLinear(nn.Module):
    """A linear layer that stays as it is, and an adapter that learns. As in peft: A begins as an
    nn.Linear does, B with zeros, so training begins from the base model.
    """

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, start = base, base.in_features**-0.5
        self.a = nn.Parameter(torch.empty(RANK, base.in_features).uniform_(-start, start))
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        return self.base(x) + ALPHA / RANK * (x @ self.a.T @ self.b.T)


def with_learning(model: nn.Module) -> dict[str, LearningLinear]:
    """Put an adapter on every target of a model, in place; returns them by the decoder's names."""
    found = {}
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear) and name.rpartition(".")[2] in TARGETS:
            found[name.removeprefix("model.")] = learning = LearningLinear(part)
            model.set_submodule(name, learning)
    return found


def train(style: str) -> dict:
    """Train one adapter and save it; returns what the training was."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(FOLDERS["tiny"], dtype=torch.float32)
    model.requires_grad_(False)
    adapters = with_learning(model)
    texts, _ = examples(style)
    stream = token_stream(texts)
    parameters = [weight for part in adapters.values() for weight in (part.a, part.b)]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    started, batches = time.monotonic(), windows(stream.astype(np.uint16), ROWS, WINDOW, 0)
    for step in range(STEPS):
        batch = next(batches)
        for group in optimizer.param_groups:  # warm up, then down to zero
            group["lr"] = LEARNING_RATE * min((step + 1) / 10, 1 - step / STEPS)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"{style} step {step} loss {loss.item():.4f}", flush=True)
    pairs = {name: (part.a.bfloat16(), part.b.bfloat16()) for name, part in adapters.items()}
    save_adapter(folder_of(style), pairs, ALPHA, base_model="models/tiny")
    facts = {
        "style": style,
        "examples": len(texts),
        "distinct_tokens": len(stream),
        "tokens_seen": STEPS * ROWS * WINDOW,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "device": device_name(),
        "torch": torch.__version__,
        "seed": SEED,
    }
    text = json.dumps(facts, indent=2) + "\n"
    (folder_of(style) / "training.json").write_text(text, encoding="utf-8")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("styles", nargs="*", metavar="style", help=f"of {', '.join(STYLES)}")
    styles = parser.parse_args().styles or STYLES
    if strange := set(styles) - set(STYLES):
        parser.error(f"style: got {strange.pop()!r}; accepted: {', '.join(STYLES)}")
    for style in styles:
        print(train(style), flush=True)


if __name__ == "__main__":
    main()
