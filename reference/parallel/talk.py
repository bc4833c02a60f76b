"""What the engine's process says to its workers, and what they say: orders, obeyed in turn, and
replies to some of them. One thread speaks and another listens, so that a step can be told while the
reply to an earlier one is on its way.
"""

import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

from lessons.l20_parallelism.processes.launch import RankError

THREAD_S = 5.0  # how long the end of a thread is waited for


class Workers(Protocol):
    """Who obeys: ProcessWorkers or RayWorkers. An order is a pickled (method of Worker,
    arguments). One thread may give orders while another collects. on_death: called by a thread of
    processes that see one of them die, also while nothing is ordered.
    """

    on_death: Callable[[RankError], None]

    def tell(self, order: bytes) -> None:
        """Give an order to all. Raises RankError."""

    def ask(self, order: bytes) -> None:
        """The same; what each rank returns can be collected. Raises RankError."""

    def collect(self) -> list:
        """Wait for what each rank returns to the oldest question that was not collected. Each
        rank says first that it has loaded, without being asked. Raises Refused, RankError.
        """

    def close(self) -> None:
        """End all of them."""


class Talk:
    """Two threads that talk to the workers, so that Ctrl-C, which reaches the main thread alone,
    never cuts a message in two. Orders are obeyed in the order in which they are given.
    """

    def __init__(self, workers: Workers):
        self.orders: SimpleQueue = SimpleQueue()
        self.workers = workers
        self.ended: Future = Future()  # holds the error that has ended it
        failing, asked = Failing(workers, self.ended), SimpleQueue()
        threads = [
            threading.Thread(target=speak, args=(workers, self.orders, asked, failing)),
            threading.Thread(target=listen, args=(workers, asked, failing)),
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        # Not a method, because that would keep this object alive. It is called at exit, too.
        self.close = weakref.finalize(self, end, workers, self.orders, threads)

    def tell(self, method: str, *arguments) -> None:
        """Let all workers do something. Whether it went well is found out by the next `ask`."""
        # Pickled now, because the caller may change a list before the thread comes to it.
        self.orders.put((None, pickle.dumps((method, arguments))))

    def ask(self, method: str, *arguments) -> list:
        """What it returns on each rank, when they have done all that they were told. Raises
        RankError.
        """
        return self.ask_later(method, *arguments).result()

    def ask_later(self, method: str, *arguments) -> Future:
        """The same, for which the caller does not wait yet."""
        self.check()
        reply: Future = Future()
        self.orders.put((reply, pickle.dumps((method, arguments))))
        return reply

    def check(self) -> None:
        """Raise RankError if the workers have ended."""
        if not self.close.alive:
            raise RuntimeError("the engine's workers were ended by shutdown()")
        if self.ended.done():
            raise_again(self.ended.result())

    def wait_until_ready(self) -> None:
        """Until all have loaded. Raises Refused, RankError."""
        reply: Future = Future()
        self.orders.put((reply, None))
        reply.result()


class Failing:
    """The first error ends the workers; who asks later gets it, too."""

    def __init__(self, workers: Workers, ended: Future):
        self.workers, self.ended = workers, ended
        self.lock = threading.Lock()  # because both threads may find that a worker failed

    def check(self) -> None:
        """Raise the error, if there was one."""
        if self.ended.done():
            raise_again(self.ended.result())

    def note(self, error: RankError, reply: Future | None) -> None:
        """An error was met, by who waits for this reply."""
        with self.lock:
            if not self.ended.done():
                self.workers.close()
                self.ended.set_result(error)
        if reply is not None:
            reply.set_exception(self.ended.result())


def speak(workers: Workers, orders: SimpleQueue, asked: SimpleQueue, failing: Failing) -> None:
    """The body of the thread that gives orders. asked: replies that the other one waits for."""
    while (item := orders.get()) is not None:
        reply, order = item
        try:
            failing.check()
            if reply is None:
                workers.tell(order)
            elif order is not None:
                workers.ask(order)
        except RankError as error:
            failing.note(error, reply)
        else:
            if reply is not None:
                asked.put(reply)
    asked.put(None)


def listen(workers: Workers, asked: SimpleQueue, failing: Failing) -> None:
    """The body of the thread that collects replies."""
    while (reply := asked.get()) is not None:
        try:
            failing.check()
            reply.set_result(workers.collect())
        except RankError as error:
            failing.note(error, reply)


def end(workers: Workers, orders: SimpleQueue, threads: list[threading.Thread]) -> None:
    """End the workers and the threads."""
    workers.close()  # first, because the threads may wait for them
    for thread in threads:
        end_thread(orders, thread)


def end_thread(orders: SimpleQueue, thread: threading.Thread) -> None:
    """Let a thread that reads this queue come to its end, because one that still runs while Python
    shuts down may take the process with it.
    """
    orders.put(None)
    if thread is not threading.current_thread():
        thread.join(THREAD_S)


def raise_again(error: RankError) -> None:
    """The same error without the places where it was raised before."""
    raise error.with_traceback(None)
