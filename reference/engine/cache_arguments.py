"""The argument that says who is told of an engine's blocks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lessons.toolbox.model.arguments import check_counts, check_kind, refuse

if TYPE_CHECKING:
    from reference.engine.engine_args import EngineArgs

ZEROMQ = ("endpoint", "replay_endpoint", "hwm", "max_queue_size", "topic")  # vLLM's, of its sockets


@dataclass(frozen=True)
class KVEventsConfig:
    """vLLM's keys that have a meaning here. Raises ValueError, in one line.

    enable_kv_cache_events: whether there are events. publisher: "http", the server's /kv_events, or
    "null", which tells no one; None: "http" if there are events. buffer_steps: batches that are
    kept for a router that has not read them yet; after that it gets the whole state.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    buffer_steps: int = 10_000

    def __post_init__(self):
        check_kind(bool, "True or False", enable_kv_cache_events=self.enable_kv_cache_events)
        check_counts(self, "buffer_steps")
        if self.publisher not in (None, "http", "null"):
            accepted = "http or null, because events are an HTTP stream here: GET /kv_events"
            refuse("kv_events_config publisher", self.publisher, accepted)

    @classmethod
    def read(cls, config: KVEventsConfig | dict | None) -> KVEventsConfig | None:
        """From what an engine is given; None: no events. Raises ValueError."""
        if config is None or isinstance(config, cls):
            return config
        known = [each.name for each in fields(cls)]
        if not isinstance(config, dict):
            refuse("kv_events_config", config, f"a dict of {', '.join(known)}")
        for name in config:
            if name in ZEROMQ:
                accepted = f"{', '.join(known)}, because there are no sockets of ZeroMQ's here"
                refuse("kv_events_config", name, accepted)
            if name not in known:
                refuse("kv_events_config", name, ", ".join(known))
        return cls(**config)

    @property
    def is_told(self) -> bool:
        """Whether someone is told."""
        return self.enable_kv_cache_events and self.publisher != "null"


def check_events(args: EngineArgs) -> None:
    """Who hears of the blocks. Raises ValueError."""
    args.kv_events_config = KVEventsConfig.read(args.kv_events_config)
    if args.tells_blocks:
        accepted = "None with enable_prefix_caching=False, because nothing is found again"
        args.require("kv_events_config", args.enable_prefix_caching is not False, accepted)
        accepted = "None where the model is in other processes (…_parallel_size)"
        args.require("kv_events_config", not args.has_workers, accepted)
