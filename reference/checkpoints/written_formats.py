"""What config.json says of the matrices that `save_quantized` writes, in the words of the library
that each format belongs to.
"""

from collections.abc import Callable
from typing import Any

from lessons.l18_weight_quantization.weights import (
    NVFP4_BLOCK,
    Float8Weight,
    GroupedInt,
    Nf4Weight,
    Nvfp4Weight,
    QuantizedWeight,
)
from lessons.toolbox.model.arguments import refuse
from reference.checkpoints.float_layouts import (
    bnb_nf4,
    float_quantized,
    int_quantized,
    is_tiled,
    tiles_of,
)
from reference.checkpoints.inputs import KINDS
from reference.checkpoints.layouts import Layout, awq, gptq, pack_quantized
from reference.checkpoints.nvfp4_layouts import modelopt_nvfp4, nvfp4_pack_quantized

Weights = dict[str, QuantizedWeight]  # by the layer's name in a checkpoint
Plan = tuple[Layout, dict[str, Any]]  # how to store a matrix, and what config.json says of it
TILED = {"strategy": "block", "block_structure": [128, 128]}


def one_kind(weights: Weights, kind: type, form: str) -> list:
    """The matrices. Raises ValueError unless all are of this class."""
    for name, weight in weights.items():
        if not isinstance(weight, kind):
            raise ValueError(
                f"format {form}: got {type(weight).__name__} in {name}; accepted: {kind.__name__}"
            )
    return list(weights.values())


def bits_and_group(weights: list[GroupedInt], form: str) -> tuple[int, int]:
    """What all matrices have in common: bits, and the group size, -1 for a scale a row. Raises
    ValueError if they differ.
    """
    bits = {weight.bits for weight in weights}
    sizes = {weight.group_size for weight in weights}
    if len(sizes) > 1 and all(weight.scales.shape[1] == 1 for weight in weights):
        sizes = {-1}
    if len(bits) > 1 or len(sizes) > 1:
        raise ValueError(
            f"format {form}: got bits {sorted(bits)}, group sizes {sorted(sizes)}; accepted: one "
            "of each for all layers"
        )
    return bits.pop(), sizes.pop()


def as_gptq(weights: Weights) -> Plan:
    """Whole numbers of 4 or 8 bits, in any order of columns. Raises ValueError."""
    matrices = one_kind(weights, GroupedInt, "gptq")
    bits, group_size = bits_and_group(matrices, "gptq")
    # Programs disagree on a zero of 0 in the older form, which stores zero − 1.
    older = not any(x.zeros is not None and bool((x.zeros == 0).any()) for x in matrices)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": any(x.order is not None for x in matrices),
        "sym": all(x.zeros is None for x in matrices),
        "lm_head": False,
        "checkpoint_format": "gptq" if older else "gptq_v2",
        "pack_dtype": "int32",
    }
    return gptq(bits, group_size, older), config


def as_awq(weights: Weights) -> Plan:
    """Whole numbers of 4 bits. Raises ValueError for others."""
    matrices = one_kind(weights, GroupedInt, "awq")
    bits, group_size = bits_and_group(matrices, "awq")
    if bits != 4 or any(x.order is not None for x in matrices):
        refuse("format", "awq", "matrices of 4 bits, without GPTQ's act-order")
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size}
    return awq(group_size), config | {"zero_point": True, "version": "gemm"}


def as_compressed(weights: Weights) -> Plan:
    """FP8, NVFP4, or whole numbers of 4 or 8 bits. Raises ValueError for others."""
    by_kind = {Float8Weight: compressed_floats, Nvfp4Weight: compressed_nvfp4}
    plan = by_kind.get(type(next(iter(weights.values()))), compressed_integers)
    layout, scheme = plan(weights)
    group = {"targets": ["Linear"], "weights": scheme | {"dynamic": False}}
    group |= {"input_activations": None, "output_activations": None, "format": layout.name}
    config = {"quant_method": "compressed-tensors", "format": layout.name}
    config |= {"quantization_status": "compressed", "config_groups": {"group_0": group}}
    return layout, config


def compressed_floats(weights: Weights) -> Plan:
    """FP8. The second value is the scheme of compressed-tensors."""
    matrices = one_kind(weights, Float8Weight, "compressed-tensors")
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    if any(is_tiled(x) for x in matrices):
        return float_quantized(tile=True), scheme | TILED
    per_row = any(x.scales.shape[0] > 1 for x in matrices)
    return float_quantized(), scheme | {"strategy": "channel" if per_row else "tensor"}


def compressed_nvfp4(weights: Weights) -> Plan:
    """NVFP4. The second value is the scheme of compressed-tensors."""
    one_kind(weights, Nvfp4Weight, "compressed-tensors")
    scheme = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": NVFP4_BLOCK}
    scheme |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    return nvfp4_pack_quantized(), scheme


def compressed_integers(weights: Weights) -> Plan:
    """INT8 and INT4, packed. The second value is the scheme of compressed-tensors."""
    matrices = one_kind(weights, GroupedInt, "compressed-tensors")
    bits, group_size = bits_and_group(matrices, "compressed-tensors")
    per_row = all(x.scales.shape[1] == 1 for x in matrices)
    size, strategy = (None, "channel") if per_row else (group_size, "group")
    symmetric = all(x.zeros is None for x in matrices)
    scheme = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    scheme |= {"group_size": size, "strategy": strategy}
    return pack_quantized(bits, size, symmetric), scheme


def rounding_inputs(plan: Plan, activations: str) -> Plan:
    """The plan of `as_compressed` for layers whose inputs are rounded, each token with a scale of
    its own. activations: "int8" or "fp8". Whole numbers then have a byte each, as the library
    writes them. Raises ValueError for matrices of floats with inputs of whole numbers.
    """
    layout, config = plan
    (group,) = config["config_groups"].values()
    kinds = {name: kind for kind, name in KINDS.items()}
    if activations not in kinds:
        refuse("activations", activations, " or ".join(kinds))
    weights = group["weights"]
    if weights["type"] == "float" and (activations, layout.name) != ("fp8", "float-quantized"):
        refuse("activations", activations, "fp8 for FP8, int8 or fp8 for whole numbers")
    group["input_activations"] = {
        "num_bits": 8,
        "type": kinds[activations],
        "strategy": "token",
        "dynamic": True,
        "symmetric": True,
    }
    if weights["type"] == "int":
        layout = int_quantized(weights["num_bits"], weights["group_size"])
        config["format"] = group["format"] = layout.name
    return layout, config


def as_fp8(weights: Weights) -> Plan:
    """FP8 with scales for tiles of 128 × 128. Raises ValueError for others."""
    matrices = one_kind(weights, Float8Weight, "fp8")
    if not all(tuple(x.scales.shape) == tiles_of(x.shape) for x in matrices):
        refuse("format", "fp8", "scales for tiles of 128 × 128; compressed-tensors has one a row")
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return float_quantized("weight_scale_inv", tile=True), config | {
        "weight_block_size": [128, 128]
    }


def as_modelopt(weights: Weights) -> Plan:
    """NVFP4, or FP8 with a scale for each row or for the matrix. Raises ValueError for others."""
    if isinstance(next(iter(weights.values())), Nvfp4Weight):
        one_kind(weights, Nvfp4Weight, "modelopt")
        layout, algorithm = modelopt_nvfp4(), {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    else:
        matrices = one_kind(weights, Float8Weight, "modelopt")
        per_row = {x.scales.shape[0] > 1 for x in matrices}
        if len(per_row) > 1:
            refuse("format", "modelopt", "one kind of scales for all matrices")
        algorithm = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN" if per_row.pop() else "FP8"}
        layout = float_quantized()
    return layout, {"quant_method": "modelopt", "producer": {"name": "modelopt"}} | algorithm


def as_bitsandbytes(weights: Weights) -> Plan:
    """NF4. Raises ValueError for others."""
    matrices = one_kind(weights, Nf4Weight, "bitsandbytes")
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": any(x.nested_absmax is not None for x in matrices),
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
    }
    return bnb_nf4(), config


FORMATS: dict[str, Callable[[Weights], Plan]] = {
    "gptq": as_gptq,
    "awq": as_awq,
    "compressed-tensors": as_compressed,
    "fp8": as_fp8,
    "modelopt": as_modelopt,
    "bitsandbytes": as_bitsandbytes,
}
LEFT_ALONE = {  # what each format calls the list of layers that it left alone
    "gptq": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "compressed-tensors": "ignore",
    "fp8": "modules_to_not_convert",
    "modelopt": "ignore",
    "bitsandbytes": "llm_int8_skip_modules",
}
