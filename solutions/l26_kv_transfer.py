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
    # SOLUTION
    lines = [("gpu", 0.0, kv_bytes / gpu_bytes * gpu_dollars_per_s)]
    for name, dollars, bytes_per_s in tiers:
        moved_s = 2 * kv_bytes / bytes_per_s
        lines.append((name, moved_s * gpu_dollars_per_s, kv_bytes * dollars))
    lines.append(("compute", compute_s * gpu_dollars_per_s, 0.0))
    best = lines[0]
    found = [("gpu", 0.0)]
    while True:
        # those that will be cheaper one day, and when
        later = [
            ((line[1] - best[1]) / (best[2] - line[2]), line) for line in lines if line[2] < best[2]
        ]
        if not later:
            return found
        since, best = min(later)
        found.append((best[0], since))
    # END


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
    # SOLUTION 26.2
    block = tl.load(blocks_ptr + row)
    value = piece * BLOCK + tl.arange(0, BLOCK)
    inside = value < PAGE
    source = pages_ptr + layer * stride_layer + block * stride_block + value
    target = packed_ptr + (row * tl.num_programs(1) + layer) * PAGE + value
    tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)
    # END


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
        # SOLUTION
        # least recently used first
        self.host: OrderedDict[str, None] = OrderedDict()
        self.disk: OrderedDict[str, None] = OrderedDict()
        # END

    def store(self, name: str) -> None:
        """A block comes from the GPU. It is host memory's most recent one, also if one of the tiers
        had it already.
        """
        # SOLUTION
        self.disk.pop(name, None)
        self.host[name] = None
        self.host.move_to_end(name)
        if len(self.host) > self.host_blocks:
            oldest, _ = self.host.popitem(last=False)
            self.disk[oldest] = None
        if len(self.disk) > self.disk_blocks:
            self.disk.popitem(last=False)
        # END

    def match(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """[(name, "host" or "disk")] of the longest beginning of `names` that is known.

        Each block that is found becomes its tier's most recent one, the last of the prefix first
        and the first of it last: so a prefix loses its end before its beginning, without which the
        rest is of no use. The blocks stay where they are.
        """
        # SOLUTION
        found = []
        for name in names:
            if name not in self.host and name not in self.disk:
                break
            found.append((name, "host" if name in self.host else "disk"))
        for name, tier in reversed(found):
            (self.host if tier == "host" else self.disk).move_to_end(name)
        return found
        # END

    def load(self, name: str) -> str:
        """A block goes to the GPU. Returns the tier that had it; afterwards it is host memory's
        most recent one. Raises KeyError for a block that neither tier has.
        """
        # SOLUTION
        if name not in self.host and name not in self.disk:
            raise KeyError(name)
        tier = "host" if name in self.host else "disk"
        self.store(name)
        return tier
        # END


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
    # SOLUTION
    owned: set[int] = set()
    copies: dict[int, str] = {}  # block: "save" or "load"
    for number, (kind, *rest) in enumerate(events):
        if kind == "step":
            reads, writes = rest
            is_right = owned >= {*reads, *writes}
            is_right &= all(copies.get(block) != "load" for block in reads)
            is_right &= not copies.keys() & set(writes)
        else:
            (block,) = rest
            is_right = {
                "take": block not in owned and block not in copies,
                "free": block in owned,
                "save": block in owned and block not in copies,
                "load": block in owned and block not in copies,
                "done": block in copies,
            }[kind]
        if not is_right:
            return number
        if kind == "take":
            owned.add(block)
        elif kind == "free":
            owned.remove(block)
        elif kind == "done":
            del copies[block]
        elif kind != "step":
            copies[block] = kind
    return None
    # END


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
    # SOLUTION
    parts = list(zip(cached, waiting, active))
    costs = [weight * (queue + prompt_blocks - have) + busy for have, queue, busy in parts]
    least, most = min(waiting), max(waiting)
    places = [(most - queue) / (most - least) if most > least else 1.0 for queue in waiting]
    found = [weight * have / prompt_blocks + place for have, place in zip(cached, places)]
    return costs, costs.index(min(costs)), found, found.index(max(found))
    # END
