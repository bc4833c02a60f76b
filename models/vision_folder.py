"""The files of models/tiny-vision beside its weights: LLaVA's layout, as transformers writes it.

The decoder is models/tiny, so its weights are not stored again: text_config names it, and
`python -m reference.vision.checkpoint models/tiny-vision build/tiny-vision` writes the whole folder
that LlavaForConditionalGeneration loads.
"""

import json

from safetensors.torch import save_file
from transformers import AutoTokenizer

from models.tokenizer import FOLDERS, HERE
from reference.vision.checkpoint import EYES
from reference.vision.config import VisionConfig
from reference.vision.tower import Eyes

FOLDER = HERE / "tiny-vision"
IMAGE_TOKEN = "<image>"
# The byte 0xFF as byte-level BPE writes it. It occurs in no UTF-8 text, so its token is free: the
# decoder needs no new row, and every other text keeps its tokens.
FREE_LETTER = "ÿ"
QUESTIONS = ("What is it?", "What do you see?", "Describe the picture.", "Read it to me.")
# A question is a comment, and the answer a line of code, because that is what this decoder knows.
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- message.content + eos_token + "\\n" }}
    {%- else %}
        {{- "# " + message.content | replace("\\n", "\\n# ") + "\\n" }}
    {%- endif %}
{%- endfor %}
"""


def free_token() -> int:
    """The id that becomes the image token's."""
    tokenizer = json.loads((FOLDERS["tiny"] / "tokenizer.json").read_text("utf-8"))
    return tokenizer["model"]["vocab"][FREE_LETTER]


VISION = VisionConfig(
    hidden_size=192,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=3,
    layer_norm_eps=1e-5,
    image_size=32,
    patch_size=8,
    hidden_act="quick_gelu",
    feature_layer=4,
    keeps_class=False,
    projector_bias=True,
    text_size=384,
    image_token_id=free_token(),
)


def vision_tokenizer():
    """models/tiny's tokenizer, in which the free token is called <image>."""
    return AutoTokenizer.from_pretrained(FOLDER)


def prompt_of(question: str) -> str:
    """A question about one picture, as the chat template writes it."""
    return f"# {IMAGE_TOKEN}\n# {question}\n"


def prompt_ids(tokenizer, question: str) -> list[int]:
    """Its tokens, with all places of the picture."""
    text = prompt_of(question).replace(IMAGE_TOKEN, IMAGE_TOKEN * VISION.tokens_per_image)
    return tokenizer(text)["input_ids"]


def write_json(name: str, content: dict) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (FOLDER / name).write_text(text, encoding="utf-8")


def write_tokenizer() -> None:
    """tokenizer.json and its config."""
    tokenizer = json.loads((FOLDERS["tiny"] / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    renamed = {IMAGE_TOKEN if word == FREE_LETTER else word: id for word, id in vocab.items()}
    tokenizer["model"]["vocab"] = renamed
    special = tokenizer["added_tokens"][0] | {"id": vocab[FREE_LETTER], "content": IMAGE_TOKEN}
    tokenizer["added_tokens"].append(special)
    write_json("tokenizer.json", tokenizer)
    config = json.loads((FOLDERS["tiny"] / "tokenizer_config.json").read_text("utf-8"))
    more = {"image_token": IMAGE_TOKEN, "processor_class": "LlavaProcessor"}
    write_json("tokenizer_config.json", config | {"extra_special_tokens": {}} | more)
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def write_configs() -> None:
    """config.json, the image processor's and the processor's."""
    text = json.loads((FOLDERS["tiny"] / "config.json").read_text("utf-8"))
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": VISION.hidden_size,
        "intermediate_size": VISION.intermediate_size,
        "num_hidden_layers": VISION.num_hidden_layers,
        "num_attention_heads": VISION.num_attention_heads,
        "image_size": VISION.image_size,
        "patch_size": VISION.patch_size,
        "hidden_act": VISION.hidden_act,
        "layer_norm_eps": VISION.layer_norm_eps,
        "projection_dim": VISION.hidden_size,
    }
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "bfloat16",
        "image_token_index": VISION.image_token_id,
        "image_seq_length": VISION.tokens_per_image,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
        "text_config": {"_name_or_path": "models/tiny", **text},
        "vision_config": vision,
    }
    write_json("config.json", config)
    size = {"height": VISION.image_size, "width": VISION.image_size}
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": VISION.image_size},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": size,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(VISION.mean),
        "image_std": list(VISION.std),
        "processor_class": "LlavaProcessor",
    }
    write_json("preprocessor_config.json", processor)
    own = {
        "processor_class": "LlavaProcessor",
        "patch_size": VISION.patch_size,
        "vision_feature_select_strategy": "default",
        "image_token": IMAGE_TOKEN,
        "num_additional_image_tokens": 1,  # the class token, which "default" takes away again
    }
    write_json("processor_config.json", own)
    text = (FOLDERS["tiny"] / "generation_config.json").read_text("utf-8")
    (FOLDER / "generation_config.json").write_text(text, encoding="utf-8")


def write_files() -> None:
    """All files but the weights."""
    FOLDER.mkdir(exist_ok=True)
    write_tokenizer()
    write_configs()


def save_folder(eyes: Eyes) -> None:
    """The weights, under the names of LLaVA's checkpoints, in bfloat16."""
    named = {}
    for name, tensor in eyes.state_dict().items():
        tower = "vision_tower."
        key = name.replace(tower, f"{tower}vision_model.") if name.startswith(tower) else name
        named[key] = tensor.detach().bfloat16().contiguous()
    save_file(named, FOLDER / EYES, {"format": "pt"})
