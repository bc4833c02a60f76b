"""What one decode step launches, eager and fused, and the model of what a launch costs.

A launch takes the CPU a few microseconds however little the kernel does. CPU and GPU work side by
side: the GPU starts a kernel when it has been issued and the one before has ended. So a step takes
about max(launches · launch time, bytes ÷ bandwidth), and fusing helps in both terms: fewer
launches, fewer bytes (`schedule`).

    python -m lessons.l07_kernel_fusion.lab.launches [--launch-us 5] [--gpu h200] [--context 4096]
"""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l02_naive_attention.rope import Rotate, rotation
from lessons.l07_kernel_fusion.fused_decoder import Ops, fused
from lessons.l07_kernel_fusion.lab.traffic import fused_pass
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.measure.passes import Pass, Traffic
from lessons.toolbox.model.config import ModelConfig

MODELS = {
    "Llama-3.2-1B": ModelConfig(
        "llama", 128256, 2048, 16, 32, 8, 64, 8192, 2**17, tie_word_embeddings=True
    ),
    "Qwen3-1.7B": ModelConfig(
        "qwen3", 151936, 2048, 28, 16, 8, 128, 6144, 40960, tie_word_embeddings=True, qk_norm=True
    ),
    # shapes as their config.json give them
    "Llama-3-8B": ModelConfig("llama", 128256, 4096, 32, 32, 8, 128, 14336, 8192),
}
# what issuing a small operation from Python takes, roughly: an assumption until it is measured
LAUNCH_S = 5e-6
# what a kernel takes on the GPU that moves next to nothing: an assumption as well
SHORTEST_S = 1.5e-6


class Span(NamedTuple):
    """One kernel: when the CPU begins to issue it, when the GPU begins and ends it, in seconds."""

    issue_s: float
    start_s: float
    end_s: float


def schedule(
    passes: list[Pass], launch_s: float, bytes_per_s: float, shortest_s: float = SHORTEST_S
) -> list[Span]:
    """When each kernel runs, if issuing one takes launch_s seconds and running it moves its bytes,
    for shortest_s at least.
    """
    spans, free_s = [], 0.0
    for index, one in enumerate(passes):
        issued_s = (index + 1) * launch_s
        start_s = max(issued_s, free_s)  # in order, on one stream
        free_s = start_s + max(shortest_s, (one.read_bytes + one.written_bytes) / bytes_per_s)
        spans.append(Span(issued_s - launch_s, start_s, free_s))
    return spans


# ---------------------------------------------------------------- counting a step


def counted_ops(passes: list[Pass]) -> Ops:
    """Operations that compute nothing: each appends the pass of its one kernel and returns tensors
    of the right shape.
    """

    def record(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        passes.append(fused_pass(name, inputs, outputs))

    def rms_norm(x, weight, eps):
        record("rms_norm", [x, weight], [x])
        return torch.empty_like(x)

    def add_rms_norm(x, residual, weight, eps):
        record("add_rms_norm", [x, residual, weight], [residual, x])
        return torch.empty_like(x)

    def silu_mul(gate, up):
        record("silu_mul", [gate, up], [gate])
        return torch.empty_like(gate)

    def qk_norm(q, k, q_weight, k_weight, eps):
        record("qk_norm", [q, k, q_weight, k_weight], [q, k])
        return torch.empty_like(q), torch.empty_like(k)

    return Ops(rms_norm, add_rms_norm, silu_mul, qk_norm)


def counted_attend(passes: list[Pass], context: int, rotate: Rotate | None = None) -> Attend:
    """Attention as lesson 3's two kernels: one writes the new row, one reads `context` rows of K
    and V. rotate: turns q and k before; None: the kernel that writes turns them (lesson 4).
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        passes.append(fused_pass("append", [k, v], [k, v]))
        passes.append(Pass("attention", q.nbytes + context * (k.nbytes + v.nbytes), q.nbytes))
        return torch.empty_like(q)

    return attend


def eager_launches(
    config: ModelConfig, context: int = 4096, dtype: torch.dtype = torch.bfloat16
) -> list[Pass]:
    """Every kernel that a decode step of the plain decoder launches, in order, with the bytes that
    it moves.
    """
    return _launches(config, context, dtype, lambda model, passes: model)


def fused_launches(
    config: ModelConfig, context: int = 4096, dtype: torch.dtype = torch.bfloat16
) -> list[Pass]:
    """The same for the fused twin, each of its operations one kernel."""
    return _launches(config, context, dtype, _fused_twin)


def rope_fused_launches(
    config: ModelConfig, context: int = 4096, dtype: torch.dtype = torch.bfloat16
) -> list[Pass]:
    """The same for the fused twin whose q and k are rotated by the kernel that writes them to the
    cache (lesson 4).
    """
    return _launches(config, context, dtype, _fused_twin, rotated_by_the_kernel=True)


STEPS = {
    "eager": eager_launches,
    "fused": fused_launches,
    "fused, lesson 4's RoPE": rope_fused_launches,
}


def _fused_twin(model: Decoder, passes: list[Pass]) -> Decoder:
    return fused(model, counted_ops(passes))


def _launches(
    config: ModelConfig,
    context: int,
    dtype: torch.dtype,
    twin: Callable,
    rotated_by_the_kernel: bool = False,
) -> list[Pass]:
    with torch.device("meta"):
        model = Decoder(config).to(dtype).requires_grad_(False)
        token = torch.zeros(1, dtype=torch.int64)
    rotation(config, token, dtype)  # the frequencies are computed once and kept
    with torch.no_grad(), Traffic() as traffic:
        model = twin(model, traffic.passes)
        rotate = None if rotated_by_the_kernel else rotation(config, token, dtype)
        model.logits(model(token, counted_attend(traffic.passes, context, rotate)))
    # An embedding is a look-up: it reads one row of its table.
    return [
        Pass(p.name, p.written_bytes, p.written_bytes) if p.name == "embedding" else p
        for p in traffic.passes
    ]


def report(launch_s: float, bytes_per_s: float, context: int) -> list[str]:
    """Markdown rows for MODELS and STEPS: launches, the GPU's own time, and what the model of a
    step makes of them.
    """
    rows = [
        "| model | step | launches | GPU busy, ms | step, ms | GPU busy, % | × eager |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, config in MODELS.items():
        first_s = None
        for label, launches_of in STEPS.items():
            passes = launches_of(config, context)
            spans = schedule(passes, launch_s, bytes_per_s)
            busy_s, end_s = sum(span.end_s - span.start_s for span in spans), spans[-1].end_s
            first_s = first_s or end_s
            rows.append(
                f"| {name} | {label} | {len(passes)} | {busy_s * 1e3:.2f} | {end_s * 1e3:.2f} | "
                f"{100 * busy_s / end_s:.0f} | {first_s / end_s:.2f} |"
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lessons.l07_kernel_fusion.lab.launches", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--launch-us",
        type=float,
        default=LAUNCH_S * 1e6,
        help="what one launch takes the CPU (default: 5)",
    )
    parser.add_argument("--gpu", default="h200", help="whose memory bandwidth counts")
    parser.add_argument("--context", type=int, default=4096, help="tokens in the cache")
    options = parser.parse_args(argv)
    try:
        chip = lookup(options.gpu)
        if options.launch_us <= 0 or options.context < 1:
            raise ValueError(
                f"--launch-us {options.launch_us:g} --context {options.context}; accepted: more "
                f"than 0, 1 or more"
            )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"One decode step, batch 1, {options.context} tokens of context, bfloat16: launches "
        f"counted, times predicted from "
        f"{chip.name}'s data sheet, {options.launch_us:g} µs a launch\n"
    )
    print(*report(options.launch_us * 1e-6, chip.memory_bytes_per_s, options.context), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
