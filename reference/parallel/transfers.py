"""A producer whose model lies in workers: each rank sends its own heads of a block.

The engine's process decides what is sent, as it decides all else. A worker packs its part when it
comes to that order, which is after the step that wrote it and before any later one. So no block has
to be kept back for it. A thread of the worker sends it.
"""

import time
from collections.abc import Sequence
from itertools import count

import torch

from lessons.l03_kv_cache.cache import KVPool
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l26_kv_transfer.connector import Job
from lessons.l26_kv_transfer.tiers import HostTier, Key
from lessons.toolbox.model.arguments import refuse
from reference.engine.engine_args import EngineArgs
from reference.features.kv_transfer.config import KVTransferConfig
from reference.features.kv_transfer.connector import TransferConnector
from reference.features.kv_transfer.handover import TransferBlockManager
from reference.features.kv_transfer.heads import check_cut, weights_name
from reference.features.kv_transfer.links import Sending
from reference.features.kv_transfer.transfers import kind_and_form
from reference.features.kv_transfer.wire import Address
from reference.parallel.runner import DistributedRunner
from reference.parallel.talk import Talk


def sending_blocks(
    args: EngineArgs, runner: DistributedRunner, others: Sequence[KVPool], cache: HashBlocks
) -> TransferBlockManager:
    """Blocks of the workers' pools that are sent to others. Arguments as transfer_blocks'. Raises
    ValueError, RankError.
    """
    ranks = args.tensor_parallel_size
    check_cut("tensor_parallel_size", runner.model.config, ranks)
    if others:
        refuse("tensor_parallel_size", ranks, "1 with a draft that has K and V and is sent, too")
    _, form = kind_and_form(args.kv_transfer_config)
    name = weights_name(args, runner.model.dtype)
    runner.talk.ask("open_transfer", f"{name}{form} of {ranks} ranks")
    connector = RemoteSender(runner.talk, ranks)
    return TransferBlockManager(runner.pool.num_blocks, args.block_size, cache, connector)


class RemoteSender:
    """A producer's KVConnector, in the engine's process. It has nothing to load."""

    listener = None
    received_blocks = loaded_blocks = 0

    def __init__(self, talk: Talk, ranks: int):
        self.talk, self.parts, self.tp_size = talk, ranks, ranks
        self.faults: dict[str, int] = {}
        self.pending: dict[int, list[Sending]] = {}
        self.numbers = count()

    def matched(self, keys: Sequence[Key]) -> int:
        """Of no key."""
        return 0

    def start_send(
        self, to: Address, keys: Sequence[Key], blocks: Sequence[int]
    ) -> tuple[Job | None, list[Sending]]:
        """As TransferConnector's. No job: the blocks may be taken at once."""
        number, keys, blocks = next(self.numbers), list(keys), list(blocks)
        self.pending[number] = [Sending(keys, blocks, part=part) for part in range(self.parts)]
        self.talk.tell("send_blocks", number, to, keys, blocks)
        return None, self.pending[number]

    def finished(self) -> list[Job]:
        """None; but the workers are asked what has arrived, if that is not known of all."""
        if self.pending:
            self.faults = {}
            for rank, (ended, faults) in enumerate(self.talk.ask("sent_blocks")):
                for number, here in ended.items():
                    self.pending[number][rank].end(here)
                for fault, times in faults.items():
                    self.faults[fault] = self.faults.get(fault, 0) + times
            left = self.pending.items()
            self.pending = {n: each for n, each in left if not all(s.here.done() for s in each)}
        return []

    def wait(self) -> None:
        """A moment, if something is on its way."""
        if self.pending:
            time.sleep(0.001)

    def close(self) -> None:
        """The workers end with the runner."""


class RankSender:
    """Of one worker: sends its heads. of: names the weights and the format, for all ranks."""

    def __init__(self, pool: KVPool, config: KVTransferConfig, of: str, rank: int):
        kind, _ = kind_and_form(config)
        self.rank, self.pages = rank, kind([pool])
        inbox = HostTier(0, self.pages.block_bytes)
        self.connector = TransferConnector(self.pages, of, inbox, config.timeout_s)
        self.sendings: dict[int, Sending] = {}

    @torch.inference_mode()
    def send(self, number: int, to: Address, keys: list[Key], blocks: list[int]) -> None:
        """Pack this rank's part of these blocks, and begin to send it."""
        packed = self.pages.pack(self.pages.pools[0], blocks)
        self.sendings[number] = self.connector.send_packed(to, keys, blocks, self.rank, packed)

    def ended(self) -> tuple[dict[int, set[Key]], dict[str, int]]:
        """(of what has ended since the last call, the keys that have arrived; all faults so far)"""
        found = {n: one.here.result() for n, one in self.sendings.items() if one.here.done()}
        self.sendings = {n: one for n, one in self.sendings.items() if n not in found}
        return found, dict(self.connector.faults)
