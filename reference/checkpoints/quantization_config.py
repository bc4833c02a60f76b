"""From the "quantization_config" of a config.json to the layouts that its matrices may have.

config_keys.py reads the keys, compressed_config.py those of compressed-tensors, and per_layer.py
what is said of single layers.

Inputs are rounded where compressed-tensors' schemes, ModelOpt's FP8 or FP8 without tiles ask for it
(inputs.py); the other methods are read for their weights alone, and inputs keep the model's type.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from lessons.l18_weight_quantization.weights import NVFP4_BLOCK, TILE
from lessons.toolbox.model.arguments import refuse
from reference.checkpoints.compressed_config import (
    by_targets,
    compressed_layouts,
    inputs_of_layer,
)
from reference.checkpoints.config_keys import Config, Method, check_keys, group_size_of, pick
from reference.checkpoints.float_layouts import bnb_int8, bnb_nf4, float_quantized
from reference.checkpoints.inputs import Inputs
from reference.checkpoints.layouts import Layout, awq, gptq
from reference.checkpoints.nvfp4_layouts import CACHE_SCALES, modelopt_nvfp4
from reference.checkpoints.per_layer import by_dynamic, by_extra_config
from reference.checkpoints.transforms import Turn, read_turns


class StoredAs(NamedTuple):
    """How one layer may be stored. inputs: how its inputs are rounded; None: not at all."""

    layouts: list[Layout]
    inputs: Inputs | None = None


class Says(NamedTuple):
    """What a quantization_config says. of(layer): of a layer, by its name in the file; None where
    it is not quantized; raises ValueError. turns: rotations as the model runs.
    """

    of: Callable[[str], StoredAs | None]
    turns: list[Turn]


def read_layouts(config: Config) -> Says:
    """What a quantization_config says. Raises ValueError, in one line that names the key."""
    name = config["quant_method"]
    if name not in METHODS:
        refuse("quant_method", name, ", ".join(METHODS))
    method = METHODS[name]
    check_keys(config, method, "quantization_config")
    of_all = StoredAs(method.layouts(config))

    def of(layer: str) -> StoredAs | None:
        own = method.of_layer(config, layer)
        if own is None:
            return None
        stored = of_all if own is config else StoredAs(method.layouts(own))
        return stored._replace(inputs=method.inputs(own))

    return Says(of, read_turns(config))


# ---------------------------------------------------------------- the methods


def gptq_layouts(config: Config) -> list[Layout]:
    """AutoGPTQ and GPTQModel. Raises ValueError for other bits, forms or group sizes."""
    form = config.get("checkpoint_format") or config.get("format")
    form = pick({"checkpoint_format": form}, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    bits = pick(config, "bits", (2, 3, 4, 8))
    return [gptq(bits, group_size_of(config, "group_size"), form == "gptq")]


def auto_round_layouts(config: Config) -> list[Layout]:
    """AutoRound, which packs as the older AutoGPTQ, as GPTQModel or as AutoAWQ. Raises ValueError
    for other types, bits or packings.
    """
    pick(config, "data_type", ("int",), "int")
    packing = pick(config, "packing_format", tuple(PACKINGS), "auto_round:auto_gptq")
    if PACKINGS[packing] == "awq":
        pick(config, "bits", (4,))
        return [awq(group_size_of(config, "group_size"))]
    return gptq_layouts({**config, "checkpoint_format": PACKINGS[packing], "format": None})


def awq_layouts(config: Config) -> list[Layout]:
    """AutoAWQ, which has written its keys in two ways. Raises ValueError for other versions."""
    pick(config, "bits", (4,), config.get("w_bit"))
    pick(config, "version", ("gemm",), config.get("format") or "gemm")
    size = "group_size" if "group_size" in config else "q_group_size"
    return [awq(group_size_of(config, size))]


def fp8_layouts(config: Config) -> list[Layout]:
    """Tiles as in DeepSeek-V3, or scales of whole matrices as in AutoFP8. Raises ValueError."""
    size = config.get("weight_block_size")
    if size is None:
        return [float_quantized(), float_quantized("weight_scale_inv")]
    if list(size) != [TILE, TILE] if isinstance(size, (list, tuple)) else True:
        refuse("quantization_config.weight_block_size", size, f"[{TILE}, {TILE}], or null")
    return [float_quantized("weight_scale_inv", tile=True)]


def fp8_inputs(config: Config) -> Inputs | None:
    """What activation_scheme says. Inputs of layers with tiles keep their type here: they would
    have a scale for 128 numbers. Raises ValueError.
    """
    if config.get("weight_block_size") is not None:
        return None
    scheme = pick(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    return Inputs("fp8", is_static=scheme == "static")


def modelopt_inputs(config: Config) -> Inputs | None:
    """FP8 has a scale for the matrix's inputs beside it, unless only weights were quantized; or
    each token has its own. NVFP4's inputs keep their type.
    """
    algorithm = config["quant_algo"].lower()
    if "nvfp4" in algorithm:
        return None
    is_static = algorithm == "fp8"
    return Inputs("fp8", is_static=is_static, may_lack_scale=is_static)


def modelopt_layouts(config: Config) -> list[Layout]:
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


def bnb_layouts(config: Config) -> list[Layout]:
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
COMPRESSED = "compressed-tensors"
# of AutoRound, and whose form each is
PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
AUTO_ROUND = Method(
    auto_round_layouts,
    "bits group_size packing_format data_type extra_config",
    """sym autoround_version iters seqlen nsamples batch_size lr minmax_lr amp low_gpu_mem_usage
    enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning gradient_accumulate_steps
    scale_dtype dataset block_name_to_quantize to_quant_block_names quant_block_list
    supported_types model_free provider act_group_size act_sym act_data_type act_dynamic
    static_kv_granularity static_attention_granularity""",
    fixed=dict(act_bits=(16, 32, None)),
    of_layer=by_extra_config,
)
METHODS = {
    "gptq": Method(
        gptq_layouts,
        "bits group_size checkpoint_format format dynamic",
        GPTQ_HARMLESS,
        fixed=dict(is_marlin_format=(False, None), pack_dtype=("int32", None)),
        of_layer=by_dynamic,
    ),
    "awq": Method(awq_layouts, "bits w_bit group_size q_group_size version format", AWQ_HARMLESS),
    COMPRESSED: Method(
        compressed_layouts,
        "config_groups format sparsity_config transform_config",
        "quantization_status global_compression_ratio run_compressed moe_sparsity_config",
        fixed=dict(kv_cache_scheme=(None,)),
        of_layer=by_targets,
        inputs=inputs_of_layer,
    ),
    "fp8": Method(
        fp8_layouts,
        "weight_block_size activation_scheme",
        "dequantize scale_fmt",
        fixed=dict(fmt=("e4m3", None), modules_to_convert=(None, []), kv_cache_scheme=(None,)),
        inputs=fp8_inputs,
    ),
    "modelopt": Method(
        modelopt_layouts,
        "quant_algo group_size",
        "producer exclude_modules config_groups kv_cache_quant_algo kv_cache_scheme",
        inputs=modelopt_inputs,
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
    "auto-round": AUTO_ROUND,
    "intel/auto-round": AUTO_ROUND,
}
