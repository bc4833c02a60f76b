"""Write models/HEADS.md, the card of the heads that draft for the embedded target, and how often
they are right into their config.json.

    python -m models.heads_card

Every number in it is measured or recorded.
"""

import json

from lessons.l17_tree_speculation.lab import parallel_counts
from lessons.l17_tree_speculation.lab.experiments import DEPTH, recorded
from models.tokenizer import HERE
from models.train_heads import (
    FEATURE_WEIGHT,
    FREQUENT,
    GUESSED,
    HEAD_DECAY,
    LOSSES,
    OWN_STEPS,
    RARE,
    WINDOW,
)
from models.train_pard import COUNT, KEPT, LEAST_KEPT, RATE


def card() -> str:
    """models/HEADS.md, every number in it from config.json or results/counted/l17_trees.json."""
    counted = recorded()
    rows, training = [], {}
    for kind in LOSSES:
        folder = HERE / f"tiny-{kind}"
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        training[kind] = facts = config["training"]
        found = counted["kinds"][kind]
        rows.append(
            f"| `models/tiny-{kind}` | {found['parameters'] / 1e6:.2f} M | "
            f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f} MB | {facts['minutes']} | "
            f"{facts['tokens_seen'] / 1e6:.2f} M | {found['acceptance'][0][0]:.0%} | "
            f"{found['greedy']['chain']:.2f} | {found['greedy']['tree']:.2f} |"
        )
    columns = ["folder", "parameters", "weights (bfloat16)", "minutes", "tokens seen"]
    columns += ["first guess right", f"tokens a pass, chain of {DEPTH}"]
    columns += [f"tree of {counted['nodes']} nodes"]
    return f"""# Heads for the embedded target

Drafts that read the hidden states of `models/tiny` (lesson 17). `python -m models.heads_card`
writes this page. They belong to the target with the fingerprint `{config["target_fingerprint"]}`,
and `load_heads` refuses every other one: train them again after the target.

| {" | ".join(columns)} |
| {" | ".join("---" for _ in columns)} |
{chr(10).join(rows)}

- **Data**: {facts["distinct_tokens"] / 1e6:.2f} M tokens of the text that the target was trained on
  (models/README.md), for MTP {training["mtp"]["distinct_tokens"] / 1e6:.2f} M; half of them of
  the standard library, in windows of {WINDOW}. The target ran over them once, in bfloat16.
- **Loss**: cross-entropy under the target's own probabilities at the place that a head predicts,
  over the {FREQUENT} tokens that are used most and {RARE} others, drawn anew in each step. Head i
  of Medusa, and step i of EAGLE-3 and MTP on their own features, count {HEAD_DECAY}^i; MTP takes
  {OWN_STEPS["mtp"]} steps, EAGLE-3 {OWN_STEPS["eagle3"]}. EAGLE also learns the target's
  features (smooth L1, weight {FEATURE_WEIGHT:g}), with noise on those that it reads.
- **MTP starts from EAGLE's weights**, so the tokens that EAGLE has seen count for it, too, and the
  two rows compare two drafts, not two designs. The target had been trained before, and stays as it
  is. A published MTP module is trained with its target from the start.
- **Optimizers**: Muon and AdamW as for the target, at half of its learning rate, for MTP at a
  quarter. Seed {facts["seed"]}. {facts["device"]}, PyTorch {facts["torch"]}, one thread. The
  machine was busy with other work, so the tokens seen say how far the training went, not the
  minutes.
- **Figures**: greedy decoding of {counted["requests"]} held-out prompts, {counted["new_tokens"]}
  tokens each, counted by `python -m lessons.l17_tree_speculation.lab.experiments`. *First guess
  right*: the likeliest token directly behind the newest one.
- **Acceptance**: `config.json` of each holds how often the guess of each rank was right at each
  depth, from the same count. The engine chooses its tree by it (`speculative_token_tree="auto"`).
- **Last matrix**: the target's rows of the {GUESSED} tokens that are used most in the text of their
  training (lesson 17, *A smaller last matrix*). They are part of the parameters, but were not
  trained.

{parallel_card()}"""


def parallel_card() -> str:
    """The part of the page about models/tiny-pard, from results/counted/l17_parallel.json."""
    counted = parallel_counts.recorded()
    facts = json.loads((HERE / "tiny-pard" / "training.json").read_text(encoding="utf-8"))
    greedy = counted["ways"]["greedy"]
    rows = []
    for count in greedy["chain"]:
        ours, theirs = (greedy[name][count]["tokens_a_pass"] for name in ("parallel", "chain"))
        rows.append(f"| {count} | {with_interval(theirs)} | {with_interval(ours)} |")
    return f"""# A draft that guesses several tokens in one pass

`models/tiny-pard` is `models/tiny-draft`, trained on with masks (PARD, lesson 17): an ordinary
checkpoint of {counted["megabytes"]:.1f} MB, whose config.json names the mask, `pard_token`. It
reads no hidden states of the target, so `load_heads` does not know it.

| guesses of a step | chain of `models/tiny-draft` | `models/tiny-pard` in one pass |
| --- | --- | --- |
{chr(10).join(rows)}

- **Figures**: tokens a pass of the target, greedy, {counted["prompts"]} held-out prompts,
  {counted["new_tokens"]} tokens each; in brackets the middle 95 % of resampled prompts. Counted by
  `python -m lessons.l17_tree_speculation.lab.parallel_counts`.
- **Training**: {facts["minutes"]:g} minutes of one core, {facts["tokens_seen"] / 1e6:.2f} M tokens
  of the heads' text, with the masks {facts["rows_trained"] / 1e6:.2f} M rows. K = {COUNT};
  {KEPT:.0%} of the chains of masks stay at each depth, at least {LEAST_KEPT:.0%} of the places.
- **Loss**: the draft's own last one, the probability that a drafted token is rejected (and a share
  of the divergence), over the columns of the vocabulary that the heads' loss has.
- **Optimizers**: as for the heads, at {RATE:g} of the target's learning rate. Seed
  {facts["seed"]}. {facts["device"]}, PyTorch {facts["torch"]}, one thread.
"""


def with_interval(found: dict) -> str:
    """A mean and its interval."""
    return f"{found['mean']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def keep_acceptance() -> None:
    """Write what was counted beside each kind of heads, where the engine finds it."""
    counted = recorded()
    for kind in LOSSES:
        path = HERE / f"tiny-{kind}" / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["acceptance"] = counted["kinds"][kind]["acceptance"]
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    keep_acceptance()
    (HERE / "HEADS.md").write_text(card(), encoding="utf-8")
