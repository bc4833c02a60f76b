"""What a rehearsal raises of its own."""

from lessons.toolbox.measure.bench import Unavailable


class NotRehearsed(Unavailable):
    """This runs on a GPU alone, or would take too long here: a rehearsal says nothing about it."""

    def __init__(self, what: str):
        super().__init__(f"NOT REHEARSED: {what}")


class CaptureError(RuntimeError):
    """What CUDA refuses while a stream is capturing."""
