# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=26
# Generated from solutions/l26_kv_transfer.py, checksum 05d7d9247343. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 26: the cheapest way after a pause, a kernel that packs pages, an index of
two tiers, a log with a race in it, and the score of a router.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@exercise("26.1", "Predict: the cheapest way after a pause", minutes=25, difficulty=2)
def cheapest_ways(
    kv_bytes: float,
    compute_s: float,
    gpu_dollars_per_s: float,
    gpu_bytes: float,
    tiers: Sequence[tuple[str, float, float]],
) -> list[tuple[str, float]]:
    """The ways to have a token's K and V again after a pause: [(way, from which pause on it is the
    cheapest, in seconds)], in the order of the pauses. The first begins at 0.

    kv_bytes: what the token keeps. The ways and their dollars:
        "gpu"       it stays: nothing once; each second its share of the rent, kv_bytes of gpu_bytes
        a tier      (name, dollars for a byte and a second, bytes/s of its link): it is moved there
                    and back, and the GPU, at gpu_dollars_per_s, waits for both; each second its
                    bytes cost what the tier says
        "compute"   nothing is kept: compute_s seconds of the GPU, once
    Each way is a straight line over the pause. Two ways may cost the same a second: a tier's price
    may be 0. A way that is never the cheapest is left out. No two lines meet at the same pause.
    Errors: none to raise.

    Example: 100 bytes, compute_s 10, a GPU of 1 dollar a second and 1000 bytes, and the tier
    ("host", 0.0002, 100)
        gpu 0 + 0.1 t, host 2 + 0.02 t, compute 10
        host is cheaper than gpu from 2 / (0.1 - 0.02) = 25 s on, compute than host from 400 s on
        -> [("gpu", 0), ("host", 25), ("compute", 400)]
    Guess first: a GPU with twice the memory for the same rent. Does a token go to the host earlier
    or later?
    """
    raise NotImplementedError("Exercise 26.1: Predict: the cheapest way after a pause")


@triton.jit
def pack_kernel(
    pages_ptr,
    packed_ptr,
    blocks_ptr,
    stride_layer,
    stride_block,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row, layer and piece of BLOCK values of a page. packed is dense: [rows,
    layers, PAGE].
    """
    # In 64 bits, because a pool has more than 2^31 values.
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    raise NotImplementedError("Exercise 26.2: A kernel that packs pages")


@exercise(
    "26.2",
    "A kernel that packs pages",
    minutes=30,
    difficulty=2,
    replaces="lessons.l26_kv_transfer.stand_ins:gather",
    through="reference.ladder.yours.pages:gather",
)
def pack_pages(pages: Tensor, blocks: Tensor, piece: int = 16) -> Tensor:
    """Copies of some blocks side by side, by `pack_kernel` above, which is yours to write; this
    wrapper is done. pages: [layers, num_blocks, PAGE] float32 -> [rows, layers, PAGE].

    blocks: [rows] int64, the block of each row, in any order; one may be there twice. The last
    dimension of pages is dense; layers and blocks have strides of their own, because after the
    blocks of a layer there is a slot that belongs to none. What is not asked for is NaN. piece:
    values that one program copies, a power of two; PAGE is any number. Every load and store has a
    mask. Aim: nothing but the result is allocated. Errors: none to raise.

    Example: 2 layers, 3 blocks of 2 values, pages [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9],
    [10, 11]]], blocks [2, 0]
        -> [[[4, 5], [10, 11]], [[0, 1], [6, 7]]]
    """
    layers, _, page = pages.shape
    packed = pages.new_full((len(blocks), layers, page), float("nan"))
    pack_kernel[len(blocks), layers, triton.cdiv(page, piece)](
        pages, packed, blocks, *pages.stride()[:2], PAGE=page, BLOCK=piece
    )
    return packed


@exercise("26.3", "An index of blocks in two tiers", minutes=40, difficulty=3)
class TieredIndex:
    """Which blocks are in host memory, and which on disk. Names of blocks are hashes of lesson 13;
    here they are any strings.

    host_blocks, disk_blocks: the most blocks that each tier may hold, 0 or more. Laws:
        a block is in one tier only
        a tier never holds more than it may
        host memory that is full gives its least recently used block to the disk (demotion)
        a disk that is full forgets its least recently used block for it
        what comes to the disk is the disk's most recent

    Example: 2 blocks in host memory, 1 on disk
        store a, store b        host a b            disk -
        store c                 host b c            disk a
        match([b, a, x])     -> [(b, "host"), (a, "disk")]; x is not known
        load(a)              -> "disk"; host memory takes it and gives c away: host b a, disk c
        match([x, b])        -> [], because a prefix ends at its first missing block
    """

    def __init__(self, host_blocks: int, disk_blocks: int):
        self.host_blocks = host_blocks
        self.disk_blocks = disk_blocks
        raise NotImplementedError("Exercise 26.3: An index of blocks in two tiers")

    def store(self, name: str) -> None:
        """A block comes from the GPU. It is host memory's most recent one, also if one of the tiers
        had it already.
        """
        raise NotImplementedError("Exercise 26.3: An index of blocks in two tiers")

    def match(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """[(name, "host" or "disk")] of the longest beginning of `names` that is known.

        Each block that is found becomes its tier's most recent one, the last of the prefix first
        and the first of it last: so a prefix loses its end before its beginning, without which the
        rest is of no use. The blocks stay where they are.
        """
        raise NotImplementedError("Exercise 26.3: An index of blocks in two tiers")

    def load(self, name: str) -> str:
        """A block goes to the GPU. Returns the tier that had it; afterwards it is host memory's
        most recent one. Raises KeyError for a block that neither tier has.
        """
        raise NotImplementedError("Exercise 26.3: An index of blocks in two tiers")


@exercise("26.4", "Find the race in a log", minutes=25, difficulty=2)
def first_race(events: Sequence[tuple]) -> int | None:
    """The number of the first event that breaks a rule, from 0; None if none does. At the beginning
    all blocks are free, and no copy is under way.

    ("take", block)      a request gets the block. It is free: it has no owner, and no copy of it is
                         under way.
    ("free", block)      the request gives it back. It has an owner.
    ("save", block)      a copy of the block to a tier begins. The block has an owner, and no copy
                         of it is under way. Until the copy is done it is one owner more: the
                         request may give the block back meanwhile, and it is still not free.
    ("load", block)      a copy from a tier into the block begins. The same.
    ("done", block)      the copy of this block is done. One is under way.
    ("step", reads, writes)    two lists of blocks. Every block has an owner, which is a request. A
                         step reads no block that is being loaded, and writes none that is being
                         loaded or saved.
    Errors: none to raise.

    Example: take 0, step [] [0], save 0, free 0, take 0, done 0
        -> 4: the copy still reads block 0 when it is given to another request
    """
    raise NotImplementedError("Exercise 26.4: Find the race in a log")


def round_robin(request: int, num_workers: int) -> int:
    """The naive router: the next one, whatever it has and does. Done, to compare with."""
    return request % num_workers


@exercise(
    "26.5",
    "The score of a router",
    minutes=25,
    difficulty=2,
    replaces="reference.router.block_index:scores",
)
def scores(
    prompt_blocks: int,
    cached: Sequence[int],
    waiting: Sequence[int],
    active: Sequence[int],
    weight: float,
) -> tuple[list[float], int, list[float], int]:
    """Which worker gets a prompt of prompt_blocks blocks, 1 or more: by Dynamo's cost and by
    llm-d's score.

    cached[w]: how many blocks of the prompt's beginning worker w holds. waiting[w]: blocks of other
    prompts that it still has to compute. active[w]: blocks of requests that it decodes.
    Returns
        the cost of each worker: weight times the blocks that it has to compute before the prompt's
            first token, plus the blocks that it decodes
        the worker of the lowest cost
        the score of each worker: weight times the share of the prompt that it holds, plus its place
            in the queue. That is 1 for the worker with the least waiting and 0 for the one with the
            most, and the others are between them in proportion; 1 for all if all have the same.
        the worker of the highest score
    Of equal workers the first is taken. Errors: none to raise.

    Example: 10 blocks, cached [2, 5, 8], waiting [0, 0, 0], active [10, 5, 9], weight 1
        costs [18, 10, 11]: worker 1; scores [1.2, 1.5, 1.8]: worker 2, which never asks who decodes
    Guess first: which worker does a weight of 0 choose, and which a very large one?
    """
    raise NotImplementedError("Exercise 26.5: The score of a router")
