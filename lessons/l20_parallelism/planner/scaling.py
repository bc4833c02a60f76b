"""How long a pass takes on many GPUs: lesson 1's floor of each GPU's part, and what they tell each
other.

    step = decode_step(model, machine, Layout(tp=8), batch=32, context=4096)
    step.seconds, step.floor_s, step.communication_s

All of it is prediction. Computing and communicating are added up, not overlapped, because in a
tensor-parallel layer each sum is between two matrix products that wait for it. Floors are
reached by no real kernel, so a real step is longer, and communication is a smaller part of it.

Sources: Pope et al. 2022, Efficiently Scaling Transformer Inference, section 3; Narayanan et al.
2021, section 3 (what is sent in which direction of the mesh).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.planner.models import ModelShape
from lessons.l01_roofline.planner.plan import peak_flops
from lessons.l20_parallelism.planner.links import (
    Machine,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    send_s,
)
from lessons.l20_parallelism.planner.shares import (
    Layout,
    check_layout,
    experts_held,
    part_of,
    stages_of,
)

BYTES = 2  # of an activation on the wire
DEGREES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Work:
    """New tokens of one pass of a replica. pairs: of queries and keys; cached: tokens whose K and V
    are read or written; logits: rows that need them.
    """

    tokens: int
    pairs: float
    cached: int
    logits: int

    @classmethod
    def decode(cls, batch: int, context: int) -> "Work":
        """One token for each of `batch` sequences, which have `context` tokens each."""
        return cls(batch, batch * context, batch * context, batch)

    @classmethod
    def prefill(cls, num_tokens: int) -> "Work":
        """One prompt."""
        return cls(num_tokens, num_tokens * (num_tokens + 1) / 2, num_tokens, 1)


@dataclass(frozen=True)
class StageTime:
    """A pass on a GPU of one stage: what it computes, and its messages in seconds."""

    floor: calc.Floor
    communication_s: float

    @property
    def seconds(self) -> float:
        return self.floor.seconds + self.communication_s


def stage_time(
    model: ModelShape,
    machine: Machine,
    layout: Layout,
    number: int,
    work: Work,
    bits_per_weight: float = 16,
    bits_per_kv: float = 16,
) -> StageTime:
    """One pass of stage `number` in seconds, with the message to the next one."""
    stages = stages_of(model, layout)
    part = part_of(model, layout, stages[number])
    is_last = number == layout.pp - 1
    # all replicas that share experts bring tokens to them
    meeting = work.tokens * (layout.dp if layout.shares_experts else 1)
    held = experts_held(model, layout)
    read, ran = 0.0, 0.0
    if model.num_experts:
        read = held * model.experts_touched(meeting) / model.num_experts
        ran = model.num_experts_per_tok
        if layout.ep > 1:  # of a token's experts a GPU has 1/ep in the mean
            ran *= meeting / work.tokens / layout.ep
    head = part.embedding_params * is_last
    moved = (part.layer_params(read) + head) * bits_per_weight / 8
    moved += work.cached * calc.kv_bytes_per_token(part, bits_per_kv)
    flops = 2 * (work.tokens * part.layer_params(ran) + work.logits * head)
    flops += calc.attention_flops(part, work.pairs)
    chip = machine.chip
    floor = calc.Floor(moved, flops, chip.memory_bytes_per_s, peak_flops(chip))
    return StageTime(floor, communication_s(model, machine, layout, number, part, work))


def communication_s(
    model: ModelShape,
    machine: Machine,
    layout: Layout,
    number: int,
    part: ModelShape,
    work: Work,
) -> float:
    """Seconds of all messages of one pass of a stage."""
    rows = work.tokens * model.hidden_size * BYTES
    sum_s = all_reduce_s(rows, layout.tp, machine)
    layers, dense = part.num_hidden_layers, part.num_dense_layers
    seconds = layers * sum_s  # after the attention of each layer
    if layout.shares_experts:
        # each shard sends its part of the tokens, once for each expert, and gets them back
        sent = rows / layout.tp * model.num_experts_per_tok
        travel_s = 2 * all_to_all_s(sent, layout.ep, machine)
        seconds += dense * sum_s + (layers - dense) * travel_s
    else:
        seconds += layers * sum_s  # after the MLP, or the experts
    if number == 0:
        seconds += sum_s  # each shard looked up its part of the vocabulary
    if number == layout.pp - 1:
        logits = work.logits * model.vocab_size * BYTES
        return seconds + all_gather_s(logits, layout.tp, machine)
    is_far = layout.tp * layout.pp > machine.gpus_per_box
    return seconds + send_s(rows, machine.between if is_far else machine.inside)


# ---------------------------------------------------------------- steps


@dataclass(frozen=True)
class Step:
    """A decode step, or a prefill, of one replica. seconds: until all of its sequences have a
    token; floor_s, communication_s: of that, on the slowest GPU; idle_s: the rest, its bubble.
    """

    seconds: float
    floor_s: float
    communication_s: float

    @property
    def idle_s(self) -> float:
        return max(0.0, self.seconds - self.floor_s - self.communication_s)


def in_turn(times: list[StageTime], num_micro_batches: int, come_back: bool) -> Step:
    """Equal micro-batches through stages. come_back: the next step's first may begin only when the
    last stage has made its token, so a cycle is the longer of a way through and the slowest stage's
    work; else the pipe fills and drains.
    """
    slowest = max(times, key=lambda time: time.seconds)
    through = sum(time.seconds for time in times)
    work = num_micro_batches * slowest.seconds
    seconds = max(through, work) if come_back else through + work - slowest.seconds
    count = num_micro_batches
    return Step(seconds, count * slowest.floor.seconds, count * slowest.communication_s)


def decode_step(
    model: ModelShape,
    machine: Machine,
    layout: Layout,
    batch: int,
    context: int,
    bits_per_weight: float = 16,
    bits_per_kv: float = 16,
) -> Step:
    """One token for each of a replica's `batch` sequences, in as many micro-batches as there are
    stages (or sequences, if these are fewer).
    """
    check_layout(model, layout)
    count = min(layout.pp, batch)
    work = Work.decode(-(-batch // count), context)
    bits = bits_per_weight, bits_per_kv
    times = [stage_time(model, machine, layout, n, work, *bits) for n in range(layout.pp)]
    return in_turn(times, count, come_back=True)


def prefill(
    model: ModelShape,
    machine: Machine,
    layout: Layout,
    num_tokens: int,
    bits_per_weight: float = 16,
    bits_per_kv: float = 16,
    num_chunks: int = 1,
) -> Step:
    """One prompt on one replica. num_chunks: equal pieces (lesson 15) that follow each other
    through the stages; each costs the same, though the later ones see more keys.
    """
    check_layout(model, layout)
    whole = Work.prefill(num_tokens)
    tokens = -(-num_tokens // num_chunks)
    work = Work(tokens, whole.pairs / num_chunks, tokens, 1)
    bits = bits_per_weight, bits_per_kv
    times = [stage_time(model, machine, layout, n, work, *bits) for n in range(layout.pp)]
    return in_turn(times, num_chunks, come_back=False)


# ---------------------------------------------------------------- scaling


def efficiency(steps: Iterable[Step], degrees: Iterable[int] = DEGREES) -> list[float]:
    """t(1) / (P · t(P)) of steps with P = 1, 2, … GPUs. 1 is what is called linear."""
    steps = list(steps)
    return [steps[0].seconds / (size * step.seconds) for size, step in zip(degrees, steps)]


def best_tp(steps: Iterable[Step], degrees: Iterable[int] = DEGREES) -> int:
    """The degree with the shortest step: beyond it, more GPUs are slower."""
    return min(zip(steps, degrees), key=lambda pair: pair[0].seconds)[1]


def all_reduce_s_for(efficiency: float, floor_s: float, num_all_reduces: int) -> float:
    """How many seconds each all-reduce may take, so that a step whose floor is floor_s has this
    efficiency. The claim "linear" means 0.
    """
    return floor_s * (1 / efficiency - 1) / num_all_reduces
