"""The engine's arguments under vLLM's names: read, checked, and refused in one line where they
cannot work.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lessons.toolbox.model.arguments import (
    check_counts,
    check_kind,
    is_number,
    is_whole,
    refuse,
    with_other_names,
)

if TYPE_CHECKING:
    from reference.engine.cache_arguments import AttentionConfig, KVEventsConfig
    from reference.engine.expert_arguments import EPLBConfig
    from reference.features.kv_transfer.config import KVTransferConfig
    from reference.speculation.speculative_config import SpeculativeConfig

# lesson 19's, named here so that a cache of plain numbers does not import it
KV_FORMATS = ("fp8", "int8", "int4")
ALL2ALL = ("naive", "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency")
CHOICES = {
    "scheduling_policy": ("fcfs", "priority", "fair"),
    "preemption_mode": ("recompute", "swap"),
    "kv_cache_dtype": ("auto", *KV_FORMATS, "fp8_ds_mla"),
    "mamba_ssm_cache_dtype": ("auto", "float32", "bfloat16", "float16"),
    "all2all_backend": ALL2ALL,
}
LONGER_NAMES = {f"{name}_per_token_head": name for name in KV_FORMATS} | {"fp8_e4m3": "fp8"}
SWITCHES = """enable_chunked_prefill async_scheduling batch_invariant enforce_eager enable_lora
    enable_expert_parallel enable_eplb disable_hybrid_kv_cache_manager"""
MOST_PICTURES = 8  # of a prompt, unless limit_mm_per_prompt says otherwise
BACKENDS = ("mp", "ray")
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
SHARES = ("decode_context_parallel_size", "cp_kv_cache_interleave_size")
DTYPES = ("auto", "float32", "float16", "bfloat16", "float64", "half", "float")
# vLLM's short forms of keys of speculative_config
SPECULATIVE = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}


def takes_vllm_names(group: str):
    """Decorator of a function or a class: what vLLM has and it does not is read by its reason."""

    def read(known: list[str], others: dict) -> None:
        from reference.engine.compatibility.reading import read_others  # here: few calls need it

        read_others(group, known, others)

    return with_other_names(read)


@takes_vllm_names("EngineArgs")
@dataclass
class EngineArgs:
    """What an engine is made of. Raises ValueError, in one line, for a value that cannot work.

    seed: of the requests that bring none: an engine with this seed gives the same calls the same
    tokens. None: others each time. max_model_len: None takes the model's own.
    max_num_batched_tokens: of one step; None takes 2048, or more if max_num_seqs asks for it.
    num_gpu_blocks_override: blocks of the cache, each of all layers; None: what memory gives.
    kv_cache_memory_bytes: of the cache; None: on a GPU what gpu_memory_utilization leaves, on a CPU
    at most 1 GiB. preemption_mode: what becomes of the K and V of a request whose blocks another
    one needs: "recompute" throws them away, "swap" keeps them in swap_space GiB of the host's
    memory. kv_offloading_size: GiB of host memory for blocks that the pool has no room for, found
    again by the prefix cache; None: none. kv_offloading_folder: where they go from there, a folder
    or what fsspec reaches, kv_offloading_folder_size GiB of it; engines of one model may share it.
    kv_transfer_config: how blocks are sent to other engines, or come from them, a dict of vLLM's
    keys: reference.features.kv_transfer.config; None: they stay. kv_events_config: whether the
    server tells routers which blocks it has, a dict of vLLM's keys. scheduling_policy: "fcfs",
    "priority", or "fair": users take turns by tokens. enable_prefix_caching: None: yes, but for a
    model with states. disable_hybrid_kv_cache_manager: layers with a window keep the K and V of all
    tokens, too. async_scheduling: each step is scheduled and launched while the one before it runs.
    batch_invariant: a request gets the same bits whatever runs beside it; vLLM reads it from the
    environment, VLLM_BATCH_INVARIANT=1. enforce_eager: no CUDA graphs of decode steps; on a CPU
    there are none. quantization: weights in fewer bits while they are loaded, a name of
    reference.weights.quantization; None: as the checkpoint has them. kv_cache_dtype: "auto", the
    model's own dtype, or "fp8" (E4M3), "int8" or "int4", with a scale for each token and KV head;
    vLLM's longer names of these are read too; "fp8_ds_mla": DeepSeek's latents in FP8, their rotary
    values as they are. attention_config: whether prompts multiply codes of
    an FP8 cache, a dict of vLLM's keys. mamba_block_size: tokens between kept states, None: 64;
    mamba_ssm_cache_dtype: of all states. speculative_config: who drafts tokens and how many, a dict
    of vLLM's keys. limit_mm_per_prompt: {"image": the most pictures of a prompt}; None: 8.
    mm_processor_cache_gb: GiB of the rows that the eyes of a LLaVA made of pictures. enable_lora:
    room for max_loras adapters of at most max_lora_rank on the device, so that a step may need as
    many; max_cpu_loras: how many the host keeps, None: max_loras.

    tensor_parallel_size, pipeline_parallel_size: shards of each layer, and stages of layers, each
    in a process (and on a GPU) of its own; as many batches as stages are in flight.
    data_parallel_size: replicas of all of these, which share the requests.
    decode_context_parallel_size: shards that would hold copies of a KV head share its tokens, so
    many of them, so a block has block_size tokens on each; cp_kv_cache_interleave_size: neighbours
    among the tokens that stay together.
    enable_expert_parallel: a shard has some experts whole instead of a strip of each; with replicas
    all of them share the experts, and all2all_backend says how rows travel.
    compilation_config: vLLM's; {"pass_config": {"enable_sp": True}} has an effect: between two sums
    each shard has some rows of a step.
    enable_eplb: such experts are placed by their loads, with copies of busy ones, as eplb_config
    says, a dict of vLLM's keys: reference.engine.expert_arguments.
    distributed_executor_backend: who starts the processes, "mp" (this program) or "ray"; None: "mp"
    if several. Memory is that of one process: kv_cache_memory_bytes, gpu_memory_utilization.
    """

    model: str = "models/tiny"
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str | None = None
    seed: int | None = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    preemption_mode: str = "recompute"
    swap_space: float = 4.0
    kv_offloading_size: float | None = None
    kv_offloading_folder: str | None = None
    kv_offloading_folder_size: float = 16.0
    kv_transfer_config: "KVTransferConfig | dict | str | None" = None
    kv_events_config: "KVEventsConfig | dict | None" = None
    enable_prefix_caching: bool | None = None
    disable_hybrid_kv_cache_manager: bool = False
    enable_chunked_prefill: bool = True
    async_scheduling: bool = False
    batch_invariant: bool = False
    scheduling_policy: str = "fcfs"
    enforce_eager: bool = False
    quantization: str | None = None
    speculative_config: "SpeculativeConfig | dict | None" = None
    kv_cache_dtype: str = "auto"
    attention_config: "AttentionConfig | dict | None" = None
    mamba_block_size: int | None = None
    mamba_ssm_cache_dtype: str = "auto"
    limit_mm_per_prompt: dict[str, int] | str | None = None
    mm_processor_cache_gb: float = 0.25
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    enable_expert_parallel: bool = False
    all2all_backend: str = "allgather_reducescatter"
    compilation_config: dict | int | None = None
    enable_eplb: bool = False
    eplb_config: "EPLBConfig | dict | None" = None
    distributed_executor_backend: str | None = None

    def __post_init__(self):
        check_counts(
            self,
            "max_model_len",
            "max_num_batched_tokens",
            "num_gpu_blocks_override",
            "max_cpu_loras",
            "mamba_block_size",
            optional=True,
        )
        check_counts(self, "max_num_seqs", "block_size", "max_loras", "max_lora_rank")
        check_counts(self, *SIZES, *SHARES)
        for name in SWITCHES.split():
            check_kind(bool, "True or False", **{name: getattr(self, name)})
        prefixes = {"enable_prefix_caching": self.enable_prefix_caching}
        check_kind((bool, type(None)), "None, True or False", **prefixes)
        self.require("max_lora_rank", self.max_lora_rank <= 512, "1 to 512")
        is_enough = self.max_cpu_loras is None or self.max_cpu_loras >= self.max_loras
        self.require("max_cpu_loras", is_enough, f"None, or max_loras ({self.max_loras}) or more")
        self.require("block_size", self.block_size <= 256, "1 to 256")
        memory = self.kv_cache_memory_bytes
        is_memory = memory is None or is_whole(memory, high=2**63 - 1)
        self.require("kv_cache_memory_bytes", is_memory, "None, or a whole number, 1 or more")
        is_share = is_number(self.gpu_memory_utilization, 0, 1) and self.gpu_memory_utilization > 0
        self.require("gpu_memory_utilization", is_share, "above 0, at most 1")
        self.require("swap_space", is_number(self.swap_space, 0), "a finite number of GiB")
        is_seed = self.seed is None or is_whole(self.seed, 0, 2**63 - 1)
        self.require("seed", is_seed, "None, or an integer with 0 <= seed < 2**63")
        dtype = str(self.dtype).removeprefix("torch.")
        self.require("dtype", dtype in DTYPES, ", ".join(DTYPES))
        self.dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
        dtype = self.kv_cache_dtype
        self.kv_cache_dtype = LONGER_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        for name, values in CHOICES.items():
            self.require(name, getattr(self, name) in values, " or ".join(values))
        if self.quantization is not None:
            from reference.weights.quantization import check_method  # here: it imports lesson 18

            check_method(self.quantization)
        if self.limit_mm_per_prompt is None:
            self.limit_mm_per_prompt = {"image": MOST_PICTURES}
        else:
            from reference.engine.picture_arguments import read_picture_limit

            self.limit_mm_per_prompt = read_picture_limit(self.limit_mm_per_prompt)
        is_size = is_number(self.mm_processor_cache_gb, 0)
        self.require("mm_processor_cache_gb", is_size, "a finite number of GiB")
        if self.speculative_config is not None:
            from reference.speculation.speculative_config import SpeculativeConfig

            self.speculative_config = SpeculativeConfig.read(self.speculative_config, self.model)
        is_known = self.distributed_executor_backend in (None, *BACKENDS)
        self.require("distributed_executor_backend", is_known, f"None, {', '.join(BACKENDS)}")
        self._check_together()
        least = self.max_num_seqs * self.rows_each
        if self.max_num_batched_tokens is None:
            self.max_num_batched_tokens = max(2048, least)
        wanted = "a token" if self.rows_each == 1 else f"{self.rows_each} tokens"
        accepted = f"{least} or more, {wanted} for each of max_num_seqs"
        self.require("max_num_batched_tokens", self.max_num_batched_tokens >= least, accepted)

    @property
    def rows_each(self) -> int:
        """Tokens of a sequence in a step at most while it decodes: its newest and a draft."""
        config = self.speculative_config
        return 1 if config is None else 1 + config.num_speculative_tokens

    @property
    def tells_blocks(self) -> bool:
        """Whether a router is told which blocks there are."""
        return self.kv_events_config is not None and self.kv_events_config.is_told

    @property
    def tokens_per_block(self) -> int:
        """Of a block in the tables: block_size on each shard that has a share of the tokens."""
        return self.block_size * self.decode_context_parallel_size

    @property
    def splits_rows(self) -> bool:
        """Whether each shard has some rows between the sums."""
        config = self.compilation_config
        passes = config.get("pass_config") if isinstance(config, dict) else None
        return bool(passes and passes.get("enable_sp"))

    @property
    def has_workers(self) -> bool:
        """Whether the model lies in processes of its own."""
        sizes = [getattr(self, name) for name in SIZES]
        return max(sizes) > 1 or self.distributed_executor_backend is not None

    @property
    def cuts_model(self) -> bool:
        """Whether a process has only a part of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size > 1 or self.shares_experts

    @property
    def shares_experts(self) -> bool:
        """Whether replicas have the experts together, so that they step together, too."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    def _check_together(self) -> None:
        """What the arguments alone show not to work together."""
        if self.kv_events_config is not None or self.attention_config is not None:
            from reference.engine.cache_arguments import check_configs  # here: few ask for these

            check_configs(self)
        if self.enable_eplb or self.eplb_config is not None:
            from reference.engine.expert_arguments import check_balance

            check_balance(self)
        method = None if self.speculative_config is None else self.speculative_config.method
        moved = self.kv_offloading_size, self.kv_offloading_folder, self.kv_transfer_config
        if moved != (None, None, None) or self.kv_offloading_folder_size != 16.0:
            from reference.features.kv_transfer.config import check_elsewhere

            check_elsewhere(self)
        shares = self.decode_context_parallel_size, self.cp_kv_cache_interleave_size
        if shares != (1, 1) or self.compilation_config is not None:
            from reference.engine.parallel_arguments import check_parallel

            check_parallel(self)
        if self.batch_invariant or method:
            from reference.features.composition import check_apart  # here: few ask for these

            check_apart(self, method)

    @classmethod
    def read(cls, **arguments) -> "EngineArgs":
        """From keyword arguments as guides pass them. Raises ValueError for one that is unknown."""
        known = [field.name for field in fields(cls)]
        if any(name not in known for name in arguments):
            from reference.speculation.speculative_config import from_older, with_speculative

            arguments = from_older(with_speculative(arguments, SPECULATIVE))
        return cls(**arguments)

    def require(self, name: str, fits: bool, accepted: str) -> None:
        """Raise the ValueError of an argument that does not fit."""
        if not fits:
            refuse(name, getattr(self, name), accepted)
