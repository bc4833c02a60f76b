"""What the engine's process says to its workers, and what they say: orders, obeyed in turn, and
replies to some of them.
"""

import pickle
import threading
import weakref
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

from lessons.l20_parallelism.processes.launch import RankError

THREAD_S = 5.0  # how long the end of a thread is waited for


class Workers(Protocol):
    """Who obeys: ProcessWorkers or RayWorkers. An order is a pickled (method of Worker,
    arguments).
    """

    def wait_until_ready(self) -> None:
        """Until all have loaded their parts. Raises Refused, RankError."""

    def tell(self, order: bytes) -> None:
        """Give an order to all. Raises RankError."""

    def ask(self, order: bytes) -> list:
        """The same; returns what each rank returns. Raises Refused, RankError."""

    def close(self) -> None:
        """End all of them."""


class Talk:
    """One thread that talks to the workers, so that Ctrl-C, which reaches the main thread alone,
    never cuts a message in two. Orders are obeyed in the order in which they are given.
    """

    def __init__(self, workers: Workers):
        self.orders: SimpleQueue = SimpleQueue()
        self.workers = workers
        self.ended: Future = Future()  # holds the error that has ended it
        told = workers, self.orders, self.ended
        thread = threading.Thread(target=talk, args=told, name="talk", daemon=True)
        thread.start()
        # Not a method, because that would keep this object alive. It is called at exit, too.
        self.close = weakref.finalize(self, end, workers, self.orders, thread)

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


def talk(workers: Workers, orders: SimpleQueue, ended: Future) -> None:
    """The thread's body. The first error ends the workers; who asks later gets it, too."""
    while True:
        item = orders.get()
        if item is None:
            return
        reply, order = item
        try:
            if ended.done():
                raise_again(ended.result())
            if reply is None:
                workers.tell(order)
            else:
                reply.set_result(
                    workers.wait_until_ready() if order is None else workers.ask(order)
                )
        except RankError as error:
            if not ended.done():
                workers.close()
                ended.set_result(error)
            if reply is not None:
                reply.set_exception(error)


def end(workers: Workers, orders: SimpleQueue, thread: threading.Thread) -> None:
    """End the workers and the thread."""
    workers.close()  # first, because the thread may wait for them
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
