"""Arguments of where K and V are kept, and of who is told."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lessons.toolbox.model.arguments import check_counts, check_kind, is_number, refuse

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


def check_cache(args: EngineArgs) -> None:
    """Where blocks go that the pool has no room for, and who hears of it. Raises ValueError."""

    def require(name: str, fits: bool, accepted: str) -> None:
        if not fits:
            refuse(name, getattr(args, name), accepted)

    args.kv_events_config = KVEventsConfig.read(args.kv_events_config)
    if args.tells_blocks:
        accepted = "None with enable_prefix_caching=False, because nothing is found again"
        require("kv_events_config", args.enable_prefix_caching, accepted)
        accepted = "None where the model is in other processes (…_parallel_size)"
        require("kv_events_config", not args.has_workers, accepted)
    size, folder = args.kv_offloading_size, args.kv_offloading_folder
    is_size = size is None or is_number(size, 0)
    require("kv_offloading_size", is_size, "None, or a finite number of GiB")
    is_folder = folder is None or (isinstance(folder, str) and folder != "")
    require("kv_offloading_folder", is_folder, "None, or a folder's name")
    is_size = is_number(args.kv_offloading_folder_size, 0)
    require("kv_offloading_folder_size", is_size, "a finite number of GiB")
    if size is None:
        accepted = "None without kv_offloading_size, the host memory that blocks pass through"
        require("kv_offloading_folder", folder is None, accepted)
        return
    accepted = "None with enable_prefix_caching=False, because it finds blocks again"
    require("kv_offloading_size", args.enable_prefix_caching, accepted)
