"""A model on many GPUs, thought through before anything is bought: what each GPU holds, how many
sequences fit, how long a step takes, and which layout is best.

    plan="python -m lessons.l20_parallelism.planner"
    $plan --model llama-3-70b --chip h100 --gpus 2 --context 4096
    $plan --model llama-3-405b --chip h100 --gpus 8 --bits-per-weight 8
    $plan --model deepseek-v3 --chip h200 --tp 8 --ep 8 --bits-per-weight 8

Lesson 1's plan.py splits evenly over any number of GPUs. New here: the layout, what does not shrink
(shares.py), what GPUs tell each other (scaling.py), and the search. Every time is a prediction.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.planner.models import ModelShape
from lessons.l20_parallelism.planner.links import Machine, machine_of
from lessons.l20_parallelism.planner.scaling import Step, decode_step, prefill
from lessons.l20_parallelism.planner.shares import Layout, Share, check_layout, shares
from lessons.toolbox.measure.hardware import Chip
from lessons.toolbox.model.arguments import check_whole, is_number, refuse


@dataclass(frozen=True)
class Plan:
    """A model in a layout. Build it with `plan`.

    batch: sequences of a replica that are wanted at once; context: tokens of each; memory_share: of
    each GPU's memory, what may be used; batched_tokens: new tokens of one pass.
    """

    model: ModelShape
    machine: Machine
    layout: Layout
    batch: int
    context: int
    bits_per_weight: float
    bits_per_kv: float
    memory_share: float
    batched_tokens: int

    @property
    def usable_bytes(self) -> float:
        """Of one GPU."""
        return self.machine.chip.memory_bytes * self.memory_share

    @property
    def shares(self) -> list[Share]:
        """A GPU of each stage, with buffers for the wanted batch."""
        bits = self.bits_per_weight, self.bits_per_kv
        return list(shares(self.model, self.layout, self.batch, *bits, self.batched_tokens))

    @property
    def fullest(self) -> Share:
        """The GPU with most weights and buffers."""
        return max(self.shares, key=lambda share: share.weight_bytes + share.buffer_bytes)

    @property
    def left_bytes(self) -> float:
        """What the weights leave on the fullest GPU; below 0 they do not fit."""
        return self.usable_bytes - max(share.weight_bytes for share in self.shares)

    def sequences_that_fit(self, with_buffers: bool = True) -> int:
        """Sequences of a replica, on its tightest stage. with_buffers: False leaves out what a pass
        needs, as a first sum on paper does.
        """
        counts = []
        for share in self.shares:
            fixed = share.weight_bytes + (share.buffer_bytes if with_buffers else 0)
            per_token = share.kv_bytes_per_token
            counts.append(
                calc.sequences_that_fit(self.usable_bytes, fixed, per_token, self.context)
            )
        return min(counts)

    @property
    def running(self) -> int:
        """Sequences of a replica that run at once: those wanted, or those that fit."""
        return min(self.batch, self.sequences_that_fit())

    @property
    def decode(self) -> Step:
        """One token for each running sequence, their contexts full; at least one is taken to
        run.
        """
        shape = max(1, self.running), self.context
        bits = self.bits_per_weight, self.bits_per_kv
        return decode_step(self.model, self.machine, self.layout, *shape, *bits)

    @property
    def prefill(self) -> Step:
        """One prompt that fills the context, in passes of batched_tokens."""
        chunks = -(-self.context // self.batched_tokens)
        bits = self.bits_per_weight, self.bits_per_kv
        return prefill(self.model, self.machine, self.layout, self.context, *bits, chunks)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """The ceiling of decoding; 0 if nothing fits."""
        return self.running * self.layout.dp / (self.decode.seconds * self.layout.size)

    @property
    def prefill_tokens_per_s_per_gpu(self) -> float:
        """The ceiling of prefill while prompts follow each other, so that no stage is idle."""
        step = self.prefill
        busy_s = step.floor_s + step.communication_s
        return self.context / (busy_s * self.layout.tp * self.layout.pp)


def plan(
    model: ModelShape,
    chip: Chip | Machine,
    layout: Layout,
    batch: int = 32,
    context: int = 4096,
    bits_per_weight: float = 16,
    bits_per_kv: float = 16,
    memory_share: float = 0.9,
    batched_tokens: int = 2048,
) -> Plan:
    """chip: in its usual box of eight, or a Machine. Raises ValueError for what cannot be. A plan
    in which nothing fits is a plan, too: sequences_that_fit() is 0.
    """
    check_whole(batch=batch, context=context, batched_tokens=batched_tokens)
    calc.positive("bits_per_weight", bits_per_weight)
    calc.positive("bits_per_kv", bits_per_kv)
    if not is_number(memory_share, 0, 1) or not memory_share:
        refuse("memory_share", memory_share, "above 0 and at most 1")
    check_layout(model, layout)
    machine = chip if isinstance(chip, Machine) else machine_of(chip)
    bits = bits_per_weight, bits_per_kv
    return Plan(model, machine, layout, batch, context, *bits, memory_share, batched_tokens)


# ---------------------------------------------------------------- search


def layouts(model: ModelShape, gpus: int) -> Iterator[Layout]:
    """Every layout on so many GPUs that the model allows."""
    check_whole(gpus=gpus)
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    for tp in sizes:
        for pp in (size for size in sizes if gpus % (tp * size) == 0):
            dp = gpus // tp // pp
            for ep in sorted({1, tp, tp * dp}):
                layout = Layout(tp, pp, dp, ep)
                try:
                    check_layout(model, layout)
                except ValueError:
                    continue
                yield layout


def search(
    model: ModelShape,
    chip: Chip | Machine,
    gpus: int,
    slowest_step_s: float = float("inf"),
    batch: int = 1,
    most: int = 256,
    **rest,
) -> list[Plan]:
    """Plans in which `batch` sequences of each replica fit and a step takes at most slowest_step_s,
    best first: by tokens/s of a GPU. Each runs as many sequences as these limits allow, `most` over
    all replicas at most. rest: as in `plan`.
    """
    found = []
    for layout in layouts(model, gpus):

        def is_good(count: int, layout=layout) -> bool:
            it = plan(model, chip, layout, count, **rest)
            return it.sequences_that_fit() >= count and it.decode.seconds <= slowest_step_s

        low, high = batch, most // layout.dp
        if low > high or not is_good(low):
            continue
        while low < high:  # the largest count that is good: more sequences need more of everything
            middle = (low + high + 1) // 2
            low, high = (middle, high) if is_good(middle) else (low, middle - 1)
        found.append(plan(model, chip, layout, low, **rest))
    return sorted(found, key=lambda found: found.tokens_per_s_per_gpu, reverse=True)
