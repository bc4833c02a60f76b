"""A server as you would write it first: a loop that takes a request, answers it, and takes the
next.

Read `BlockingServer.serve`. Each request waits for all before it, however short it is. No client
sees a token before the last one, and none can leave. The queue takes whatever comes, so under
overload requests wait for longer and longer, until all clients have given up.

Then the two queues that you might put between an engine's thread and a reader, once answers are
streamed. mailbox.py has the one that works.
"""

from queue import Queue, SimpleQueue

from lessons.l22_serving.optimized import StepEngine


class BlockingServer:
    """One request at a time, in the order of arrival. Clients are threads that call `ask`."""

    def __init__(self, engine: StepEngine):
        self.engine = engine
        self.inbox: SimpleQueue[tuple[str, dict, SimpleQueue] | None] = SimpleQueue()

    def ask(self, request_id: str, **wishes):
        """The whole answer, once all who came before have theirs. wishes: of engine.add_request."""
        reply = SimpleQueue()
        self.inbox.put((request_id, wishes, reply))
        return reply.get()

    def stop(self) -> None:
        """End `serve` when all who have asked so far are answered."""
        self.inbox.put(None)

    def serve(self) -> None:
        """Answer until `stop` is called."""
        while (request := self.inbox.get()) is not None:
            request_id, wishes, reply = request
            output = None
            self.engine.add_request(request_id, **wishes)
            while self.engine.has_unfinished_requests:
                for newest in self.engine.step():
                    output = newest
            reply.put(output)


class GrowingQueue:
    """Keeps every output until it is read. A reader who reads slowly, or not at all, fills the
    memory: each output holds the whole answer so far, so a thousand tokens are half a million kept.
    """

    def __init__(self):
        self.outputs: SimpleQueue = SimpleQueue()

    def put(self, output) -> None:
        """From the engine's thread."""
        self.outputs.put(output)

    def get(self):
        """The oldest output that was not read."""
        return self.outputs.get()


class StoppingQueue:
    """Has room for `size` outputs, and the engine waits when it is full. So one reader who stops
    reading stops all answers.
    """

    def __init__(self, size: int):
        self.outputs: Queue = Queue(size)

    def put(self, output) -> None:
        """From the engine's thread."""
        self.outputs.put(output)

    def get(self):
        """The oldest output that was not read."""
        return self.outputs.get()
