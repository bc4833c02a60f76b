"""Checks of exercise 3.2, a pool that grows and forgets. test_l03.py collects them."""

import torch

from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import AttentionOps
from lessons.l03_kv_cache.lab.testing import CONFIG, Streams
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.toolbox.proof.traps import poison_, poisoned_empty
from tests.exercises.checking import assert_equal, assert_largest_tensor, check

BYTES_PER_TOKEN = CONFIG.kv_bytes_per_token(4)


def new_pool(impl, num_blocks=1, block_size=40, ops=LESSON_03_TORCH, **options):
    """An empty pool on the CPU whose slots hold NaN until they are written."""
    pool = impl(CONFIG, num_blocks, block_size, ops, **options)
    poison_(pool.k_slots)
    poison_(pool.v_slots)
    return pool


class Conversation:
    """One sequence's random q, k, v in all layers, and what attention over chosen tokens gives."""

    def __init__(self, seed, total):
        self.narrow = Streams(CONFIG, total, seed)
        self.wide = Streams(CONFIG, total, seed, torch.float64)
        for streams in (self.narrow, self.wide):
            streams.layers = [[x.cpu() for x in qkv] for qkv in streams.layers]

    def whole(self, order):
        """Attention over the tokens `order`, layer by layer, float64: [[len(order), Hq, D]]."""
        chosen = Streams(CONFIG, 0, 0)
        chosen.layers = [[x[order] for x in qkv] for qkv in self.wide.layers]
        return [chosen.whole(layer).cpu() for layer in range(CONFIG.num_hidden_layers)]

    def rows(self, layer, rows):
        """q, k, v of some tokens in float32: [T, H, D] each."""
        return [x[rows] for x in self.narrow.layers[layer]]


def step(pool, chunks, first_block=0, layers=range(CONFIG.num_hidden_layers)):
    """One step of several sequences: what each layer gives, [[T, Hq, D]] * layers.

    chunks: (conversation, its new tokens, how many it holds) for each sequence.
    """
    tokens = [([0] * len(rows), held) for _, rows, held in chunks]
    tables = [[first_block + b] for b in range(len(chunks))] if first_block else None
    attend = pool.attending(new_batch(tokens, pool.block_size, "cpu", tables), first_block)
    outs = []
    for layer in layers:
        parts = zip(*(conversation.rows(layer, rows) for conversation, rows, _ in chunks))
        q, k, v = map(torch.cat, parts)
        outs.append(attend(layer, q, k, v))
    return outs


def feed(pool, steps):
    """Run so many tokens a step through all layers of a pool's only block, growing as needed."""
    held = 0
    for new in steps:
        pool.reserve(held + new)
        attend = pool.attending(new_batch([([0] * new, held)], pool.block_size))
        for layer in range(CONFIG.num_hidden_layers):
            attend(layer, torch.zeros(new, 6, 8), *torch.zeros(2, new, 2, 8))
        held += new
    return pool


# ---------------------------------------------------------------- steps

STEPS = {
    "prefill_then_decode": ([6, 1, 1, 1], 40, "the prompt at once, then token by token"),
    "one_by_one": ([1] * 8, 40, "each token finds those before it"),
    "chunks": ([5, 3, 1, 4, 1], 40, "a chunk's first token does not see its last one"),
    "exactly_full": ([4, 1, 1], 6, "the last slot of the block is used"),
    "growth": ([5, 1, 60, 1], 3, "the block moves to the larger buffers"),
}


def assert_attends(outs, want, rows, label):
    """outs: what each layer gave for the new tokens; want: each layer's attention over all."""
    for layer, (out, whole) in enumerate(zip(outs, want)):
        label_here = f"layer {layer}, {label}"
        assert_equal(out, whole[rows], atol=1e-5, dtype=torch.float32, label=label_here)


@check("3.2", {case: why for case, (*_, why) in STEPS.items()})
def test_attends_as_if_recomputed(impl, case, seed):
    steps, block_size, _ = STEPS[case]
    total = sum(steps)
    text, pool, held = Conversation(seed, total), new_pool(impl, 1, block_size), 0
    want = text.whole(torch.arange(total))
    for new in steps:
        pool.reserve(held + new)
        rows = slice(held, held + new)
        outs = step(pool, [(text, range(held, held + new), held)])
        assert_attends(outs, want, rows, f"positions from {held}")
        held += new


@check("3.2", {"from_block_0": "a decode and a chunk", "from_block_1": "the blocks after another"})
def test_several_sequences(impl, case, seed):
    """Each sequence reads its own block; what other blocks hold does not show."""
    first = int(case[-1])
    pool = new_pool(impl, num_blocks=3, block_size=8)
    texts = [Conversation(seed + b, 7) for b in range(2)]
    step(pool, [(text, range(4), 0) for text in texts], first)
    outs = step(pool, [(texts[0], range(4, 5), 4), (texts[1], range(4, 7), 4)], first)
    whole = [text.whole(torch.arange(7)) for text in texts]
    want = [torch.cat([a[4:5], b[4:7]]) for a, b in zip(*whole)]
    assert_attends(outs, want, slice(None), f"two sequences in the blocks from {first} on")


# name: (tokens a step, block size to start with, (block size, written, copied) in tokens, why)
COUNTED = {
    "fits": ([30, 1, 1], 64, (64, 32, 0), "nothing is copied while there is room"),
    "exactly_full": ([64], 64, (64, 64, 0), "64 tokens fit into 64 slots"),
    "one_more": ([64, 1], 64, (128, 65, 64), "the 65th token moves 64 slots"),
    "twice": ([1] * 130, 64, (256, 130, 64 + 128), "two moves"),
    "small_start": ([3, 2], 3, (64, 5, 3), "a block that grows has 64 slots at least"),
    "power_of_two": ([40, 88], 40, (128, 128, 40), "128 tokens fit into 128 slots"),
    "long_prompt": ([300], 64, (512, 300, 64), "a pool does not know which slots are in use"),
}


@check("3.2", {case: why for case, (*_, why) in COUNTED.items()})
def test_counts(impl, case, seed):
    steps, block_size, want, _ = COUNTED[case]
    pool = feed(impl(CONFIG, 1, block_size, LESSON_03_TORCH), steps)
    got = (
        pool.block_size,
        pool.written_bytes / BYTES_PER_TOKEN,
        pool.growth_copy_bytes / BYTES_PER_TOKEN,
    )
    names = ("block_size", "written_bytes, in tokens,", "growth_copy_bytes, in tokens,")
    for name, mine, right in zip(names, got, want):
        assert_equal(mine, type(mine)(right), label=f"your pool's {name}")


@check("3.2")
def test_growth_moves_every_block(impl, seed):
    """Three blocks move; what is new holds zeros, whatever memory held before. In bfloat16, which
    they keep.
    """
    dtype = torch.bfloat16
    pool = impl(CONFIG, 3, 5, LESSON_03_TORCH, dtype)
    g = torch.Generator().manual_seed(seed)
    old = {}
    for name in ("k_slots", "v_slots"):
        slots = getattr(pool, name)
        slots.copy_(torch.randn(slots.shape, generator=g))
        old[name] = slots[:, :15].unflatten(1, (3, 5)).clone()
    with poisoned_empty():
        pool.reserve(6)
    for name, blocks in old.items():
        slots = getattr(pool, name)
        shape = [2, 3 * 64 + 1, 2, 8]
        assert_equal(list(slots.shape), shape, label=f"the shape of your {name}")
        want = torch.zeros(2, 3, 64, 2, 8, dtype=dtype)
        want[:, :, :5] = blocks
        got = slots[:, :-1].unflatten(1, (3, 64))
        assert_equal(got, want, label=f"your {name} after reserve(6), block by block")
    copied = sum(blocks.nbytes for blocks in old.values())
    assert_equal(pool.growth_copy_bytes, copied, label="growth_copy_bytes")
    assert len(pool.cos_sin_cache) >= 64, "your cos_sin_cache has too few rows for 64 positions"


@check("3.2")
def test_a_new_pool_holds_zeros(impl, seed):
    with poisoned_empty():
        pool = impl(CONFIG, 3, 5, LESSON_03_TORCH)
    for name in ("k_slots", "v_slots"):
        want = torch.zeros(2, 3 * 5 + 1, 2, 8)
        assert_equal(getattr(pool, name), want, label=f"your new {name}")


@check("3.2")
def test_a_slot_of_minus_one_is_the_spare_one(impl, seed):
    """The token with slot -1 leaves all blocks as they were."""
    pool = impl(CONFIG, 2, 4, LESSON_03_TORCH)
    batch = new_batch([([5], 0), ([6], 0)], 4)
    batch.slot_mapping[1] = -1
    k, v = torch.ones(2, 2, 2, 8)
    pool.attending(batch)(0, torch.ones(2, 6, 8), k, v)
    for name in ("k_slots", "v_slots"):
        written = getattr(pool, name)[0, :8].flatten(1).any(1).nonzero().flatten()
        assert_equal(written.tolist(), [0], label=f"the slots of your {name} that were written")


@check("3.2")
def test_a_step_copies_one_row(impl, seed):
    """A step that fits creates nothing as large as the pool; the buffers stay where they are."""
    pool = feed(impl(CONFIG, 1, 128, LESSON_03_TORCH), [100])
    places = pool.k_slots.data_ptr(), pool.v_slots.data_ptr()

    def one_more():
        pool.reserve(101)
        attend = pool.attending(new_batch([([0], 100)], 128))
        attend(0, torch.ones(1, 6, 8), *torch.ones(2, 1, 2, 8))

    assert_largest_tensor(100 * 2 * 8, "write the new row into the buffer", one_more)
    assert (pool.k_slots.data_ptr(), pool.v_slots.data_ptr()) == places, (
        "your step moved the buffers, although the token fits"
    )


@check("3.2", {"decode": "one new token of each sequence", "prefill": "one of them brings two"})
def test_what_the_ops_are_given(impl, case, seed):
    """In a pool that stores layer 1 alone, whose window is 5: a stage of a pipeline."""
    calls = []

    def write(q, k, v, k_slots, v_slots, batch, cos_sin_cache):
        calls.append(("write", k_slots.data_ptr(), v_slots.data_ptr(), len(cos_sin_cache)))
        return q + 1

    def read_by(name):
        def read(q, k_cache, v_cache, batch, softmax_scale, window):
            places = k_cache.data_ptr(), v_cache.data_ptr()
            calls.append((name, *places, list(k_cache.shape), softmax_scale, window))
            return q + 1

        return read

    ops = AttentionOps(write, read_by("prefill"), read_by("decode"))
    pool = impl(CONFIG, 2, 4, ops, torch.bfloat16, layers=range(1, 2))
    assert_equal(list(pool.k_slots.shape), [1, 2 * 4 + 1, 2, 8], label="the shape of your k_slots")
    batch = new_batch([([5], 0), ([6] if case == "decode" else [6, 7], 0)], 4)
    count = len(batch.tokens)
    k, v = torch.zeros(2, count, 2, 8, dtype=torch.bfloat16)
    out = pool.attending(batch)(1, torch.zeros(count, 6, 8), k, v)
    places = pool.k_slots.data_ptr(), pool.v_slots.data_ptr()
    want = [("write", *places, 4), (case, *places, [2, 4, 2, 8], CONFIG.softmax_scale, 5)]
    assert_equal(calls, want, label="the calls of write, then decode or prefill")
    assert_equal(out, torch.full((count, 6, 8), 2.0), label="what attend returns")
    assert_equal(pool.written_bytes, k.nbytes + v.nbytes, label="written_bytes")


REWINDS = {  # tokens fed first, tokens forgotten, block size
    "edited": (9, 4, 40, "other tokens take the place of the forgotten ones"),
    "all": (6, 6, 40, "everything forgotten: as good as new"),
    "after_growth": (70, 66, 8, "what stays moved with the growth"),
}


@check("3.2", {case: why for case, (*_, why) in REWINDS.items()})
def test_forgetting_the_newest(impl, case, seed):
    """The next batch says that fewer are held. Nothing else happens."""
    first, back, block_size, _ = REWINDS[case]
    text, pool = Conversation(seed, first + 5), new_pool(impl, 1, block_size)
    half = first // 2
    for rows in (range(half), range(half, first)):
        pool.reserve(rows.stop)
        step(pool, [(text, rows, rows.start)])
    kept, new = first - back, range(first, first + 5)
    outs = step(pool, [(text, new, kept)])
    order = torch.tensor([*range(kept), *new])
    assert_attends(outs, text.whole(order), slice(-5, None), f"after forgetting {back} tokens")


FORGOTTEN = {  # block, tokens held before, what the others hold, why
    "first": (0, [5, 3, 4], [4, 3], "the last sequence takes block 0"),
    "middle": (1, [5, 3, 4], [5, 4], "it may be longer than the one that ended"),
    "last": (2, [5, 3, 4], [5, 3], "no block has to move"),
    "fewer": (0, [5, 4], [4], "the last sequence need not be in the last block"),
    "only": (0, [5], [], "none is left"),
}


@check("3.2", {case: why for case, (*_, why) in FORGOTTEN.items()})
def test_forgetting_a_sequence(impl, case, seed):
    block, before, want, _ = FORGOTTEN[case]
    held, last = list(before), len(before) - 1
    pool = impl(CONFIG, 3, 8, LESSON_03_TORCH)
    g = torch.Generator().manual_seed(seed)
    expected = {}
    for name in ("k_slots", "v_slots"):
        slots = getattr(pool, name)
        slots.copy_(torch.randn(slots.shape, generator=g))
        expected[name] = slots.clone()
        if block < last:  # the last sequence's four tokens
            expected[name][:, block * 8 : block * 8 + 4] = slots[:, last * 8 : last * 8 + 4]
    assert_equal(pool.forget(block, held), want, label="what forget returned")
    assert_equal(held, before, label="your argument `held`")
    for name, slots in expected.items():
        assert_equal(getattr(pool, name), slots, label=f"your {name} after forget({block})")


@check("3.2", {"after": "no sequence is in that block", "negative": "nor in one before the first"})
def test_forget_refuses(impl, case, seed):
    pool = impl(CONFIG, 3, 8, LESSON_03_TORCH)
    try:
        pool.forget(2 if case == "after" else -1, [5, 3])
    except ValueError:
        return
    raise AssertionError("expected a ValueError")
