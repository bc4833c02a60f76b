"""Workers as Ray's actors: as processes.py, where Ray finds the machines and the GPUs.

Tried with two workers on one machine without a GPU, and with nothing else.
"""

import pickle
import socket
from queue import SimpleQueue

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from lessons.l20_parallelism.processes.launch import RankError, children_find_the_course, join_world
from lessons.l20_parallelism.processes.mesh import Mesh, new_links
from lessons.toolbox.model.arguments import one_line
from reference.engine.engine_args import EngineArgs
from reference.parallel.processes import COLLECTIVE_TIMEOUT_S, DEATH_S, Refused
from reference.parallel.worker import Worker


class Actor:
    """A worker's process. device: "cpu", or "cuda", of which Ray shows an actor only its own."""

    def __init__(self, rank: int, mesh: Mesh, args: EngineArgs, device: str):
        self.rank, self.mesh, self.args, self.device = rank, mesh, args, device

    def address(self) -> str:
        """Where the ranks can meet, on this actor's machine."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def load(self, rendezvous: str) -> None:
        """Join the others, and load."""
        if self.device == "cpu":
            workers = self.mesh.size * self.args.data_parallel_size
            torch.set_num_threads(max(1, torch.get_num_threads() // workers))
        if self.mesh.size > 1:
            backend = "gloo" if self.device == "cpu" else "nccl"
            size = self.mesh.size
            join_world(self.rank, size, rendezvous, backend, COLLECTIVE_TIMEOUT_S)
        self.worker = Worker(self.args, new_links(self.mesh), self.device)

    def obey(self, order: bytes):
        """Do what a pickled (method of Worker, arguments) says."""
        method, arguments = pickle.loads(order)
        return getattr(self.worker, method)(*arguments)


class RayWorkers:
    """One actor for each rank of a replica. Ray is started on this machine, unless it runs
    already.
    """

    def __init__(self, args: EngineArgs, mesh: Mesh, devices: list[str]):
        if not ray.is_initialized():
            with children_find_the_course():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="error",
                    # because actors beyond the number of cores would wait for ever
                    num_cpus=max(len(devices) * args.data_parallel_size, torch.get_num_threads()),
                )
        device = torch.device(devices[0]).type
        needs = dict(num_cpus=1, num_gpus=1 if device == "cuda" else 0, max_restarts=0)
        kind = ray.remote(Actor).options(**needs)
        self.actors = [kind.remote(rank, mesh, args, device) for rank in range(mesh.size)]
        rendezvous = self.actors[0].address.remote()
        self.under_way: dict = {}  # {what was told since the last question: rank}
        self.asked: SimpleQueue = SimpleQueue()  # what has to end for each, and its replies
        self.expect([actor.load.remote(rendezvous) for actor in self.actors])

    def tell(self, order: bytes) -> None:
        """As in processes.py."""
        self.under_way |= {actor.obey.remote(order): i for i, actor in enumerate(self.actors)}

    def ask(self, order: bytes) -> None:
        """As in processes.py."""
        self.expect([actor.obey.remote(order) for actor in self.actors])

    def expect(self, replies: list) -> None:
        """These will be collected, when all that was told before has ended, too."""
        self.under_way |= {reply: rank for rank, reply in enumerate(replies)}
        self.asked.put((self.under_way, replies))
        self.under_way = {}

    def collect(self) -> list:
        """As in processes.py."""
        waiting, replies = self.asked.get()
        while waiting:
            [done], _ = ray.wait(list(waiting))
            rank = waiting.pop(done)
            if (error := error_of(rank, done)) is not None:
                raise self.death(waiting) or error
        return ray.get(replies)

    def death(self, waiting: dict) -> RankError | None:
        """The first death among the other ranks, within DEATH_S."""
        ended, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=DEATH_S)
        errors = [error_of(waiting[done], done) for done in ended]
        return next((error for error in errors if error and "died" in str(error)), None)

    def close(self) -> None:
        """End the actors. Ray itself ends with this program."""
        for actor in self.actors:
            if ray.is_initialized():
                ray.kill(actor)


def error_of(rank: int, reply) -> RankError | None:
    """What went wrong with a reply that is there; None: nothing."""
    try:
        ray.get(reply)
    except RayTaskError as error:
        cause = error.cause
        said = one_line(str(cause))
        if isinstance(cause, ValueError):
            return Refused(rank, said)
        return RankError(rank, f"raised {type(cause).__name__}: {said}")
    except RayActorError:
        return RankError(rank, "died (Ray has lost its process)")
    return None
