"""What a token costs on the wire in each form of dispatch and combine.

    python -m lessons.l23_experts.lab.traffic --ranks 8

A table for the layers of three models, computed by ranks/traffic.py. For DeepSeek-V3 it also draws
tokens through lesson 6's router, because a router that keeps the groups with the best experts
spreads a token over more of them than chance does.
"""

import sys

import torch

from lessons.l01_roofline.planner.models import find_model
from lessons.l06_mla.moe import Router
from lessons.l23_experts.ranks.traffic import Layer, expected_ranks, slot_bytes, token_bytes
from lessons.l23_experts.ranks.wire import Float8, Plain
from lessons.toolbox.command import OneLineParser
from lessons.toolbox.model.config import MoEConfig

V3_GROUPS, V3_KEPT = 8, 4  # n_group and topk_group of DeepSeek-V3's config.json
NAMES = {
    "Mixtral 8x7B": ("mixtral-8x7b", 1, 1),
    "Qwen3-30B-A3B": ("qwen3-30b-a3b", 1, 1),
    "DeepSeek-V3, any groups": ("deepseek-v3", 1, 1),
    "DeepSeek-V3": ("deepseek-v3", V3_GROUPS, V3_KEPT),
}
WIDTH, TOKENS = 256, 8192  # of the tokens that are drawn


def layer_of(name: str) -> Layer:
    """A layer of experts of one of NAMES."""
    model, *groups = NAMES[name]
    shape = find_model(model)
    return Layer(shape.num_experts, shape.num_experts_per_tok, shape.hidden_size, *groups)


def drawn_ranks(layer: Layer, size: int, num_tokens: int = TOKENS) -> tuple[float, int]:
    """The mean and the most ranks of a token, of lesson 6's sigmoid router with random weights over
    random tokens.
    """
    config = MoEConfig(
        layer.num_experts,
        layer.top_k,
        1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        n_group=layer.num_groups,
        topk_group=layer.kept_groups,
    )
    with torch.no_grad():
        _, chosen = Router(WIDTH, config)(torch.randn(num_tokens, WIDTH))
    ranks = chosen // (layer.num_experts // size)
    reached = torch.zeros(num_tokens, size).scatter_(1, ranks, 1).sum(1)
    return float(reached.mean()), int(reached.max())


def row_of(layer: Layer, size: int) -> dict[str, float]:
    """ranks: of a token; then bytes of a token, there and back, in each form."""
    ranks = expected_ranks(layer, size)
    return {
        "ranks": ranks,
        "gathered": token_bytes(layer, size, Plain()),
        "an expert": token_bytes(layer, layer.top_k, Plain()),
        "a rank": token_bytes(layer, ranks, Plain()),
        "a rank, FP8": token_bytes(layer, ranks, Float8()),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = OneLineParser(
        prog="python -m lessons.l23_experts.lab.traffic", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=8, help="that the experts are spread over")
    parser.add_argument("--max-tokens", type=int, default=128, help="slots of an expert and a rank")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        rows = {name: row_of(layer_of(name), given.ranks) for name in NAMES}
        slots = slot_bytes(layer_of("DeepSeek-V3"), given.max_tokens, Float8())
    except ValueError as error:
        parser.error(str(error))
    print(f"kB of a token in a layer, there and back, on {given.ranks} ranks (its own included)")
    print(f"{'':24}{'ranks':>6}" + "".join(f"{name:>13}" for name in list(rows["DeepSeek-V3"])[1:]))
    for name, row in rows.items():
        numbers = "".join(f"{row[form] / 1e3:13.1f}" for form in list(row)[1:])
        print(f"{name:24}{row['ranks']:6.2f}{numbers}")
    torch.manual_seed(given.seed)
    mean, most = drawn_ranks(layer_of("DeepSeek-V3"), given.ranks)
    print(f"\nDeepSeek-V3's router, drawn: {mean:.2f} ranks in the mean, {most} at most")
    there, back = (number / 1e6 for number in slots)
    print(
        f"slots for {given.max_tokens} tokens of a rank: {there:.0f} MB there, {back:.0f} MB back"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
