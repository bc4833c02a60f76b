"""Train models/tiny-vision: a small vision transformer and a projector in front of models/tiny.

    python -m models.train_vision            # minutes on one core
    python -m models.vision_card             # held-out figures -> VISION.md

No weight of the decoder changes, so text is answered exactly as models/tiny answers it. What
pictures are turned into has to make this decoder say their names, and it was trained on Python
alone. So:

1. Words. Which rows in the place of a picture make the frozen decoder say "red(4, 7)"? They are
sums of
   one learnt table for the colour and one for each digit's place. (Prompt tuning, Lester et al.
     2021.)
2. Eyes. Tower and projector learn to give these rows for a picture. The decoder does not run. A
head
   over all rows, thrown away afterwards, teaches the tower what can be told apart.
3. Rows. The same with a head that sees one row at a time: each row has to tell the whole picture,
not
   its own patch alone, because any row may be what the decoder attends to.
4. Both together, through the decoder, as LLaVA is trained; the rows become what eyes can give.
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
    FOLDER,
    QUESTIONS,
    VISION,
    prompt_ids,
    save_folder,
    vision_tokenizer,
    write_files,
)
from models.vision_pictures import COLOURS, MOST_DIGITS, name_of, pictures
from reference.vision.pictures import normalized, read_picture
from reference.vision.tower import Eyes

# Of each stage: steps, pictures or names of a step, learning rate.
WORDS = (200, 32, 3e-3)
EYES = (450, 64, 1e-3)
ROWS = (800, 64, 7e-4)
BOTH = (170, 32, 4e-4)
SEED = 0
NOTHING = 10  # the class of a place without a digit


def labels_of(name: str) -> list[int]:
    """What a name says: the colour's number, then a digit or NOTHING for each place."""
    colour, _, digits = name.rstrip(")").partition("(")
    found = [int(digit) for digit in digits.split(", ") if digit]
    return [list(COLOURS).index(colour), *found, *[NOTHING] * (MOST_DIGITS - len(found))]


def batches(rows: int, seed: int):
    """pixels: [rows, 3, S, S], names: of each."""
    stream = pictures(seed)
    while True:
        drawn, names = zip(*islice(stream, rows))
        seen = [read_picture(picture, VISION).pixels for picture in drawn]
        yield torch.stack([normalized(pixels, VISION) for pixels in seen]), names


def name_batches(rows: int, seed: int):
    """names alone."""
    random = Random(seed)
    while True:
        digits = [[random.randrange(10) for _ in range(random.randint(0, 3))] for _ in range(rows)]
        yield [name_of(random.choice(list(COLOURS)), found) for found in digits]


class Learning:
    """An optimizer whose rate warms up and falls to nothing as a cosine."""

    def __init__(self, weights, steps: int, rate: float):
        self.weights, self.steps, self.rate, self.step = list(weights), steps, rate, 0
        self.optimizer = torch.optim.AdamW(self.weights, lr=rate, betas=(0.9, 0.99), weight_decay=0)

    def learn(self, what: str, loss: Tensor) -> None:
        """One update."""
        share = min((self.step + 1) / 20, 0.5 + 0.5 * np.cos(np.pi * self.step / self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * float(share)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        if self.step % 25 == 0 or self.step == self.steps - 1:
            print(f"{what} step {self.step} loss {loss.item():.4f}", flush=True)
        self.step += 1


class Speaking:
    """The frozen decoder: the loss of what it says behind some rows and a question."""

    def __init__(self):
        self.tokenizer = vision_tokenizer()
        # bfloat16, in which the checkpoint is stored: half the time
        self.decoder = AutoModelForCausalLM.from_pretrained(FOLDERS["tiny"], dtype=torch.bfloat16)
        self.decoder.requires_grad_(False)
        self.embedding = self.decoder.get_input_embeddings()
        self.random = Random(SEED)

    def loss(self, seen: Tensor, names) -> Tensor:
        """seen: [B, N, text_size] -> nats a token of the names and of the end behind them."""
        prompt = prompt_ids(self.tokenizer, self.random.choice(QUESTIONS))
        bare = self.tokenizer(list(names), add_special_tokens=False)["input_ids"]
        answers = [[*ids, 0] for ids in bare]
        longest = max(map(len, answers))
        rows = [[*prompt, *answer, *[0] * (longest - len(answer))] for answer in answers]
        targets = [[*answer, *[-100] * (longest - len(answer))] for answer in answers]
        x, at = self.embedding(torch.tensor(rows)), prompt.index(VISION.image_token_id)
        seen = seen.to(x.dtype)
        x = torch.cat([x[:, :at], seen, x[:, at + seen.shape[1] :]], dim=1)[:, :-1]
        logits = self.decoder(inputs_embeds=x, use_cache=False, logits_to_keep=longest).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), torch.tensor(targets).flatten())


class Words(nn.Module):
    """Rows for a name: [B, 1 + MOST_DIGITS] -> [B, N, text_size]."""

    def __init__(self, scale: float):
        super().__init__()
        shape = VISION.tokens_per_image, VISION.text_size
        self.base = nn.Parameter(torch.randn(shape) * scale)
        sizes = [len(COLOURS), *[NOTHING + 1] * MOST_DIGITS]
        self.tables = nn.ParameterList(torch.randn(n, *shape) * 0.3 * scale for n in sizes)

    def forward(self, labels: Tensor) -> Tensor:
        return self.base + sum(table[one] for table, one in zip(self.tables, labels.unbind(1)))


def train_words(speaking: Speaking, steps: int) -> Words:
    """The first stage."""
    # as large as the rows of tokens, so that the decoder's norms are not surprised
    words = Words(speaking.embedding.weight.float().square().mean().sqrt().item())
    learning, source = Learning(words.parameters(), steps, WORDS[2]), name_batches(WORDS[1], SEED)
    for names in islice(source, steps):
        seen = words(torch.tensor([labels_of(name) for name in names]))
        learning.learn("words", speaking.loss(seen, names))
    return words.requires_grad_(False)


class Head(nn.Module):
    """Reads colour and digits off some rows of the tower. It is thrown away."""

    def __init__(self, rows: int):
        super().__init__()
        self.sizes = [len(COLOURS), *[NOTHING + 1] * MOST_DIGITS]
        self.linear = nn.Linear(rows * VISION.hidden_size, sum(self.sizes))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """features: [B, rows · hidden_size], labels: [B, 1 + MOST_DIGITS] -> the loss."""
        parts = self.linear(features).split(self.sizes, dim=-1)
        return sum(F.cross_entropy(part, label) for part, label in zip(parts, labels.unbind(1)))


def new_eyes() -> Eyes:
    """Eyes that have learnt nothing."""
    eyes = Eyes(VISION)
    nn.init.normal_(eyes.vision_tower.embeddings.class_embedding, std=0.02)
    nn.init.normal_(eyes.vision_tower.embeddings.position_embedding.weight, std=0.02)
    return eyes


def train_eyes(eyes: Eyes, words: Words, steps: int) -> None:
    """The second stage."""
    head = Head(VISION.num_patches)
    learning = Learning([*eyes.parameters(), *head.parameters()], steps, EYES[2])
    for pixels, names in islice(batches(EYES[1], SEED), steps):
        labels = torch.tensor([labels_of(name) for name in names])
        features = eyes.vision_tower(pixels)
        loss = wrong_by(eyes, words, features, labels)
        learning.learn("eyes", loss + 0.3 * head(features.flatten(1), labels))


def train_rows(eyes: Eyes, words: Words, steps: int, seed: int) -> None:
    """The third stage, or one of its two halves. seed: of its pictures."""
    head, count = Head(1), VISION.num_patches
    learning = Learning([*eyes.parameters(), *head.parameters()], steps, ROWS[2])
    for pixels, names in islice(batches(ROWS[1], seed), steps):
        labels = torch.tensor([labels_of(name) for name in names])
        features = eyes.vision_tower(pixels)
        loss = wrong_by(eyes, words, features, labels)
        each = head(features.flatten(0, 1), labels.repeat_interleave(count, dim=0))
        learning.learn("rows", 2 * loss + 0.3 * each)


def wrong_by(eyes: Eyes, words: Words, features: Tensor, labels: Tensor) -> Tensor:
    """The squared error of rows as a share of what rows differ by. features: [B, N,
    hidden_size].
    """
    spread = sum(table.var(dim=0).mean() for table in words.tables)
    return F.mse_loss(eyes.multi_modal_projector(features), words(labels)) / spread


def train_both(speaking: Speaking, eyes: Eyes, steps: int) -> None:
    """The last stage."""
    learning = Learning(eyes.parameters(), steps, BOTH[2])
    for pixels, names in islice(batches(BOTH[1], SEED + 2), steps):
        learning.learn("both", speaking.loss(eyes(pixels), names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = {"words": WORDS, "eyes": EYES, "rows": ROWS, "both": BOTH}
    for name, (steps, _, _) in stages.items():
        parser.add_argument(f"--{name}", type=int, default=steps, metavar="STEPS")
    wanted = vars(parser.parse_args())
    torch.manual_seed(SEED)
    write_files()
    started, speaking = time.process_time(), Speaking()
    words, eyes = train_words(speaking, wanted["words"]), new_eyes()
    train_eyes(eyes, words, wanted["eyes"])
    # in two halves, each with a fresh head and a rate that rises again
    first = wanted["rows"] * 3 // 8
    train_rows(eyes, words, first, SEED + 1)
    train_rows(eyes, words, wanted["rows"] - first, SEED + 3)
    train_both(speaking, eyes, wanted["both"])
    save_folder(eyes)
    facts = {f"{name}_seen": steps * stages[name][1] for name, steps in wanted.items()} | {
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
