"""From config.json to ModelConfig.

transformers reads the file. It knows every family's defaults, the types of the values, and how RoPE
was written before version 5 (`rope_scaling`, `rope_theta`) and since (`rope_parameters`). This
module checks the numbers, refuses by name each key that the decoders do not read and that could
change what the model computes, and lets families.py map the rest.
"""

import json
from pathlib import Path
from typing import Any

from lessons.toolbox.model.arguments import one_line, shown
from lessons.toolbox.model.config import ModelConfig, RopeScaling
from lessons.toolbox.model.families import FAMILIES, LACKING, Family, of_decoder, with_method

# Fields of ModelConfig that every config.json must hold. transformers has a default for each, but
# the default of another checkpoint gives a model that runs and answers wrongly. Lists of keys are
# strings here, with blanks between the keys.
NEEDED = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    max_position_embeddings"""
OPTIONAL = "num_key_value_heads tie_word_embeddings"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")

# The largest number that a key may hold, and that of keys that are not named here. No published
# model comes near, and larger ones would fill the memory before config and weights are compared.
LARGEST = {"rope_theta": 2**53, "rope_local_base_freq": 2**53, "num_hidden_layers": 10_000}
LENGTHS = ("max_position_embeddings", "original_max_position_embeddings", "sliding_window")
LARGEST |= dict.fromkeys(LENGTHS, 2**24)
LARGEST_SIZE = 2**19
# DeepSeek's mscale 0 means that there is none
MAY_BE_ZERO = ("first_k_dense_replace", "max_window_layers", "mscale", "mscale_all_dim")

# What each RoPE type reads from its object, beside the type and rope_theta.
LLAMA3 = "factor original_max_position_embeddings low_freq_factor high_freq_factor"
YARN = """factor original_max_position_embeddings beta_fast beta_slow attention_factor
    mscale mscale_all_dim"""
LONGROPE = "factor original_max_position_embeddings attention_factor short_factor long_factor"
ROPE_KEYS = {"default": "", "linear": "factor", "llama3": LLAMA3, "yarn": f"{YARN} truncate"}
ROPE_KEYS["longrope"] = LONGROPE
# Numbers whose type transformers does not check.
UNTYPED = f"head_dim rope_theta {LLAMA3} {YARN}".split()

# Keys that change nothing at inference, whatever they say: where the file comes from, how it was
# trained, which task head it had, how a library keeps it in memory.
HARMLESS = """architectures model_type auto_map transformers_version torch_dtype dtype
    is_llama_config transformers.js_config unsloth_version unsloth_fixed finetuned
    initializer_range pretraining_tp gradient_checkpointing neftune_noise_alpha
    aux_loss_alpha seq_aux ep_size output_router_logits router_aux_loss_coef
    num_nextn_predict_layers num_mtp_layers pard_token spd_type
    max_sequence_length model_max_length
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    tokenizer_class prefix return_dict is_decoder torchscript use_bfloat16 tf_legacy_loss"""
HARMLESS_ENDS = ("_token_id", "_dropout", "_dropout_prob", "_pdrop")
# Keys that transformers' class may not know, and the value at which they change nothing.
NEUTRAL = dict(
    is_causal=True,
    partial_rotary_factor=1,
    rope_interleaved=False,
    use_mrope=False,
    use_sliding_window=False,
    attention_bias=False,
    mlp_bias=False,
    add_cross_attention=False,
    tie_encoder_decoder=False,
    pruned_heads={},
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message is one short line that says what is wrong and
    what would be right.
    """

    def __init__(self, message: str):
        super().__init__(one_line(message))  # because names in a file may be a megabyte long


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises CheckpointError that names the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} holds no {file.name}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: malformed JSON or UTF-8
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


# where older files of ModelOpt and of AutoGPTQ alone say how the weights are quantized
BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}


def read_config(folder: Path, part: str | None = None) -> ModelConfig:
    """Shape of the checkpoint in `folder`, from its config.json; stop tokens also from
    generation_config.json. part: the key under which the decoder's own config stands, if the file
    describes more than a decoder (a LLaVA's "text_config"; a Llama 4's is found without it).

    Raises CheckpointError, one line: malformed JSON, a key that is missing or of the wrong kind
    (named), an architecture, RoPE type or key that the decoders do not have, sizes that do not fit.
    """
    file = folder / "config.json"
    raw = read_json(file)
    for name, method in BESIDE.items():
        if raw.get("quantization_config") is None and (folder / name).exists():
            beside = read_json(folder / name)
            said = beside.get("quantization", beside)
            raw["quantization_config"] = with_method(said, method)
    raw = of_decoder(raw, part)
    eos_token_ids = dict.fromkeys(_eos_token_ids(file, raw))
    generation = folder / "generation_config.json"
    # chat checkpoints often name <|im_end|> or <|eot_id|> in only one of the files
    if generation.exists():
        eos_token_ids |= dict.fromkeys(_eos_token_ids(generation, read_json(generation)))
    try:
        return _model_config(raw, tuple(eos_token_ids))
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _model_config(raw: dict[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The content of config.json as ModelConfig. Raises ValueError that names the key."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        has = LACKING.get(model_type) if isinstance(model_type, str) else None
        why = "" if has is None else f", because it has {has}"
        given = f"'model_type' {shown(model_type)} is not supported{why}"
        raise ValueError(f"{given}; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    raw = family.reworded(_with_one_name(raw, family.also_called or {}))
    needed = f"{NEEDED} {family.eps} {family.needs}".split()
    for key in needed:
        if key not in raw:
            raise ValueError(f"the key '{key}' is missing")
    read = {*needed, *OPTIONAL.split(), *ROPE, *family.reads.split(), "quantization_config"}
    known = {key: value for key, value in raw.items() if key in read}
    known.pop("quantization_config", None)  # because transformers would look for its library
    for name in ROPE:
        if known.get(name) is None:
            known.pop(name, None)
        elif name != "rope_theta":
            known[name] = _checked_ropes(name, known[name], family)
    _check_numbers(known, may_be_zero=(*MAY_BE_ZERO, *family.may_be_zero.split()))
    config = _transformers_config(family.read_as or model_type, known)
    _refuse_unread(raw, read, vars(config), NEUTRAL | (family.fixed or {}))

    head_dim = getattr(config, "head_dim", None)  # Qwen2's class does not know the key
    if head_dim is None and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size ({config.hidden_size}) must be a multiple of num_attention_heads "
            f"({config.num_attention_heads}), or the key 'head_dim' be given"
        )
    fields = {key: getattr(config, key) for key in NEEDED.split()}
    fields |= dict(
        model_type=model_type,
        rms_norm_eps=getattr(config, family.eps),
        num_key_value_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        rope_theta=_rope_of(config)["rope_theta"],
        rope_scaling=_rope_scaling(config),
        tie_word_embeddings=config.tie_word_embeddings,
        eos_token_ids=eos_token_ids,
        quantization_config=raw.get("quantization_config") or None,
    )
    return ModelConfig(**fields | family.fields(config))


def _with_one_name(raw: dict[str, Any], also_called: dict[str, str]) -> dict[str, Any]:
    """The file with one name for each key that has two. Raises ValueError where the two differ."""
    raw = dict(raw)
    for other, key in also_called.items():
        value = raw.pop(other, None)
        if value is not None and raw.setdefault(key, value) != value:
            given = shown(raw[key])
            raise ValueError(f"'{other}' ({shown(value)}) must be '{key}' ({given}), or be absent")
    return raw


def _transformers_config(model_type: str, known: dict[str, Any]):
    """transformers' config with the keys that we read. No code of the checkpoint runs."""
    from transformers import AutoConfig  # here, because importing transformers takes seconds

    try:
        return AutoConfig.for_model(model_type, **known)
    except Exception as error:  # because its checks raise whatever their code runs into
        reason = str(error.args[0] if isinstance(error, KeyError) else error)
        # Without which validator said it, and without its second list of the accepted types.
        raise ValueError(reason.split(":\n    ")[-1].split(" Errors: ")[0]) from error


# ---------------------------------------------------------------- what is refused


def _check_numbers(
    content: dict[str, Any], within: str = "", may_be_zero: tuple[str, ...] = MAY_BE_ZERO
) -> None:
    """Refuse numbers that no model has. transformers checks that a number stands where one must,
    but not that it is positive, and would begin to list the layers of a model with 10¹² of them.
    """
    for key, value in content.items():
        largest = LARGEST.get(key, LARGEST_SIZE)
        if type(value) in (int, float):  # not isinstance, because True is an int
            fits = 0 < value <= largest or (value == 0 and key in may_be_zero)
        else:
            fits = value is None or key not in UNTYPED
        if not fits:
            raise ValueError(
                f"'{within}{key}' must be a positive number up to {largest}, not {shown(value)}"
            )


def _checked_ropes(name: str, rope: Any, family: Family) -> dict[str, Any]:
    """The RoPE object `name`, or its objects for both kinds of layers. Refuses as
    `_checked_rope`.
    """
    # the older key holds what the layers without a window do
    if not family.rope_by_layer or name == "rope_scaling":
        return _checked_rope(name, rope, family)
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(rope, dict) or not set(rope) <= set(kinds):
        raise ValueError(f"'{name}' must hold {' and '.join(kinds)}, not {shown(rope)}")
    checked = {kind: _checked_rope(f"{name}.{kind}", rope[kind], family) for kind in rope}
    return {kind: value for kind, value in checked.items() if value}


def _checked_rope(name: str, rope: Any, family: Family) -> dict[str, Any]:
    """The RoPE object `name` without nulls. Refuses what its type does not read."""
    if not isinstance(rope, dict):
        raise ValueError(f"'{name}' must be an object or null, not {shown(rope)}")
    rope = {key: value for key, value in rope.items() if value is not None}
    rope_type = rope.get("rope_type", rope.get("type", "default"))  # `type` until 4.43
    supported = family.rope_types.split()
    if not isinstance(rope_type, str) or rope_type not in supported:
        raise ValueError(
            f"'{name}.rope_type' {shown(rope_type)} is not supported; "
            f"supported: {', '.join(supported)}"
        )
    read = {"rope_theta", "rope_type", "type", *ROPE_KEYS[rope_type].split()}
    read |= {"partial_rotary_factor"} & {*family.reads.split()}
    _refuse_unread(rope, read, {}, NEUTRAL, f"{name}.")
    _check_numbers(rope, f"{name}.")
    if type(rope.get("truncate", True)) is not bool:
        raise ValueError(f"'{name}.truncate' must be true or false, not {shown(rope['truncate'])}")
    return rope


def _refuse_unread(
    raw: dict[str, Any], read: set[str], known: dict[str, Any], neutral: dict, within: str = ""
) -> None:
    """Raise ValueError for a key that is not read and whose value could change the result.

    known: what transformers has for the family's keys, so defaults for those that are not read.
    neutral: values that change nothing, for keys that the family may not know.
    """
    from transformers import GenerationConfig

    sampling = vars(GenerationConfig())  # which the caller decides, whatever config.json says
    for key, value in raw.items():
        harmless = key in HARMLESS.split() or key in sampling or key.endswith(HARMLESS_ENDS)
        if key in read or harmless or key.startswith("_") or value is None:
            continue
        name, given = shown(within + key), shown(value)
        expected = known.get(key, neutral.get(key))
        if expected is None:
            raise ValueError(
                f"{name} is {given}, and the decoders do not read this key; remove it if it "
                f"changes nothing"
            )
        if value != expected:
            raise ValueError(f"{name} must be {shown(expected)}, not {given}")


def _eos_token_ids(file: Path, content: dict[str, Any]) -> list[int]:
    value = content.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or abs(token) >= 2**31 for token in ids):
        raise CheckpointError(
            f"{file}: 'eos_token_id' must be an integer or a list of integers, not {shown(value)}"
        )
    return ids


def _rope_of(config) -> dict[str, Any]:
    """What the layers rotate by; where they differ, those without a window."""
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def _rope_scaling(config) -> RopeScaling | None:
    rope = _rope_of(config)
    rope_type = rope["rope_type"]
    if rope_type == "default":
        return None
    fields = {key: rope[key] for key in ROPE_KEYS[rope_type].split() if key in rope}
    if rope_type == "longrope":
        original = rope["original_max_position_embeddings"]
        fields.setdefault("factor", config.max_position_embeddings / original)
        fields |= {key: tuple(fields[key]) for key in ("short_factor", "long_factor")}
    return RopeScaling(rope_type, **fields)
