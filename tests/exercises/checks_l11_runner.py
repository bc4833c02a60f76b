"""Checks of exercise 11.4, the runner. test_l11.py collects them."""

import gc
import random
import weakref

import torch

from lessons.l03_kv_cache.cache import KVPool
from lessons.l11_cuda_graphs.naive import LOCKSTEP, decode_batch, decode_logits
from lessons.l11_cuda_graphs.simulator import SimulatedGraphs
from lessons.toolbox.model.config import ModelConfig
from tests.exercises.checking import assert_equal, call, check

CONFIG = ModelConfig(
    "llama",
    vocab_size=31,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=8,
    max_position_embeddings=64,
)
CAPACITY = 8


class ToyDecoder:
    """One layer of attention over the tokens' vectors: a decoder as far as a runner can see, and
    quick.
    """

    def __init__(self, generator):
        self.config, self.device = CONFIG, torch.device("cpu")
        self.embedding, self.k, self.v = (
            torch.randn(31, size, generator=generator, dtype=torch.float64) for size in (8, 4, 4)
        )

    def __call__(self, tokens, attend):
        tables = self.embedding, self.k, self.v
        q, k, v = (table[tokens].unflatten(1, (-1, 4)) for table in tables)
        return attend(0, q, k, v).flatten(1)

    def logits(self, hidden):
        return hidden @ self.embedding.T


class CountingGraphs(SimulatedGraphs):
    """Notes the batch size of every capture and of every replay."""

    def __init__(self):
        super().__init__(warm_ups=1)
        self.captures, self.replays = [], []

    def capture(self, step):
        graph, output = super().capture(step)
        self.captures.append(len(output))
        replay = graph.replay
        graph.replay = lambda: (self.replays.append(len(output)), replay())[1]
        return graph, output


def runner_setup(impl, seed, rows=4, buckets=None):
    """A runner over a pool filled with random rows, the graphs that it has, and the same pool for
    an eager step.
    """
    g = torch.Generator().manual_seed(seed)
    model = ToyDecoder(g)
    ops = LOCKSTEP.stand_ins
    mine, reference = (KVPool(CONFIG, rows, CAPACITY, ops, torch.float64) for _ in range(2))
    mine.k_slots.normal_(generator=g)
    mine.v_slots.normal_(generator=g)
    reference.k_slots.copy_(mine.k_slots)
    reference.v_slots.copy_(mine.v_slots)
    graphs = CountingGraphs()
    return impl(model, mine, graphs, buckets), model, mine, reference, graphs


def step_columns(draw, lengths):
    """inputs: [4, B] of a step whose sequences hold `lengths` tokens before it."""
    return torch.tensor(
        [
            [draw.randrange(31) for _ in lengths],
            lengths,
            [row * CAPACITY + n for row, n in enumerate(lengths)],
            [n + 1 for n in lengths],
        ]
    )


RUNS = {  # name: (buckets, lengths before each step, why)
    "one_bucket_exactly": ([2], [[3, 5], [4, 6]], "a batch that fills its bucket, twice"),
    "padded": ([4], [[3, 5], [4, 6]], "two rows of padding beside two sequences"),
    "one_sequence": (None, [[4], [5], [6]], "the bucket of one"),
    "shrinks": (None, [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4]], "sequences leave: 4, 3, 2, 1"),
    "grows": (None, [[1], [2, 5], [3, 6, 2], [4, 7, 3, 6]], "sequences come: 1, 2, 3, 4"),
    "unsorted_buckets": ([4, 1, 3], [[2, 2], [3, 3, 1], [4]], "buckets in any order"),
    "a_row_is_taken_over": (
        [4],
        [[1, 2, 3, 6], [2, 3], [3, 4]],
        "who has left writes no more: its row may be another's by then",
    ),
}


@check("11.4", {case: why for case, (*_, why) in RUNS.items()}, seconds=20)
def test_logits_and_pool(impl, case, seed):
    """All results are looked at in the end, and every slot of the pool but the spare
    one.
    """
    buckets, steps, _ = RUNS[case]
    runner, model, mine, reference, _ = runner_setup(impl, seed, buckets=buckets)
    draw, results = random.Random(seed), []
    for lengths in steps:
        inputs = step_columns(draw, lengths)
        if len(lengths) < 3:  # another sequence's prompt in the last row
            for pool in (mine, reference):
                pool.k_slots[:, 3 * CAPACITY : -1] = 0.5
                pool.v_slots[:, 3 * CAPACITY : -1] = 0.5
        want = decode_logits(model, reference, decode_batch(inputs, CAPACITY))
        results.append((call(lambda inputs: runner(inputs), dict(inputs=inputs)), want))
        inputs.fill_(1)  # the caller reuses its tensor
    for turn, (got, want) in enumerate(results):
        assert_equal(
            got, want, atol=1e-9, label=f"the logits of step {turn + 1}, looked at after the last"
        )
    for name in ("k_slots", "v_slots"):
        got, want = (getattr(pool, name)[:, :-1] for pool in (mine, reference))
        assert_equal(got, want, atol=1e-9, label=f"pool.{name}")


@check("11.4", seconds=20)
def test_capturing_changes_no_row(impl, seed):
    _, _, mine, reference, _ = runner_setup(impl, seed)
    got, want = mine.k_slots[:, :-1], reference.k_slots[:, :-1]
    assert_equal(got, want, label="pool.k_slots after the captures")


@check("11.4", seconds=20)
def test_keeps_what_its_graphs_read(impl, seed):
    """The caller that made the runner lets go of everything else."""
    runner, model, pool, *_ = runner_setup(impl, seed)
    model, pool = weakref.ref(model), weakref.ref(pool)
    gc.collect()
    for name, held in (("model", model), ("pool", pool)):
        assert held() is not None, (
            f"the {name} was freed while your runner lives: its graphs read memory that is "
            "another's by now"
        )
    del runner


@check(
    "11.4",
    {
        "given": "buckets [1, 2, 4]",
        "unsorted": "buckets [2, 4, 1]",
        "default": "a pool of 6 blocks: 1, 2, 4, 6",
    },
    seconds=20,
)
def test_captures_and_replays(impl, case, seed):
    """Each bucket once, the largest first, none later; a step replays the smallest bucket that
    holds it, once.
    """
    rows, buckets = (
        (6, None) if case == "default" else (4, [1, 2, 4] if case == "given" else [2, 4, 1])
    )
    runner, *_, graphs = runner_setup(impl, seed, rows, buckets)
    expected = sorted(buckets or [1, 2, 4, 6], reverse=True)
    assert_equal(graphs.captures, expected, label="the batch sizes of your captures")
    batches, draw = [2, 1, 3, 4, *([5] if rows == 6 else [])], random.Random(seed)
    for batch in batches:
        runner(step_columns(draw, [2] * batch))
    assert_equal(
        graphs.replays,
        [min(b for b in expected if b >= batch) for batch in batches],
        label="the batch sizes replayed",
    )
    assert_equal(graphs.captures, expected, label="the captures after these steps")


@check(
    "11.4",
    {
        "batch": "more sequences than the largest bucket",
        "bucket_above": "a bucket larger than the pool's number of blocks",
        "bucket_below": "a bucket of 0",
    },
    seconds=20,
)
def test_refuses(impl, case, seed):
    buckets = {"batch": [1, 2], "bucket_above": [2, 5], "bucket_below": [0, 2]}[case]
    captures = []
    try:
        runner, *_ = runner_setup(
            lambda m, c, g, b: (captures.append(g), impl(m, c, g, b))[1], seed, buckets=buckets
        )
        if case == "batch":
            runner(step_columns(random.Random(seed), [1, 1, 1]))
            raise AssertionError(f"expected a ValueError for 3 sequences and buckets {buckets}")
        raise AssertionError(f"expected a ValueError for buckets {buckets} of a pool with 4 blocks")
    except ValueError:
        assert case == "batch" or not captures[0].captures, "you capture before you refuse"
