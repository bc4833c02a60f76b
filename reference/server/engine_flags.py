"""The engine's flags of the command line: one for every field of AsyncEngineArgs, whose docstring
says more than fits here.
"""

import argparse
import json
from dataclasses import Field, fields
from typing import Any

from reference.engine.async_engine import AsyncEngineArgs
from reference.engine.engine_args import BACKENDS, CHOICES, SPECULATIVE
from reference.weights.quantization import METHODS

JSON_FLAGS = (
    "speculative_config",
    "kv_transfer_config",
    "kv_events_config",
    "attention_config",
    "eplb_config",
    "compilation_config",
)
HELP = {
    "tokenizer": "folder or hub name (default: the model's)",
    "dtype": "of weights and activations (default: auto, the checkpoint's)",
    "device": "as PyTorch names it (default: a GPU if there is one)",
    "seed": "of requests that bring none (default: {})",
    "max_model_len": "tokens of a prompt with its answer (default: the model's)",
    "max_num_seqs": "answers that run at once (default: {})",
    "max_num_batched_tokens": "of one step (default: 2048, or more for --max-num-seqs)",
    "block_size": "tokens of a block of the cache (default: {})",
    "gpu_memory_utilization": "share of a GPU's memory that may be taken (default: {})",
    "num_gpu_blocks_override": "blocks of the cache, of all layers (default: what memory gives)",
    "kv_cache_memory_bytes": "of the cache (default: on a CPU at most 1 GiB)",
    "preemption_mode": f"{' or '.join(CHOICES['preemption_mode'])} (default: {{}})",
    "swap_space": "GiB of the host's memory for --preemption-mode swap (default: {})",
    "kv_offloading_size": "GiB of the host's memory for blocks of earlier prompts (default: none)",
    "kv_offloading_folder": "where they go from there, a folder or an address of fsspec's",
    "kv_offloading_folder_size": "GiB of --kv-offloading-folder (default: {})",
    "kv_transfer_config": "how K and V go to other engines, in JSON: "
    '{{"kv_connector": "TcpConnector", "kv_role": "kv_producer"}}',
    "kv_events_config": 'block events for a router: {{"enable_kv_cache_events": true}}',
    "enable_prefix_caching": "prompts that begin alike share blocks (default: yes, without states)",
    "disable_hybrid_kv_cache_manager": "layers with a window keep all K and V (default: {})",
    "enable_chunked_prefill": "long prompts share steps with those who decode (default: {})",
    "async_scheduling": "schedule a step while the one before it runs (default: {})",
    "batch_invariant": "the same bits for a request whatever runs beside it (default: {})",
    "scheduling_policy": f"{', '.join(CHOICES['scheduling_policy'])} (default: {{}})",
    "enforce_eager": "no CUDA graphs (default: {})",
    "quantization": f"of the weights: {', '.join(METHODS)} (default: as the checkpoint has them)",
    "speculative_config": 'who drafts, in JSON: {{"method": "ngram", "num_speculative_tokens": 3}}',
    "kv_cache_dtype": f"{', '.join(CHOICES['kv_cache_dtype'])} (default: {{}})",
    "attention_config": "prompts multiply codes of an FP8 cache, in JSON: "
    '{{"use_prefill_query_quantization": true}}',
    "mamba_block_size": "a state is kept after multiples of so many tokens (default: 64)",
    "mamba_ssm_cache_dtype": f"{', '.join(CHOICES['mamba_ssm_cache_dtype'])} (default: {{}})",
    "limit_mm_per_prompt": 'pictures of a prompt: {{"image": 2}} (default: 8)',
    "mm_processor_cache_gb": "GiB for pictures that were seen before (default: {})",
    "enable_lora": "serve adapters, see --lora-modules (default: {})",
    "max_loras": "adapters of one step (default: {})",
    "max_lora_rank": "of an adapter (default: {})",
    "max_cpu_loras": "adapters that the host keeps (default: --max-loras)",
    "tensor_parallel_size": "shards of each layer (default: {})",
    "pipeline_parallel_size": "stages of layers (default: {})",
    "data_parallel_size": "replicas, which share the requests (default: {})",
    "decode_context_parallel_size": "shards that share the tokens of a KV head (default: {})",
    "cp_kv_cache_interleave_size": "neighbours among tokens that stay together (default: {})",
    "enable_expert_parallel": "a shard has whole experts, shared by replicas (default: {})",
    "all2all_backend": f"how rows come to them: {', '.join(CHOICES['all2all_backend'])}",
    "compilation_config": 'rows for each shard: {{"pass_config": {{"enable_sp": true}}}}',
    "enable_eplb": "place shared experts by their loads (default: {})",
    "eplb_config": 'copies of busy experts, in JSON: {{"num_redundant_experts": 2}}',
    "distributed_executor_backend": f"who starts the processes: {' or '.join(BACKENDS)}",
    "max_waiting_requests": "in the queue; who comes then gets 429 (default: no limit)",
    "max_waiting_tokens": "in the queue, of prompts and of answers (default: no limit)",
    "max_waiting_per_user": "requests of one user in the queue (default: no limit)",
    "max_wait_s": "s, of waiting in the queue, as predicted (default: no limit)",
}


def as_json(text: str) -> Any:
    """A JSON value, for argparse."""
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: JSON") from None


def engine_options(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of AsyncEngineArgs but the model."""
    group = parser.add_argument_group("engine", "reference.AsyncEngineArgs says more of them")
    for field in fields(AsyncEngineArgs):
        if field.name != "model":
            flag = f"--{field.name.replace('_', '-')}"
            option = group.add_argument(flag, default=argparse.SUPPRESS, **reading_of(field))
            # only now, because argparse adds a default of its own to the help of --no-…
            option.help = HELP[field.name].format(field.default)
    for name, key in SPECULATIVE.items():
        flag, kind = f"--{name.replace('_', '-')}", int if name == "spec_tokens" else str
        text = f"{key} of --speculative-config"
        group.add_argument(flag, default=argparse.SUPPRESS, type=kind, help=text)


def reading_of(field: Field) -> dict[str, Any]:
    """How argparse reads a field."""
    kind = str(field.type).removeprefix("<class '")
    if kind.startswith("bool"):
        return {"action": argparse.BooleanOptionalAction}
    if field.name in JSON_FLAGS:
        return {"type": as_json}
    numbers = (number for number in (int, float) if kind.startswith(number.__name__))
    return {"type": next(numbers, str)}
