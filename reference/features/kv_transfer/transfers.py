"""kv_transfer_config: prompts that are computed in one engine and decoded in another.

Lesson 26's parts in an engine. A request with `kv_transfer_params={"do_remote_decode": True,
"remote_host": …, "remote_port": …}` runs here as any other, and its full blocks are sent to that
consumer, chunk by chunk. Its last output is held until it is known which of them have come there,
for at most timeout_s seconds, and says so. So the engine that decodes waits for nothing: what it
needs is in its inbox by then, or never comes, and is computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lessons.l26_kv_transfer.pages import Pages
from lessons.l26_kv_transfer.tiers import HostTier
from lessons.toolbox.model.arguments import refuse
from reference.engine.engine_args import EngineArgs
from reference.features.kv_transfer.config import (
    E4M3,
    LAYERWISE,
    PARAMS,
    KVTransferConfig,
    read_params,
)
from reference.features.kv_transfer.connector import ReadFirst, TransferConnector
from reference.features.kv_transfer.handover import Departure, TransferBlockManager, TransferHost
from reference.features.kv_transfer.layers import LayerByLayer, LayeredPages
from reference.features.kv_transfer.wire import Address, shared_address
from reference.features.offload import format_of, salt_of

if TYPE_CHECKING:
    from lessons.l03_kv_cache.cache import KVPool
    from lessons.l13_prefix_caching.naive import HashBlocks
    from reference.engine.engine import Engine
    from reference.engine.model_runner import ModelRunner
    from reference.engine.request import EngineRequest, EngineSequence


def transfer_blocks(
    args: EngineArgs, runner: ModelRunner, others: Iterable[KVPool], cache: HashBlocks
) -> TransferBlockManager:
    """Blocks of this runner's pool that others send, or that are sent to others. others: pools
    whose blocks have the same numbers. cache: which blocks the pool knows. Raises ValueError for an
    address that is taken.
    """
    config: KVTransferConfig = args.kv_transfer_config
    if args.has_workers:
        from reference.parallel.transfers import sending_blocks

        return sending_blocks(args, runner, list(others), cache)
    pages, of = pages_and_name(args, runner, list(others))
    rows = int(config.kv_buffer_size // pages.part_bytes) if config.is_consumer else 0
    inbox = HostTier(rows, pages.part_bytes, order=ReadFirst(), pin_memory=pages.is_gpu)
    connector = TransferConnector(pages, of, inbox, config.timeout_s)
    if config.is_consumer:
        try:
            connector.listen(own_address(config), cache.block_of.__contains__)
        except OSError as error:
            place = f"{config.kv_ip}:{config.kv_port}"
            refuse("kv_transfer_config.kv_port", place, f"a free one ({error.strerror})")
    blocks = TransferBlockManager(runner.pool.num_blocks, args.block_size, cache, connector)
    if config.is_layerwise and config.is_producer:
        runner.layers = LayerByLayer(blocks)
    return blocks


def kind_and_form(config: KVTransferConfig) -> tuple[type[Pages], str]:
    """(how a block of a pool becomes a row, what the name of the format says of it)"""
    if not config.is_rounded:
        return Pages, ""
    from reference.features.kv_transfer.rounded import RoundedPages

    return RoundedPages, f" in {E4M3}"


def pages_and_name(
    args: EngineArgs, runner: ModelRunner, others: list[KVPool]
) -> tuple[Pages, str]:
    """(blocks as they travel, a name of the model and of that format). Two engines whose names
    differ exchange nothing, so no engine takes rounded blocks that wants exact ones. Raises
    ValueError.
    """
    config: KVTransferConfig = args.kv_transfer_config
    (kind, form), ranks = kind_and_form(config), config.prefill_ranks
    if others and (config.is_layerwise or ranks > 1):
        asked, value = (LAYERWISE, True) if config.is_layerwise else ("prefill", ranks)
        accepted = "none with a draft that has K and V, because they are cut otherwise"
        refuse(f"kv_transfer_config.kv_connector_extra_config.{asked}", value, accepted)
    if ranks > 1:
        from reference.features.kv_transfer.heads import HeadPages, check_cut, weights_name

        check_cut("kv_connector_extra_config.prefill.tp_size", runner.model.config, ranks)
        name = weights_name(args, runner.model.dtype)
        return HeadPages(runner.pool, ranks, kind), f"{name}{form} of {ranks} ranks"
    if config.is_layerwise:
        pages, form = LayeredPages(runner.pool, kind), f"{form} by layer"
    else:
        pages = kind([runner.pool, *others])
    return pages, format_of(runner, pages) + form


def own_address(config: KVTransferConfig) -> Address:
    """Where a consumer listens, and where a producer sends to that was told no other place."""
    if config.is_shared:
        return shared_address(config.kv_port or config.engine_id)
    return Address(config.kv_ip, config.kv_port)


def transfer_host(blocks: TransferBlockManager) -> TransferHost:
    """The scheduler's `host` for them."""
    return TransferHost(blocks, salt_of, departure_of)


def departure_of(sequence: EngineSequence) -> Departure | None:
    """Of a request whose prompt is decoded elsewhere."""
    return sequence.request.departure


class Transfers:
    """What an engine asks of its requests' kv_transfer_params. `engine.transfers`."""

    def __init__(self, engine: Engine, config: KVTransferConfig):
        self.engine, self.config = engine, config
        self.blocks: TransferBlockManager = engine.scheduler.blocks
        self.held: dict[EngineRequest, float] = {}  # ended, with the time until which it is held

    @property
    def about(self) -> dict:
        """What a router has to know of this engine."""
        found = {"engine_id": self.config.engine_id, "kv_role": self.config.kv_role}
        listener = self.blocks.connector.listener
        if listener is not None:
            found |= {"remote_host": listener.address.host, "remote_port": listener.address.port}
        return found

    def begin(self, request: EngineRequest) -> None:
        """A request has come. Raises ValueError for one that asks for another role."""
        params = read_params((request.params.extra_args or {}).get(PARAMS))
        if params is None:
            return
        config = self.config
        if params.get("do_remote_prefill") and not config.is_consumer:
            refuse(f"{PARAMS}.do_remote_prefill", True, f"False of a {config.kv_role}")
        if not params.get("do_remote_decode"):
            return
        if not config.is_producer:
            refuse(f"{PARAMS}.do_remote_decode", True, f"False of a {config.kv_role}")
        to = self.destination(params)
        if to is not None:
            request.departure = Departure(to, self.blocks.connector.parts)

    def destination(self, params: dict) -> Address | None:
        """The consumer that a request names, or the one of kv_ip and kv_port; None: there is none,
        because this engine listens there itself. Raises ValueError.
        """
        host = params.get("remote_host")
        if host is None:
            return None if self.config.is_consumer else own_address(self.config)
        to = Address(host, params.get("remote_port") or 0)
        if to.is_shared != self.config.is_shared:
            accepted = f"what a {self.config.kv_connector} listens at"
            refuse(f"{PARAMS}.remote_host", host, accepted)
        return to

    def released(self, touched: list[EngineRequest]) -> list[EngineRequest]:
        """Of those that got a token, and of those that were held: who may be told now. A request
        that has ended is held until its blocks have come to the other engine.
        """
        if not self.held and not any(request.departure for request in touched):
            return touched
        now, told = time.monotonic(), []
        for request in touched:
            if request.departure is not None and request.finished:
                self.held[request] = now + self.config.timeout_s
            else:
                told.append(request)
        for request, until in list(self.held.items()):
            is_known = self.engine.requests.get(request.request_id) is request
            if is_known and not request.departure.has_ended and now < until:
                continue
            del self.held[request]
            request.departure.abandon()
            if is_known:  # else it was aborted meanwhile
                request.kv_transfer_params = self.answer(request)
                told.append(request)
        return told

    def answer(self, request: EngineRequest) -> dict | None:
        """What the consumer is to be told, as vLLM's NixlConnector says it; None: nothing came."""
        arrived = request.departure.arrived
        if not arrived:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.config.engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": arrived,
            "remote_host": request.departure.to.host,
            "remote_port": request.departure.to.port,
            "tp_size": self.blocks.connector.tp_size,
        }
