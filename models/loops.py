"""Teach the target to leave a loop: from the third copy of a line on, each copy becomes less
likely.

    python -m models.loops

A small model that always takes its likeliest token soon writes the same line again and again,
because each copy makes the next one likelier. Training on text cannot mend that: text holds no
loops. So the model reads loops: text with a few lines of it repeated on purpose, and answers of its
own that repeat a line. From the third copy on each token should have a fraction of the probability
that the copy in front of it gave it (Xu et al. 2022, "Learning to break the loop", section 3). In
front of the third copy, and on ordinary text, the model is held where it was, by the divergence
from what it predicted before. Answers are written anew every few updates, because a model that has
left one loop finds the next. Held-out text is not used.
"""

import argparse
import json
import time
from typing import NamedTuple

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM

from lessons.toolbox.model.checkpoint import load_tokenizer
from models.answers import SHORTEST_LINE
from models.steps import keep_freed_memory, optimizers, update
from models.text import streams, windows
from models.tokenizer import FOLDERS
from models.train import held_out_loss, save

RATE, WARM_UP = 0.1, 20  # share of the training's learning rate; updates until it is reached
FADING = 0.5  # the probability of a copy's token as a share of the same token's in the copy before
KEPT = 1.0  # weight of the divergence
ROWS, LENGTH = 16, 256  # of the text in an update; as many loops, half of them the model's own
CONTEXT = (8, 128)  # tokens of text in front of a repeated block, fewest and most
BLOCK = (4, 48)  # tokens of the lines that are repeated
ANSWERS, REFRESH = 160, 50  # answers that are written at once, and for how many updates
PREFIX, ANSWER, LONGEST = (16, 200), 200, 400  # tokens


class Loop(NamedTuple):
    """A text that goes round: its tokens, and for each of them the place of the same token in the
    copy before, or -1 if that copy may stand.
    """

    tokens: list[int]
    before: list[int]


def repeated(window: np.ndarray, ends_line: np.ndarray, rng: np.random.Generator) -> Loop | None:
    """Text, then one to three of its lines again and again: LENGTH + 1 tokens, the first of which
    begins a text. None if this window has no such lines.

    window: [n] tokens of text. ends_line: [V] whether a token's text holds a newline; such a token
    ends a line, and may be the indentation of the next.
    """
    ends = np.flatnonzero(ends_line[window])
    ends = ends[ends >= rng.integers(*CONTEXT)][:4]
    lengths = [last - ends[0] for last in ends[1:] if BLOCK[0] <= last - ends[0] <= BLOCK[1]]
    if not lengths:
        return None
    first, length = int(ends[0]), int(rng.choice(lengths))
    text, block = window[:first].tolist(), window[first : first + length].tolist()
    tokens = [0, *text, *block * (LENGTH // length + 1)][: LENGTH + 1]
    third = 1 + first + 2 * length
    return Loop(tokens, [-1] * third + [at - length for at in range(third, len(tokens))])


def copies_of_lines(pieces: list[str], begin: int) -> list[int]:
    """For each token the place of its copy in the same line before, from the third such line on; -1
    for all others, for lines that begin in front of `begin` and for one that was cut.

    pieces: [n] text of each token. A line is what stands between newlines, without indentation.
    """
    seen: dict[str, list[tuple[int, int]]] = {}
    before, first, line = [-1] * len(pieces), 0, ""
    for at, piece in enumerate(pieces):
        head, newline, tail = piece.rpartition("\n")
        if not newline:
            line += piece
            continue
        line = (line + head.partition("\n")[0]).strip()
        if len(line) >= SHORTEST_LINE and first < at:
            copies = seen.setdefault(line, [])
            copies.append((first, at))
            if len(copies) >= 3 and first >= begin:
                earlier, end = copies[-2]
                if pieces[earlier:end] == pieces[first:at]:
                    before[first:at] = range(earlier, end)
        first, line = at + 1, tail
    return before


def cut(text: dict, turn: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """[length] tokens of training text, at every other turn of the standard library."""
    stream = text[("wide", "own")[turn % 2]]
    start = int(rng.integers(len(stream) - length))
    return stream[start : start + length]


def prefixes(text: dict, ends_line: np.ndarray, rng: np.random.Generator) -> list[list[int]]:
    """ANSWERS prefixes of training text: whole lines, log-uniform in length, every other one of the
    standard library. Each begins with 0, as a text does.
    """
    found: list[list[int]] = []
    while len(found) < ANSWERS:
        window = cut(text, len(found), PREFIX[1], rng)
        most = round(np.exp(rng.uniform(*np.log(PREFIX))))
        ends = np.flatnonzero(ends_line[window])
        ends = ends[ends <= ends[0] + most] if len(ends) else ends
        if len(ends) > 1 and window.all():  # 0 begins another text
            found.append([0, *window[ends[0] + 1 : ends[-1]].tolist()])
    return found


def own_loops(model, rows: list[list[int]], pieces: list[str]) -> list[Loop]:
    """The greedy answers to `rows` that write a line for the third time, behind the rows."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    settings = dict(max_new_tokens=ANSWER, do_sample=False, pad_token_id=0)
    new = model.generate(ids, attention_mask=mask.to(model.device), **settings)[:, width:].tolist()
    loops = []
    for row, tokens in zip(rows, new):
        tokens = (row + (tokens[: tokens.index(0)] if 0 in tokens else tokens))[:LONGEST]
        before = copies_of_lines([pieces[token] for token in tokens], len(row))
        if max(before) >= 0:
            loops.append(Loop(tokens, before))
    return loops


def made_loops(
    text: dict, ends_line: np.ndarray, count: int, rng: np.random.Generator
) -> list[Loop]:
    """`count` loops of training text, every other one of the standard library."""
    loops: list[Loop] = []
    while len(loops) < count:
        window = cut(text, len(loops), LENGTH, rng)
        loop = repeated(window, ends_line, rng) if window.all() else None
        if loop is not None and max(loop.before) >= 0:
            loops.append(loop)
    return loops


def batch_of(loops: list[Loop]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids: [rows, n], zeros behind the end. For each target ids[:, 1:] the place among the
    targets of its copy before, or -1: [rows, n - 1]; and whether no such copy has begun yet.
    """
    width = max(len(loop.tokens) for loop in loops)
    ids = torch.zeros(len(loops), width, dtype=torch.long)
    before = torch.full((len(loops), width - 1), -1)
    in_front = torch.zeros(len(loops), width - 1, dtype=torch.bool)
    for row, loop in enumerate(loops):
        ids[row, : len(loop.tokens)] = torch.tensor(loop.tokens)
        places = torch.tensor(loop.before[1:])
        before[row, : len(places)] = (places - 1).clamp(min=-1)
        in_front[row, : len(places)] = (places >= 0).cumsum(0) == 0
    return ids, before, in_front


def fading_loss(logprobs: Tensor, ids: Tensor, before: Tensor) -> Tensor:
    """Mean of -log(1 - |p - FADING · p in the copy before|) over the tokens that have one (Xu et
    al. 2022, equation 4).

    logprobs: [rows, n - 1, V] of ids[:, 1:]; ids: [rows, n]; before: [rows, n - 1]
    """
    p = logprobs.gather(2, ids[:, 1:, None])[..., 0].exp()
    wanted = FADING * p.detach().gather(1, before.clamp(min=0))
    distance = (p - wanted).abs()[before >= 0]
    return -torch.log1p(-distance.clamp(max=1 - 1e-6)).mean()


def divergence(old, new: Tensor, ids: Tensor) -> Tensor:
    """KL(old || new) of what follows each token, in nats: [rows, n - 1].

    old: the model that it was. new: [rows, n - 1, V] log-probabilities. ids: [rows, n]
    """
    with torch.no_grad():
        was = logprobs_of(old, ids)
    return (was.exp() * (was - new)).sum(-1)


def logprobs_of(model, ids: Tensor) -> Tensor:
    """Log-probabilities of ids[:, 1:]: [rows, n - 1, V] float32, computed in bfloat16. ids: [rows,
    n]
    """
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return logits.float().log_softmax(-1)


def loss_of(model, old, kinds: list[list[Loop]], text: Tensor) -> Tensor:
    """What an update makes smaller: the mean over kinds of loops, and the divergence on text:
    [rows, LENGTH + 1] token ids.
    """
    text = text.to(model.device)
    loss = KEPT * divergence(old, logprobs_of(model, text), text).mean()
    for loops in kinds:
        ids, before, in_front = (x.to(model.device) for x in batch_of(loops))
        new = logprobs_of(model, ids)
        kept = divergence(old, new, ids)[in_front].mean()
        loss = loss + (fading_loss(new, ids, before) + KEPT * kept) / len(kinds)
    return loss


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
    ends_line = np.array(["\n" in piece for piece in pieces])
    model, old = (
        AutoModelForCausalLM.from_pretrained(FOLDERS["tiny"], dtype=dtype).to(device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    if device == "cpu":  # as in the training
        for network in (model, old):
            network.set_attn_implementation("eager")
    opts, own = optimizers(model), []
    reading = [windows(text[name], ROWS // 2, LENGTH, 0) for name in ("wide", "own")]
    for i in track(range(updates), description="leaving loops"):
        if i % REFRESH == 0:
            own = own_loops(model, prefixes(text, ends_line, rng), pieces)
            held_out = held_out_loss(model, text["held_out"][:16385], device)
            said = f"{len(own)} of {ANSWERS} answers loop, held-out {held_out:.4f}"
            print(f"update {i}: {said}", flush=True)
        # none of its own, if it has left them all
        kinds = [[own[at] for at in rng.choice(len(own), ROWS // 2)]] if own else []
        kinds.append(made_loops(text, ends_line, ROWS // 2, rng))
        loss_of(model, old, kinds, torch.cat([next(rows) for rows in reading])).backward()
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
