"""The three adapters that are shipped: what the card says of them, and that they serve in one
batch.
"""

import json

import pytest

from lessons.l21_multi_lora.peft.adapters import check_complete, load_adapter
from models.adapter_text import HELD_OUT_TABLES, STYLES, TABLES, sql
from models.adapters_card import FIGURES, card, folder_of
from models.tokenizer import HERE
from reference import LLM, LoRARequest, SamplingParams

pytestmark = pytest.mark.skipif(
    not FIGURES.exists(), reason="NOT RUN: python -m models.adapters_card has not measured them"
)


@pytest.fixture(scope="module")
def figures():
    return json.loads(FIGURES.read_text(encoding="utf-8"))


def test_the_card_says_what_was_measured(figures):
    assert (HERE / "ADAPTERS.md").read_text(encoding="utf-8") == card(figures)


def test_each_adapter_changes_the_style_and_is_best_at_its_own(figures):
    found = figures["adapters"]
    for style in STYLES:
        losses = {name: of_styles[style]["loss"] for name, of_styles in found.items()}
        assert min(losses, key=losses.get) == style, losses
        assert found[style][style]["looks"] > found["base"][style]["looks"], style


def test_they_are_small():
    for style in STYLES:
        assert (folder_of(style) / "adapter_model.safetensors").stat().st_size < 500e3


def test_held_out_tables_are_in_no_training_text():
    assert not set(TABLES) & set(HELD_OUT_TABLES)
    words = " ".join(sql(500, seed=0)).split()
    assert not set(HELD_OUT_TABLES) & set(words)


def test_three_adapters_and_the_base_in_one_batch():
    """The same prompt for all: who answers in SQL is the adapter that learned it."""
    llm = LLM(
        "models/tiny", enable_lora=True, max_loras=3, max_lora_rank=8, num_gpu_blocks_override=64
    )
    requests = [
        LoRARequest(style, number, f"models/tiny-lora-{style}")
        for number, style in enumerate(STYLES, start=1)
    ]
    for request in requests:
        linears = llm.engine.runner.adapters.store.linears
        check_complete(request.lora_path, load_adapter(request.lora_path), linears)
    prompts = ["-- the city of all hotels with price above 40\n"] * 4
    greedy = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate(prompts, greedy, use_tqdm=False, lora_request=[None, *requests])
    base, in_sql, *_ = (output.outputs[0].text for output in outputs)
    assert in_sql.lstrip().startswith("SELECT city") and not base.lstrip().startswith("SELECT")
    assert outputs[1].lora_request is requests[0]
