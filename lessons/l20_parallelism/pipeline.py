"""Pipeline parallelism: every stage has some of the layers, and micro-batches pass through them.

    stages = split_layers(80, 4)                        # [0–19, 20–39, 40–59, 60–79]
    hidden = run_stage(model, links, tokens, attend)    # on every rank of the pipeline

Read `split_layers`, `run_stage`, then `schedule`, which says who works when, without a model.

While one batch is in the pipe, all stages but one are idle. So a batch is cut into m micro-batches
that follow each other. With p stages of equal time a pass takes m + p − 1 of these times, and each
stage works in m of them: the others are the bubble, (p − 1) / (m + p − 1).

Decoding needs another count. A sequence's next token is known only when the last stage has made
this one, so a micro-batch comes back to the first stage after p times. With m ≥ p micro-batches in
flight no stage waits, and there is no bubble but at the two ends; with fewer, 1 − m / p of the time
is idle. "1F1B", one forward and one backward pass in turn, orders the passes of *training*, to
hold fewer activations. Inference has no backward pass, so all that is left of it is the order here.

Sources: GPipe (Huang et al. 2019, section 2); Megatron-LM (Narayanan et al. 2021, section 2.2).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l03_kv_cache.batch import Batch, new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l20_parallelism.processes.mesh import Links
from lessons.toolbox.model.arguments import check_whole, is_number, refuse

# ---------------------------------------------------------------- who has which layers


def split_layers(
    num_layers: int, num_stages: int, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """The layers of each stage, so that the fullest stage has as little as possible.

    first, last: what the embedding adds to the first stage and the head to the last one, in
    layers. Where stages are equally full, those in the middle take a layer first, because the ends
    have the embedding and the head. Raises ValueError.
    """
    check_whole(num_layers=num_layers, num_stages=num_stages)
    if num_stages > num_layers:
        refuse("num_stages", num_stages, f"1 to {num_layers}, the number of layers")
    for name, value in {"first": first, "last": last}.items():
        if not is_number(value, 0):
            refuse(name, value, "a number of layers, 0 or more")
    ends = (0, num_stages - 1)
    load = [first * (stage == ends[0]) + last * (stage == ends[1]) for stage in range(num_stages)]
    counts = [1] * num_stages  # a stage without a layer would be a process for nothing
    for _ in range(num_layers - num_stages):
        stage = min(range(num_stages), key=lambda s: (load[s] + counts[s], s in ends, s))
        counts[stage] += 1
    return [range(*pair) for pair in pairwise(accumulate(counts, initial=0))]


# ---------------------------------------------------------------- one pass on every rank


def run_stage(model: Decoder, links: Links, tokens: Tensor, attend: Attend) -> Tensor | None:
    """This rank's part of one pass. model: has `stage_layers`, the range that it runs. tokens: [T],
    the same on all ranks -> hidden: [T, hidden_size] with its norm on the last stage, else None.
    """
    pipe = links.pipeline
    if links.is_first_stage:
        x = model.embed_tokens(tokens)
    else:
        weight = model.norm.weight  # every stage has it, and it knows the dtype and the device
        x = weight.new_empty(len(tokens), model.config.hidden_size)
        pipe.receive(x, pipe.rank - 1)
    x = model.run_layers(x, attend, model.stage_layers)
    if links.is_last_stage:
        return model.norm(x)
    pipe.send(x, pipe.rank + 1)
    return None


def run_micro_batches(
    model: Decoder, links: Links, passes: Iterable[tuple[Tensor, Attend]]
) -> list[Tensor | None]:
    """`run_stage` for one micro-batch after the other, each (tokens: [T], attend). While a stage
    runs the second, the next one runs the first: no message has to say so, because each waits only
    for what it needs.
    """
    return [run_stage(model, links, tokens, attend) for tokens, attend in passes]


class MicroBatch:
    """Some sequences that are decoded together, on one stage. pool: of this stage's layers, a block
    for each of the prompts, which has room for all tokens.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], pool: KVPool):
        self.new = [list(prompt) for prompt in prompts]  # what the next pass runs, by sequence
        self.held = [0] * len(prompts)
        self.pool = pool

    def next_pass(self, device: torch.device | str) -> Batch:
        """The whole prompts, or the token that `take` brought for each."""
        batch = new_batch(list(zip(self.new, self.held)), self.pool.block_size, device)
        self.held = [held + len(new) for new, held in zip(self.new, self.held)]
        return batch

    def take(self, tokens: Tensor) -> None:
        """The next token of each sequence: [B] int64."""
        self.new = [[token] for token in tokens.tolist()]


@torch.inference_mode()
def decode_in_flight(
    model: Decoder, links: Links, micro_batches: Sequence[MicroBatch], num_steps: int
) -> list[list[Tensor]]:
    """Greedy decoding of several micro-batches that follow each other round and round; the first
    step is their prompts. Returns the tokens [step][micro-batch]: [B], on every rank.

    The last stage chooses the tokens and sends them to all others: the first one needs them to
    begin the next step, and each `attend` counts the tokens in its cache.
    """
    chosen: list[list[Tensor]] = []
    on_their_way: list = []
    for step in range(num_steps):
        chosen.append([])
        for number, micro_batch in enumerate(micro_batches):
            if step:
                micro_batch.take(_from_last_stage(chosen[step - 1][number], links))
            batch = micro_batch.next_pass(model.device)
            hidden = run_stage(model, links, batch.tokens, micro_batch.pool.attending(batch))
            tokens = torch.zeros_like(batch.logits_at)
            if links.is_last_stage:
                tokens = model.logits(hidden[batch.logits_at]).argmax(-1)
                # not `send`: the first stage may be sending to the next one at this moment
                others = range(links.pipeline.size - 1)
                on_their_way += [links.pipeline.send_later(tokens, to) for to in others]
            chosen[-1].append(tokens)
    for tokens in chosen[-1]:
        _from_last_stage(tokens, links)
    for work in on_their_way:
        work.wait()
    return chosen


def _from_last_stage(tokens: Tensor, links: Links) -> Tensor:
    """Fill `tokens` with those that the last stage has sent; on the last stage it has them."""
    if not links.is_last_stage:
        links.pipeline.receive(tokens, links.pipeline.size - 1)
    return tokens


# ---------------------------------------------------------------- who works when


@dataclass(frozen=True)
class Piece:
    """A stage at work on a micro-batch, at one step of decoding; times in the unit of
    stage_times.
    """

    stage: int
    micro_batch: int
    step: int
    start: float
    end: float


def schedule(
    stage_times: Sequence[float],
    num_micro_batches: int,
    num_steps: int = 1,
    send_time: float = 0.0,
) -> list[Piece]:
    """Every piece of work, each as early as it can be. stage_times: of a micro-batch on each stage,
    in seconds or any other unit; send_time: between two stages, in the same unit.

    A piece waits for its stage, which takes pieces in the order of steps and micro-batches, and for
    the same micro-batch on the stage before. On the first stage it waits for its token of the step
    before, from the last stage. num_steps: 1 for a prefill.
    """
    check_whole(num_micro_batches=num_micro_batches, num_steps=num_steps)
    if not stage_times or not all(is_number(time, 0) and time for time in stage_times):
        refuse("stage_times", list(stage_times), "one or more numbers above 0")
    free = [0.0] * len(stage_times)  # when each stage has done what it has begun
    token_at = [0.0] * num_micro_batches
    pieces = []
    for step in range(num_steps):
        for micro_batch in range(num_micro_batches):
            ready = token_at[micro_batch]
            for stage, time in enumerate(stage_times):
                start = max(ready, free[stage])
                free[stage] = start + time
                pieces.append(Piece(stage, micro_batch, step, start, start + time))
                ready = start + time + send_time
            token_at[micro_batch] = ready
    return pieces


def of_stage(pieces: Iterable[Piece], stage: int) -> Iterator[tuple[int, int]]:
    """(step, micro-batch) of one stage's work, in order."""
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.stage == stage:
            yield piece.step, piece.micro_batch


def idle_share(pieces: Sequence[Piece]) -> float:
    """Of all stages' time until the last piece ends, the share in which they do nothing."""
    stages = len({piece.stage for piece in pieces})
    busy = sum(piece.end - piece.start for piece in pieces)
    return 1 - busy / (stages * max(piece.end for piece in pieces))


def bubble(num_stages: int, num_micro_batches: int) -> float:
    """The idle share of one forward pass over stages of equal time: (p − 1) / (m + p − 1)."""
    check_whole(num_stages=num_stages, num_micro_batches=num_micro_batches)
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def decode_bubble(num_stages: int, num_in_flight: int) -> float:
    """The idle share of long decoding with so many micro-batches in flight: 1 − m / p, none from
    m = p on.
    """
    check_whole(num_stages=num_stages, num_in_flight=num_in_flight)
    return max(0.0, 1 - num_in_flight / num_stages)
