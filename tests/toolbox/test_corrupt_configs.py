"""A config.json with wrong values gives transformers' logits, or one short line."""

from collections import Counter

import pytest

from lessons.toolbox.model.checkpoint import load_config
from tests.toolbox.corruptions import (
    CONFIGS,
    corrupted,
    outcome,
    save_weights,
    write_config,
)

TRIES, TRIES_OF_ALL = 10, 200  # of each family

pytestmark = [
    pytest.mark.usefixtures("seed"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
]


@pytest.mark.parametrize("model_type", CONFIGS)
def test_wrong_values_give_the_same_logits_or_one_line(model_type, tmp_path, request):
    raw, found = CONFIGS[model_type], Counter()
    write_config(tmp_path, raw)
    save_weights(load_config(tmp_path), tmp_path)
    assert outcome(raw, tmp_path) == "equal"
    for _ in range(TRIES_OF_ALL if request.config.getoption("--all") else TRIES):
        found[outcome(corrupted(raw), tmp_path)] += 1
    print(dict(found))
    assert found["equal"] + found["refused"], "both must happen, or nothing was tried"


@pytest.mark.parametrize(
    "model_type, key",
    [
        ("deepseek_v3", "hidden_size"),
        ("deepseek_v3", "moe_intermediate_size"),
        ("mixtral", "intermediate_size"),
    ],
)
def test_experts_of_one_row_or_column_give_the_same_logits(model_type, key, tmp_path):
    raw = CONFIGS[model_type]
    write_config(tmp_path, raw)
    save_weights(load_config(tmp_path), tmp_path)
    assert outcome(raw | {key: 1}, tmp_path) == "equal"
