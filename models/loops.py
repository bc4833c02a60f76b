"""Teach the target to leave its loops: it reads its own answers, and to write a line for the third time
becomes less likely than something else.

    python -m models.loops

A small model that always takes its likeliest token soon writes the same line again and again, because
each copy makes the next one likelier. Training on text cannot mend that: text holds no loops. So the
model continues prefixes of training text, and wherever it wrote a line for the third time, the token of
that line at which it was least sure is made less likely than the best other one. (Welleck et al. 2020,
"Neural text generation with unlikelihood training", push down every token of an answer's repeated
n-grams. To leave a loop one token is enough, and code repeats much for good reasons.) In front of the
third copy, and on ordinary text, the model is held where it was: by the divergence from what it
predicted before. New answers are written every few updates, because a model that has left one loop finds
the next. Held-out text is not used.
"""

import argparse
import json
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM

from lessons.toolbox.model.checkpoint import load_tokenizer
from models.evaluate import SHORTEST_LINE
from models.steps import keep_freed_memory, optimizers, update
from models.text import streams, windows
from models.tokenizer import FOLDERS
from models.train import held_out_loss, save

RATE = (
    0.1  # of the learning rate of the training: warmed up over WARM_UP updates, then linear to zero
)
WARM_UP = 20
ROWS, LENGTH = 16, 256  # of the text, and of the answers, that an update reads
ANSWERS, REFRESH = 192, 25  # answers that are written at once, and for how many updates
PREFIX = (16, 200)  # tokens in front of an answer, fewest and most
ANSWER = 200  # tokens
MARGIN = 0.3  # nats by which another token should be likelier than the one that goes on in the loop
SHARPNESS = 4.0  # of the step from "must be pushed" to "may stay"
KEPT = 1.0  # weight of the divergence


class Answer(NamedTuple):
    """Token ids of a prefix and of the answer behind it, and the lines in the answer that stood there
    twice before: (first token, the one behind the last).
    """

    tokens: list[int]
    copies: list[tuple[int, int]]


def third_copies(pieces: list[str], begin: int) -> list[tuple[int, int]]:
    """Places (first, behind the last) of lines which begin at or behind `begin`, are whole, and are
    the third of their kind. A line here is what stands between newlines, without indentation.

    pieces: [n] text of each token. A token with a newline ends a line and may indent the next.
    """
    seen: dict[str, int] = {}
    found, first, line = [], 0, ""
    for at, piece in enumerate(pieces):
        head, newline, tail = piece.rpartition("\n")
        if not newline:
            line += piece
            continue
        line = (line + head.partition("\n")[0]).strip()
        if len(line) >= SHORTEST_LINE and first < at:
            seen[line] = seen.get(line, 0) + 1
            if seen[line] == 3 and first >= begin:
                found.append((first, at))
        first, line = at + 1, tail
    return found


def prefixes(text: dict, pieces: list[str], rng: np.random.Generator) -> list[list[int]]:
    """ANSWERS prefixes of training text: whole lines, log-uniform in length, every other one of the
    standard library. Each begins with 0, as a text does.
    """
    found: list[list[int]] = []
    ends_line = np.array(["\n" in piece for piece in pieces])
    while len(found) < ANSWERS:
        stream = text[("wide", "own")[len(found) % 2]]
        start = int(rng.integers(len(stream) - PREFIX[1]))
        most = round(np.exp(rng.uniform(*np.log(PREFIX))))
        window = stream[start : start + PREFIX[1]]
        ends = np.flatnonzero(ends_line[window])
        ends = ends[ends <= ends[0] + most] if len(ends) else ends
        if len(ends) > 1 and window.all():  # 0 begins another text
            found.append([0, *window[ends[0] + 1 : ends[-1]].tolist()])
    return found


def write_answers(model, rows: list[list[int]], pieces: list[str]) -> list[Answer]:
    """The greedy answers to `rows` that write a line for the third time."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    settings = dict(max_new_tokens=ANSWER, do_sample=False, pad_token_id=0)
    ids, mask = ids.to(model.device), mask.to(model.device)
    new = model.generate(ids, attention_mask=mask, **settings)[:, width:].tolist()
    answers = []
    for row, tokens in zip(rows, new):
        tokens = row + (tokens[: tokens.index(0)] if 0 in tokens else tokens)
        copies = third_copies([pieces[token] for token in tokens], len(row))
        if copies:
            answers.append(Answer(tokens[: copies[-1][1] + 1], copies))
    return answers


def batch_of(answers: list[Answer]) -> tuple[Tensor, Tensor]:
    """Token ids: [rows, n], zeros behind the end; and for each target ids[:, 1:] how many thirds of
    lines begin in its row up to there: [rows, n - 1]; -1 behind the end.
    """
    width = max(len(answer.tokens) for answer in answers)
    ids = torch.zeros(len(answers), width, dtype=torch.long)
    begun = torch.full((len(answers), width - 1), -1)
    for row, answer in enumerate(answers):
        ids[row, : len(answer.tokens)] = torch.tensor(answer.tokens)
        begun[row, : len(answer.tokens) - 1] = 0
        for first, _ in answer.copies:
            begun[row, first - 1 : len(answer.tokens) - 1] += 1
    return ids, begun


def leaving_loss(logprobs: Tensor, ids: Tensor, answers: list[Answer]) -> Tensor:
    """Mean over third copies of a soft hinge: the smallest margin of the copy's tokens over the best
    other token should be below -MARGIN, in nats. Less would do to leave, more changes the model.

    logprobs: [rows, n - 1, V] of ids[:, 1:]; ids: [rows, n]
    """
    wanted = ids[:, 1:, None]
    others = logprobs.scatter(2, wanted, float("-inf")).amax(2)
    margins = logprobs.gather(2, wanted)[..., 0] - others
    smallest = [
        margins[row, first - 1 : behind].min()  # with the token that ends the line
        for row, answer in enumerate(answers)
        for first, behind in answer.copies
    ]
    return F.softplus(SHARPNESS * (torch.stack(smallest) + MARGIN)).mean() / SHARPNESS


def divergence(old, new: Tensor, ids: Tensor) -> Tensor:
    """KL(old || new) of what follows each token, in nats: [rows, n - 1].

    old: the model that it was. new: [rows, n - 1, V] log-probabilities. ids: [rows, n]
    """
    with torch.no_grad():
        before = logprobs_of(old, ids)
    return (before.exp() * (before - new)).sum(-1)


def logprobs_of(model, ids: Tensor) -> Tensor:
    """Log-probabilities of ids[:, 1:]: [rows, n - 1, V] float32, computed in bfloat16. ids: [rows, n]"""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return logits.float().log_softmax(-1)


def loss_of(model, old, answers: list[Answer], text: Tensor) -> Tensor:
    """What an update makes smaller. text: [rows, LENGTH + 1] token ids."""
    ids, begun = (x.to(model.device) for x in batch_of(answers))
    new = logprobs_of(model, ids)
    in_front = divergence(old, new, ids)[begun == 0].mean()
    text = text.to(model.device)
    on_text = divergence(old, logprobs_of(model, text), text).mean()
    return leaving_loss(new, ids, answers) + KEPT * (in_front + on_text)


def leave_loops(updates: int) -> None:
    """Train models/tiny that way and save it, with what was done in its training.json. What has
    learned it already is left as it is.
    """
    place = FOLDERS["tiny"] / "training.json"
    facts, started = json.loads(place.read_text()), time.monotonic()
    if "loop_updates" in facts:
        return print(f"{place.parent} left its loops in {facts['loop_updates']} updates")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, rng, tokenizer = streams(), np.random.default_rng(0), load_tokenizer(FOLDERS["tiny"])
    pieces = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    model, old = (
        AutoModelForCausalLM.from_pretrained(FOLDERS["tiny"], dtype=dtype).to(device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    if device == "cpu":  # as in the training
        for network in (model, old):
            network.set_attn_implementation("eager")
    opts, pool = optimizers(model), []
    reading = [windows(text[name], ROWS // 2, LENGTH, 0) for name in ("wide", "own")]
    for i in track(range(updates), description="leaving loops"):
        if i % REFRESH == 0:
            pool = write_answers(model, prefixes(text, pieces, rng), pieces)
            held_out = held_out_loss(model, text["held_out"][:16385], device)
            said = f"{len(pool)} of {ANSWERS} answers loop, held-out {held_out:.4f}"
            print(f"update {i} {said}", flush=True)
        some = [pool[at] for at in rng.choice(len(pool), ROWS, replace=len(pool) < ROWS)]
        loss_of(model, old, some, torch.cat([next(rows) for rows in reading])).backward()
        update(model, opts, RATE * min((i + 1) / WARM_UP, 1 - i / updates))
    save(model, FOLDERS["tiny"])
    facts |= {"loop_updates": updates, "loop_minutes": round((time.monotonic() - started) / 60, 1)}
    place.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=300)
    options = parser.parse_args()
    keep_freed_memory()
    leave_loops(options.updates)
