"""Proves that all-reduces through symmetric memory give the sum on every rank, to the same bit, in
Python and as kernels between real processes; that slow ranks change nothing; and that each planted
bug is seen. test_flags.py reads the compiled flags.
"""

import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lessons.l20_parallelism.lab.specs import KERNELS
from lessons.l20_parallelism.processes import symmetric, symmetric_kernels
from lessons.l20_parallelism.processes.collectives import WAYS
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import RankError, run_ranks
from lessons.l20_parallelism.processes.symmetric import SymmetricGroup, shared_on_cpu
from lessons.l20_parallelism.processes.symmetric_kernels import one_shot_kernel, two_shot_kernel
from lessons.toolbox.measure.device import has_gpu, interpreting
from lessons.toolbox.proof.compiled import Bounds
from lessons.toolbox.proof.numerics import assert_close_to_oracle
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.traps import CANARY, guarded_empty

ON_GPU = has_gpu() and not interpreting()
SMALL_BLOCK = 16  # of the kernels here, so that few numbers fill BLOCKS programs, and one more
SHAPES = [(), (7,), (5, 3), (SMALL_BLOCK * symmetric.BLOCKS + 5,), (0,)]
KINDS = {"python": symmetric, "kernels": symmetric_kernels}
NAMES = ("one_shot", "two_shot")


def part_of(rank: int, shape: tuple, dtype: torch.dtype, seed: int) -> Tensor:
    """What a rank adds, the same for every process that asks."""
    generator = torch.Generator().manual_seed(seed + 1000 * rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def shared(world: Group, num_bytes: int, timeout_s: float = 60.0):
    """Symmetric memory of this machine's kind."""
    if ON_GPU:
        device = torch.device("cuda", torch.cuda.current_device())
        return symmetric.shared_on_gpus(world, num_bytes, device)
    return shared_on_cpu(world, num_bytes, timeout_s)


def reduce_rank(world: Group, kind: str, dtype: torch.dtype, seed: int) -> list:
    """(way, shape, the total, whether x and what is after its place in the buffer stayed as they
    were), after random waits.
    """
    symmetric_kernels.BLOCK = symmetric_kernels.BLOCK if ON_GPU else SMALL_BLOCK
    memory, found = shared(world, 1 << 16), []
    waits = torch.rand(100, generator=torch.Generator().manual_seed(seed + world.rank)).tolist()
    for name in NAMES:
        for number, shape in enumerate(SHAPES):
            x = part_of(world.rank, shape, dtype, seed + number).to(memory.buffers[0].device)
            before, own = x.clone(), memory.buffers[world.rank].fill_(CANARY)
            time.sleep(0.01 * waits.pop())
            with guarded_empty():
                total = getattr(KINDS[kind], name)(x, memory)
            is_untouched = torch.equal(x, before) and bool((own[x.nbytes :] == CANARY).all())
            found.append((name, shape, total.cpu(), is_untouched))
    return found


def ranks_here(size: int, function, *args, **options) -> list:
    """run_ranks on GPUs where kernels are compiled, else on this CPU."""
    if ON_GPU and torch.cuda.device_count() < size:
        pytest.skip(f"NOT RUN: needs {size} GPUs")
    return run_ranks(size, function, *args, backend="nccl" if ON_GPU else "gloo", **options)


def check_sums(size: int, kind: str, dtype: torch.dtype, seed: int) -> dict[str, list]:
    """Each way and shape against the sum in float64; {way: errors}."""
    errors: dict[str, list] = {name: [] for name in NAMES}
    for number, cases in enumerate(zip(*ranks_here(size, reduce_rank, kind, dtype, seed))):
        name, shape, total, _ = cases[0]
        case = seed + number % len(SHAPES)
        parts = [part_of(rank, shape, dtype, case) for rank in range(size)]
        assert all(is_untouched for *_, is_untouched in cases), name
        assert all(torch.equal(case[2], total) for case in cases), f"{name}: ranks differ"
        # the same order and the same float32 sums in Python and in the kernels
        assert torch.equal(total, symmetric.added(parts).to(dtype).view(shape)), name
        if total.numel():
            out, eager, ref64 = total, sum(parts), sum(part.double() for part in parts)
            rows = [x.reshape(1, -1) for x in (out, eager, ref64)]
            errors[name].append(assert_close_to_oracle(*rows))
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.sample(2)
def test_every_rank_gets_the_sum(size, dtype, seed):
    if ON_GPU:
        pytest.skip("NOT RUN: the ranks of a GPU wait in a kernel")
    check_sums(size, "python", dtype, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.sample(2)
def test_the_kernels_give_every_rank_the_sum(size, dtype, seed, proof):
    errors = check_sums(size, "kernels", dtype, seed)
    proof.record(one_shot_kernel, errors["one_shot"])
    proof.record(two_shot_kernel, errors["two_shot"])


def beside_messages(world: Group, seed: int) -> list[tuple[Tensor, Tensor]]:
    """(through shared memory, by messages) of the ways that have the same name."""
    memory = shared_on_cpu(world, 1 << 12)
    x = part_of(world.rank, (5, 7), torch.float64, seed)
    return [(getattr(symmetric, n)(x, memory), WAYS[n].run(x, world)) for n in NAMES]


def test_they_give_what_messages_give(seed):
    """The ways of collectives.py, which send what is read here."""
    for cases in run_ranks(3, beside_messages, seed):
        for read, sent in cases:
            torch.testing.assert_close(read, sent)


# ---------------------------------------------------------------- planted bugs

FIRST = "barrier(flags, own_flags_ptr, rank, SIZE)  # all inputs are there"
LAST_OF_ONE = "barrier(flags, own_flags_ptr, rank, SIZE)  # all have read"
SUMMING = {
    "one_shot": f"{FIRST}\n    for start in range(first, n, step):",
    "two_shot": f"{FIRST}\n    for start in range(first, piece, step):",
}


def slow_reader(way: str) -> tuple[str, str]:
    """The last rank reads late, which no correct kernel minds."""
    turns = f"{FIRST}\n    for _ in range(10000 * (rank == SIZE - 1)):\n        tl.debug_barrier()"
    return SUMMING[way], turns + SUMMING[way].removeprefix(FIRST)


# name: (module, way, replacements in its source)
BUGS = {
    "a slow reader, no bug": ("kernels", "one_shot", [slow_reader("one_shot")]),
    "a slow adder, no bug": ("kernels", "two_shot", [slow_reader("two_shot")]),
    "a slow rank in Python, no bug": (
        "python",
        "one_shot",
        [("total = added(buffers)", "time.sleep(0.1 * memory.rank); total = added(buffers)")],
    ),
    "adds before the inputs are there": (
        "kernels", "one_shot", [(SUMMING["one_shot"], SUMMING["one_shot"].removeprefix(FIRST))],
    ),
    "reuses its buffer while others read": (
        "kernels", "one_shot", [slow_reader("one_shot"), (LAST_OF_ONE, "pass  #")],
    ),
    "copies before the sums are there": (
        "kernels", "two_shot",
        [slow_reader("two_shot"),
         ("barrier(flags, own_flags_ptr, rank, SIZE)  # all sums", "pass  # all sums")],
    ),
    "a flag is not set back": (
        "kernels", "one_shot", [("flag_ptr, 1, 0,", "flag_ptr, 1, 1,"), ("!= 0:", "== 2:")],
    ),
    "all ranks add the first piece": (
        "kernels", "two_shot", [("at = rank * piece + start", "at = 0 * piece + start")],
    ),
    "a sum is written to another piece": (
        "kernels", "two_shot",
        [("tl.store(buffers[peer] + at, total", "tl.store(buffers[peer] + at % piece, total")],
    ),
    "each rank begins with itself": (
        "kernels", "one_shot",
        [("return tuple(buffers),",
          "return tuple(buffers[memory.rank :] + buffers[: memory.rank]),")],
    ),
    "sums in 16 bits": ("kernels", "one_shot", [("return tl.float64 if x.dtype == torch.float64 "
                                                 "else tl.float32", "return tl.bfloat16")]),
    "Python adds before the inputs are there": (
        "python", "one_shot",
        [("    memory.barrier()  # all inputs are there\n    total = added(buffers)",
          "    total = added(buffers)")],
    ),
    "Python reuses its buffer while others read": (
        "python", "one_shot",
        [("total = added(buffers)", "time.sleep(0.1 * memory.rank); total = added(buffers)"),
         ("memory.barrier()  # all have read", "pass  #")],
    ),
    "a piece too few": (
        "python", "two_shot",
        [("for piece in pieces:", "for piece in pieces[1:]:")],
    ),
    "counts are never compared": ("python", "barrier", [("[0] < self.epoch", "[0] < 1")]),
}  # fmt: skip
RIGHT = [name for name in BUGS if name.endswith("no bug")]
# one program adds all, or a piece, so that a rank may be a round ahead of a slow one
ROUNDS, VALUES, PROGRAM = 3, 160, {"one_shot": 256, "two_shot": 64}


def rank_with_bugs(world: Group, names: list[str], seed: int) -> dict[str, list[Tensor]]:
    """The totals of some rounds with each bug in turn, the first rank being late to each round."""
    found = {}
    for name in names:
        kind, way, replacements = BUGS[name]
        module = KINDS[kind]
        with tempfile.TemporaryDirectory() as folder:
            for old, new in replacements:
                module = with_bug(module, Path(folder), old, new)
            if kind == "kernels":
                module.BLOCK = PROGRAM[way]
            one_of = module if kind == "python" else symmetric
            memory = one_of.shared_on_cpu(world, 1 << 10, 10.0)
            function = getattr(module, "one_shot" if way == "barrier" else way)
            found[name] = []
            for number in range(ROUNDS):
                x = part_of(world.rank, (VALUES,), torch.float32, seed + number)
                if world.rank == 0:
                    time.sleep(0.1)
                found[name].append(function(x, memory))
            world.barrier()
    return found


def test_planted_bugs_are_seen(seed):
    """Where nobody is early or late, several of them give the right sums."""
    if ON_GPU:
        pytest.skip("NOT RUN: bugs are planted in interpreted kernels")
    by_rank = run_ranks(3, rank_with_bugs, list(BUGS), seed)
    seen = set()
    for name in BUGS:
        for number in range(ROUNDS):
            parts = [part_of(rank, (VALUES,), torch.float32, seed + number) for rank in range(3)]
            want = symmetric.added(parts)
            if not all(torch.equal(found[name][number], want) for found in by_rank):
                seen.add(name)
    assert seen == set(BUGS) - set(RIGHT)


def never_comes(world: Group) -> None:
    memory = shared_on_cpu(world, 64, timeout_s=0.3)
    if world.rank:
        memory.barrier()
    world.barrier()


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(RankError, match="rank 1 raised TimeoutError: rank 0 did not come"):
        run_ranks(2, never_comes)


def refuses(world: Group) -> None:
    symmetric.one_shot(torch.ones(17), shared_on_cpu(world, 64))


def test_a_tensor_larger_than_the_buffers_is_refused():
    with pytest.raises(RankError, match="bytes of x: got 68; accepted: at most 64"):
        run_ranks(1, refuses)


# ---------------------------------------------------------------- as a group


def group_rank(world: Group, seed: int) -> list:
    """Totals of a group whose buffers hold 256 bytes, its barriers, and what its wire counted."""
    group = SymmetricGroup(world, shared_on_cpu(world, 256), one_shot_bytes=128)
    found = []
    for length in (16, 64, 65):
        wide = part_of(world.rank, (length, 2), torch.float32, seed)
        x = wide[:, 0]  # not contiguous, changed in place
        total = group.all_reduce(x)
        found.append((torch.equal(total, wide[:, 0]), total.tolist(), group.memory.epoch))
    return [found, dict(group.wire.bytes), dict(group.wire.calls)]


def test_a_group_takes_shared_memory_for_what_fits(seed):
    for found, num_bytes, calls in run_ranks(3, group_rank, seed):
        for length, (is_in_place, total, barriers) in zip((16, 64, 65), found):
            parts = [part_of(rank, (length, 2), torch.float32, seed)[:, 0] for rank in range(3)]
            torch.testing.assert_close(torch.tensor(total), sum(parts))
            assert is_in_place and barriers == {16: 2, 64: 4, 65: 4}[length]
        assert num_bytes == {"all_reduce": 4 * (16 + 64 + 65)} and calls == {"all_reduce": 3}


# ---------------------------------------------------------------- the compiler

BOUNDS = {
    "few registers, so that all programs run at once": Bounds("", registers=64, shared_bytes=64),
    "one shot: x and each rank's values in loads of 16 bytes": Bounds(
        "one_shot_bf16_8", loads_128bit=9
    ),
    "two shot: x, a piece of each rank, and the sums": Bounds("two_shot_bf16_2", loads_128bit=4),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)
