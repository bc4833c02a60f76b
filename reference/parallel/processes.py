"""Workers as processes of this machine, each at the other end of a pipe.

An order goes to all of them, pickled once. A process that dies takes the others along within a
second: a thread waits for the ends of all processes, because a rank whose neighbour died may wait
for it for ever.
"""

import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from types import ModuleType

import torch

from lessons.l20_parallelism.processes.launch import (
    RankError,
    end_with_parent,
    exit_of,
    join_world,
    process_context,
    started,
)
from lessons.l20_parallelism.processes.mesh import Mesh, new_links, share_experts
from lessons.toolbox.model.arguments import one_line
from reference.engine.engine_args import EngineArgs
from reference.parallel.worker import Worker

COLLECTIVE_TIMEOUT_S = 600.0
WARM = "reference.parallel.warm"
DEATH_S = 1.0  # how long a complaint waits for the death that may be its cause


class Refused(RankError):
    """A worker raised a ValueError before the first step: the arguments cannot work. said: how."""

    def __init__(self, rank: int, said: str):
        super().__init__(rank, f"refused: {said}")
        self.said = said


class Pipes:
    """Orders to processes at the other ends of pipes, and their replies. One thread may give orders
    while another collects. first: the rank of the first. sent_bytes, heard_bytes: through all pipes
    so far.
    """

    first = sent_bytes = heard_bytes = 0

    def __init__(self, ranks: list[tuple]):
        self.ranks = ranks
        self.pipes = [pipe for _, pipe in ranks]

    def tell(self, order: bytes) -> None:
        """Send a pickled (method, arguments). Raises RankError if a worker is gone."""
        self.send(pickle.dumps((False, order)))

    def ask(self, order: bytes) -> None:
        """The same; `collect` returns what it returns on each rank. Raises RankError."""
        self.send(pickle.dumps((True, order)))

    def send(self, message: bytes) -> None:
        """The same bytes to all. Raises RankError."""
        try:
            for pipe in self.pipes:
                pipe.send_bytes(message)
                self.sent_bytes += len(message)
        except OSError:
            raise self.cause() from None

    def collect(self) -> list:
        """The next reply of each rank; the first says that it has loaded. The first that is a
        complaint raises (Refused, RankError).
        """
        replies, waiting = [None] * len(self.pipes), dict(zip(self.pipes, range(len(self.pipes))))
        while waiting:
            try:
                found = {pipe: pipe.recv_bytes() for pipe in wait(list(waiting))}
            except (EOFError, OSError):
                raise self.cause() from None
            for pipe, message in found.items():
                index, (error, value) = waiting.pop(pipe), pickle.loads(message)
                self.heard_bytes += len(message)
                if error is not None:
                    raise self.cause(error(self.first + index, value), DEATH_S)
                replies[index] = value
        return replies

    def cause(self, complaint: RankError | None = None, timeout_s: float = 10.0) -> RankError:
        """What to tell: a death rather than the complaints of those that it has left alone."""
        raise NotImplementedError

    def close(self) -> None:
        """End all of them."""
        raise NotImplementedError


class ProcessWorkers(Pipes):
    """One process for each rank of a mesh. devices: of each rank."""

    def __init__(self, args: EngineArgs, mesh: Mesh, devices: list[str]):
        self.mesh = mesh
        self.stack, self.is_closing = ExitStack(), False
        self.closing = threading.Lock()  # because two threads may find that a worker failed
        self.death: RankError | None = None
        self.on_death: Callable[[RankError], None] = lambda death: None
        self.complaint: RankError | None = None  # the first
        self.has_died = threading.Event()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        told = f"file://{folder}/ranks", mesh, args, devices, COLLECTIVE_TIMEOUT_S
        with without_main():
            ranks = started(mesh.size, worker_main, *told, preload=(WARM,))
            super().__init__(self.stack.enter_context(ranks))
        self.stop_waiting, self.end_of_wait = process_context().Pipe()
        self.watcher = threading.Thread(target=self.watch, name="workers", daemon=True)
        self.watcher.start()

    def replicas(self) -> list["ReplicaWorkers"]:
        """Those of each replica of the mesh."""
        size = self.mesh.tp * self.mesh.pp
        return [ReplicaWorkers(self, first, size) for first in range(0, self.mesh.size, size)]

    def cause(self, complaint: RankError | None = None, timeout_s: float = 10.0) -> RankError:
        """What to tell: a death rather than the complaints of those that it has left alone."""
        # kept for other replicas, which hear an end and no more
        self.complaint = self.complaint or complaint
        self.has_died.wait(timeout_s)
        return self.death or self.complaint or RankError(0, "was ended")

    def watch(self) -> None:
        """Until a process dies, or `close` is called. In a thread of its own."""
        sentinels = {process.sentinel: rank for rank, (process, _) in enumerate(self.ranks)}
        ended = wait([*sentinels, self.end_of_wait])
        if self.end_of_wait in ended:
            return
        rank = sentinels[ended[0]]
        self.ranks[rank][0].join(5)
        self.death = RankError(rank, f"died ({exit_of(self.ranks[rank][0])})")
        self.has_died.set()
        for process, _ in self.ranks:
            process.kill()
        self.on_death(self.death)

    def close(self) -> None:
        """End all of them. Once is enough; a second caller waits until it is done."""
        with self.closing:
            if self.is_closing:
                return
            self.is_closing = True
            self.stop_waiting.close()
            self.watcher.join()
            # First of all, because a thread that waits at a pipe wakes up when its other end is
            # gone.
            for process, _ in self.ranks:
                process.kill()
            self.has_died.set()
            self.stack.close()


class ReplicaWorkers(Pipes):
    """Some neighbours of `whole`, which hear orders of their own, and end with all others."""

    def __init__(self, whole: ProcessWorkers, first: int, size: int):
        super().__init__(whole.ranks[first : first + size])
        self.whole, self.first = whole, first
        self.cause, self.close = whole.cause, whole.close

    @property
    def on_death(self) -> Callable[[RankError], None]:
        """Of the whole."""
        return self.whole.on_death

    @on_death.setter
    def on_death(self, tell: Callable[[RankError], None]) -> None:
        self.whole.on_death = tell


@contextmanager
def without_main() -> Iterator[None]:
    """Inside it, processes start without this program's main module, which they do not need. With
    it they would run it again, and a script without `if __name__ == "__main__"` would make workers
    in its workers.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# ---------------------------------------------------------------- in the worker's process


def worker_main(
    rank: int,
    pipe: Connection,
    rendezvous: str,
    mesh: Mesh,
    args: EngineArgs,
    devices: list[str],
    timeout_s: float,
) -> None:
    """The body of a worker's process. timeout_s: of a collective."""
    end_with_parent()
    # because Ctrl-C goes to all processes of a terminal, and the engine's decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):  # no process is at the other end
        serve(pipe, partial(new_worker, rank, rendezvous, mesh, args, devices, timeout_s))
    os._exit(0)  # because a backend's threads may wait for ranks that have gone


def new_worker(
    rank: int,
    rendezvous: str,
    mesh: Mesh,
    args: EngineArgs,
    devices: list[str],
    timeout_s: float,
) -> Worker:
    """Join the others, and load."""
    device = torch.device(devices[rank])
    if device.type == "cpu":
        # because threads that wait for a core cost more than they win
        workers = mesh.tp * mesh.pp * args.data_parallel_size
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    if mesh.size > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        join_world(rank, mesh.size, rendezvous, backend, timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # not the one of this rank's number: there may be replicas
    links = new_links(mesh, timeout_s)
    if args.shares_experts:
        links = share_experts(links)
    return Worker(args, links, devices[rank])


def serve(pipe: Connection, new: Callable[[], Worker]) -> None:
    """Load, then do what comes through the pipe, until it ends. A process that raises says so once,
    and does nothing more: what the other ranks have done meanwhile is unknown.
    """
    try:
        worker = new()
    except BaseException as error:
        complain(pipe, error)
    pipe.send_bytes(pickle.dumps((None, None)))
    while True:
        wants_reply, order = pickle.loads(pipe.recv_bytes())
        try:
            method, arguments = pickle.loads(order)
            value = getattr(worker, method)(*arguments)
        except BaseException as error:
            complain(pipe, error)
        if wants_reply:
            pipe.send_bytes(pickle.dumps((None, value)))


def complain(pipe: Connection, error: BaseException) -> None:
    """Tell the error in one line, then read what comes, so that no process waits for a full
    pipe.
    """
    kind, said = Refused, one_line(str(error))
    if not isinstance(error, ValueError):
        kind, said = RankError, f"raised {type(error).__name__}: {said}"
    pipe.send_bytes(pickle.dumps((kind, said)))
    while True:
        pipe.recv_bytes()
