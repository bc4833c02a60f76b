"""Train the heads that draft for the embedded target (lesson 17), and ship them beside it.

    python -m models.train_heads features            # what the target computes, kept in build/
    python -m models.train_heads medusa --minutes 8
    python -m models.train_heads eagle  --minutes 8
    python -m models.train_heads mtp    --minutes 12
    python -m models.train_heads eagle3 --minutes 12
    python -m lessons.l17_tree_speculation.lab.experiments     # what they are worth
    python -m models.heads_card                                # models/HEADS.md

The target is not trained. It runs once over some text, and its hidden states are kept, so each of
the drafts learns from a file, in minutes and on one core. All of them learn to give the target's
own probabilities (distillation), because those decide what is accepted.

Heads of other target weights are useless, so config.json holds the target's fingerprint.
"""

import argparse
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l17_tree_speculation.heads.heads import KINDS, MTPDraft, tap_depths, tapped_features
from lessons.l17_tree_speculation.heads.heads_files import fingerprint, load_heads, save_heads
from lessons.toolbox.measure.device import default_device
from models.heads_attention import OwnSteps, windowed_attend
from models.steps import name_of, optimizers, schedule, update
from models.text import PYTHON, streams
from models.tokenizer import HERE

TARGET = "models/tiny"
FEATURES = HERE.parent / "build" / "tiny-features.pt"
WINDOW = 256  # tokens of a piece of text
GUESSED = 2048  # tokens that heads can guess: half of the vocabulary, 94 % of the tokens of a text
SIZES = {
    "medusa": dict(hidden_size=384, count=4, draft_vocab_size=GUESSED),
    "eagle": dict(intermediate_size=512, draft_vocab_size=GUESSED),
    "mtp": dict(intermediate_size=512, draft_vocab_size=GUESSED),
    "eagle3": dict(intermediate_size=512, draft_vocab_size=GUESSED),
}
# passes in training, all but the first over its own features; DeepSeek-V3's module had one
OWN_STEPS = {"mtp": 2, "eagle3": 3}
FREQUENT, RARE = 768, 256  # columns of the vocabulary in a training step
HEAD_DECAY = 0.8  # head i counts 0.8^i (Medusa, section 2.2.1)
FEATURE_WEIGHT = 1.0  # EAGLE: of the distance to the target's feature, beside the cross-entropy


# ---------------------------------------------------------------- the target's hidden states


@torch.inference_mode()
def run_target(model: Decoder, tokens: Tensor) -> Tensor:
    """tokens: [rows, length] -> taps and hidden state of each: [rows, length, 4 · hidden_size]."""
    rows, length = tokens.shape
    attend = windowed_attend(model.config, rows, length)
    taps = tap_depths(model.config.num_hidden_layers)
    hidden, tapped = tapped_features(model, tokens.flatten(), attend, taps)
    return torch.cat([tapped, hidden], dim=-1).unflatten(0, (rows, length))


def windows_to_keep(text: dict, count: int) -> Tensor:
    """Windows of the training text, half of them of the standard library, no token twice, in any
    order: [count, WINDOW] int64.
    """
    rng, found = np.random.default_rng(0), []
    libraries = text["wide"][len(text["own"]) :]
    for stream in (text["own"], libraries):
        starts = rng.permutation(np.arange(0, len(stream) - WINDOW, WINDOW))[: count // 2]
        found += [stream[start : start + WINDOW] for start in starts]
    return torch.from_numpy(np.stack(found)[rng.permutation(len(found))].astype(np.int64))


def keep_features(num_tokens: int) -> None:
    """Run the target over random windows of the training text and keep what it computes."""
    model = Decoder.from_pretrained(TARGET, device=default_device(), dtype=torch.bfloat16)
    text = streams()
    tokens = windows_to_keep(text, num_tokens // WINDOW)
    # Made once and filled, because it may be half of the machine's memory.
    features = torch.empty(*tokens.shape, 4 * model.config.hidden_size, dtype=torch.bfloat16)
    for rows, kept in zip(tokens.split(8), features.split(8)):
        kept.copy_(run_target(model, rows.to(model.device)))
    FEATURES.parent.mkdir(exist_ok=True)
    kept = dict(tokens=tokens.int(), features=features, target=fingerprint(model))
    torch.save(kept | {"python": str(text.get("python", PYTHON))}, FEATURES)
    print(f"kept {features.nbytes / 1e6:.0f} MB of {tokens.numel()} tokens")


# ---------------------------------------------------------------- losses
#
# embedded, hidden: [rows, length, hidden_size]; tapped: [rows, length, 3 · hidden_size]


class Vocabulary(NamedTuple):
    """The columns of the target's head that a training step looks at: [columns, hidden_size].

    All 4096 would take most of the time. So each step takes those that are used most, and a random
    part of the others, and compares the probabilities within them.
    """

    weight: Tensor

    @classmethod
    def of_step(cls, target: Decoder, by_use: Tensor) -> "Vocabulary":
        """by_use: [V], all tokens, the ones used most first."""
        return cls(target.lm_head.weight[columns_of_step(by_use)])

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., columns] float32."""
        return F.linear(hidden, self.weight).float().log_softmax(-1)

    def distance(self, student: Tensor, wanted: Tensor) -> Tensor:
        """Cross-entropy of the student's probabilities under the wanted ones; up to a constant it
        is the KL divergence. student: [..., hidden_size]; wanted: [..., columns].
        """
        return -(wanted * self.log_probabilities(student)).sum(-1).mean()

    @torch.no_grad()
    def probabilities(self, hidden: Tensor) -> Tensor:
        """What the target itself predicts: [..., hidden_size] -> [..., columns]."""
        return self.log_probabilities(hidden).exp()


def columns_of_step(by_use: Tensor) -> Tensor:
    """The FREQUENT tokens that are used most, and RARE of the others: [columns]."""
    rare = by_use[FREQUENT:]
    some = rare[torch.randperm(len(rare), device=rare.device)[:RARE]]
    return torch.cat([by_use[:FREQUENT], some])


def medusa_loss(heads, vocabulary: Vocabulary, embedded, tapped, hidden: Tensor) -> Tensor:
    """Head i at position t learns what the target says at position t + i + 1."""
    size, loss = hidden.shape[1], 0.0
    wanted = vocabulary.probabilities(hidden)
    drafted = heads(hidden)  # [count, rows, length, hidden_size]
    for index, ours in enumerate(drafted):
        ahead = index + 1
        here = vocabulary.distance(ours[:, : size - ahead], wanted[:, ahead:])
        loss = loss + HEAD_DECAY**index * here
    return loss


def eagle_loss(draft, vocabulary: Vocabulary, embedded: Tensor, tapped, hidden: Tensor) -> Tensor:
    """The next feature and its probabilities, from the target's features and the next token."""
    rows, length = hidden.shape[0], hidden.shape[1] - 1
    # noise of the paper's kind, because drafted features will be a little wrong, too
    noise = (torch.rand_like(hidden) - 0.5) * 0.2
    features = (hidden + noise * hidden.std())[:, :-1].flatten(0, 1)
    embeddings = embedded[:, 1:].flatten(0, 1)
    attend = windowed_attend(draft.config, rows, length)

    def layer(q, k, v):
        return attend(0, q, k, v)

    out = draft(embeddings, features, layer).unflatten(0, (rows, length))
    far = F.smooth_l1_loss(out.float(), hidden[:, 1:])
    wanted = vocabulary.probabilities(hidden[:, 1:])
    return vocabulary.distance(draft.hidden(out), wanted) + FEATURE_WEIGHT * far


def mtp_loss(draft, vocabulary: Vocabulary, embedded: Tensor, tapped, hidden: Tensor) -> Tensor:
    """Probabilities alone, from the target's last features."""
    return own_steps_loss(draft, vocabulary, embedded, hidden, hidden)


def eagle3_loss(
    draft, vocabulary: Vocabulary, embedded: Tensor, tapped: Tensor, hidden: Tensor
) -> Tensor:
    """Probabilities alone, from three features of the target."""
    return own_steps_loss(draft, vocabulary, embedded, tapped, hidden)


def own_steps_loss(
    draft, vocabulary: Vocabulary, embedded: Tensor, tapped: Tensor, hidden: Tensor
) -> Tensor:
    """The target's probabilities, first from its features, then from the draft's own. tapped: what
    the draft reads of the target.
    """
    rows, length = hidden.shape[0], hidden.shape[1] - 1
    attend = OwnSteps(draft.config, rows, length)
    embeddings = embedded[:, 1:].flatten(0, 1)
    features = draft.features(tapped[:, :-1].flatten(0, 1))
    wanted = vocabulary.probabilities(hidden[:, 1:])
    loss = 0.0
    for step in range(OWN_STEPS[draft.kind]):
        out = draft(embeddings, features, attend).unflatten(0, (rows, length))
        # The first `step` positions have no chain of this length in front of them.
        ours = draft.hidden(out[:, step:])
        loss = loss + HEAD_DECAY**step * vocabulary.distance(ours, wanted[:, step:])
        # What was made at position i is the feature that position i + 1 starts from.
        features = out.roll(1, dims=1).flatten(0, 1)
    return loss


LOSSES = {"medusa": medusa_loss, "eagle": eagle_loss, "mtp": mtp_loss, "eagle3": eagle3_loss}


# ---------------------------------------------------------------- training


@torch.no_grad()
def begin_as_eagle(draft: MTPDraft, target: Decoder, hidden: Tensor) -> None:
    """Start an MTP module as the EAGLE draft that is trained already. Each norm starts at the size
    of what it norms, so it changes little. hidden: [..., hidden_size], some of the target's.
    """
    eagle = load_heads(HERE / "tiny-eagle", target)
    draft.eh_proj.load_state_dict(eagle.fc.state_dict())
    draft.layer.load_state_dict(eagle.layer.state_dict())
    features = hidden.float().square().mean().sqrt()
    draft.enorm.weight.fill_(target.embed_tokens.weight.square().mean().sqrt())
    draft.hnorm.weight.fill_(features)
    draft.norm.weight.fill_(features)


def tokens_by_use(tokens: Tensor, target: Decoder) -> Tensor:
    """All tokens of the vocabulary, the ones used most first: [V]."""
    use = torch.bincount(tokens.flatten(), minlength=target.config.vocab_size)
    return use.argsort(descending=True, stable=True)


def train(kind: str, minutes: float, rows: int) -> None:
    """Train one kind of heads for a wall-clock budget and ship them."""
    torch.manual_seed(0)
    device = default_device()
    target = Decoder.from_pretrained(TARGET, device=device)
    kept = torch.load(FEATURES, mmap=True)
    if kept["target"] != fingerprint(target):
        raise SystemExit(f"{FEATURES} is of other weights: run `features` again")
    tokens, features = kept["tokens"].long(), kept["features"]
    by_use = tokens_by_use(tokens, target).to(device)
    heads = KINDS[kind].for_target(target.config, SIZES[kind]).to(device)
    heads.lm_head.read(target, by_use[:GUESSED])
    heads.lm_head.requires_grad_(False)  # the losses look at the target's own rows
    size = target.config.hidden_size
    if isinstance(heads, MTPDraft):
        begin_as_eagle(heads, target, features[0, :, -size:])
    opts, rng = optimizers(heads), np.random.default_rng(0)
    start, step, spent = time.monotonic(), 0, 0.0
    while spent < 1:
        for chosen in torch.from_numpy(rng.permutation(len(tokens))).split(rows):
            spent = (time.monotonic() - start) / (60 * minutes)
            if spent >= 1:
                break
            read = features[chosen].to(device).float()
            tapped, hidden = read.split([3 * size, size], dim=-1)
            with torch.autocast(device.type, torch.bfloat16):
                vocabulary = Vocabulary.of_step(target, by_use)
                embedded = target.embed_tokens(tokens[chosen].to(device))
                loss = LOSSES[kind](heads, vocabulary, embedded, tapped, hidden)
            loss.backward()
            update(heads, opts, factor=schedule(spent) * LEARNING_RATES[kind])
            step += 1
            if step % 25 == 0:
                print(f"{kind} step {step} spent {spent:.3f} loss {loss.item():.4f}", flush=True)
    facts = dict(
        target=TARGET,
        target_fingerprint=kept["target"],
        training=dict(
            minutes=round((time.monotonic() - start) / 60, 1),
            steps=step,
            tokens_seen=step * rows * WINDOW,
            distinct_tokens=tokens.numel(),
            seed=0,
            device=name_of(device.type),
            torch=torch.__version__,
            python_source=kept.get("python", PYTHON),
        ),
    )
    save_heads(HERE / f"tiny-{kind}", heads.cpu(), facts)


# of models/train.py's rate, because heads are small and begin near what they should become, and MTP
# as a draft that is trained
LEARNING_RATES = {"medusa": 0.5, "eagle": 0.5, "mtp": 0.25, "eagle3": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["features", *LOSSES])
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--tokens", type=int, default=250_000, help="of text, for `features`")
    parser.add_argument("--rows", type=int, default=4, help="windows of a training step")
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    if args.what == "features":
        keep_features(args.tokens)
    else:
        train(args.what, args.minutes, args.rows)


if __name__ == "__main__":
    main()
