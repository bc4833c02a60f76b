"""The arguments that say who is told of an engine's blocks, and how its cache is read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lessons.toolbox.model.arguments import check_counts, check_kind, refuse

if TYPE_CHECKING:
    from lessons.l02_naive_attention.decoder import Decoder
    from lessons.l17_tree_speculation.trees.tree import Tree
    from lessons.toolbox.model.config import ModelConfig
    from reference.engine.engine_args import EngineArgs

QUERIES = "use_prefill_query_quantization"
# vLLM's others, without effect: each operation has one implementation
WITHOUT_EFFECT = """backend flash_attn_version use_prefill_decode_attention
    flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph use_cudnn_prefill
    use_trtllm_ragged_deepseek_prefill use_trtllm_attention disable_flashinfer_prefill
    disable_flashinfer_q_quantization"""
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


@dataclass(frozen=True)
class AttentionConfig:
    """vLLM's key that has a meaning here. Raises ValueError, in one line.

    use_prefill_query_quantization: queries of prompts are quantized, and multiplied with an FP8
    cache as codes (lesson 19).
    """

    use_prefill_query_quantization: bool = False

    def __post_init__(self):
        asked = self.use_prefill_query_quantization
        check_kind(bool, "True or False", **{f"attention_config {QUERIES}": asked})

    @classmethod
    def read(cls, config: AttentionConfig | dict) -> AttentionConfig | None:
        """From what an engine is given; None: nothing but what has no effect. Raises
        ValueError.
        """
        if not isinstance(config, cls):
            if not isinstance(config, dict):
                refuse("attention_config", config, f"a dict of {QUERIES}")
            for name in config:
                if name not in (QUERIES, *WITHOUT_EFFECT.split()):
                    refuse("attention_config", name, f"{QUERIES}, and vLLM's other keys")
            config = cls(config.get(QUERIES, False))
        return config if config.use_prefill_query_quantization else None


def check_configs(args: EngineArgs) -> None:
    """Both arguments, where one is given. Raises ValueError."""
    if args.kv_events_config is not None:
        check_events(args)
    if args.attention_config is None:
        return
    args.attention_config = AttentionConfig.read(args.attention_config)
    if args.attention_config is None:
        return
    for accepted, fits in (
        ("None unless kv_cache_dtype is fp8", args.kv_cache_dtype == "fp8"),
        ("None unless block_size is a multiple of 16", args.block_size % 16 == 0),
        ("None with speculative_config", args.speculative_config is None),
        ("None where the model is in other processes (…_parallel_size)", not args.has_workers),
        ("None with batch_invariant", not args.batch_invariant),
    ):
        if not fits:
            refuse(f"attention_config {QUERIES}", True, accepted)


def cache_dtype_of(config: ModelConfig, kv_cache_dtype: str) -> str:
    """What K and V of a model are stored in: "fp8" for a draft that has no latents, where those of
    its target are fp8_ds_mla.
    """
    return "fp8" if kv_cache_dtype == "fp8_ds_mla" and config.mla is None else kv_cache_dtype


def read_by_kernels(args: EngineArgs, model: Decoder, tree: Tree | None) -> bool:
    """Whether kernels read the cache as it is stored, on a GPU. Quantized latents but DeepSeek's
    rows become numbers first, and so does a quantized cache where sequences run trees, or ranks
    share its tokens.
    """
    if args.kv_cache_dtype == "auto":
        return True
    shares = args.decode_context_parallel_size > 1
    if args.kv_cache_dtype == "fp8_ds_mla":
        from lessons.l19_kv_quantization.kernels.latents.pool import RowKernelPool, row_pool_of

        return row_pool_of(model) is RowKernelPool and not shares
    return model.config.mla is None and tree is None and not shares


def check_events(args: EngineArgs) -> None:
    """Who hears of the blocks. Raises ValueError."""
    args.kv_events_config = KVEventsConfig.read(args.kv_events_config)
    if args.tells_blocks:
        accepted = "None with enable_prefix_caching=False, because nothing is found again"
        args.require("kv_events_config", args.enable_prefix_caching is not False, accepted)
        accepted = "None where the model is in other processes (…_parallel_size)"
        args.require("kv_events_config", not args.has_workers, accepted)
