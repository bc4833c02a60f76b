"""What parallel drafting is worth on the embedded model: tokens a pass of the target, and how often
the draft runs for them, beside drafts that guess token after token. Nothing is timed.

    python -m lessons.l17_tree_speculation.lab.parallel_counts

counts all of it on all of the ladder's prompts and writes results/counted/l17_parallel.json, which
the lesson quotes. An interval holds the middle 95 % of what resampled prompts give (Efron 1979).
"""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.generate import generate as generate_plain
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.l16_speculative_sampling.drafts import Drafter, ModelDrafter
from lessons.l16_speculative_sampling.generate import Counts as ChainCounts
from lessons.l16_speculative_sampling.generate import generate as generate_chains
from lessons.l17_tree_speculation.generate import Counts, generate
from lessons.l17_tree_speculation.heads.parallel import (
    ParallelDraft,
    load_parallel,
    place_logits,
)
from lessons.l17_tree_speculation.lab.experiments import DEPTH, WAYS, rounded
from lessons.l17_tree_speculation.lab.workload import (
    MODELS,
    NEW_TOKENS,
    embedded_heads,
    embedded_pair,
    held_out_prompts,
)
from lessons.l17_tree_speculation.trees.tree import chain

FILE = Path(__file__).parents[3] / "results" / "counted" / "l17_parallel.json"
PROMPTS = 32
COUNTS = dict(greedy=(DEPTH, 2 * DEPTH), sampled=(DEPTH,))  # K
HEADS = ("medusa", "eagle", "mtp")
SAMPLES = 10_000  # of the bootstrap


def recorded() -> dict:
    """What was counted last."""
    return json.loads(FILE.read_text(encoding="utf-8"))


class Counted(NamedTuple):
    """Of one prompt: tokens emitted, passes of the target that verified, passes of the draft."""

    tokens: int
    target: int
    draft: int


@lru_cache
def embedded_parallel() -> ParallelDraft:
    """The draft with masks, in float32 on the target's device."""
    return load_parallel(MODELS / "tiny-pard", device=embedded_pair()[0].device)


def counted_model(
    draft: Decoder, new_drafter: type[Drafter], count: int, way: SamplingParams, prompts: int
) -> list[Counted]:
    """A draft model's chains of `count` guesses. new_drafter: how it guesses them."""
    target, found = embedded_pair()[0], []
    for row, prompt in enumerate(held_out_prompts(prompts)):
        counts = ChainCounts()
        how = dict(draft=draft, new_drafter=new_drafter, num_speculative_tokens=count)
        params = replace(way, seed=row)
        generate_chains(target, [prompt], NEW_TOKENS, params, counts=counts, **how)
        passes = counts.emitted - counts.kept
        # With one request a chain runs the draft once for each guess.
        drafts = counts.drafted if new_drafter is ModelDrafter else counts.steps
        found.append(Counted(counts.emitted, passes, drafts))
    return found


def counted_heads(kind: str, way: SamplingParams, prompts: int) -> list[Counted]:
    """The same of heads. EAGLE and MTP run their layer once a guess, Medusa's run at once."""
    (target, heads, _), found = embedded_heads(kind), []
    for row, prompt in enumerate(held_out_prompts(prompts)):
        counts, params = Counts(), replace(way, seed=row)
        how = dict(heads=heads, tree=chain(DEPTH), counts=counts)
        generate(target, [prompt], NEW_TOKENS, params, **how)
        drafts = counts.passes if kind == "medusa" else counts.nodes
        found.append(Counted(counts.kept + counts.passes, counts.passes, drafts))
    return found


def tokens_a_pass(found: list[Counted]) -> float:
    """Of all prompts together."""
    return sum(one.tokens for one in found) / sum(one.target for one in found)


def resampled(found: list[Counted]) -> Tensor:
    """Tokens a pass of resampled prompts, always the same ones: [SAMPLES] float64."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(found), (SAMPLES, len(found)), generator=generator)
    tokens, passes, _ = torch.tensor(found, dtype=torch.float64).unbind(1)
    return tokens[rows].sum(1) / passes[rows].sum(1)


def interval(mean: float, samples: Tensor) -> dict[str, float]:
    """The middle 95 % of the samples."""
    ends = torch.tensor([0.025, 0.975], dtype=samples.dtype)
    low, high = samples.quantile(ends).tolist()
    return dict(mean=mean, low=low, high=high)


def summary(found: list[Counted]) -> dict:
    """What a table prints of a draft."""
    drafts, tokens = sum(one.draft for one in found), sum(one.tokens for one in found)
    passes = sum(one.target for one in found)
    return dict(
        tokens_a_pass=interval(tokens_a_pass(found), resampled(found)),
        draft_passes_a_pass=drafts / passes,
        draft_passes_of_100_tokens=100 * drafts / tokens,
    )


def gap(ours: list[Counted], theirs: list[Counted]) -> dict[str, float]:
    """Ours minus theirs in tokens a pass, over the same prompts."""
    return interval(
        tokens_a_pass(ours) - tokens_a_pass(theirs), resampled(ours) - resampled(theirs)
    )


def even_cost(chain: list[Counted], parallel: list[Counted]) -> float:
    """t, a pass of the draft over one of the target, from which on the parallel draft is the faster
    one: where 1 / (tokens a pass) + t · (draft passes a token) is the same for both. A pass over
    some masks is taken to be as long as one over a token, as it is on a GPU in a small batch.
    """
    target, draft = (
        [sum(getattr(one, name) for one in rows) / sum(one.tokens for one in rows)
         for rows in (chain, parallel)]
        for name in ("target", "draft")
    )  # fmt: skip
    return (target[1] - target[0]) / (draft[0] - draft[1])


def places_right(prompts: int, count: int = 2 * DEPTH) -> list[float]:
    """How often the draft's likeliest token of each place is the target's, if all before it in the
    pass were: [count].
    """
    target, draft = embedded_pair()[0], embedded_parallel()
    asked, right = [0] * count, [0] * count
    for prompt in held_out_prompts(prompts):
        how = dict(sampling=WAYS["greedy"], rung=PREALLOCATED)
        (answer,) = generate_plain(target, [prompt], NEW_TOKENS + count, **how)
        for begin in range(NEW_TOKENS):
            text = prompt + answer[:begin]
            logits = place_logits(draft.model, text, count, draft.mask_token)
            for place, token in enumerate(logits.argmax(-1).tolist()):
                asked[place] += 1
                if token != answer[begin + place]:
                    break
                right[place] += 1
    return [hits / max(1, tests) for hits, tests in zip(right, asked)]


def count_all(prompts: int = PROMPTS) -> dict:
    """Everything that the lesson quotes."""
    found = dict(prompts=prompts, new_tokens=NEW_TOKENS, samples=SAMPLES, count=DEPTH)
    found["ways"] = {name: count_way(name, prompts) for name in WAYS}
    parallel, greedy = embedded_parallel(), WAYS["greedy"]
    found["heads"] = {kind: summary(counted_heads(kind, greedy, prompts)) for kind in HEADS}
    found["places_right"] = places_right(prompts)
    weights = sum(p.numel() for p in parallel.model.parameters())
    found |= dict(million_weights=weights / 1e6, megabytes=2 * weights / 1e6)
    training = json.loads((MODELS / "tiny-pard" / "training.json").read_text(encoding="utf-8"))
    found["training"] = dict(
        minutes=training["minutes"],
        million_tokens_seen=training["tokens_seen"] / 1e6,
        million_rows=training["rows_trained"] / 1e6,
    )
    return found


def count_way(name: str, prompts: int) -> dict:
    """The chain of lesson 16's draft beside the same number of guesses in one pass; greedy also the
    new draft's own chain, which says what the training has done to it without masks.
    """
    chain_draft, parallel = embedded_pair()[1], embedded_parallel()
    drafts = {
        "chain": (chain_draft, ModelDrafter),
        "parallel": (parallel.model, parallel.drafter),
    }
    if name == "greedy":
        drafts["own_chain"] = parallel.model, ModelDrafter
    found, gaps, even = {}, {}, {}
    for count in COUNTS[name]:
        counted = {
            draft: counted_model(*how, count, WAYS[name], prompts) for draft, how in drafts.items()
        }
        for draft, rows in counted.items():
            found.setdefault(draft, {})[str(count)] = summary(rows)
        both = counted["chain"], counted["parallel"]
        gaps[str(count)], even[str(count)] = gap(*both), even_cost(*both)
    return found | dict(chain_minus_parallel=gaps, even_cost=even)


def main() -> None:
    found = rounded(count_all())
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
