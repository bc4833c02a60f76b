"""Start the ranks as processes on this machine, and end them together.

    def rank_main(world: Group, x): ...      # at the top of a module, so that a process finds it
    results = run_ranks(4, rank_main, x)           # what each rank returned, in order

A rank that raises or dies ends all of them within a second or two, with one line that names it.
torchrun works as well: it starts the processes itself, and `world_from_environment` joins them.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from lessons.l20_parallelism.processes.group import Group
from lessons.toolbox.model.arguments import check_whole, one_line

ROOT = str(Path(__file__).resolve().parents[3])
# A rank whose neighbour died complains about the wire, and of several failures the first of these
# kinds counts. A dying process closes its pipe and its wires together, in no certain order, so that
# an echo may be heard before its cause. A RuntimeError that is no echo is told so much later.
DIED, RAISED, ECHO = range(3)
ECHO_S = 1.0
PRELOAD = ["lessons.l20_parallelism.processes.warm"]


class RankError(RuntimeError):
    """A rank raised or died; the others were ended. rank: which one."""

    def __init__(self, rank: int, what: str):
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


def run_ranks(
    size: int,
    function: Callable,
    *args,
    backend: str = "gloo",
    timeout_s: float = 120.0,
) -> list:
    """Call function(world, *args) in `size` new processes. Returns what each rank returned.

    function and args have to be picklable: a function at the top of a module. backend: "gloo" on a
    CPU, "nccl" on GPUs. Raises RankError if a rank raises, dies or is not done within timeout_s.
    """
    check_whole(size=size)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/ranks"
        with started(
            size, _rank_main, rendezvous, size, backend, timeout_s, function, args
        ) as ranks:
            return gather_results(ranks, timeout_s)


def gather_results(ranks: list[tuple], timeout_s: float) -> list:
    """What each rank sends through its pipe. Raises RankError, for the rank that was at fault."""
    deadline = time.monotonic() + timeout_s
    results, waiting, failures = [None] * len(ranks), dict(enumerate(ranks)), []
    while waiting:
        pipes = {pipe: rank for rank, (_, pipe) in waiting.items()}
        ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes[pipe]
            process, _ = waiting.pop(rank)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process.join(5)
                failures.append((DIED, rank, f"died ({exit_of(process)})"))
                continue
            if ok:
                results[rank] = value
            else:
                is_echo, said = value
                failures.append((ECHO if is_echo else RAISED, rank, f"raised {said}"))
        if failures and min(failures)[0] != ECHO:
            break
        if failures:  # then the cause is about to be told
            deadline = min(deadline, time.monotonic() + ECHO_S)
    if failures:
        _, rank, what = min(failures)
        raise RankError(rank, what)
    if waiting:
        raise RankError(min(waiting), f"was not done within {timeout_s:g} s")
    return results


def exit_of(process) -> str:
    """How a process ended, in words."""
    code = process.exitcode
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


@contextlib.contextmanager
def started(
    size: int, target: Callable, *args, preload: tuple[str, ...] = ()
) -> Iterator[list[tuple]]:
    """`size` processes that run target(rank, pipe, *args), each with our end of its pipe; ended
    when the block is left, however it is left. preload: modules that they import, too, if these are
    the first processes of this program.
    """
    context, ranks = process_context(preload), []
    try:
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=target, args=(rank, theirs, *args), daemon=True)
            process.start()
            theirs.close()  # so that we read the end of file when the rank dies
            ranks.append((process, mine))
        yield ranks
    finally:
        for process, pipe in ranks:
            pipe.close()
            process.kill()
        for process, _ in ranks:
            process.join()


def process_context(preload: tuple[str, ...] = ()):
    """How processes start: forked from a clean server that has imported PyTorch once. A fork of
    this process would inherit its threads' locks and its CUDA state; a new interpreter takes
    seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    # because the server does not learn this process's sys.path
    with children_find_the_course(), children_hear_no_interrupt():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def children_find_the_course() -> Iterator[None]:
    """Inside it, Python processes that this one starts find the course. Afterwards the environment
    is as it was, because other programs may be started from here, too.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def children_hear_no_interrupt() -> Iterator[None]:
    """Inside it, processes that this one starts, and all that they start, never hear Ctrl-C. It
    goes to every process of a terminal, and the program's own decides what it means. A worker
    cannot see to that by itself: while Python starts it, it would die with a traceback on the
    screen.
    """
    resource_tracker.ensure_running()  # because its own start would let Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """From now on this process ends when the program that started it does, whatever it is doing. It
    may be waiting for a rank that was never started, and nothing else would wake it up.
    """

    def wait_for_end() -> None:
        wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=wait_for_end, name="parent", daemon=True).start()


def _rank_main(
    rank: int,
    pipe: Connection,
    rendezvous: str,
    size: int,
    backend: str,
    timeout_s: float,
    function: Callable,
    args: tuple,
) -> None:
    """The body of a rank's process."""
    end_with_parent()
    # because the ranks share this machine's cores, and threads that wait for a core cost more than
    # they win; torchrun does the same by OMP_NUM_THREADS
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    torch.seed()  # because forks of one server would all draw the same numbers
    try:
        join_world(rank, size, rendezvous, backend, timeout_s)
        dist.barrier()  # a rank that is done before another has met all would look like a death
        # Pickled here, because a pipe would send a tensor as shared memory, which ends with us.
        message = pickle.dumps((True, function(Group.world(), *args)))
    except BaseException as error:
        is_echo = isinstance(error, RuntimeError)  # what torch.distributed raises
        said = one_line(f"{type(error).__name__}: {error}")
        message = pickle.dumps((False, (is_echo, said)))
    pipe.send_bytes(message)
    # Until all are done, because others may still be reading what this rank has sent, or meeting it
    # in a new group.
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    os._exit(0)  # because gloo's threads may wait for ranks that have gone


def join_world(rank: int, size: int, rendezvous: str, backend: str, timeout_s: float) -> None:
    """Become a rank of the world. rendezvous: a file:// address that all ranks share."""
    take_device(rank, backend)
    dist.init_process_group(
        backend,
        init_method=rendezvous,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )


def world_from_environment(backend: str = "gloo") -> Group:
    """The world that torchrun started this process in; a group of one elsewhere."""
    if "RANK" not in os.environ:
        return Group.alone()
    take_device(int(os.environ.get("LOCAL_RANK", 0)), backend)
    dist.init_process_group(backend)
    return Group.world()


def take_device(rank: int, backend: str) -> None:
    """With "nccl", make one GPU this process's own. rank: among the ranks of this machine."""
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
