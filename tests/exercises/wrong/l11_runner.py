"""Wrong answers to exercise 11.4, the runner; l11.py registers them."""

import copy
from functools import partial

import torch

from lessons.l11_cuda_graphs.naive import decode_batch, decode_logits
from lessons.l11_cuda_graphs.optimized import GraphRunner as LessonsRunner


class SlippedRunner:
    """The runner with one slip: the attributes named in `slip` differ from what the class says
    here.
    """

    # which rows of the inputs reach the buffers; "rebind": none, the attribute is replaced
    copy = "all"
    pads = True  # the columns behind the batch become padding
    padding = (0, 0, -1, 0)
    smallest_first = recapture = own_pool = whole = lazy = False
    clones = cuts = checks = checks_batch = replays = warm = keeps = True
    pick = "smallest"

    def __init__(self, model, pool, graphs, buckets=None, **slip):
        vars(self).update(slip)
        most = pool.num_blocks
        self.buckets = sorted(buckets or {*(1 << n for n in range((most - 1).bit_length())), most})
        if self.checks and not 1 <= self.buckets[0] <= self.buckets[-1] <= most:
            raise ValueError(f"buckets: got {self.buckets}")
        if self.own_pool:
            pool = copy.copy(pool)
            pool.k_slots, pool.v_slots = pool.k_slots.clone(), pool.v_slots.clone()
        self.model, self.pool, self.api, self.captured = model, pool, graphs, {}
        order = self.buckets if self.smallest_first else self.buckets[::-1]
        for bucket in () if self.lazy else order:
            self.capture(bucket)
        if not self.keeps:
            del self.model, self.pool

    def capture(self, bucket):
        buffer = torch.tensor(self.padding)[:, None].repeat(1, bucket)

        def step():
            batch = decode_batch(buffer, self.slots_seen(buffer))
            return decode_logits(self.model, self.pool, batch)

        with torch.inference_mode():
            self.captured[bucket] = [buffer, *self.api.capture(step)]

    def slots_seen(self, buffer):
        return self.pool.block_size

    def __call__(self, inputs):
        batch = inputs.shape[1]
        fitting = [b for b in self.buckets if b >= batch]
        if not fitting and self.checks_batch:
            raise ValueError(f"inputs: got {batch}")
        bucket = {
            "smallest": fitting[0] if fitting else self.buckets[-1],
            "largest": self.buckets[-1],
            "too small": max([b for b in self.buckets if b <= batch], default=self.buckets[0]),
        }[self.pick]
        if self.recapture or bucket not in self.captured:
            self.capture(bucket)
        buffer, graph, logits = self.captured[bucket]
        fresh = buffer.clone()
        if self.pads:
            fresh[:, batch:] = torch.tensor(self.padding)[:, None]
        fresh[:, :batch] = inputs[:, :bucket]
        if self.copy == "rebind":
            self.captured[bucket][0] = fresh
        else:
            rows = (
                [0, 1, 2, 3]
                if self.copy == "all"
                else [row for row in range(4) if row != self.copy]
            )
            buffer[rows] = fresh[rows]
        for _ in range({True: 1, False: 0, "twice": 2}[self.replays]):
            graph.replay()
        logits = logits[:batch] if self.cuts else logits
        return logits.clone() if self.clones else logits


class PythonLength(SlippedRunner):
    def slots_seen(self, buffer):
        return int(buffer[3].max()) + 1


class OneLength(SlippedRunner):
    def slots_seen(self, buffer):
        return self.pool.block_size // 2


SLIPS = [
    (
        "rebinds_inputs",
        SlippedRunner,
        dict(copy="rebind"),
        "The graph reads the buffer that it was captured with. Copy into it; a new tensor it never "
        "sees.",
    ),
    (
        "stale_tokens",
        SlippedRunner,
        dict(copy=0),
        "The tokens in the buffer are those of the capture.",
    ),
    (
        "stale_positions",
        SlippedRunner,
        dict(copy=1),
        "The positions in the buffer stay as captured: every token is at 0.",
    ),
    (
        "stale_slots",
        SlippedRunner,
        dict(copy=2),
        "slot_mapping stays as captured: no new K and V is ever written.",
    ),
    (
        "stale_lengths",
        SlippedRunner,
        dict(copy=3),
        "context_lens stays as captured: every query sees nothing.",
    ),
    (
        "no_padding",
        SlippedRunner,
        dict(pads=False),
        "Columns after the batch keep an older step's values and write into a row that is "
        "another's by now.",
    ),
    (
        "padding_into_slot_0",
        SlippedRunner,
        dict(padding=(0, 0, 0, 1)),
        "Your padding writes into slot 0, a neighbour's.",
    ),
    (
        "padding_into_its_row",
        SlippedRunner,
        dict(padding=(0, 0, 8, 1)),
        "Your padding writes into a slot; -1 writes nowhere.",
    ),
    (
        "not_cloned",
        SlippedRunner,
        dict(clones=False),
        "You return the graph's own output. The next replay overwrites it: clone.",
    ),
    ("whole_bucket", SlippedRunner, dict(cuts=False), "You return the rows of padding as well."),
    (
        "bucket_too_small",
        SlippedRunner,
        dict(pick="too small"),
        "Your bucket is not larger than the batch: who finds no place?",
    ),
    (
        "always_the_largest",
        SlippedRunner,
        dict(pick="largest"),
        "As slow as the largest batch: take the smallest that fits.",
    ),
    (
        "captures_each_time",
        SlippedRunner,
        dict(recapture=True),
        "You capture at every step: that costs more than launching it.",
    ),
    (
        "captures_late",
        SlippedRunner,
        dict(lazy=True),
        "You capture in the middle of serving. Do it in __init__.",
    ),
    (
        "smallest_first",
        SlippedRunner,
        dict(smallest_first=True),
        "Small graphs first: the memory that they took is too small for the large ones. Begin with "
        "the largest.",
    ),
    (
        "own_pool",
        SlippedRunner,
        dict(own_pool=True),
        "Your graphs run on a pool of their own: the caller's never changes.",
    ),
    (
        "forgets_the_pool",
        SlippedRunner,
        dict(keeps=False),
        "A graph owns no memory that it reads. Keep model and pool in an attribute.",
    ),
    (
        "never_replays",
        SlippedRunner,
        dict(replays=False),
        "You copy the inputs and read the output. Who ran the graph?",
    ),
    ("replays_twice", SlippedRunner, dict(replays="twice"), "You replay twice for each step."),
    (
        "accepts_any_bucket",
        SlippedRunner,
        dict(checks=False),
        "A bucket above pool.num_blocks or below 1 is an error: ValueError.",
    ),
    (
        "accepts_any_batch",
        SlippedRunner,
        dict(checks_batch=False),
        "More sequences than the largest bucket: ValueError.",
    ),
    (
        "length_of_python",
        PythonLength,
        {},
        "max_context_len from int(...) waits for the GPU while capturing; it is refused.",
    ),
    (
        "half_the_rows",
        OneLength,
        {},
        "max_context_len is a shape: it stays as captured, so it must be the whole block.",
    ),
]


def add_to(answers):
    """Register the wrong answers and the lesson's own, which is right."""
    for name, kind, slip, hint in SLIPS:
        answers.wrong("11.4", hint, name)(partial(kind, **slip))
    answers.alternative("11.4")(LessonsRunner)
