"""kv_transfer_config and a request's kv_transfer_params, in vLLM's shape: read, checked, refused in
one line.

Source: vLLM, vllm/config/kv_transfer.py; what a proxy sends and gets back:
tests/v1/kv_connector/nixl_integration/toy_proxy_server.py and NixlConnector's request_finished.
`serde` with its keys is LMCache's, docs/source/mp/serde.rst; so is the name `use_layerwise`.
`prefill` is vllm-ascend's, for its MooncakeConnectorV1.
"""

import json
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from lessons.toolbox.model.arguments import is_number, is_whole, refuse

CONNECTORS = ("TcpConnector", "SharedMemoryConnector")
PRODUCERS, CONSUMERS = ("kv_producer", "kv_both"), ("kv_consumer", "kv_both")
ROLES = ("kv_producer", "kv_consumer", "kv_both")
NAME = "kv_transfer_config"
PARAMS = "kv_transfer_params"
FLAGS = ("do_remote_decode", "do_remote_prefill")
LAYERWISE = "use_layerwise"
EXTRA = ("timeout_s", "serde", LAYERWISE, "prefill")
ACCEPTED_EXTRA = (
    '{"timeout_s": seconds, above 0, "serde": {"type": "fp8"}, "use_layerwise": True, or of a '
    'kv_consumer "prefill": {"tp_size": ranks}}'
)
E4M3 = "float8_e4m3fn"  # PyTorch's name, and LMCache's
# What a request may say beside the two: kinds of values that are not None.
REMOTE = {
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_block_ids": list,
    "remote_host": str,
    "remote_port": int,
    "tp_size": int,
}


@dataclass
class KVTransferConfig:
    """How an engine sends K and V to others, or gets it from them. Raises ValueError.

    kv_connector: "TcpConnector", or "SharedMemoryConnector" between engines of one machine.
    kv_role: "kv_producer" computes prompts for others, "kv_consumer" decodes them, "kv_both" does
    both. kv_ip, kv_port: where a consumer listens; port 0 takes a free one. For a producer alone:
    where it sends what no request says a place for. kv_buffer_size: bytes of host memory for blocks
    that have come and were not asked for yet. engine_id: a name for logs; None draws one.
    kv_connector_extra_config: {"timeout_s": how long the other end may take to answer, "serde":
    {"type": "fp8"} rounds blocks on their way to E4M3, in rounded.py; without it they come as they
    are, "use_layerwise": True sends each layer when it has run, in layers.py, "prefill":
    {"tp_size": 2} of a consumer takes blocks from producers of two ranks, in heads.py}. Of the
    others vLLM's default alone is accepted, or what fits.
    """

    kv_connector: str | None = None
    kv_role: str | None = None
    engine_id: str | None = None
    kv_buffer_device: str = "cpu"
    kv_buffer_size: float = 1e9
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: str = "recompute"

    def __post_init__(self):
        self._require("kv_connector", self.kv_connector in CONNECTORS, " or ".join(CONNECTORS))
        self._require("kv_role", self.kv_role in ROLES, ", ".join(ROLES))
        is_name = self.engine_id is None or (isinstance(self.engine_id, str) and self.engine_id)
        self._require("engine_id", bool(is_name), "None, or a name")
        self._require("kv_buffer_device", self.kv_buffer_device == "cpu", "cpu, host memory")
        self._require("kv_buffer_size", is_number(self.kv_buffer_size, 0), "a number of bytes")
        accepted = "None or 0 to 2**31, and without effect, because no group has ranks here"
        self._require("kv_rank", self.kv_rank is None or is_whole(self.kv_rank, 0), accepted)
        self._require("kv_parallel_size", self.kv_parallel_size == 1, "1, because engines come")
        is_host = isinstance(self.kv_ip, str) and self.kv_ip not in ("", "0.0.0.0", "::")
        self._require("kv_ip", is_host, "a host that the other engines reach")
        self._require("kv_port", is_whole(self.kv_port, 0, 65535), "0 to 65535")
        is_ours = self.kv_connector_module_path is None
        self._require("kv_connector_module_path", is_ours, "None, because no foreign code is run")
        is_plain = self.enable_permute_local_kv is False
        self._require("enable_permute_local_kv", is_plain, "False, because all have one layout")
        recomputes = self.kv_load_failure_policy == "recompute"
        self._require("kv_load_failure_policy", recomputes, "recompute")
        extra = self.kv_connector_extra_config
        is_known = isinstance(extra, dict) and extra.keys() <= set(EXTRA)
        is_time = is_known and is_number(self.timeout_s, 0) and self.timeout_s > 0
        fits = is_time and self.has_known_serde and self.has_known_parts
        self._require("kv_connector_extra_config", fits, ACCEPTED_EXTRA)
        self.engine_id = self.engine_id or str(uuid.uuid4())

    def _require(self, name: str, fits: bool, accepted: str) -> None:
        if not fits:
            refuse(f"{NAME}.{name}", getattr(self, name), accepted)

    @classmethod
    def read(cls, given: "KVTransferConfig | dict | str") -> "KVTransferConfig":
        """An object, a dict of its fields, or JSON of one. Raises ValueError."""
        if isinstance(given, cls):
            return given
        found, known = given, [each.name for each in fields(cls)]
        if isinstance(given, str):
            with suppress(ValueError):
                found = json.loads(given)
        if not isinstance(found, dict):
            refuse(NAME, given, '{"kv_connector": …, "kv_role": …}')
        for name in found:
            if name not in known:
                refuse(NAME, name, f"the keys {', '.join(known)}")
        return cls(**found)

    @property
    def timeout_s(self) -> float:
        """How long the other end may take to answer."""
        return self.kv_connector_extra_config.get("timeout_s", 10.0)

    @property
    def has_known_serde(self) -> bool:
        """Whether `serde` names no format, or the one that there is."""
        serde = self.kv_connector_extra_config.get("serde")
        if serde is None:
            return True
        if not isinstance(serde, dict) or not serde.keys() <= {"type", "fp8_dtype"}:
            return False
        return serde.get("type") == "fp8" and serde.get("fp8_dtype", E4M3) == E4M3

    @property
    def has_known_parts(self) -> bool:
        """Whether it is said in a known way in which parts blocks travel, and in one alone."""
        by_layer = self.kv_connector_extra_config.get(LAYERWISE, False)
        prefill = self.kv_connector_extra_config.get("prefill", {})
        is_known = isinstance(prefill, dict) and prefill.keys() <= {"tp_size"}
        if not is_known or not isinstance(by_layer, bool):
            return False
        ranks = prefill.get("tp_size", 1)
        return is_whole(ranks) and (ranks == 1 or (not by_layer and self.kv_role == "kv_consumer"))

    @property
    def prefill_ranks(self) -> int:
        """Of a consumer: how many ranks each producer has that sends to it."""
        return self.kv_connector_extra_config.get("prefill", {}).get("tp_size", 1)

    @property
    def is_rounded(self) -> bool:
        """Whether blocks travel in 8 bits."""
        return self.kv_connector_extra_config.get("serde") is not None

    @property
    def is_layerwise(self) -> bool:
        """Whether each layer of a block leaves when it has run."""
        return self.kv_connector_extra_config.get(LAYERWISE, False)

    @property
    def is_shared(self) -> bool:
        """Whether the bytes go through memory of one machine."""
        return self.kv_connector == "SharedMemoryConnector"

    @property
    def is_producer(self) -> bool:
        return self.kv_role in PRODUCERS

    @property
    def is_consumer(self) -> bool:
        return self.kv_role in CONSUMERS


def read_params(given: Any) -> dict[str, Any] | None:
    """A request's kv_transfer_params; None: it asks for nothing. Raises ValueError."""
    if given is None or given == {}:
        return None
    if not isinstance(given, dict):
        refuse(PARAMS, given, '{"do_remote_decode": …, "do_remote_prefill": …}')
    for name, value in given.items():
        if name in FLAGS:
            fits, accepted = value is None or isinstance(value, bool), "True or False"
        elif name in REMOTE:
            kind = REMOTE[name]
            fits = value is None or (isinstance(value, kind) and not isinstance(value, bool))
            accepted = f"None, or of the kind {kind.__name__}"
        else:
            refuse(PARAMS, name, f"the keys {', '.join([*FLAGS, *REMOTE])}")
        if not fits:
            refuse(f"{PARAMS}.{name}", value, accepted)
    if given.get("do_remote_decode") and given.get("do_remote_prefill"):
        refuse(f"{PARAMS}.do_remote_prefill", True, "False with do_remote_decode")
    port = given.get("remote_port")
    if port is not None and not 0 <= port < 2**16:
        refuse(f"{PARAMS}.remote_port", port, "0 to 65535")
    return dict(given)


def check_elsewhere(args) -> None:
    """Where blocks go that leave the pool: kv_offloading_… and kv_transfer_config of an engine's
    arguments. Raises ValueError.
    """
    from reference.features.composition import refuse_together

    size, folder = args.kv_offloading_size, args.kv_offloading_folder
    require = args.require
    require(
        "kv_offloading_size", size is None or is_number(size, 0), "None, or a finite number of GiB"
    )
    is_folder = folder is None or (isinstance(folder, str) and folder != "")
    require("kv_offloading_folder", is_folder, "None, or a folder's name")
    is_size = is_number(args.kv_offloading_folder_size, 0)
    require("kv_offloading_folder_size", is_size, "a finite number of GiB")
    if args.kv_transfer_config is not None:
        args.kv_transfer_config = KVTransferConfig.read(args.kv_transfer_config)
    if size is None:
        accepted = "None without kv_offloading_size, the host memory that blocks pass through"
        require("kv_offloading_folder", folder is None, accepted)
    if args.kv_transfer_config is not None and args.kv_transfer_config.is_rounded:
        check_rounded(args)
    asked = {"kv_offloading_size": "offloading", NAME: "transfer"}
    asked = {name: one for name, one in asked.items() if getattr(args, name) is not None}
    for name, feature in asked.items():
        accepted = "None with enable_prefix_caching=False, because it finds blocks again"
        if args.enable_prefix_caching is False:
            refuse(name, shown_config(args, name), accepted)
        others = {
            "processes": (
                "where the model is in other processes (…_parallel_size)",
                args.has_workers and not (feature == "transfer" and may_send_parts(args)),
            ),
            "swap": ('with preemption_mode="swap"', args.preemption_mode == "swap"),
            "offloading": ("with kv_offloading_size", size is not None and feature == "transfer"),
        }
        for other, (where, is_asked) in others.items():
            if is_asked:
                value = shown_config(args, name)
                refuse_together(name, value, feature, other, f"None {where}")


def may_send_parts(args) -> bool:
    """Whether the workers of an engine may send blocks: ranks that share each layer, and have
    nothing to receive.
    """
    config, ranks = args.kv_transfer_config, args.tensor_parallel_size
    is_cut_by_heads = ranks > 1 and args.pipeline_parallel_size == args.data_parallel_size == 1
    is_plain = args.kv_cache_dtype == "auto" and not config.is_layerwise
    return is_cut_by_heads and is_plain and config.kv_role == "kv_producer"


def check_rounded(args) -> None:
    """Raise ValueError where blocks that are rounded on their way make no sense."""
    name, asked = f"{NAME}.kv_connector_extra_config.serde", "fp8"
    if args.kv_cache_dtype != "auto":
        where = f"kv_cache_dtype={args.kv_cache_dtype!r}"
        refuse(name, asked, f"None with {where}, because codes travel as they are")
    if args.batch_invariant:
        why = "rounded blocks give other bits than computed ones"
        refuse(name, asked, f"None with batch_invariant=True, because {why}")


def shown_config(args, name: str) -> Any:
    """The value of an argument, short enough for a line."""
    value = getattr(args, name)
    return value.kv_role if isinstance(value, KVTransferConfig) else value
