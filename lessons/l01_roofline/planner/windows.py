"""Models in which some layers see a window of keys: their shapes, and what a sequence keeps.

    python -m lessons.l01_roofline --model gemma-3-27b --gpu h200 --context 32768

An engine that keeps layers in groups gives a window's pages back (lesson 27). Without groups all
layers keep all tokens: replace(shape, num_window_layers=0).

Sources: config.json of each publisher; `published` as its model card or paper states it. Mistral 7B
had its window in v0.1 alone.
"""

from lessons.l01_roofline.planner.models import ModelShape
from lessons.toolbox.model.window_groups import groups_of

BLOCK_SIZE = 16  # tokens of a page
_SHAPES = (
    ModelShape(
        "gpt-oss-120b",
        "116.83B",
        "arXiv 2508.10925, table 1",
        2880,
        36,
        64,
        8,
        64,
        2880,
        201088,
        num_experts=128,
        num_experts_per_tok=4,
        moe_intermediate_size=2880,
        num_window_layers=18,
        window=128,
    ),
    ModelShape(
        "gpt-oss-20b",
        "20.91B",
        "arXiv 2508.10925, table 1",
        2880,
        24,
        64,
        8,
        64,
        2880,
        201088,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=2880,
        num_window_layers=12,
        window=128,
    ),
    ModelShape(
        "gemma-3-27b",
        "27.0B",
        "arXiv 2503.19786, table 1, without its eyes",
        5376,
        62,
        32,
        16,
        128,
        21504,
        262208,
        tie_word_embeddings=True,
        num_window_layers=52,
        window=1024,
    ),
    ModelShape(
        "gemma-3-1b",
        "1.0B",
        "arXiv 2503.19786, table 1",
        1152,
        26,
        4,
        1,
        256,
        6912,
        262144,
        tie_word_embeddings=True,
        num_window_layers=22,
        window=512,
    ),
    ModelShape(
        "mistral-7b-v0.1",
        "7.24B",
        "arXiv 2310.06825; Hugging Face page of v0.1",
        4096,
        32,
        32,
        8,
        128,
        14336,
        32000,
        num_window_layers=32,
        window=4096,
    ),
)
WINDOWED: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}


def pages_of_sequence(model: ModelShape, context: int) -> int:
    """Pages of a sequence of so many tokens, all groups together, in a step that adds one."""
    return groups_of(model.layer_windows).most_pages(context, BLOCK_SIZE, 1)


def page_values(model: ModelShape, block_size: int = BLOCK_SIZE) -> int:
    """Numbers that a page holds: K and V of block_size tokens in the layers of a group."""
    each = model.kv_values_per_token // model.num_kv_layers
    return block_size * groups_of(model.layer_windows).layers_each * each


def values_of_sequence(model: ModelShape, context: int) -> int:
    """Numbers that a sequence of so many tokens keeps in the cache."""
    if not model.num_window_layers:
        return model.kv_values_per_token * context
    return pages_of_sequence(model, context) * page_values(model)


def values_of_step(model: ModelShape, tokens: int) -> int:
    """Numbers that the tokens of one pass take on top in groups with a window, until the pass has
    ended: they are written before any of them is out of sight.
    """
    if not model.num_window_layers:
        return 0
    groups = groups_of(model.layer_windows)
    count = sum(window is not None for window in groups.windows)
    return count * -(-tokens // BLOCK_SIZE) * page_values(model)
