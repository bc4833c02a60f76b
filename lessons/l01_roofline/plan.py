"""One deployment, thought through before anything is bought: what fits, how fast it can be at best,
and what a token costs.
"""

from dataclasses import dataclass

import torch

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.models import ModelShape
from lessons.toolbox.measure.hardware import Chip


@dataclass(frozen=True)
class Plan:
    """A model on `gpus` equal GPUs that split weights and KV cache evenly. Build it with
    `make_plan`.

    Left out: communication, activations, and that tensor parallelism beyond the number of KV heads
    keeps copies (lesson 20).

    batch: sequences wanted at once; context: tokens of each; memory_share: of each GPU's memory,
    what may be used.
    """

    model: ModelShape
    chip: Chip
    gpus: int
    batch: int
    context: int
    bits_per_weight: float
    bits_per_kv: float
    memory_share: float

    @property
    def usable_bytes(self) -> float:
        return self.gpus * self.chip.memory_bytes * self.memory_share

    @property
    def weight_bytes(self) -> float:
        return calc.weight_bytes(self.model, self.bits_per_weight)

    @property
    def kv_bytes_per_token(self) -> float:
        return calc.kv_bytes_per_token(self.model, self.bits_per_kv)

    @property
    def sequences(self) -> int:
        """How many sequences of `context` tokens fit."""
        return calc.sequences_that_fit(
            self.usable_bytes, self.weight_bytes, self.kv_bytes_per_token, self.context
        )

    @property
    def running(self) -> int:
        """Sequences that run at once: those wanted, or those that fit."""
        return min(self.batch, self.sequences)

    @property
    def _machine(self) -> tuple[float, float, float, float]:
        bandwidth = self.gpus * self.chip.memory_bytes_per_s
        peak = self.gpus * peak_flops(self.chip)
        return bandwidth, peak, self.bits_per_weight, self.bits_per_kv

    @property
    def prefill(self) -> calc.Floor:
        """One prompt that fills the context."""
        return calc.prefill_floor(self.model, self.context, *self._machine)

    @property
    def decode(self) -> calc.Floor:
        """One step of all running sequences, their contexts full."""
        return calc.decode_floor(self.model, self.running, self.context, *self._machine)

    @property
    def tokens_per_s(self) -> float:
        """The ceiling of decoding, all running sequences together."""
        return calc.tokens_per_s(self.decode.seconds, self.running)


def peak_flops(chip: Chip) -> float:
    """The chip's dense 16-bit matrix rate in FLOP/s, float32 where it has no 16-bit units: weights
    of fewer bits are widened.
    """
    rate = chip.bf16_flops_per_s or chip.fp16_flops_per_s
    return chip.peak_flops_per_s(torch.float32) if rate is None else rate


def make_plan(
    model: ModelShape,
    chip: Chip,
    batch: int,
    context: int,
    gpus: int | None = None,
    bits_per_weight: float = 16,
    bits_per_kv: float = 16,
    memory_share: float = 0.9,
) -> Plan:
    """gpus: None takes the fewest that hold the weights and `batch` sequences.

    Raises ValueError for numbers that cannot be, and where the weights or even one sequence do not
    fit, saying what would do.
    """
    calc.positive("batch", batch)
    if calc.positive("memory_share", memory_share) > 1:
        raise ValueError(f"memory_share is {memory_share}; accepted: above 0 and at most 1")
    usable = chip.memory_bytes * memory_share
    weights = calc.weight_bytes(model, bits_per_weight)
    per_sequence = calc.positive("context", context) * calc.kv_bytes_per_token(model, bits_per_kv)
    if gpus is None:
        gpus = calc.gpus_needed(weights + batch * per_sequence, usable)
    gpus = int(calc.positive("gpus", gpus))
    bits = bits_per_weight, bits_per_kv
    plan = Plan(model, chip, gpus, batch, context, *bits, memory_share)
    least = {
        f"weights of {model.name}": weights,
        f"weights and one sequence of {context} tokens": weights + per_sequence,
    }
    for what, needed in least.items():
        if needed > plan.usable_bytes:
            raise ValueError(
                f"gpus is {gpus}: {what} do not fit, {needed / 1e9:.1f} GB needed, "
                f"{plan.usable_bytes / 1e9:.1f} GB usable on {gpus} x {chip.name}; "
                f"{calc.gpus_needed(needed, usable)} GPUs would do"
            )
    return plan
