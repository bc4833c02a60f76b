"""Train the draft model to draft K tokens in one pass (lesson 17, PARD), and ship it beside it.

    python -m models.train_heads features     # what the target computes, kept in build/
    python -m models.train_pard --minutes 12
    python -m lessons.l17_tree_speculation.lab.parallel_counts      # what it is worth

It begins with the weights of models/tiny-draft. In each window of text, from every token on, a
chain of masks stands for the tokens to come, and each mask learns what the target says at its
place. A chain of masks is a branch of a token tree: it sees the text up to its token, and itself.
So all chains of a window are trained in one pass, by a tree mask.

K masks after each of L tokens would be K · L rows. Conditional drop-token (COD) keeps a share of
the chains at each depth, and only those that were kept at the depth before, because a mask reads
the keys and values of all masks before it in its chain.

Source: An et al. 2025, PARD (arXiv 2504.18583), section 3. The paper learns the tokens of a text;
here the masks learn the target's probabilities, as models/tiny-draft did.
"""

import argparse
import json
import shutil
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l17_tree_speculation.heads.heads_files import fingerprint
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.checkpoint import load_tokenizer
from models.steps import keep_freed_memory, name_of, optimizers, rejected, schedule, update
from models.text import PYTHON
from models.tokenizer import FOLDERS, HERE
from models.train import save
from models.train_heads import FEATURES, TARGET, WINDOW, columns_of_step, tokens_by_use

FOLDER = HERE / "tiny-pard"
MASK = "ÿ"  # byte 255 in a byte-level vocabulary: no text in UTF-8 has it
COUNT = 8  # K, tokens of a pass: the newest token and 7 masks
KEPT, LEAST_KEPT = 0.7, 0.2  # of the chains at each depth, as in the paper's configuration
RATE = 0.5  # of models/train.py's learning rate


class Chains(NamedTuple):
    """The rows of a window: all of its tokens, then masks. anchors: the token that a row's chain
    begins with; depths: how many masks there are up to the row, 0 for a token. [T] each.
    """

    anchors: Tensor
    depths: Tensor

    @property
    def positions(self) -> Tensor:
        """A mask has the position of the token in whose place it is."""
        return self.anchors + self.depths

    @property
    def sees(self) -> Tensor:
        """The tree mask: [T, T], True where row i reads the key of row j."""
        here, there = self.anchors[:, None], self.anchors
        is_text = (self.depths == 0) & (there <= here)
        is_own_chain = (there == here) & (self.depths <= self.depths[:, None])
        return is_text | is_own_chain


def drop_tokens(length: int, count: int = COUNT) -> Chains:
    """Every token of a window, and chains of up to count - 1 masks after some of them."""
    alive = torch.arange(length)
    anchors, depths = [alive], [torch.zeros_like(alive)]
    for depth in range(1, count):
        # Only a chain whose masks were all kept so far can go on, and its place must have a token.
        alive = alive[alive + depth < length]
        kept = int(max(KEPT**depth, LEAST_KEPT) * length)
        alive = alive[torch.randperm(len(alive))[:kept]]
        anchors.append(alive)
        depths.append(torch.full_like(alive, depth))
    return Chains(torch.cat(anchors), torch.cat(depths))


class Read(NamedTuple):
    """What a step reads of the target. tokens: [L] of a window; hidden: [L, hidden_size]; head:
    [columns, hidden_size], the rows of its last matrix for the tokens that the step compares;
    columns: [columns], which tokens these are.
    """

    tokens: Tensor
    hidden: Tensor
    head: Tensor
    columns: Tensor


def pard_loss(model: LlamaForCausalLM, read: Read, chains: Chains, mask: int) -> Tensor:
    """How often a drafted token would be rejected, and a share of the divergence (models/steps.py).
    mask: the mask token.
    """
    places = chains.positions
    inputs = torch.where(chains.depths == 0, read.tokens[places], mask)
    made = model.model(
        input_ids=inputs[None],
        position_ids=places[None],
        attention_mask=chains.sees[None, None],
        use_cache=False,
    ).last_hidden_state
    student = F.linear(made, model.lm_head.weight[read.columns])
    # What the target says at a mask's place, having read the text up to there.
    with torch.no_grad():
        wanted = F.linear(read.hidden, read.head)[places][None]
    return rejected(wanted.float(), student.float())


def train(minutes: float, rows: int) -> None:
    """Train for `minutes` of CPU time and write models/tiny-pard."""
    torch.manual_seed(0)
    device = default_device()
    target = Decoder.from_pretrained(TARGET, device=device)
    kept = torch.load(FEATURES, mmap=True)
    if kept["target"] != fingerprint(target):
        raise SystemExit(f"{FEATURES} is of other weights: run models.train_heads features again")
    tokens, size = kept["tokens"].long(), target.config.hidden_size
    by_use = tokens_by_use(tokens, target).to(device)
    model = LlamaForCausalLM.from_pretrained(FOLDERS["draft"], dtype=torch.float32).to(device)
    mask = load_tokenizer(FOLDERS["draft"]).convert_tokens_to_ids(MASK)
    model.config.pard_token = mask  # the name that vLLM reads
    opts, rng = optimizers(model), np.random.default_rng(0)
    # CPU time, because other work on the machine must not shorten the training
    start, step, spent, trained = time.process_time(), 0, 0.0, 0
    while spent < 1:
        for chosen in torch.from_numpy(rng.permutation(len(tokens))).split(rows):
            spent = (time.process_time() - start) / (60 * minutes)
            if spent >= 1:
                break
            columns = columns_of_step(by_use)
            head = target.lm_head.weight[columns]
            for row in chosen:  # one by one, because a CPU then finds a window in its cache
                chains = drop_tokens(WINDOW)
                hidden = kept["features"][row, :, -size:].to(device).float()
                read = Read(tokens[row].to(device), hidden, head, columns)
                with torch.autocast(device.type, torch.bfloat16):
                    loss = pard_loss(model, read, chains, mask)
                (loss / len(chosen)).backward()
                trained += len(chains.anchors)
            update(model, opts, factor=schedule(spent) * RATE)
            step += 1
            if step % 25 == 0:
                print(f"pard step {step} spent {spent:.3f} loss {loss.item():.4f}", flush=True)
    training = dict(
        begun_as="models/tiny-draft",
        minutes=round((time.process_time() - start) / 60, 1),
        steps=step,
        tokens_seen=step * rows * WINDOW,
        rows_trained=trained,
        distinct_tokens=tokens.numel(),
        seed=0,
        device=name_of(device.type),
        torch=torch.__version__,
        python_source=kept.get("python", PYTHON),
    )
    write(model.cpu(), training)


def write(model: LlamaForCausalLM, training: dict) -> None:
    """An ordinary checkpoint whose config.json names the mask, as vLLM wants it: pard_token."""
    save(model, FOLDER)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDERS["draft"] / name, FOLDER / name)
    (FOLDER / "training.json").write_text(json.dumps(training, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=12, help="of CPU time")
    parser.add_argument("--rows", type=int, default=4, help="windows of a training step")
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    keep_freed_memory()
    train(args.minutes, args.rows)


if __name__ == "__main__":
    main()
