"""From the "quantization_config" of a config.json to the layouts that its matrices may have.

Every key is known by name. Some are read; some change nothing, because they say how the numbers
were found or how another library runs them; some must have the one value that changes nothing. A
key that is in none of these lists is refused, because it might change what the model computes.

Weights alone count here: where a checkpoint also asks for 8-bit activations (W8A8), the layers get
their inputs in the model's own dtype, as vLLM does on a GPU without such units. Lesson 19 rounds
activations, and the engine runs such layers by its product.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from lessons.l18_weight_quantization.weights import NVFP4_BLOCK, TILE
from lessons.toolbox.model.arguments import refuse, shown
from reference.checkpoints.float_layouts import (
    bnb_int8,
    bnb_nf4,
    float_quantized,
    int_quantized,
)
from reference.checkpoints.layouts import Layout, awq, gptq, pack_quantized
from reference.checkpoints.nvfp4_layouts import CACHE_SCALES, modelopt_nvfp4, nvfp4_pack_quantized

# The same in every method: who wrote it, which layers stay as they are (the tensors tell, too).
HARMLESS = """quant_method modules_to_not_convert ignored_layers llm_int8_skip_modules ignore
    backend version meta"""


class Method(NamedTuple):
    """One quant_method. layouts(config): those that its matrices may have, told apart by their
    markers. reads, harmless: keys, between blanks. fixed: keys and the values that change nothing.
    """

    layouts: Callable[[dict[str, Any]], list[Layout]]
    reads: str
    harmless: str = ""
    fixed: dict[str, tuple] | None = None


def read_layouts(config: dict[str, Any]) -> list[Layout]:
    """The layouts of a quantization_config. Raises ValueError, in one line that names the key."""
    name = config["quant_method"]
    if name not in METHODS:
        refuse("quant_method", name, ", ".join(METHODS))
    method = METHODS[name]
    check_keys(config, method, "quantization_config")
    return method.layouts(config)


def check_keys(config: dict[str, Any], method: Method, within: str) -> None:
    """Raise ValueError for a key whose value could change the result."""
    fixed = method.fixed or {}
    known = f"{HARMLESS} {method.harmless} {method.reads}".split()
    for key, value in config.items():
        if key in fixed:
            if value not in fixed[key]:
                raise ValueError(
                    f"'{within}.{key}' must be {shown(fixed[key][0])}, not {shown(value)}"
                )
        elif key not in known and value is not None:
            raise ValueError(
                f"{shown(f'{within}.{key}')} is {shown(value)}, and no reader knows this key; "
                "remove it if it changes nothing"
            )


def pick(config: dict[str, Any], key: str, accepted: tuple, default=None):
    """The value of a key. Raises ValueError for one that is not accepted."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, str):
        value = value.lower()
    # the type, because True is 1 to Python
    if not any(type(value) is type(one) and value == one for one in accepted):
        refuse(f"quantization_config.{key}", config.get(key), " or ".join(map(str, accepted)))
    return value


def group_size_of(config: dict[str, Any], key: str) -> int:
    """A positive whole number, or -1. Raises ValueError for another one, or for none."""
    size = config.get(key)
    if type(size) is not int or (size < 1 and size != -1) or size > 2**20:
        refuse(f"quantization_config.{key}", size, "a positive whole number, or -1 for whole rows")
    return size


# ---------------------------------------------------------------- the methods


def gptq_layouts(config: dict[str, Any]) -> list[Layout]:
    """AutoGPTQ and GPTQModel. Raises ValueError for other bits, forms or group sizes."""
    form = config.get("checkpoint_format") or config.get("format")
    form = pick({"checkpoint_format": form}, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    bits = pick(config, "bits", (4, 8))
    return [gptq(bits, group_size_of(config, "group_size"), form == "gptq")]


def awq_layouts(config: dict[str, Any]) -> list[Layout]:
    """AutoAWQ, which has written its keys in two ways. Raises ValueError for other versions."""
    pick(config, "bits", (4,), config.get("w_bit"))
    pick(config, "version", ("gemm",), config.get("format") or "gemm")
    size = "group_size" if "group_size" in config else "q_group_size"
    return [awq(group_size_of(config, size))]


def compressed_layouts(config: dict[str, Any]) -> list[Layout]:
    """compressed-tensors: a layout for each scheme. Raises ValueError for one that is not read
    here.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        refuse("quantization_config.config_groups", groups, "an object of schemes")
    found = {}
    for name, scheme in groups.items():
        if not isinstance(scheme, dict) or not isinstance(scheme.get("weights"), dict):
            refuse(f"quantization_config.config_groups.{name}", scheme, "a scheme with weights")
        check_keys(scheme, SCHEME, f"config_groups.{name}")
        form = scheme.get("format") or config.get("format")
        layout = layout_of(scheme["weights"], form)
        if layout.marker in found:
            raise ValueError(
                "'quantization_config.config_groups' names two schemes whose tensors have the same "
                "names; accepted: one scheme for each kind of tensor"
            )
        found[layout.marker] = layout
    sparsity = config.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, dict) or sparsity.get("format") != "dense":
        refuse("quantization_config.sparsity_config", sparsity, "null, or the format 'dense'")
    # First, because a packed matrix has a weight_scale, too, the marker of the others.
    return sorted(found.values(), key=lambda layout: layout.marker != "weight_packed")


def layout_of(weights: dict[str, Any], form: str) -> Layout:
    """One scheme of compressed-tensors, its matrices as `form` stores them. Raises ValueError."""
    check_keys(weights, WEIGHTS, "weights")
    forms = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    forms += ("nvfp4-pack-quantized",)
    form = pick({"format": form}, "format", forms)
    if form == "nvfp4-pack-quantized":
        pick(weights, "type", ("float",))
        pick(weights, "num_bits", (4,))
        pick(weights, "group_size", (NVFP4_BLOCK,))
        pick(weights, "strategy", ("tensor_group", "group"), "tensor_group")
        return nvfp4_pack_quantized()
    kind = pick(weights, "type", ("int", "float"), "int")
    packs = form == "pack-quantized"
    bits = pick(weights, "num_bits", (4, 8) if packs else (8,), 8)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if packs:
        strategy = pick({"strategy": strategy}, "strategy", ("group", "channel"))
        pick(weights, "type", ("int",), "int")
        grouped = strategy == "group"
        return pack_quantized(bits, group_size_of(weights, "group_size") if grouped else None)
    if kind == "int":
        pick({"strategy": strategy}, "strategy", ("channel", "tensor"))
        return int_quantized()
    tile = pick({"strategy": strategy}, "strategy", ("channel", "tensor", "block")) == "block"
    if tile and weights.get("block_structure") != [TILE, TILE]:
        refuse("block_structure", weights.get("block_structure"), f"[{TILE}, {TILE}]")
    return float_quantized(tile=tile)


def fp8_layouts(config: dict[str, Any]) -> list[Layout]:
    """Tiles as in DeepSeek-V3, or scales of whole matrices as in AutoFP8. Raises ValueError."""
    size = config.get("weight_block_size")
    if size is None:
        return [float_quantized(), float_quantized("weight_scale_inv")]
    if list(size) != [TILE, TILE] if isinstance(size, (list, tuple)) else True:
        refuse("quantization_config.weight_block_size", size, f"[{TILE}, {TILE}], or null")
    return [float_quantized("weight_scale_inv", tile=True)]


def modelopt_layouts(config: dict[str, Any]) -> list[Layout]:
    """NVIDIA ModelOpt: FP8 with a scale for the matrix or for each row, and NVFP4. The cache keeps
    the model's type, whatever kv_cache_quant_algo says. Raises ValueError for other algorithms.
    """
    algorithms = ("fp8", "fp8_per_channel_per_token", "nvfp4", "w4a16_nvfp4")
    algorithm = pick(config, "quant_algo", algorithms)
    if "nvfp4" in algorithm:
        pick(config, "group_size", (NVFP4_BLOCK,), NVFP4_BLOCK)
        return [modelopt_nvfp4()]
    layout = float_quantized()
    return [replace(layout, unread=(*layout.unread, *CACHE_SCALES))]


def bnb_layouts(config: dict[str, Any]) -> list[Layout]:
    """NF4 or LLM.int8(). Raises ValueError for FP4, which is bitsandbytes' other 4-bit format."""
    in_4 = config.get("load_in_4bit", config.get("_load_in_4bit"))
    in_8 = config.get("load_in_8bit", config.get("_load_in_8bit"))
    if in_8 is True and not in_4:
        return [bnb_int8()]
    if in_4 is not True:
        refuse("quantization_config.load_in_4bit", in_4, "true, or load_in_8bit true")
    pick(config, "bnb_4bit_quant_type", ("nf4",), "fp4")
    return [bnb_nf4()]


# modules_in_block_to_quantize and lm_head only say which layers have codes; the tensors tell
GPTQ_HARMLESS = """damp_percent damp_auto_increment dataset tokenizer batch_size cache_block_outputs
    block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize
    model_seqlen
    exllama_config use_exllama disable_exllama use_cuda_fp16 max_input_length pad_token_id
    static_groups true_sequential model_name_or_path model_file_base_name act_group_aware
    sym desc_act lm_head mse method pack_impl offload_to_disk offload_to_disk_path"""
AWQ_HARMLESS = """zero_point do_fuse fuse_max_seq_len exllama_config modules_to_fuse desc_act sym
    modules_in_block_to_quantize lm_head true_sequential"""
WEIGHTS = Method(
    compressed_layouts,
    "num_bits type strategy group_size block_structure",
    "symmetric observer observer_kwargs actorder scale_dtype zp_dtype",
    fixed=dict(dynamic=(False, None)),
)
SCHEME = Method(
    compressed_layouts, "weights format", "targets input_activations output_activations"
)
METHODS = {
    "gptq": Method(
        gptq_layouts,
        "bits group_size checkpoint_format format",
        GPTQ_HARMLESS,
        fixed=dict(dynamic=(None, {}), is_marlin_format=(False, None), pack_dtype=("int32", None)),
    ),
    "awq": Method(awq_layouts, "bits w_bit group_size q_group_size version format", AWQ_HARMLESS),
    "compressed-tensors": Method(
        compressed_layouts,
        "config_groups format sparsity_config",
        "quantization_status global_compression_ratio run_compressed moe_sparsity_config",
        fixed=dict(
            kv_cache_scheme=(None,),
            transform_config=(None, {}),
        ),
    ),
    "fp8": Method(
        fp8_layouts,
        "weight_block_size",
        "activation_scheme dequantize scale_fmt",
        fixed=dict(fmt=("e4m3", None), modules_to_convert=(None, []), kv_cache_scheme=(None,)),
    ),
    "modelopt": Method(
        modelopt_layouts,
        "quant_algo group_size",
        "producer exclude_modules config_groups kv_cache_quant_algo kv_cache_scheme",
    ),
    "fbgemm_fp8": Method(lambda config: [float_quantized()], "", "activation_scale_ub"),
    "bitsandbytes": Method(
        bnb_layouts,
        "load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_quant_type",
        "bnb_4bit_compute_dtype bnb_4bit_use_double_quant bnb_4bit_quant_storage "
        "llm_int8_threshold llm_int8_enable_fp32_cpu_offload",
        fixed=dict(llm_int8_has_fp16_weight=(False, None)),
    ),
    "mxfp4": Method(lambda config: [], "", "dequantize"),
}
