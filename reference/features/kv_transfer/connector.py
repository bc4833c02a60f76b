"""A connector between engines: one computes a prompt and sends its blocks, another one decodes.

    connector = TransferConnector(pages, "name of model and format", inbox)
    connector.listen(Address("127.0.0.1", 14579))         # a consumer: blocks come by themselves
    job, sendings = connector.start_send(to, keys, blocks)  # a producer, after each chunk

The producer pushes. A block is sent as soon as a chunk of the prompt has filled it, so most of the
prompt has arrived when its last chunk has run. It arrives in the consumer's inbox, which is a
HostTier. So what the consumer does with it is what an engine with tiers does: `matched` looks into
the inbox, and `start_load` copies to the pool. With pages that come layer by layer, the inbox holds
parts of blocks, and layers.py says when a block is whole. So it is with a producer of several
ranks, each of which sends its heads (heads.py).

What can go wrong costs blocks, and a block that did not come is computed. A consumer that does not
answer costs the producer one timeout; then nothing is sent to it for as long.
"""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress

from torch import Tensor

from lessons.l26_kv_transfer.connector import Job, TierConnector
from lessons.l26_kv_transfer.pages import Pages
from lessons.l26_kv_transfer.tiers import HostTier, Key, Lru
from reference.features.kv_transfer.layers import Parts
from reference.features.kv_transfer.links import Link, Sending
from reference.features.kv_transfer.listener import Listener
from reference.features.kv_transfer.wire import Address, key_and_part

MOST_LINKS = 64  # of a producer


class ReadFirst(Lru):
    """The inbox's order of eviction: what the engine has read goes before what it has not."""

    def use(self, key: Key) -> None:
        self.keys.move_to_end(key, last=False)


class TransferConnector(TierConnector):
    """A KVConnector between engines. of: names the model and the format of its blocks. inbox: where
    blocks from others wait, or the parts in which they come; of a producer it may have room for
    none. timeout_s: for an answer of the other end. tp_size: ranks that share the model here.
    """

    def __init__(self, pages: Pages, of: str, inbox: HostTier, timeout_s: float = 10.0):
        self.parts, self.part_bytes, tier = pages.parts, pages.part_bytes, inbox
        if self.parts > 1:
            tier = Parts(inbox, self.parts, pages.last_parts)
        super().__init__(pages, tier, timeout_s)
        self.of, self.timeout_s, self.inbox, self.tp_size = of, timeout_s, inbox, 1
        self.links: dict[Address, Link] = {}
        # One thread, so that the beginning of a prompt leaves first: what follows needs it.
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="kv-read")
        self.under_way: set[Future] = set()
        self.listener: Listener | None = None
        self.received_blocks = 0
        self.known: Callable[[Key], bool] = lambda key: False

    def note(self, fault: str) -> None:
        """Count a fault."""
        self.faults[fault] = self.faults.get(fault, 0) + 1

    # ------------------------------------------------------------ a consumer

    def listen(self, address: Address, known: Callable[[Key], bool] = lambda key: False) -> None:
        """Let producers send blocks here. known: whether the pool has a block already. Raises
        OSError for an address that is taken.
        """
        self.known = known
        what = (self.of, self.part_bytes, self.keep, self.wants, self.note, self.timeout_s)
        self.listener = Listener(address, *what)

    def wants(self, name: bytes) -> bool:
        """Whether a block, or a part of one, should be sent. In a listener's thread."""
        return not (self.inbox.has(name) or self.known(key_and_part(name)[0]))

    def keep(self, name: bytes, data: Tensor) -> None:
        """A block has come, or a part of one. In a listener's thread."""
        self.inbox.put(name, data)
        self.received_blocks += key_and_part(name)[1] == self.parts - 1

    def start_save(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        """Nothing is kept here."""

    # ------------------------------------------------------------ a producer

    def start_send(
        self, to: Address, keys: Sequence[Key], blocks: Sequence[int]
    ) -> tuple[Job, list[Sending]]:
        """Begin to send blocks of the pool, in all their parts. They are read first, and may be
        taken then.
        """
        job = Job(list(keys), list(blocks), is_load=False)
        sendings = [Sending(job.keys, job.blocks, part=part) for part in range(self.parts)]
        link = self.link(to)
        self.under_way.update(sending.here for sending in sendings)
        after = self.pages.now()
        self.copying[job] = self.reader.submit(self.run, job, self.read, after, link, sendings)
        return job, sendings

    def send_part(
        self, to: Address, keys: Sequence[Key], blocks: Sequence[int], part: int
    ) -> Sending:
        """Begin to send one layer of blocks of the pool, which has just been written. They may be
        taken when this returns.
        """
        return self.send_packed(to, keys, blocks, part, self.pages.packed(part, blocks))

    def send_packed(
        self, to: Address, keys: Sequence[Key], blocks: Sequence[int], part: int, packed: Tensor
    ) -> Sending:
        """Begin to send a part that was packed just now, by work that the device was given. packed:
        [len(blocks), part_bytes] uint8.
        """
        sending, link = Sending(list(keys), list(blocks), part=part), self.link(to)
        self.under_way.add(sending.here)
        self.reader.submit(self.bring, packed, self.pages.now(), link, sending)
        return sending

    def link(self, to: Address) -> Link:
        """The way to a consumer; of too many, the one that was used least recently is closed."""
        link = self.links.pop(to, None)
        if link is None:
            link = Link(to, self.of, self.part_bytes, self.timeout_s, self.note)
        self.links[to] = link
        if len(self.links) > MOST_LINKS:
            oldest = self.links.pop(next(iter(self.links)))
            oldest.thread.submit(oldest.close)
            oldest.thread.shutdown(wait=False)
        return link

    def read(self, job: Job, after, link: Link, sendings: list[Sending]) -> None:
        """From the pool; the link's thread sends them."""
        packed = None
        try:
            if job.may_touch():
                packed = self.pages.read(job.blocks, after)
                job.end(len(job.blocks))
                for sending, part in zip(sendings, packed.split(self.part_bytes, dim=1)):
                    link.post(sending, part)
        except BaseException:
            packed = None
            raise
        finally:
            if packed is None:
                for sending in sendings:
                    sending.end(set())

    def bring(self, packed: Tensor, after, link: Link, sending: Sending) -> None:
        """packed: [rows, part_bytes] uint8, to host memory; the link's thread sends it."""
        try:
            with self.pages.beside(after):
                packed = self.pages.on_host(packed)
            link.post(sending, packed)
        except Exception as error:
            self.note(type(error).__name__)
            sending.end(set())

    def finished(self) -> list[Job]:
        self.under_way = {future for future in self.under_way if not future.done()}
        return super().finished()

    def wait(self) -> None:
        futures = [*self.copying.values(), *self.under_way]
        wait(futures, timeout=0.05, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        super().close()
        self.reader.shutdown(wait=False, cancel_futures=True)
        for link in self.links.values():
            link.thread.shutdown(wait=False, cancel_futures=True)
            if link.wire is not None:
                with suppress(OSError):
                    link.wire.connection.shutdown(socket.SHUT_RDWR)
