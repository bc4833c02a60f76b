"""A producer's ways to its consumers: a connection and a thread for each.

A consumer that does not answer costs one timeout; then nothing is sent to it for as long.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from lessons.l26_kv_transfer.tiers import Key
from reference.features.kv_transfer.wire import ROWS, Address, Refused, Wire, connect, send_batch


@dataclass(eq=False)
class Sending:
    """Blocks on their way, or a part of each. here: which of the keys the consumer has that part
    of, once that is known.
    """

    keys: list[Key]
    blocks: list[int]
    here: Future = field(default_factory=Future)
    is_wanted: bool = True  # False: no request waits for it any more
    part: int = 0

    def end(self, here: set[Key]) -> None:
        """It is known now what arrived."""
        if not self.here.done():
            self.here.set_result(here)


class Link:
    """A producer's way to one consumer: a connection, and a thread that sends one batch after the
    other. note: told of each fault.
    """

    def __init__(
        self,
        to: Address,
        of: str,
        block_bytes: int,
        timeout_s: float,
        note: Callable[[str], None],
    ):
        self.to, self.of, self.block_bytes, self.timeout_s = to, of, block_bytes, timeout_s
        self.note = note
        self.wire: Wire | None = None
        self.rests_until = 0.0
        self.sent_blocks = 0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="kv-send")

    def post(self, sending: Sending, packed: Tensor) -> None:
        """Send them after what was posted before. packed: [len(sending.keys), block_bytes]."""
        self.thread.submit(self.send, sending, packed)

    def send(self, sending: Sending, packed: Tensor) -> None:
        """In the link's thread: batch after batch, up to the first that fails."""
        here: set[Key] = set()
        try:
            for start in range(0, len(sending.keys), ROWS):
                if not sending.is_wanted or time.monotonic() < self.rests_until:
                    break
                keys = sending.keys[start : start + ROWS]
                rows = [row.numpy().data for row in packed[start : start + ROWS]]
                arrived = self.exchange(keys, rows, sending.part)
                here.update(key for key, has_come in zip(keys, arrived) if has_come)
                self.sent_blocks += sum(arrived)
        except Exception as error:
            self.note("refused" if isinstance(error, Refused) else f"send {type(error).__name__}")
            self.close()
            self.rests_until = time.monotonic() + self.timeout_s
        finally:
            sending.end(here)

    def exchange(self, keys: list[Key], rows: list, part: int = 0) -> list[bool]:
        """One batch. A connection that was used before may be one to a consumer that has gone, so
        it is tried once more on a new one. Raises OSError and Refused.
        """
        is_used = self.wire is not None
        try:
            self.wire = self.wire or connect(self.to, self.of, self.block_bytes, self.timeout_s)
            return send_batch(self.wire, keys, rows, part)
        except ConnectionError:
            if not is_used:
                raise
        self.close()
        return self.exchange(keys, rows, part)

    def close(self) -> None:
        """End the connection."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None
