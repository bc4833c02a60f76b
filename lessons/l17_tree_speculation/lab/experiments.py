"""What is counted on the embedded model: how often guesses are right, tokens a pass, and how far
typical acceptance leaves the target's distribution. Nothing is timed.

    python -m lessons.l17_tree_speculation.lab.experiments

counts all of it again and writes results/counted/l17_trees.json, which the README quotes.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities
from lessons.l16_speculative_sampling.generate import Counts as ChainCounts
from lessons.l16_speculative_sampling.generate import generate as generate_chains
from lessons.l17_tree_speculation.generate import Counts, generate
from lessons.l17_tree_speculation.lab.workload import (
    KINDS,
    MODELS,
    NEW_TOKENS,
    embedded_heads,
    embedded_pair,
    held_out_prompts,
)
from lessons.l17_tree_speculation.trees.accept import Chosen, FromDraft, Rule, Typical
from lessons.l17_tree_speculation.trees.tree import (
    Tree,
    best_tree,
    chain,
    expected_tokens,
    full_tree,
)

FILE = Path(__file__).parents[3] / "results" / "counted" / "l17_trees.json"
REQUESTS = 8
NODES = 16  # of the best tree, the root among them
DEPTH = 4
WIDE = full_tree([4, 2, 2, 1])  # wide enough to see how often the second and third guess is right
WAYS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True),
}
PLAIN = SamplingParams(ignore_eos=True)  # temperature 1, all tokens: what typical acceptance bends


def recorded() -> dict:
    """What was counted last."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def params_of(way: SamplingParams, requests: int) -> list[SamplingParams]:
    """A seed for each request."""
    return [replace(way, seed=row) for row in range(requests)]


def counted(
    kind: str, way: SamplingParams, tree: Tree, rule: Rule | None = None, requests: int = REQUESTS
) -> tuple[Counts, list[list[int]]]:
    """What happens to guesses on held-out code, and the answers. The same numbers on every machine,
    up to ties of rounding.
    """
    target, heads, _ = embedded_heads(kind)
    counts = Counts()
    outputs = generate(
        target,
        held_out_prompts(requests),
        NEW_TOKENS,
        params_of(way, requests),
        heads=heads,
        tree=tree,
        rule=rule,
        counts=counts,
    )
    return counts, outputs


def acceptance(kind: str, requests: int = REQUESTS) -> list[list[float]]:
    """How often each guess is right in greedy decoding, per depth and rank, falling."""
    counts, _ = counted(kind, WAYS["greedy"], WIDE, requests=requests)
    return [sorted(row, reverse=True) for row in counts.acceptance(DEPTH, 4) if row]


def chain_tokens(way: SamplingParams, with_draft: bool, requests: int = REQUESTS) -> float:
    """Tokens a pass of lesson 16's drafts, K = 4, on the same prompts."""
    target, draft, _ = embedded_pair()
    counts = ChainCounts()
    generate_chains(
        target,
        held_out_prompts(requests),
        NEW_TOKENS,
        params_of(way, requests),
        draft=draft if with_draft else None,
        num_speculative_tokens=DEPTH,
        counts=counts,
    )
    return counts.emitted / (counts.emitted - counts.kept)


@torch.inference_mode()
def surprise(outputs: list[list[int]], requests: int = REQUESTS) -> float:
    """How unlikely the answers are to the target: the mean of -log p, in nats a token."""
    target, _, _ = embedded_pair()
    total, tokens = 0.0, 0
    for prompt, output in zip(held_out_prompts(requests), outputs):
        text = torch.tensor([*prompt, *output], device=target.device)
        hidden = target(text, whole_sequence(target, len(text)))
        logits = target.logits(hidden[len(prompt) - 1 : -1]).float()
        chosen = text[len(prompt) :, None]
        total -= float(logits.log_softmax(-1).gather(1, chosen).sum())
        tokens += len(output)
    return total / tokens


@torch.inference_mode()
def lost_probability(outputs: list[list[int]], kind: str, tree: Tree, requests: int) -> float:
    """The total variation between what typical acceptance emits next and what the target would,
    mean over the places of some answers at which heads have something to read.

    Where a guess of the root passes, the rule is certain: all of the probability goes to one token,
    and 1 - p of it is in the wrong place. Where no guess passes, nothing is.
    """
    target, heads, _ = embedded_heads(kind)
    total, places = 0.0, 0
    rule = Typical()
    for prompt, output in zip(held_out_prompts(requests), outputs):
        text = torch.tensor([*prompt, *output], device=target.device)
        hidden = target(text, whole_sequence(target, len(text)))
        guesses = target.logits(heads.heads[0](hidden)).topk(len(tree.children[0])).indices
        for place in range(len(prompt), len(text) - 1):
            p = probabilities(target.logits(hidden[place][None])[0], PLAIN, [], [])
            bound = min(rule.epsilon, rule.delta * float(torch.exp(-torch.special.entr(p).sum())))
            # Deeper guesses may change this, but most often the first guess that passes decides.
            passing = [float(p[guess]) for guess in guesses[place - 1] if p[guess] > bound]
            total += 1 - passing[0] if passing else 0.0
            places += 1
    return total / places


def typical_bias(kind: str, tree: Tree, requests: int = REQUESTS) -> dict[str, float]:
    """Tokens a pass and surprise, typical beside exact, at temperature 1."""
    exact, plain = counted(kind, PLAIN, tree, Chosen(), requests)
    typical, bent = counted(kind, PLAIN, tree, Typical(), requests)
    return dict(
        exact_tokens=exact.tokens_a_pass,
        typical_tokens=typical.tokens_a_pass,
        exact_surprise=surprise(plain, requests),
        typical_surprise=surprise(bent, requests),
        total_variation=lost_probability(bent, "medusa", tree, requests),
    )


def facts_of(kind: str) -> dict[str, float]:
    """What the heads take: memory in bfloat16, and what their training saw."""
    _, heads, _ = embedded_heads(kind)
    count = sum(p.numel() for p in heads.parameters())
    config = json.loads((MODELS / f"tiny-{kind}" / "config.json").read_text(encoding="utf-8"))
    seen = config["training"]["tokens_seen"]
    return dict(parameters=count, megabytes=2 * count / 1e6, million_tokens_seen=seen / 1e6)


def count_all() -> dict:
    """Everything that the README quotes."""
    found = dict(requests=REQUESTS, new_tokens=NEW_TOKENS, nodes=NODES, kinds={})
    for kind in KINDS:
        table = acceptance(kind)
        tree = best_tree(table, NODES)
        entry = dict(facts_of(kind), acceptance=table, tree=list(tree.parents))
        entry["expected"] = {
            str(nodes): expected_tokens(best_tree(table, nodes), table)
            for nodes in (1, 2, 3, 5, 8, 16, 32, 64)
        }
        entry["expected_chain"] = expected_tokens(chain(len(table)), table)
        for name, way in WAYS.items():
            entry[name] = dict(
                chain=counted(kind, way, chain(DEPTH))[0].tokens_a_pass,
                tree=counted(kind, way, tree)[0].tokens_a_pass,
            )
        entry["sampled"]["drawn"] = counted(kind, WAYS["sampled"], tree, FromDraft())[
            0
        ].tokens_a_pass
        found["kinds"][kind] = entry
        print(kind, json.dumps(entry), flush=True)
    tree = Tree(tuple(found["kinds"]["medusa"]["tree"]))
    found["typical"] = typical_bias("medusa", tree)
    found["chains"] = {
        name: dict(draft=chain_tokens(way, True), ngram=chain_tokens(way, False))
        for name, way in WAYS.items()
    }
    draft = embedded_pair()[1]
    found["chains"]["draft_megabytes"] = 2 * sum(p.numel() for p in draft.parameters()) / 1e6
    return found


def rounded(found):
    """The same with four decimals, so that the file can be read."""
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [rounded(value) for value in found]
    return round(found, 4) if isinstance(found, float) else found


def main() -> None:
    found = rounded(count_all())
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
