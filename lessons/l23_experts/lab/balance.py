"""What copies of busy experts do for the balance of ranks, on loads of three kinds.

    python -m lessons.l23_experts.lab.balance          prints the tables
    python -m lessons.l23_experts.lab.balance --write  writes results/counted/l23_balance.json, too

No trained model with experts is small enough to ship, so the routers are random, and the skew comes
from elsewhere:

    zipf     expert number r (in an order that is drawn) is liked as 1 / r
    skewed   lab/imbalance.py's router, which prefers some experts for all tokens
    texts    a random router reads what an MLP of models/tiny, which is trained, reads: the hidden
             values of Python modules that it was not trained on, or of this course's lessons

A placement is made from the loads of STATISTICS tokens, and then judged on other tokens. Everything
is counted, nothing is timed.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l06_mla.moe import Router
from lessons.l23_experts.lab import imbalance
from lessons.l23_experts.ranks.load import load_of
from lessons.l23_experts.ranks.mending import mended
from lessons.l23_experts.ranks.placement import (
    Placement,
    by_number,
    in_order,
    in_turn,
    moved,
    place,
    place_by_nodes,
    renumbered,
)
from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.model.config import MoEConfig
from lessons.toolbox.model.corpus import corpus, token_stream

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "results" / "counted" / "l23_balance.json"
EXPERTS, TOP_K, RANKS, NODES, GROUPS = 256, 8, 32, 4, 8  # DeepSeek-V3's prefill: 32 GPUs
REDUNDANT = (0, 32, 64, 128)
STATISTICS, STEP = 8192, 4096  # tokens
MOVES = (0, 4, 8, 16, 32, 64)
# An expert of DeepSeek-V3 in FP8, and its layers that have experts.
EXPERT_BYTES, LAYERS = 3 * 7168 * 2048, 58
LAYER, WINDOW = 3, 512  # of models/tiny
SEED = 23

Source = Callable[[int], Tensor]  # number of tokens -> the experts of each: [T, TOP_K]


def zipf(exponent: float = 1.0) -> Source:
    """Experts drawn without repetition, by Gumbel noise on the logarithm of their weights."""
    liked = -exponent * (1 + torch.randperm(EXPERTS)).log()

    def draw(num_tokens: int) -> Tensor:
        noise = -torch.rand(num_tokens, EXPERTS).clamp(min=1e-9).log()
        return (liked - noise.log()).topk(TOP_K).indices

    return draw


def skewed() -> Source:
    """Random tokens through a router that prefers some experts."""
    router = imbalance.new_router(EXPERTS, TOP_K, imbalance.SKEW)
    return lambda num_tokens: router(torch.randn(num_tokens, imbalance.WIDTH))[1]


@cache
def mlp_inputs(kind: str, num_tokens: int) -> Tensor:
    """What the MLP of layer LAYER of models/tiny reads for the tokens of such texts, "modules" or
    "lessons", in a drawn order: [T, hidden_size].
    """
    texts = corpus()[1]
    if kind == "lessons":
        pages = sorted((ROOT / "lessons").glob("l*/README.md"))
        texts = [page.read_text(encoding="utf-8") for page in pages]
    wanted = num_tokens // WINDOW
    windows = torch.from_numpy(token_stream(texts)[: wanted * WINDOW].copy()).view(wanted, WINDOW)
    model = Decoder.from_pretrained("models/tiny")
    seen: list[Tensor] = []
    layer = model.layers[LAYER].post_attention_layernorm
    hook = layer.register_forward_hook(lambda _, inputs, output: seen.append(output))
    with torch.no_grad():
        for tokens in windows:
            model(tokens, whole_sequence(model, WINDOW))
    hook.remove()
    return torch.cat(seen)[torch.randperm(wanted * WINDOW)]


def of_texts(kind: str, num_tokens: int = STATISTICS + STEP) -> Source:
    """A random router, the same for all kinds of texts, on so many tokens, which go round."""
    x = mlp_inputs(kind, num_tokens)
    config = MoEConfig(EXPERTS, TOP_K, 1)
    torch.manual_seed(SEED)
    router = Router(x.shape[1], config).requires_grad_(False)
    chosen, place = router(x)[1], 0

    def draw(num_tokens: int) -> Tensor:
        nonlocal place
        rows = torch.arange(place, place + num_tokens) % len(chosen)
        place += num_tokens
        return chosen[rows]

    return draw


def both(first: Source, second: Source) -> Source:
    """Half of the tokens of each."""
    return lambda num_tokens: torch.cat([first(num_tokens // 2), second(num_tokens // 2)])


def loads_of(chosen: Tensor) -> tuple[int, ...]:
    """Pairs of each expert. chosen: [T, k]."""
    return load_of(chosen, EXPERTS).counts


def imbalance_of(chosen: Tensor, placement: Placement, choose=in_turn) -> float:
    """The busiest rank over the mean, with the tokens as they are: chosen: [T, k]."""
    slots = choose(chosen, placement.copies())
    return load_of(slots // placement.per_rank, placement.size).imbalance


def rows_of(source: Source, served: Source | None = None) -> dict:
    """Of a source the balance of ranks on new tokens, by how many copies there are. served: another
    source that the new tokens are of, so that the statistics are stale.
    """
    loads, step = loads_of(source(STATISTICS)), (served or source)(STEP)
    found = {"busiest expert": load_of(step, EXPERTS).imbalance}
    found["in order"] = imbalance_of(step, in_order(EXPERTS, RANKS))
    for redundant in REDUNDANT:
        found[str(redundant)] = imbalance_of(step, place(loads, EXPERTS + redundant, RANKS))
    placement = place(loads, EXPERTS + 32, RANKS)
    nodes = place_by_nodes(loads, EXPERTS + 32, RANKS, NODES, GROUPS)
    found["32, groups on nodes"] = imbalance_of(step, nodes)
    found["32, by number"] = imbalance_of(step, placement, by_number)
    return found


def doubled_of(source: Source) -> dict:
    """Slots that gain nothing, by how many copies there are."""
    loads = loads_of(source(STATISTICS))
    copies = [redundant for redundant in REDUNDANT if redundant]
    return {str(n): place(loads, EXPERTS + n, RANKS).num_doubled for n in copies}


def moves_of(first: Source, second: Source) -> dict:
    """Experts that travel when the placement for one source becomes that for another, and GB of all
    layers if each is an expert of DeepSeek-V3.
    """
    before, after = (
        place(loads_of(source(STATISTICS)), EXPERTS + 32, RANKS) for source in (first, second)
    )
    counts = moved(before, after), moved(before, renumbered(before, after))
    gb = [count * EXPERT_BYTES * LAYERS / 1e9 for count in counts]
    names = "as EPLB numbers ranks", "ranks renumbered"
    return {
        name: {"experts": count, "gb": size, "gb_a_gpu": size / RANKS}
        for name, count, size in zip(names, counts, gb)
    }


def mended_of(first: Source, second: Source) -> dict:
    """A placement for one source that serves another, after few moves by the loads of that."""
    before = place(loads_of(first(STATISTICS)), EXPERTS + 32, RANKS)
    loads, step = loads_of(second(STATISTICS)), second(STEP)
    found = {}
    for most in MOVES:
        placement = mended(before, loads, most)
        counts = {"experts": moved(before, placement), "balance": imbalance_of(step, placement)}
        found[str(most)] = counts
    return found


def record_of() -> dict:
    """All tables."""
    torch.manual_seed(SEED)
    sources = {"zipf": zipf(), "skewed": skewed()}
    modules, lessons = of_texts("modules"), of_texts("lessons")
    sources |= {"modules": modules, "lessons": lessons}
    return {
        "what": "counted, with random routers; nothing was timed",
        "command": "python -m lessons.l23_experts.lab.balance --write",
        "experts": EXPERTS,
        "ranks": RANKS,
        "balance": {name: rows_of(source) for name, source in sources.items()},
        "stale": {
            "placed for modules, serving lessons": rows_of(modules, lessons),
            "placed for lessons, serving modules": rows_of(lessons, modules),
            "placed for both, serving lessons": rows_of(both(modules, lessons), lessons),
            "placed for both, serving modules": rows_of(both(modules, lessons), modules),
        },
        "doubled": {name: doubled_of(source) for name, source in sources.items()},
        "moves": {
            "from modules to lessons": moves_of(modules, lessons),
            "from modules to other modules": moves_of(modules, modules),
        },
        "mended": mended_of(modules, lessons),
    }


def show(record: dict) -> None:
    """The tables as text."""
    print(f"{record['experts']} experts on {record['ranks']} ranks: the busiest rank over the mean")
    for part in ("balance", "stale"):
        columns = list(next(iter(record[part].values())))
        print("\n" + " " * 38 + "".join(f"{name:>16}" for name in columns))
        for name, row in record[part].items():
            print(f"{name:38}" + "".join(f"{row[column]:16.2f}" for column in columns))
    print()
    for name, counts in record["doubled"].items():
        print(f"{name}: of so many copies so many are beside another of the same expert: {counts}")
    for most, row in record["mended"].items():
        print(f"at most {most} moves, from modules to lessons: {row['balance']:.2f} times the mean")
    for name, ways in record["moves"].items():
        for way, counts in ways.items():
            print(f"{name}, {way}: {counts['experts']} experts, {counts['gb_a_gpu']:.1f} GB a GPU")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser(
        prog="python -m lessons.l23_experts.lab.balance", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--write", action="store_true", help="the record, too")
    given = parser.parse_args(arguments)
    return run_command("balance", lambda: run(given))


def run(given: argparse.Namespace) -> int:
    """Count, write if asked, and print."""
    record = record_of()
    if given.write:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    show(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
