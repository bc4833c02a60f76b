"""Data parallelism: several engines that share the requests, behind the interface of one.

Each replica has its own workers, scheduler and cache. A thread of each runs its steps, so no
replica waits for another one's. Requests without a seed draw theirs here, in the order of their
arrival. So an answer does not depend on where it was computed.
"""

import copy
import threading
import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from random import Random
from typing import TYPE_CHECKING

from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.toolbox.model.arguments import check_kind, refuse
from reference.engine.engine import Engine
from reference.engine.outputs import RequestOutput
from reference.engine.request import EngineRequest
from reference.parallel.runner import DistributedRunner
from reference.parallel.talk import end_thread

if TYPE_CHECKING:
    from lessons.l21_multi_lora.slots import LoRARequest

Advance = Callable[[Engine], list[EngineRequest]]
MOST_KNOWN = 100_000  # blocks of prompts of which a router remembers where they went
SLACK = 4  # requests by which a replica may be ahead, before a prefix goes elsewhere


class Router:
    """Which replica gets a prompt: the one that had the longest part of it before, because its
    cache may still hold it; the one with the fewest requests, if none knows it or that one is SLACK
    ahead.

    As the simulator's PrefixAware, for prompts that are tokens. SGLang's router weighs the same
    two.
    """

    def __init__(self, block_size: int):
        self.blocks = HashBlocks(block_size)
        self.block_size = block_size
        self.home: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # a prefix of whole blocks: who had it last

    def choose(self, prompt: Sequence[int], loads: Sequence[int]) -> int:
        """The index of a replica. loads: requests on each."""
        least = min(range(len(loads)), key=loads.__getitem__)
        keys = list(self.blocks.hashes(prompt, len(prompt) // self.block_size))
        place = next((self.home[key] for key in reversed(keys) if key in self.home), least)
        if loads[place] > loads[least] + SLACK:
            place = least
        for key in keys:
            self.home[key] = place
            self.home.move_to_end(key)
        while len(self.home) > MOST_KNOWN:
            self.home.popitem(last=False)
        return place


class Replica:
    """An engine and the thread that runs its steps. Any other caller of the engine holds `lock`.
    advance: what a step is.
    """

    def __init__(self, engine: Engine, advance: Advance):
        self.engine = engine
        self.lock = threading.Lock()
        self.steps: SimpleQueue[Future | None] = SimpleQueue()
        self.requests: dict[str, EngineRequest] = {}  # whose end was not told yet
        self.under_way: Future | None = None
        thread = threading.Thread(
            target=run_steps, args=(engine, advance, self.lock, self.steps), daemon=True
        )
        thread.start()
        # Not a method, because that would keep this object alive. The thread keeps the engine
        # alive.
        self.close = weakref.finalize(self, end_thread, self.steps, thread)

    def begin_step(self) -> Future:
        """Let the thread run a step, if it runs none. Returns what will hold the requests that got
        a token. Raises RuntimeError after `close`.
        """
        self.check()
        if self.under_way is None:
            self.under_way = Future()
            self.steps.put(self.under_way)
        return self.under_way

    def check(self) -> None:
        """Raise RuntimeError after `close`."""
        if not self.close.alive:
            raise RuntimeError("the engine's workers were ended by shutdown()")

    def end_step(self) -> list[EngineRequest]:
        """What `told` returns of the step that has ended."""
        step, self.under_way = self.under_way, None
        return self.told(step)

    def told(self, step: Future) -> list[EngineRequest]:
        """The requests that got a token in a step that has ended, but not those that were aborted
        since then: a request may have come by the same name again. If the step raised, so does
        this.
        """
        try:
            touched = step.result()
        except BaseException:
            self.requests = dict(self.engine.requests)  # it has aborted the others
            raise
        touched = [one for one in touched if self.requests.get(one.request_id) is one]
        for request in touched:
            if request.finished:
                del self.requests[request.request_id]
        return touched


def run_steps(engine: Engine, advance: Advance, lock: threading.Lock, steps: SimpleQueue) -> None:
    """The body of a replica's thread."""
    while (done := steps.get()) is not None:
        try:
            with lock:
                touched = advance(engine)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(touched)
        del done  # because an error holds its frames, and they this engine


class ReplicatedEngine:
    """Engine's interface over several. seed: of the requests that bring none; None: a fresh one."""

    def __init__(self, engines: list[Engine], seed: int | None = None):
        self.engines = engines
        self.tokenizer = engines[0].tokenizer
        # Bound to the first engine as it is now, because no thread may use another one's tokenizer.
        self.read_prompt = copy.copy(engines[0]).read_prompt
        for engine in engines:
            engine.tokenizer = copy.deepcopy(self.tokenizer)
        self.replicas = [Replica(engine, self.advance_one) for engine in engines]
        self.max_model_len = engines[0].max_model_len
        self.router = Router(engines[0].scheduler.blocks.block_size)
        self.structures = engines[0].structures
        seeds = Random(seed)
        for engine in engines:
            engine.seeds, engine.structures = seeds, self.structures

    @staticmethod
    def advance_one(engine: Engine) -> list[EngineRequest]:
        """A step of a replica, in its thread."""
        return engine.advance()

    @property
    def runner(self) -> DistributedRunner:
        """For what is the same on all replicas: the model's shape, and that none has adapters."""
        return self.engines[0].runner

    @property
    def has_unfinished_requests(self) -> bool:
        return any(replica.requests for replica in self.replicas)

    @property
    def requests(self) -> ChainMap:
        """All requests that are under way: {id: EngineRequest}."""
        return ChainMap(*[replica.requests for replica in self.replicas])

    def add_request(self, request_id: str, prompt, *wishes, **named) -> None:
        """As in Engine. Raises ValueError."""
        if not isinstance(request_id, str) or request_id in self.requests:
            refuse("request_id", request_id, "a string not in use")
        text, ids, _ = self.read_prompt(prompt)
        loads = [len(engine.requests) for engine in self.engines]
        replica = self.replicas[self.router.choose(ids, loads)]
        with replica.lock:
            replica.engine.add_request(request_id, ids, *wishes, **named)
            request = replica.requests[request_id] = replica.engine.requests[request_id]
            request.prompt = text

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """As in Engine. Raises ValueError for a request_id that is no string."""
        check_kind(str, "a string", request_id=request_id)
        for replica in self.replicas:
            request = replica.requests.pop(request_id, None)
            if request is not None:
                with replica.lock:
                    # None for one that has ended, and whose end was not told.
                    return replica.engine.abort_request(request_id) or request.output()
        return None

    def add_lora(self, lora_request: "LoRARequest") -> None:
        """As in Engine, on all replicas."""
        for replica in self.replicas:
            with replica.lock:
                replica.engine.add_lora(lora_request)

    def remove_lora(self, lora_int_id: int) -> bool:
        """As in Engine: whether one of the replicas knew it."""
        known = False
        for replica in self.replicas:
            with replica.lock:
                known |= replica.engine.remove_lora(lora_int_id)
        return known

    def list_loras(self) -> set[int]:
        """As in Engine: what one of the replicas has."""
        return {id for engine in self.engines for id in engine.list_loras()}

    def step(self) -> list[RequestOutput]:
        """As in Engine."""
        return [request.output() for request in self.advance()]

    def advance(self) -> list[EngineRequest]:
        """Let all replicas that have requests go on, and wait for one that has ended a step.
        Returns the requests that got a token. If its step raised, so does this.
        """
        steps = {
            replica.begin_step(): replica
            for replica in self.replicas
            if replica.engine.has_unfinished_requests or replica.under_way is not None
        }
        if not steps:
            return []
        # One, also if more have ended, because no request's tokens may be lost if another's step
        # raised.
        ended = wait(steps, return_when=FIRST_COMPLETED).done.pop()
        return steps[ended].end_step()

    def close(self) -> None:
        """End the workers of all replicas."""
        for replica in self.replicas:
            replica.close()
            replica.engine.close()
