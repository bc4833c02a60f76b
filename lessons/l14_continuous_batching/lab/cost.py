"""How long a step takes: t_fixed + t_token · tokens + t_context · context, fitted to measured
steps.

    python -m lessons.l14_continuous_batching.lab.cost [--out DIR]

measures steps of the embedded model and writes step_cost.json beside this file, from which the
pictures are drawn.

t_fixed is paid once a step: reading the weights, and Python's work. t_token is paid for every token
that is computed, t_context for every token whose K and V are read.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lessons.l01_roofline.calculators import kv_bytes_per_token
from lessons.l01_roofline.planner.models import find_model
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.lab.testing import new_request
from lessons.l14_continuous_batching.loop import BLOCK_SIZE, StepRunner
from lessons.l14_continuous_batching.naive import PaddedStep
from lessons.l14_continuous_batching.sequence import Chunk, Step
from lessons.toolbox.command import OneLineParser, check_writable, run_command
from lessons.toolbox.measure.device import fingerprint
from lessons.toolbox.measure.hardware import CHIPS, Chip
from lessons.toolbox.measure.timing import interleave

H200 = CHIPS["h200"]
MEASURED = Path(__file__).with_name("step_cost.json")
# (sequences, new tokens of each, tokens that each holds already)
DECODES = [(b, 1, held) for b in (1, 4, 8, 16, 32) for held in (31, 255, 767)]
PROMPTS = [(1, 16, 0), (1, 64, 0), (1, 256, 0), (4, 32, 0), (4, 128, 0), (16, 16, 0)]


class Sample(NamedTuple):
    """One measured step: tokens computed, tokens whose K and V were read, seconds."""

    tokens: int
    context: int
    seconds: float


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step. fixed_s: of any step; token_s: of a token that is computed; context_s: of
    a token of context.
    """

    fixed_s: float
    token_s: float
    context_s: float

    def __call__(self, step: Step | PaddedStep) -> float:
        return self.seconds(step.num_tokens, step.num_context_tokens)

    def seconds(self, tokens: int, context: int) -> float:
        """Seconds of a step of so many tokens that reads so many tokens of context."""
        return self.fixed_s + self.token_s * tokens + self.context_s * context

    def worst_error(self, samples: Sequence[Sample]) -> float:
        """The largest relative error over measured steps."""
        return max(abs(self.seconds(s.tokens, s.context) / s.seconds - 1) for s in samples)


def fit(samples: Sequence[Sample]) -> StepCost:
    """The cost of least squared relative error, because a short step counts as much as a long
    one. Raises ValueError for fewer than three samples.
    """
    if len(samples) < 3:
        raise ValueError(f"samples: got {len(samples)}; accepted: 3 or more, one for each unknown")
    tokens, context, seconds = np.array(samples, dtype=float).T
    unknowns = np.stack([np.ones_like(tokens), tokens, context], axis=1) / seconds[:, None]
    fixed_s, token_s, context_s = np.linalg.lstsq(unknowns, np.ones_like(seconds), rcond=None)[0]
    return StepCost(float(fixed_s), float(token_s), float(context_s))


def predicted(model: str = "llama-3-8b", chip: Chip = H200) -> StepCost:
    """What data sheets say of a model in 16 bits: weights read once a step, two operations a weight
    and token, K and V read once. A lower bound: no launch gaps, no scheduling.
    """
    shape = find_model(model)
    return StepCost(
        fixed_s=2 * shape.params_read(batch=1) / chip.memory_bytes_per_s,
        token_s=2 * shape.active_params / chip.peak_flops_per_s(torch.bfloat16),
        context_s=kv_bytes_per_token(shape) / chip.memory_bytes_per_s,
    )


def new_step(
    runner: StepRunner, num_seqs: int, new: int, held: int
) -> tuple[Callable[[], torch.Tensor], int, int]:
    """(a function that runs the step and returns logits: [S, V], its tokens, its context) of
    sequences that hold `held` tokens each and run `new` more. What they hold is zeros, which take
    as long as other numbers.
    """
    for row in list(runner.blocks.tables):
        runner.blocks.free(row)
    chunks = []
    for row in range(num_seqs):
        sequence = new_request(row, held + new, 1)
        sequence.computed = held
        runner.blocks.grow(row, 0, held + new)
        chunks.append(Chunk(sequence, new))
    step, tables = Step(chunks, []), dict(runner.blocks.tables)

    def run() -> torch.Tensor:
        runner.blocks.tables = tables
        return runner(step)

    return run, step.num_tokens, step.num_context_tokens


def measured_steps(model: Decoder, shapes=tuple(DECODES + PROMPTS), budget_s=0.3) -> list[Sample]:
    """Steps of the model over a paged pool, timed in turn. budget_s: seconds for each."""
    longest = max(held + new for _, new, held in shapes)
    num_blocks = max(b * -(-(held + new) // BLOCK_SIZE) for b, new, held in shapes)
    samples = []
    runner = StepRunner(model, BlockManager(num_blocks, BLOCK_SIZE), longest)
    steps = [new_step(runner, *shape) for shape in shapes]
    functions = {str(index): run for index, (run, _, _) in enumerate(steps)}
    timings = interleave(functions, device=model.device, budget_s=budget_s)
    for index, (_, tokens, context) in enumerate(steps):
        # the fastest run, because others on this machine can only add to it
        samples.append(Sample(tokens, context, timings[str(index)].best_s))
    return samples


def recorded_samples(path: Path = MEASURED) -> tuple[list[Sample], dict]:
    """(measured steps, the machine that they were measured on) from a file that `main` wrote."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return [Sample(*sample) for sample in record["samples"]], record["fingerprint"]


def embedded() -> Decoder:
    """The embedded model, in float32."""
    return Decoder.from_pretrained(str(Path(__file__).parents[3] / "models" / "tiny"))


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser(
        "python -m lessons.l14_continuous_batching.lab.cost", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, default=MEASURED.parent, help="folder of step_cost.json: beside this"
    )
    options = parser.parse_args(argv)
    return run_command("cost", lambda: record(options.out))


def record(out: Path) -> int:
    """Measure steps of the embedded model, and write out/step_cost.json. Raises ValueError."""
    check_writable(out)
    torch.set_num_threads(1)
    samples = measured_steps(embedded())
    facts = {"fingerprint": fingerprint(), "threads": 1, "samples": samples}
    text = json.dumps(facts, indent=1) + "\n"
    (out / MEASURED.name).write_text(text, encoding="utf-8")
    cost = fit(samples)
    print(f"{cost}, worst error {cost.worst_error(samples):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
