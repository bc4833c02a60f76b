"""Every key that transformers knows, changed: transformers' logits, or a refusal.

The keys are no list of ours: they are the fields of transformers' config class, its aliases, and
whatever the sources of its model and of its RoPE read. So a key that a new version of transformers
adds is tried as well.
"""

import dataclasses
import importlib
import inspect
import random
import re
from collections import Counter

import pytest
from transformers import AutoConfig, modeling_rope_utils

from lessons.toolbox.model import config_json
from tests.toolbox.corruptions import CONFIGS, outcome, save_weights, write_config

pytestmark = [
    pytest.mark.usefixtures("seed"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
]

SOME = {  # plausible values of keys whose kind does not suggest any
    "layer_types": [["sliding_attention"] * 2, ["full_attention"] * 2],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    # not 1, because transformers saves such a matrix of an expert as a vector
    "moe_intermediate_size": [2, 7, 16],
    "intermediate_size": [2, 7, 16],  # an expert's, in Mixtral
    "hidden_act": ["gelu", "relu", "silu"],
    "rope_parameters": [{"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}, {}],
    "short_factor": [[1.5, 2.0]],
    "long_factor": [[1.5, 2.0]],
    "rope_type": ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"],
}


def top_keys(model_type: str) -> dict:
    """The keys that may be in a config.json: key -> transformers' default."""
    kind = type(AutoConfig.for_model(model_type))
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    modeling = kind.__module__.replace("configuration_", "modeling_")
    source = inspect.getsource(importlib.import_module(modeling))
    read = re.findall(r"""\bconfig\.([a-z]\w*)|getattr\((?:self\.)?config, ["'](\w+)""", source)
    named = {*kind.attribute_map, *("".join(pair) for pair in read)}
    return dict.fromkeys(sorted(named)) | defaults


def rope_keys() -> dict:
    """The keys that may be in its RoPE object: key -> None."""
    source = inspect.getsource(modeling_rope_utils)
    read = re.findall(r"""rope_parameters\w*(?:\.get\(|\[)["'](\w+)""", source)
    return dict.fromkeys(sorted({*modeling_rope_utils.RopeParameters.__annotations__, *read}))


def others(key: str, value) -> list:
    """Plausible values of a key that has this one."""
    if key in SOME:
        return SOME[key]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, max(1, value // 2), 1]
    if isinstance(value, float):
        return [value / 2, 1.5 * value + 0.25]
    return [True, False, 2, 4, 0.5, 2.0]


def changed_configs(model_type: str) -> list[tuple[str, dict]]:
    """(key, config.json with another value of it), for every key and every plausible value."""
    raw, found = CONFIGS[model_type], []
    for key, default in top_keys(model_type).items():
        for value in others(key, raw.get(key, default)):
            found.append((key, raw | {key: value}))
    name = "rope_parameters" if "rope_parameters" in raw else "rope_scaling"
    for rope_type in SOME["rope_type"][1:]:
        rope = {"rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 16}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
        for key in rope_keys():
            for value in others(key, rope.get(key)):
                found.append((f"{rope_type} {key}", raw | {name: rope | {key: value}}))
    return found


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_changed_key_changes_what_transformers_changes(model_type, tmp_path, request):
    write_config(tmp_path, CONFIGS[model_type])
    save_weights(config_json.read_config(tmp_path), tmp_path)
    assert outcome(CONFIGS[model_type], tmp_path) == "equal"
    cases, found = changed_configs(model_type), Counter()
    random.shuffle(cases)
    at_least = len(cases) if request.config.getoption("--all") else 20
    for tried, (key, raw) in enumerate(cases):
        if tried >= at_least and found["equal"] and found["refused"]:
            break
        print(key, raw.get(key), raw.get("rope_scaling"))
        found[outcome(raw, tmp_path)] += 1
    assert found["equal"] and found["refused"], "both must happen, or nothing was tried"


@pytest.mark.parametrize(
    "model_type, changes",
    [
        ("llama", {"rope_theta": 500.0}),
        ("qwen2", {"sliding_window": 3}),
        ("deepseek_v3", {"n_group": 4}),
    ],
)
def test_a_key_that_is_ignored_is_noticed(model_type, changes, tmp_path, monkeypatch):
    """A reader that drops the key in question gives other logits than transformers."""
    read = config_json._model_config

    def forgetful(raw, *rest):
        return read(raw | {key: CONFIGS[model_type][key] for key in changes}, *rest)

    monkeypatch.setattr(config_json, "_model_config", forgetful)
    with pytest.raises(AssertionError):
        for _ in range(10):  # because groups of experts do not matter to every random input
            outcome(CONFIGS[model_type] | changes, tmp_path)
