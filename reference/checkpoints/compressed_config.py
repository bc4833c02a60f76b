"""compressed-tensors' part of quantization_config.py: schemes, and the layers that they name.

    config_groups   {"group_0": {"targets": ["Linear"], "weights": …, "input_activations": …}}

Source: compressed-tensors, quantization/quant_args.py and quant_scheme.py, utils/match.py.
"""

from lessons.l18_weight_quantization.weights import NVFP4_BLOCK, TILE
from lessons.toolbox.model.arguments import refuse
from reference.checkpoints.config_keys import Config, Method, check_keys, group_size_of, pick
from reference.checkpoints.float_layouts import float_quantized, int_quantized
from reference.checkpoints.inputs import Inputs, inputs_of
from reference.checkpoints.layouts import Layout, pack_quantized
from reference.checkpoints.nvfp4_layouts import nvfp4_pack_quantized
from reference.checkpoints.per_layer import rank


def compressed_layouts(config: Config) -> list[Layout]:
    """A layout for each scheme. Raises ValueError for one that is not read here."""
    found = []
    for name, scheme in schemes_of(config).items():
        check_keys(scheme, SCHEME, f"config_groups.{name}")
        form = scheme.get("format") or config.get("format")
        layout = layout_of(scheme["weights"], form)
        inputs_of(scheme.get("input_activations"))
        found.append(layout)
    sparsity = config.get("sparsity_config") or {"format": "dense"}  # {} is the library's "none"
    if not isinstance(sparsity, dict) or sparsity.get("format") != "dense":
        refuse("quantization_config.sparsity_config", sparsity, "null, or the format 'dense'")
    # First, because a packed matrix has a weight_scale, too, the marker of the others.
    return sorted(found, key=lambda layout: layout.marker != "weight_packed")


def schemes_of(config: Config) -> dict[str, Config]:
    """config_groups; {} where matrices are rotated alone. Raises ValueError for what is no object
    of schemes with weights.
    """
    groups = config.get("config_groups")
    if not groups and config.get("transform_config"):
        return {}
    if not isinstance(groups, dict) or not groups:
        refuse("quantization_config.config_groups", groups, "an object of schemes")
    for name, scheme in groups.items():
        if not isinstance(scheme, dict) or not isinstance(scheme.get("weights"), dict):
            refuse(f"quantization_config.config_groups.{name}", scheme, "a scheme with weights")
        targets = scheme.get("targets", [])
        if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
            refuse(f"config_groups.{name}.targets", targets, "a list of names")
    return groups


def by_targets(config: Config, name: str) -> Config | None:
    """The config with the one scheme that means a layer most closely; None where none of several
    does. A single scheme means every layer that is stored as codes.
    """
    groups = schemes_of(config)
    if len(groups) < 2:
        return config
    ranks = []
    for group, scheme in groups.items():
        found = [(rank(one, name), one) for one in scheme.get("targets", [])]
        ranks += [(*one, group) for one in found if one[0] is not None]
    if not ranks:
        return None
    group = min(ranks)[2]
    return config | {"config_groups": {group: groups[group]}}


def inputs_of_layer(config: Config) -> Inputs | None:
    """How a layer's inputs are rounded. config: that of one layer, by `by_targets`."""
    for scheme in schemes_of(config).values():  # one, or none
        return inputs_of(scheme.get("input_activations"))
    return None


def layout_of(weights: Config, form: str) -> Layout:
    """One scheme's, its matrices as `form` stores them. Raises ValueError."""
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
    is_int, packs = kind == "int", form == "pack-quantized"
    bits = pick(weights, "num_bits", (4, 8) if is_int or packs else (8,), 8)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if packs:
        pick(weights, "type", ("int",), "int")
        strategy = pick({"strategy": strategy}, "strategy", ("group", "channel"))
        grouped = strategy == "group"
        return pack_quantized(bits, group_size_of(weights, "group_size") if grouped else None)
    if is_int:
        strategy = pick({"strategy": strategy}, "strategy", ("group", "channel", "tensor"))
        grouped = strategy == "group"
        return int_quantized(bits, group_size_of(weights, "group_size") if grouped else None)
    tile = pick({"strategy": strategy}, "strategy", ("channel", "tensor", "block")) == "block"
    if tile and weights.get("block_structure") != [TILE, TILE]:
        refuse("block_structure", weights.get("block_structure"), f"[{TILE}, {TILE}]")
    return float_quantized(tile=tile)


WEIGHTS = Method(
    compressed_layouts,
    "num_bits type strategy group_size block_structure",
    "symmetric observer observer_kwargs actorder scale_dtype zp_dtype",
    fixed=dict(dynamic=(False, None)),
)
SCHEME = Method(
    compressed_layouts,
    "weights format input_activations",
    "targets",
    fixed=dict(output_activations=(None,)),
)
