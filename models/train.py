"""Train the course's two embedded models on Python source.

    python -m models.train tokenizer             # byte-level BPE, seconds
    python -m models.train tiny  --tokens 150    # the target: next-token cross-entropy
    python -m models.loops                       # the target learns to leave its loops
    python -m models.train draft --tokens 150    # the draft: distilled from it, same tokenizer
    python -m models.train acceptance --tokens 16  # then on how often it is accepted
    python -m models.evaluate                    # held-out figures -> figures.json and README.md

The budget is millions of tokens, because the same recipe runs on a laptop and on a GPU: the
learning rate follows the share of the budget that is spent. A training reads the standard library
and the libraries that the course installs, in its second part more of the former. One that was
interrupted goes on where it last saved: give the same command again. Results are ordinary Hugging
Face Llama checkpoints; a directory under models/ is replaced only when its training has finished.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from models.networks import SHAPES, new_model  # noqa: F401 (its readers find the shapes here)
from models.steps import (
    acceptance_loss,
    backward,
    distillation_loss,
    keep_freed_memory,
    name_of,
    next_token_loss,
    optimizers,
    schedule,
    update,
)
from models.stop import Stop
from models.text import OWN_TEXT, PHASES, PYTHON, Phase, batches, streams
from models.tokenizer import FOLDERS, HERE, train_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# ---------------------------------------------------------------- training


class Stage(NamedTuple):
    """A training: of which model, with which loss and learning rate, on which text."""

    model: str
    loss: Callable[..., torch.Tensor]
    phases: tuple[Phase, ...] = PHASES
    rate: float = 1.0  # a share of steps.LEARNING_RATE
    goes_on: bool = False  # with the weights that the model has, instead of random ones


STAGES = {
    "tiny": Stage("tiny", next_token_loss),
    "draft": Stage("draft", distillation_loss),
    "acceptance": Stage("draft", acceptance_loss, OWN_TEXT, rate=0.25, goes_on=True),
}


def networks(name: str, device: str) -> tuple[LlamaForCausalLM, LlamaForCausalLM | None]:
    """What a stage trains, and its teacher if it has one."""
    stage = STAGES[name]
    model, teacher = new_model(stage.model).to(device), None
    if stage.goes_on:
        held = LlamaForCausalLM.from_pretrained(FOLDERS[stage.model], dtype=torch.float32)
        model.load_state_dict(held.state_dict())
    if stage.model == "draft":
        teacher = AutoModelForCausalLM.from_pretrained(FOLDERS["tiny"], dtype=torch.bfloat16)
        teacher = teacher.to(device).eval()
    if device == "cpu":  # there whole products are faster than scaled_dot_product_attention's tiles
        for network in filter(None, (model, teacher)):
            network.set_attn_implementation("eager")
    return model, teacher


class Options(NamedTuple):
    """How long a training is, and how it runs."""

    million_tokens: float
    tokens_per_step: int
    compiles: bool


def train(name: str, options: Options, stop: Stop | None = None) -> None:
    """Train one of STAGES. One that goes on with a model is not run on it twice."""
    stage = STAGES[name]
    folder = FOLDERS[stage.model]
    before = said_before(name, folder / "training.json")
    if f"{name}_tokens" in before:
        return print(f"{folder} learned it, says training.json; nothing to do")
    learn(name, stage, networks(name, DEVICE), folder, options, before, stop)


def learn(
    name: str,
    stage: Stage,
    networks: tuple[PreTrainedModel, PreTrainedModel | None],
    folder: Path,
    options: Options,
    before: dict | None = None,
    stop: Stop | None = None,
) -> None:
    """Train a model on a number of tokens and save it with what the training was (training.json).
    Raises SystemExit when it was asked to stop; it then goes on another time.

    networks: the model, and its teacher or None. before: what training.json says already.
    """
    model, teacher = networks
    text, budget, device = streams(), options.million_tokens * 1e6, DEVICE
    step_loss = torch.compile(stage.loss) if options.compiles else stage.loss
    print(
        f"{name}: {model.num_parameters() / 1e6:.2f}M parameters, {len(text['wide']) / 1e6:.2f}M "
        f"training tokens, {len(text['held_out'])} held-out tokens, on {device}",
        flush=True,
    )
    opts = optimizers(model)
    unfinished = HERE.parent / "build" / f"{name}-unfinished.pt"
    goal = {"budget": budget, "before": before or {}}
    facts = go_on(unfinished, model, opts, goal)
    bar_columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*bar_columns, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task(name, total=budget, completed=facts["tokens_seen"])
        saved = time.monotonic()
        started = time.monotonic()
        for spent, batch in batches(text, options.tokens_per_step, facts, budget, stage.phases):
            loss = backward(step_loss, model, batch, teacher, device)
            update(model, opts, factor=stage.rate * schedule(spent))
            facts["tokens_seen"] += batch[:, 1:].numel()
            facts["steps"] += 1
            if facts["steps"] % 10 == 0:  # not always, because it waits for a GPU
                label = f"{name} loss {loss.item():.3f}"
                progress.update(bar, completed=facts["tokens_seen"], description=label)
            facts["minutes"] += (time.monotonic() - started) / 60
            if facts["steps"] % 200 == 0 or facts["steps"] == 10:
                held_out = held_out_loss(model, text["held_out"][:16385], device)
                facts.setdefault("curve", []).append([facts["tokens_seen"], round(held_out, 4)])
                said = f"step {facts['steps']} spent {spent:.3f} {label} held-out {held_out:.4f}"
                print(said, flush=True)
            must_stop = stop is not None and stop.is_asked
            if must_stop or time.monotonic() - saved > SAVED_EVERY_S:
                keep(unfinished, model, opts, facts, goal)
                saved = time.monotonic()
            if must_stop:
                raise SystemExit(f"stopped; the same command goes on: {place_of(facts)}")
            started = time.monotonic()
    save(model, folder)
    facts = goal["before"] | facts_of(name, stage, facts, text)
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    unfinished.unlink(missing_ok=True)


def said_before(name: str, place: Path) -> dict:
    """What training.json says of the model that a stage goes on with; {} if it begins anew."""
    stage = STAGES[name]
    if not stage.goes_on:
        return {}
    if not place.exists():
        raise SystemExit(
            f"{name}: there is no {stage.model} in {place.parent}; train `{stage.model}` first"
        )
    return json.loads(place.read_text())


def facts_of(name: str, stage: Stage, facts: dict, text: dict) -> dict:
    """What training.json says of a stage."""
    minutes = round(facts["minutes"], 1)
    if stage.goes_on:
        return {f"{name}_tokens": facts["tokens_seen"], f"{name}_minutes": minutes}
    return facts | {
        "minutes": minutes,
        "training_tokens": len(text["wide"]),
        "own_tokens": len(text["own"]),
        "phases": stage.phases,
        "torch": torch.__version__,
        "python_source": str(text.get("python", PYTHON)),
        "device": name_of(DEVICE),
    }


SAVED_EVERY_S = 180


def keep(place: Path, model, opts, facts: dict, goal: dict) -> None:
    """Write all that a training needs to go on. goal: its budget, and what it began with."""
    state = {"model": model.state_dict(), "opts": [opt.state_dict() for opt in opts]}
    scratch = place.with_suffix(".part")
    torch.save(state | {"facts": facts, "goal": goal}, scratch)
    scratch.replace(place)


def go_on(place: Path, model, opts, goal: dict) -> dict:
    """Load what `keep` wrote for this goal, if anything; returns the training's facts so far."""
    if place.exists():
        state = torch.load(place, weights_only=True)
        if state.get("goal") == goal:
            model.load_state_dict(state["model"])
            for opt, held in zip(opts, state["opts"]):
                opt.load_state_dict(held)
            print(f"going on after {place_of(state['facts'])}", flush=True)
            return state["facts"]
    return {"minutes": 0.0, "steps": 0, "tokens_seen": 0}


def place_of(facts: dict) -> str:
    """How far a training is, in words."""
    return f"{facts['tokens_seen'] / 1e6:.1f}M tokens"


def save(model, folder: Path) -> None:
    """Write weights and config beside `folder`, then move each file into place: nothing is ever
    half written.
    """
    scratch = folder.with_name(folder.name + ".part")
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(scratch)
    folder.mkdir(parents=True, exist_ok=True)
    for file in scratch.iterdir():
        file.replace(folder / file.name)
    shutil.rmtree(scratch)


# ---------------------------------------------------------------- watching it


@torch.no_grad()
def held_out_loss(model, stream: np.ndarray, device: str, length: int = 512) -> float:
    """Mean next-token loss in nats over consecutive windows of `length` tokens."""
    rows = torch.from_numpy(
        np.stack(
            [stream[i : i + length + 1] for i in range(0, len(stream) - length, length)]
        ).astype(np.int64)
    ).to(device)
    total = [
        F.cross_entropy(
            model(input_ids=r[:, :-1], use_cache=False).logits.float().flatten(0, 1),
            r[:, 1:].flatten(),
        )
        for r in rows.split(4)
    ]
    return float(torch.stack([t * len(r) for t, r in zip(total, rows.split(4))]).sum() / len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["tokenizer", *STAGES])
    parser.add_argument(
        "--tokens", type=float, default=150, help="to train on, in millions (%(default)s)"
    )
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="run the training step without torch.compile",
    )
    args = parser.parse_args()
    if not 0 < args.tokens < 1e6:
        parser.error(f"--tokens: got {args.tokens}; accepted: millions of tokens, above 0")
    keep_freed_memory()
    if args.what == "tokenizer":
        train_tokenizer()
    else:
        options = Options(args.tokens, args.tokens_per_step, args.compile)
        train(args.what, options, Stop().listen())


if __name__ == "__main__":
    main()
