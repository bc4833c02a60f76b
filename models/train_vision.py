"""Train models/tiny-vision: a small vision transformer and a projector in front of models/tiny.

    python -m models.train_vision            # a few minutes on one core
    python -m models.vision_card             # held-out figures -> VISION.md

Two stages, as LLaVA has them. First the tower alone learns to tell colours and digits apart, with a
head that is thrown away; LLaVA takes a tower that CLIP has trained. Then tower and projector learn to
say it through the decoder, which is frozen: no weight of it changes, so text is answered exactly as
models/tiny answers it. What the picture's rows learn is a prompt that makes this decoder say the name.
"""

import argparse
import json
import time
from itertools import islice
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lessons.toolbox.measure.device import device_name
from models.tokenizer import FOLDERS
from models.vision_folder import (
    CHAT_QUESTIONS,
    FOLDER,
    VISION,
    prompt_ids,
    save_folder,
    vision_tokenizer,
)
from models.vision_pictures import COLOURS, MOST_DIGITS, pictures
from reference.vision.pictures import normalized, read_picture
from reference.vision.tower import Eyes

TOWER_STEPS, TOWER_ROWS, TOWER_RATE = 600, 64, 1e-3
STEPS, ROWS, RATE = 700, 32, 6e-4
SEED = 0
NOTHING = 10  # the class of a place without a digit


def batches(rows: int, seed: int):
    """pixels: [rows, 3, S, S], names: of each."""
    stream = pictures(seed)
    while True:
        drawn, names = zip(*islice(stream, rows))
        pixels = [normalized(read_picture(picture, VISION).pixels, VISION) for picture in drawn]
        yield torch.stack(pixels), names


def labels_of(names: tuple[str, ...]) -> Tensor:
    """What stands in each picture: [B, 1 + MOST_DIGITS]: the colour's number, then digits."""
    colours, found = list(COLOURS), []
    for name in names:
        colour, *digits = name.split()
        places = [*map(int, digits), *[NOTHING] * (MOST_DIGITS - len(digits))]
        found.append([colours.index(colour), *places])
    return torch.tensor(found)


class Head(nn.Module):
    """Reads colour and digits off all rows of the tower. It is thrown away."""

    def __init__(self):
        super().__init__()
        self.sizes = [len(COLOURS), *[NOTHING + 1] * MOST_DIGITS]
        self.linear = nn.Linear(VISION.num_patches * VISION.hidden_size, sum(self.sizes))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """features: [B, N, hidden_size], labels: [B, 1 + MOST_DIGITS] -> the loss."""
        parts = self.linear(features.flatten(1)).split(self.sizes, dim=-1)
        return sum(F.cross_entropy(part, label) for part, label in zip(parts, labels.unbind(1)))


def stepped(optimizer: torch.optim.Optimizer, loss: Tensor, step: int, steps: int, rate: float):
    """One update; the rate warms up, and falls as a cosine."""
    share = min((step + 1) / 50, 0.5 + 0.5 * float(np.cos(np.pi * step / steps)))
    for group in optimizer.param_groups:
        group["lr"] = rate * share
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def train_tower(eyes: Eyes, steps: int) -> None:
    """The first stage."""
    head = Head()
    weights = [*eyes.vision_tower.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=TOWER_RATE, weight_decay=0.01)
    source = batches(TOWER_ROWS, SEED)
    for step in range(steps):
        pixels, names = next(source)
        loss = head(eyes.vision_tower(pixels), labels_of(names))
        stepped(optimizer, loss, step, steps, TOWER_RATE)
        if step % 50 == 0 or step == steps - 1:
            print(f"tower step {step} loss {loss.item():.4f}", flush=True)


class Speaking(nn.Module):
    """The frozen decoder behind the eyes: the loss of what it says about a picture."""

    def __init__(self, eyes: Eyes):
        super().__init__()
        self.eyes = eyes
        self.tokenizer = vision_tokenizer()
        # bfloat16, in which the checkpoint is stored: half the time
        self.decoder = AutoModelForCausalLM.from_pretrained(
            FOLDERS["tiny"], dtype=torch.bfloat16
        ).requires_grad_(False)

    def forward(self, pixels: Tensor, names: tuple[str, ...], question: str) -> Tensor:
        """pixels: [B, 3, S, S] -> nats a token of the names and of the end behind them."""
        prompt = prompt_ids(self.tokenizer, question)
        answers = [[*self.tokenizer(name)["input_ids"], 0] for name in names]
        longest = max(map(len, answers))
        rows = [[*prompt, *answer, *[0] * (longest - len(answer))] for answer in answers]
        targets = [[*answer, *[-100] * (longest - len(answer))] for answer in answers]
        tokens = torch.tensor(rows)
        seen = self.eyes(pixels).to(self.decoder.dtype)  # [B, N, text_size]
        embedded = self.decoder.get_input_embeddings()(tokens)
        at = prompt.index(VISION.image_token_id)
        embedded = torch.cat([embedded[:, :at], seen, embedded[:, at + seen.shape[1] :]], dim=1)
        logits = self.decoder(
            inputs_embeds=embedded[:, :-1], use_cache=False, logits_to_keep=longest
        ).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), torch.tensor(targets).flatten())


def train_whole(eyes: Eyes, steps: int) -> None:
    """The second stage."""
    speaking, random = Speaking(eyes), Random(SEED)
    optimizer = torch.optim.AdamW(eyes.parameters(), lr=RATE, weight_decay=0.0)
    source = batches(ROWS, SEED + 1)
    for step in range(steps):
        loss = speaking(*next(source), random.choice(CHAT_QUESTIONS))
        stepped(optimizer, loss, step, steps, RATE)
        if step % 25 == 0 or step == steps - 1:
            print(f"whole step {step} loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tower-steps", type=int, default=TOWER_STEPS)
    parser.add_argument("--steps", type=int, default=STEPS)
    found = parser.parse_args()
    torch.manual_seed(SEED)
    started, eyes = time.process_time(), Eyes(VISION)
    nn.init.normal_(eyes.vision_tower.embeddings.class_embedding, std=0.02)
    nn.init.normal_(eyes.vision_tower.embeddings.position_embedding.weight, std=0.02)
    train_tower(eyes, found.tower_steps)
    train_whole(eyes, found.steps)
    save_folder(eyes)
    facts = {
        "pictures_tower": found.tower_steps * TOWER_ROWS,
        "pictures_whole": found.steps * ROWS,
        "processor_minutes": round((time.process_time() - started) / 60, 1),
        "threads": torch.get_num_threads(),
        "device": device_name(),
        "torch": torch.__version__,
        "seed": SEED,
    }
    (FOLDER / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(facts, flush=True)


if __name__ == "__main__":
    main()
