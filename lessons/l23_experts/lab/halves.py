"""Two halves of a batch in turns beside one batch, on a line that is as slow as you like.

    python -m lessons.l23_experts.lab.halves --travel-ms 10

Layers of experts run in this process, and their rows travel so long in each direction. For what a
GPU would compute a thread sleeps. The command draws what the threads did: "0" and "1" are the
halves, a column is a piece of time.
"""

import sys
import time

import torch
from torch import Tensor, nn

from lessons.l06_mla.moe import MoE
from lessons.l20_parallelism.processes.group import Group
from lessons.l23_experts.grouped import GroupedExperts
from lessons.l23_experts.naive import layer_config
from lessons.l23_experts.ranks.experts import SplitTokensMoE
from lessons.l23_experts.ranks.halves import Line, Span, in_turns
from lessons.l23_experts.ranks.overlap import COMPUTE, NETWORK
from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.model.arguments import check_positive, check_whole
from lessons.toolbox.model.config import MoEConfig

SIZE, EXPERTS, TOP_K, INNER = 64, 16, 4, 32
COLUMNS = 72


class SlowExperts(nn.Module):
    """Experts that take row_s longer for each row. A thread that sleeps uses no processor, so
    halves do not slow each other down.
    """

    def __init__(self, experts: GroupedExperts, row_s: float):
        super().__init__()
        self.experts, self.row_s = experts, row_s

    def rows(self, x: Tensor, chosen: Tensor) -> Tensor:
        """As GroupedExperts.rows: [T, H] -> [T · k, H]."""
        time.sleep(self.row_s * chosen.numel())
        return self.experts.rows(x, chosen)


class Layer(nn.Module):
    """A product of rows in the place of attention, and a layer of experts. token_s: what both
    together take longer for each token, half of it in the experts.
    """

    def __init__(self, group: Group, token_s: float, kind: type[nn.Module]):
        super().__init__()
        moe = MoE(layer_config(SIZE, MoEConfig(EXPERTS, TOP_K, INNER, norm_topk_prob=True)))
        self.token_s = token_s
        self.mix = nn.Linear(SIZE, SIZE, bias=False)
        self.mlp = kind(moe, group)
        if token_s:
            self.mlp.experts = SlowExperts(self.mlp.experts, token_s / 2 / TOP_K)

    def forward(self, x: Tensor) -> Tensor:  # [T, SIZE] -> [T, SIZE]
        x = x + self.mix(x)
        time.sleep(self.token_s / 2 * len(x))
        return x + self.mlp(x)


def new_model(
    group: Group,
    num_layers: int,
    seed: int,
    token_s: float = 0.0,
    kind: type[nn.Module] = SplitTokensMoE,
) -> nn.Sequential:
    """Layers with random weights in float64, the same for the same seed on every rank. kind: a form
    of ranks/experts.py or ranks/dispatch.py; token_s is for SplitTokensMoE alone.
    """
    torch.manual_seed(seed)
    layers = nn.Sequential(*(Layer(group, token_s, kind) for _ in range(num_layers)))
    return layers.double().requires_grad_(False)


def tokens_of(num_tokens: int, seed: int) -> Tensor:
    """[T, SIZE]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, SIZE, generator=generator, dtype=torch.float64)


def both_ways(
    model: nn.Module, x: Tensor, group: Group, byte_s: float
) -> tuple[Tensor, Tensor, list[list[Span]]]:
    """The model's output for x: [T, SIZE] as one batch and as two halves, both [T, SIZE], and what
    the threads and the line did.
    """
    outs, spans = [], []
    for inputs in ([x], list(x.chunk(2))):
        line = Line(byte_s)
        outs.append(torch.cat(in_turns(model, inputs, group, line)))
        line.close()
        spans.append(line.spans)
    return *outs, spans


def run_halves(world: Group, kind: type[nn.Module], seed: int, byte_s: float) -> dict:
    """What a rank of a test computes with two layers of a form: whole, halves: [T, SIZE] of its own
    tokens; alone: the halves without turns; order: whose exchange was when.
    """
    model, x = new_model(world, 2, seed, kind=kind), tokens_of(10, seed + world.rank)
    whole, halves, spans = both_ways(model, x, world, byte_s)
    alone = torch.cat([model(half) for half in x.chunk(2)])
    order = [span.half for span in spans[1] if span.lane == NETWORK]
    return dict(whole=whole, halves=halves, alone=alone, order=order)


def hidden_s(spans: list[Span]) -> float:
    """Seconds in which a half computes while the other's rows travel."""
    computing = [span for span in spans if span.lane == COMPUTE]
    travelling = [span for span in spans if span.lane == NETWORK]
    return sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s))
        for a in computing
        for b in travelling
        if a.half != b.half
    )


def end_of(spans: list[Span]) -> float:
    """Seconds until the last one ended."""
    return max(span.end_s for span in spans)


def lanes(spans: list[Span], seconds: float) -> list[str]:
    """A line of letters for each lane, COLUMNS for so many seconds."""
    rows = []
    for lane in (COMPUTE, NETWORK):
        row = ["·"] * COLUMNS
        for span in spans:
            if span.lane == lane:
                first = int(span.start_s / seconds * COLUMNS)
                last = max(first + 1, int(span.end_s / seconds * COLUMNS))
                row[first:last] = str(span.half) * (min(last, COLUMNS) - first)
        rows.append(f"{lane:8} {''.join(row[:COLUMNS])}")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser(
        prog="python -m lessons.l23_experts.lab.halves", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--travel-ms", type=float, default=10.0, help="of all rows, each way")
    parser.add_argument("--work-ms", type=float, default=20.0, help="of a layer, for all tokens")
    given = parser.parse_args(arguments)
    return run_command("halves", lambda: run(given))


def run(given) -> int:
    """Print both time lines."""
    check_whole(layers=given.layers)
    check_whole(2, tokens=given.tokens)
    check_positive(travel_ms=given.travel_ms, work_ms=given.work_ms)
    group, token_s = Group.alone(), given.work_ms / 1e3 / given.tokens
    model = new_model(group, given.layers, 0, token_s)
    x = tokens_of(given.tokens, 1)
    byte_s = given.travel_ms / 1e3 / (TOP_K * x.nbytes)
    whole, halves, spans = both_ways(model, x, group, byte_s)
    seconds = max(map(end_of, spans))
    for name, own in zip(("one batch", "two halves"), spans):
        print(f"{name}: {1e3 * end_of(own):.0f} ms, {1e3 * hidden_s(own):.0f} ms hidden")
        print("\n".join(lanes(own, seconds)))
    print(f"largest difference of the outputs: {float((whole - halves).abs().max()):.0e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
