"""How long a step takes on a replica: by lesson 1's roofline, or fitted to measured steps.

    # 4 GPUs a replica, because the weights need them.
    deployment = new_deployment("llama-3-70b", "h100")
    deployment.cost(step)                               # seconds

Two ways that other simulators use, too: data-sheet rates with an assumed efficiency (lesson 15's
StepCost), or a formula fitted to measured steps (lesson 14's). Vidur (Agrawal et al. 2024) fits
each operator by itself, which needs the GPU that is to be predicted.

A replica of several GPUs splits weights, cache and work evenly, without any communication. That is
too good; lesson 20 measures what is missing.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lessons.l01_roofline.calculators import gpus_needed, kv_bytes_per_token, weight_bytes
from lessons.l01_roofline.planner.models import ModelShape, find_model
from lessons.l01_roofline.planner.plan import peak_flops
from lessons.l14_continuous_batching.lab import cost as measured
from lessons.l14_continuous_batching.naive import PaddedStep
from lessons.l14_continuous_batching.sequence import Step
from lessons.l15_chunked_prefill.lab import costs as roofline
from lessons.l15_chunked_prefill.lab.costs import LINKS_BYTES_PER_S, Work
from lessons.l26_kv_transfer.costs import LINKS, Token, token_of
from lessons.toolbox.measure.hardware import Chip, lookup
from lessons.toolbox.model.window_groups import WindowGroups, groups_of

BLOCK_SIZE = 16  # tokens
MOST_GPUS = 8  # of one replica: a node


def work_of(step: Step | PaddedStep) -> Work:
    """The work of a step. Of a padded one every row counts, as far as the longest goes."""
    if isinstance(step, Step):
        return roofline.work_of(step)
    rows, width, held = len(step.wave), step.width, step.context - step.width
    pairs = rows * (width * held + width * (width + 1) // 2)
    return Work(step.num_tokens, pairs, step.num_context_tokens, sampled=rows)


def in_sight(work: Work, step: Step, count: int, shape: ModelShape) -> Work:
    """The work of a step, and of count - 1 like it that follow, in the mean over layers of which
    some see a window: only the pairs and the tokens of context that they see.
    """
    pairs, context = 0, 0
    for chunk in step.chunks:
        new, held = chunk.count, chunk.sequence.computed + np.arange(count)
        # By what a window takes away of each token's keys, and of what all of them read.
        hidden = [np.maximum(0, held + token - shape.window) for token in range(1, new + 1)]
        pairs = pairs + sum(hidden)
        context = context + hidden[0]
    share = shape.num_window_layers / shape.num_kv_layers
    return work._replace(pairs=work.pairs - share * pairs, context=work.context - share * context)


@dataclass(frozen=True)
class RooflineCost:
    """Lesson 15's cost of a step. Its numbers may be arrays, so that many steps cost one call."""

    step: roofline.StepCost

    def seconds(self, work: Work):
        """Seconds of a step, or [N] of N steps."""
        floor = self.step.floor(work)
        busy_s = np.maximum(floor.memory_s, floor.compute_s)
        return self.step.overhead_s + busy_s / self.step.efficiency


@dataclass(frozen=True)
class FittedCost:
    """Lesson 14's cost: a fixed part, one for each token and one for each token of context, fitted
    to measured steps.
    """

    step: measured.StepCost

    def seconds(self, work: Work):
        """Seconds of a step, or [N] of N steps."""
        return self.step.seconds(work.tokens, work.context)


class Tiers(NamedTuple):
    """Room for K and V beside the memory of each GPU, and the links to it, in one direction. 0
    bytes: there is no such tier.
    """

    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    host_bytes_per_s: float = LINKS["PCIe 5.0"]
    disk_bytes_per_s: float = LINKS["NVMe"]


NO_TIERS = Tiers()
NO_TOKEN = Token(0.0, 0.0)


@dataclass(frozen=True)
class Deployment:
    """What one replica is made of, and what a step on it costs.

    gpus: of one replica. num_blocks: of its cache. token: what one token keeps, and takes to
    compute (lesson 26). tiers: of each GPU. link_bytes_per_s: of each GPU to those of other
    replicas. sent_in: pieces, one for each layer, in which K and V of a prompt leave while it is
    computed; 1: all of them at its end. windows: the model, if some of its layers see a window.
    """

    name: str
    cost: RooflineCost | FittedCost
    num_blocks: int
    gpus: int = 1
    token: Token = NO_TOKEN
    tiers: Tiers = NO_TIERS
    link_bytes_per_s: float = LINKS_BYTES_PER_S["NVLink"]
    sent_in: int = 1
    block_size: int = BLOCK_SIZE
    windows: ModelShape | None = None

    def __call__(self, step: Step | PaddedStep) -> float:
        """Seconds of a step."""
        return float(np.atleast_1d(self.seconds(step, 1))[0])

    def seconds(self, step: Step | PaddedStep, count: int):
        """Seconds of a step and of count - 1 that follow, in which each row sees one token more:
        one pair and one token of context.
        """
        work = work_of(step)
        if count > 1:
            more = np.arange(count) * work.tokens
            work = Work(work.tokens, work.pairs + more, work.context + more, work.sampled)
        # Measured steps know by themselves what they read.
        is_predicted = isinstance(self.cost, RooflineCost) and isinstance(step, Step)
        if self.windows is not None and is_predicted:
            work = in_sight(work, step, count, self.windows)
        return self.cost.seconds(work)

    @cached_property
    def groups(self) -> WindowGroups | None:
        """Of its layers, each with blocks of its own. A tier keeps blocks of all layers."""
        is_tiered = self.tiers.host_bytes + self.tiers.disk_bytes > 0
        has_windows = self.windows is not None and not is_tiered
        return groups_of(self.windows.layer_windows) if has_windows else None

    @property
    def in_layers(self) -> str:
        """Of how many layers a block is, if not of all."""
        return "" if self.groups is None else f" in {self.groups.layers_each} layers"

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a request of so many tokens takes, if it takes all of them at once."""
        if self.groups is None:
            return -(-tokens // self.block_size)
        return self.groups.most_pages(tokens, self.block_size, tokens)

    def transfer_s(self, tokens: int) -> float:
        """Seconds to send the K and V of so many tokens to another replica. Each GPU sends its own
        part over a link of its own.
        """
        return tokens * self.token.move_s(self.gpus * self.link_bytes_per_s)


def new_deployment(
    model: str = "llama-3-8b",
    gpu: str = "h100",
    gpus: int | None = None,
    step_cost: Path | None = None,
    tiers: Tiers = NO_TIERS,
    link_bytes_per_s: float = LINKS_BYTES_PER_S["NVLink"],
    by_layer: bool = False,
) -> Deployment:
    """A model of lesson 1 on GPUs of lesson 1, in 16 bits.

    gpus: of a replica; None takes the fewest that hold the weights in 90 % of their memory.
    step_cost: a file of measured steps as lesson 14's lab/cost.py writes it, instead of the
    roofline. by_layer: whether a prompt's K and V are sent layer by layer. Raises ValueError for
    unknown names, and for a model that does not fit.
    """
    shape, chip = find_model(model), lookup(gpu)
    gpus = checked_gpus(shape, chip, gpus)
    whole = replace(
        chip,
        memory_bytes=gpus * chip.memory_bytes,
        memory_bytes_per_s=gpus * chip.memory_bytes_per_s,
        bf16_flops_per_s=gpus * peak_flops(chip),
    )
    predicted = roofline.StepCost(shape, whole)
    if step_cost is None:
        cost, source = RooflineCost(predicted), "predicted from data sheets"
    else:
        fitted, worst, machine = read_step_cost(step_cost)
        cost = FittedCost(fitted)
        source = f"its steps simulated as fitted to {machine}, each within {worst:.0%}"
    has_windows = shape.num_window_layers > 0
    if has_windows and tiers.host_bytes + tiers.disk_bytes > 0:
        predicted = roofline.StepCost(replace(shape, num_window_layers=0), whole)
    many = f"{gpus} x " if gpus > 1 else ""
    return Deployment(
        f"{shape.name} on {many}{chip.name}, {source}",
        cost,
        predicted.kv_blocks(BLOCK_SIZE),
        gpus,
        token_of(shape, chip=whole),
        tiers,
        link_bytes_per_s,
        shape.num_hidden_layers if by_layer else 1,
        windows=shape if has_windows else None,
    )


def checked_gpus(shape: ModelShape, chip: Chip, gpus: int | None) -> int:
    """GPUs of a replica. Raises ValueError if they do not hold the weights and one block."""
    block = BLOCK_SIZE * kv_bytes_per_token(shape)
    needed, usable = weight_bytes(shape) + block, 0.9 * chip.memory_bytes
    fewest = gpus_needed(needed, usable)
    if gpus is None and fewest <= MOST_GPUS:
        return fewest
    if gpus is None or gpus * usable < needed:
        raise ValueError(
            f"--model {shape.name}: {needed / 1e9:.0f} GB in 16 bits need {fewest} x {chip.name} "
            f"({usable / 1e9:.0f} GB usable of each); accepted without --gpus-per-replica: at most "
            f"{MOST_GPUS} of them, a node; with it: {fewest} or more"
        )
    return gpus


def read_step_cost(path: Path) -> tuple[measured.StepCost, float, str]:
    """(the fitted cost, its worst error over the measured steps, the machine) of a file of measured
    steps. Raises ValueError, in one line, for a file that holds none.
    """
    accepted = "accepted: a file that lessons.l14_continuous_batching.lab.cost wrote"
    try:
        samples, machine = measured.recorded_samples(path)
        cost = measured.fit(samples)
        return cost, cost.worst_error(samples), str(machine["device"])
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise ValueError(f"--step-cost {path}: {error}; {accepted}") from None
