"""One deployment, thought through before anything is bought: what fits, how fast it can be at best,
and what a token costs.
"""

import contextlib
from dataclasses import dataclass, replace

import torch

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.planner.models import ModelShape
from lessons.l01_roofline.planner.windows import values_of_sequence, values_of_step
from lessons.toolbox.measure.hardware import Chip


@dataclass(frozen=True)
class Plan:
    """A model on `gpus` equal GPUs that split weights and KV cache evenly. Build it with
    `make_plan`.

    Left out: communication, and that tensor parallelism beyond the number of KV heads keeps copies
    (lesson 20). Activations are counted as if each GPU held them whole, which is the safe side.

    batch: sequences wanted at once; context: tokens of each; memory_share: of each GPU's memory,
    what may be used, because the CUDA context, captured graphs, communication buffers and gaps
    between allocations need the rest; batched_tokens: new tokens of one pass (lesson 15's budget).
    """

    model: ModelShape
    chip: Chip
    gpus: int
    batch: int
    context: int
    bits_per_weight: float
    bits_per_kv: float
    memory_share: float
    batched_tokens: int = 2048

    @property
    def reserve_bytes(self) -> float:
        """What the system keeps, of all GPUs."""
        return self.gpus * self.chip.memory_bytes - self.usable_bytes

    @property
    def activation_bytes(self) -> float:
        """What one pass needs beside weights and cache, on all GPUs."""
        return self.gpus * calc.activation_bytes(self.model, self.batched_tokens, self.batch)

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
    def cache_bytes(self) -> float:
        """K and V of one sequence."""
        return values_of_sequence(self.model, self.context) * self.bits_per_kv / 8

    @property
    def step_bytes(self) -> float:
        """What the tokens of a pass take in layers with a window, until they are out of sight."""
        return values_of_step(self.model, self.batched_tokens) * self.bits_per_kv / 8

    @property
    def sequences(self) -> int:
        """How many sequences of `context` tokens fit."""
        fixed = self.weight_bytes + self.activation_bytes + self.step_bytes
        each = self.cache_bytes + self.model.state_bytes
        return max(0, int((self.usable_bytes - fixed) // each))

    @property
    def fits(self) -> bool:
        return self.sequences >= self.batch

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
    batched_tokens: int = 2048,
) -> Plan:
    """gpus: None takes the fewest that hold the weights and `batch` sequences.

    Raises ValueError for numbers that cannot be, and where the weights or even one sequence do not
    fit, saying what would do.
    """
    calc.positive("batch", batch)
    calc.positive("context", context)
    calc.positive("batched_tokens", batched_tokens)
    if calc.positive("memory_share", memory_share) > 1:
        raise ValueError(f"memory_share is {memory_share}; accepted: above 0 and at most 1")
    count = 1 if gpus is None else int(calc.positive("gpus", gpus))
    bits = bits_per_weight, bits_per_kv
    plan = Plan(model, chip, count, batch, context, *bits, memory_share, batched_tokens)
    if gpus is None:
        return on_enough_gpus(plan)
    needed = plan.weight_bytes + plan.activation_bytes
    what = f"weights of {model.name} and activations"
    if needed <= plan.usable_bytes:
        needed += plan.step_bytes + plan.cache_bytes + model.state_bytes
        what = f"weights, activations and one sequence of {context} tokens"
    if needed > plan.usable_bytes:
        ways = ways_out(plan)
        raise ValueError(
            f"gpus is {gpus}: {what} do not fit, {needed / 1e9:.1f} GB needed, "
            f"{plan.usable_bytes / 1e9:.1f} GB usable on {gpus} x {chip.name}; "
            f"for {batch} sequences would do: {'; or '.join(ways) or 'nothing of what we tried'}"
        )
    return plan


MOST_GPUS = 1024


def on_enough_gpus(plan: Plan) -> Plan:
    """The plan on the fewest GPUs that hold all of it, a power of two. Raises ValueError if even
    1024 are too few, because what each GPU holds for itself leaves no room.
    """
    gpus = 1
    while gpus <= MOST_GPUS:
        if (enough := replace(plan, gpus=gpus)).fits:
            return enough
        gpus *= 2
    raise ValueError(
        f"batched_tokens is {plan.batched_tokens}, batch is {plan.batch}: they do not fit on "
        f"{MOST_GPUS} x {plan.chip.name}; accepted: fewer"
    )


def ways_out(plan: Plan) -> list[str]:
    """What to do if `plan.batch` sequences do not fit: every single change after which they do, in
    words, from the cheapest to try to the dearest. [] if they fit, or if no single one is enough.
    """
    if plan.fits:
        return []
    ways = []
    if plan.sequences:
        ways.append(f"{plan.sequences} sequences at once, and the others wait")
    fixed = plan.weight_bytes + plan.activation_bytes + plan.batch * plan.model.state_bytes
    room = (plan.usable_bytes - fixed) / (plan.batch * plan.kv_bytes_per_token)
    # A window's layers do not shrink with the context, so for them this is no way out.
    if room >= 1 and not plan.model.num_window_layers:
        ways.append(f"a context of {int(room)} tokens")
    changes = [
        ("an 8-bit cache (lesson 19)", {"bits_per_kv": 8}),
        ("8-bit weights (lesson 18)", {"bits_per_weight": 8}),
        ("4-bit weights, 4.5 bits with their scales (lesson 18)", {"bits_per_weight": 4.5}),
    ]
    for words, change in changes:
        ((name, bits),) = change.items()
        if bits < getattr(plan, name) and replace(plan, **change).fits:
            ways.append(words)
    with contextlib.suppress(ValueError):  # where no number of GPUs holds it
        ways.append(f"{on_enough_gpus(plan).gpus} GPUs")
    return ways
