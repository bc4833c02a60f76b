"""The shape of a LLaVA checkpoint beside its decoder: what its config.json and its image processor
say.

The folder is the one that transformers' LlavaForConditionalGeneration reads: config.json with a
text_config, a vision_config (a CLIPVisionModel) and the projector's fields;
preprocessor_config.json (or processor_config.json) of a CLIPImageProcessor; a tokenizer that has
the image token.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lessons.toolbox.model.arguments import is_number, is_whole, shown
from lessons.toolbox.model.config_json import CheckpointError, read_json

ACTIVATIONS = ("quick_gelu", "gelu")
BICUBIC = 3  # PIL's number of the filter that CLIP resizes with
# Of a CLIPVisionConfig; transformers fills in what a config.json leaves out, and so do we.
CLIP_DEFAULTS = dict(
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    image_size=224,
    patch_size=32,
    layer_norm_eps=1e-5,
)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class VisionConfig:
    """A tower, a projector, and how a picture becomes numbers.

    hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, layer_norm_eps: of the
    tower. image_size, patch_size: pixels of an edge. feature_layer: how many of its layers run: 0
    to num_hidden_layers. keeps_class: whether the class token is a feature, too ("full").
    text_size: the decoder's hidden_size. image_token_id: the token that stands for a picture in a
    prompt. mean, std: of red, green and blue, by which pixels of 0 to 1 are normalized.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float
    image_size: int
    patch_size: int
    hidden_act: str
    feature_layer: int
    keeps_class: bool
    projector_bias: bool
    text_size: int
    image_token_id: int
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens_per_image(self) -> int:
        """How many places of the prompt a picture takes."""
        return self.num_patches + self.keeps_class


def read_vision_config(folder: Path) -> VisionConfig:
    """The config of a LLaVA folder. Raises CheckpointError, in one line, for what the tower here
    does not have.
    """
    raw = read_json(folder / "config.json")
    vision, text = part_of(raw, "vision_config"), part_of(raw, "text_config")
    kind = vision.get("model_type", "clip_vision_model")
    need("vision_config.model_type", kind, kind == "clip_vision_model", "'clip_vision_model'")
    sizes = {name: vision.get(name, default) for name, default in CLIP_DEFAULTS.items()}
    for name, value in sizes.items():
        if name != "layer_norm_eps":
            need(f"vision_config.{name}", value, is_whole(value, 1, 2**16), "a size, 1 to 65536")
    eps = sizes["layer_norm_eps"]
    need("vision_config.layer_norm_eps", eps, is_number(eps, 0, 1), "0 to 1")
    heads, patch = sizes["num_attention_heads"], sizes["patch_size"]
    fits = sizes["hidden_size"] % heads == 0
    need("vision_config.num_attention_heads", heads, fits, "a divisor of hidden_size")
    fits = sizes["image_size"] % patch == 0
    need("vision_config.patch_size", patch, fits, "a divisor of image_size")
    act = vision.get("hidden_act", "quick_gelu")
    need("vision_config.hidden_act", act, act in ACTIVATIONS, " or ".join(ACTIVATIONS))
    act = raw.get("projector_hidden_act", "gelu")
    need("projector_hidden_act", act, act == "gelu", "'gelu'")
    chosen = raw.get("vision_feature_select_strategy", "default")
    need("vision_feature_select_strategy", chosen, chosen in ("default", "full"), "default, full")
    token = raw.get("image_token_index", raw.get("image_token_id"))
    vocab_size = text.get("vocab_size")
    fits = is_whole(vocab_size) and is_whole(token, 0, vocab_size - 1)
    need("image_token_index", token, fits, "a token id of text_config's vocab_size")
    need(
        "text_config.hidden_size",
        text.get("hidden_size"),
        is_whole(text.get("hidden_size")),
        "a size",
    )
    return VisionConfig(
        **sizes,
        hidden_act=vision.get("hidden_act", "quick_gelu"),
        feature_layer=layer_of(raw.get("vision_feature_layer", -2), sizes["num_hidden_layers"]),
        keeps_class=chosen == "full",
        projector_bias=bool(raw.get("multimodal_projector_bias", True)),
        text_size=text["hidden_size"],
        image_token_id=token,
        **normalization_of(folder, sizes["image_size"]),
    )


def part_of(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """An object within config.json."""
    part = raw.get(name)
    need(name, part, isinstance(part, dict), "an object")
    return part


def layer_of(layer: Any, num_layers: int) -> int:
    """vision_feature_layer as a number of layers that run: −1 is all of them, −2 all but the
    last.
    """
    fits = is_whole(layer, -num_layers - 1, num_layers)
    need("vision_feature_layer", layer, fits, f"one layer, {-num_layers - 1} to {num_layers}")
    return layer % (num_layers + 1)


def normalization_of(folder: Path, image_size: int) -> dict[str, tuple[float, ...]]:
    """{mean, std} of the image processor, whose other steps must be CLIP's: RGB, the short edge to
    image_size by bicubic interpolation, the middle cut out, 1/255, mean and std.
    """
    raw: dict[str, Any] = {}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            raw = read_json(folder / name)
            raw = raw.get("image_processor", raw)
    steps = ("do_convert_rgb", "do_resize", "do_center_crop", "do_rescale", "do_normalize")
    for step in steps:
        need(step, raw.get(step, True), raw.get(step, True) is True, "true")
    resample = raw.get("resample", BICUBIC)
    need("resample", resample, resample == BICUBIC, f"{BICUBIC} (bicubic)")
    for name, sides in (("size", ("shortest_edge",)), ("crop_size", ("height", "width"))):
        size = raw.get(name)
        size = {side: size for side in sides} if is_whole(size) else size
        fits = isinstance(size, dict) and all(size.get(side) == image_size for side in sides)
        need(name, size, fits, f"{image_size}, the image_size of vision_config")
    factor = raw.get("rescale_factor", 1 / 255)
    need("rescale_factor", factor, factor == 1 / 255, "1/255")
    found = {}
    for name, default in (("mean", CLIP_MEAN), ("std", CLIP_STD)):
        values = raw.get(f"image_{name}", default)
        fits = isinstance(values, (list, tuple)) and len(values) == 3
        fits = fits and all(is_number(value, 0, 1) for value in values)
        need(f"image_{name}", values, fits and (name == "mean" or min(values) > 0), "three, 0 to 1")
        found[name] = tuple(map(float, values))
    return found


def need(name: str, value: Any, fits: bool, accepted: str) -> None:
    """Raise CheckpointError unless the value fits."""
    if not fits:
        raise CheckpointError(f"{name}: got {shown(value)}; accepted: {accepted}")
