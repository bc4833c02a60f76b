"""Layers in groups by how far back they look, so that each group's pages can be given back.

    groups = groups_of((128, None) * 18)     # gpt-oss-120b: 18 layers with a window, 18 without
    groups.layers_each                       # 18: a page holds the K and V of 18 layers
    groups.most_pages(32768, 16, 2048)       # pages that one sequence needs at most

A page is a number of tokens in the layers of one group. All groups have pages of one size, so one
pool serves them all. A group that has fewer layers than the others leaves a part of its pages
empty.

Source of the rule for the size: vLLM, vllm/v1/core/kv_cache_utils.py,
_get_kv_cache_groups_uniform_page_size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# The largest kind is one group, too, while it has fewer layers than this times the smallest's.
AS_ONE_GROUP = 1.5


@dataclass(frozen=True)
class WindowGroups:
    """layers: of each group, those of the model. windows: of each group, how many keys a query
    sees, itself included; None: all. layers_each: how many layers a page has room for.
    """

    layers: tuple[tuple[int, ...], ...]
    windows: tuple[int | None, ...]
    layers_each: int

    @cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """{layer: (its group, its place in a page)}."""
        found = {}
        for group, layers in enumerate(self.layers):
            found |= {layer: (group, at) for at, layer in enumerate(layers)}
        return found

    @property
    def has_full(self) -> bool:
        """Whether the first group keeps everything."""
        return self.windows[0] is None

    def pages_at_rest(self, held: int, block_size: int) -> int:
        """Pages of a sequence that holds so many tokens, between two steps."""
        pages = blocks_for(held, block_size)
        return sum(pages - first_page(window, held, block_size) for window in self.windows)

    def most_pages(self, tokens: int, block_size: int, most_tokens: int) -> int:
        """Pages that a sequence needs at most on its way to so many tokens. most_tokens: of a step,
        because a step writes all of its tokens before any of them is out of sight.
        """
        return sum(
            most_of_group(window, 0, tokens, block_size, most_tokens) for window in self.windows
        )


def groups_of(windows: Sequence[int | None]) -> WindowGroups:
    """The groups of a model. windows: of each layer. Full layers come first."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    each, largest = min(counts), max(counts)
    if largest < AS_ONE_GROUP * each:
        each = largest  # a few empty places cost less than a second group of the larger kind
    layers, of_group = [], []
    for window in sorted(kinds, key=lambda window: (window is not None, window or 0)):
        count = -(-len(kinds[window]) // each)
        layers += [tuple(kinds[window][at::count]) for at in range(count)]
        of_group += [window] * count
    return WindowGroups(tuple(layers), tuple(of_group), each)


def blocks_for(tokens: int, block_size: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // block_size)


def first_page(window: int | None, held: int, block_size: int) -> int:
    """The first page that the next token of a sequence still sees. held: tokens that it has, so the
    next one's position; it sees the keys from position held - window + 1 on.
    """
    return 0 if window is None else max(0, held - window + 1) // block_size


def most_of_group(
    window: int | None, held: int, tokens: int, block_size: int, most_tokens: int
) -> int:
    """Pages that a sequence owns at most in a group while it goes from `held` tokens to `tokens`,
    at most most_tokens of them in a step.
    """
    pages = blocks_for(tokens, block_size) - first_page(window, held, block_size)
    if window is None:
        return pages
    # A step sees this many positions, and the first of them may be the last of its page.
    seen = window - 1 + min(most_tokens, max(1, tokens - held))
    return min(pages, (seen + block_size - 2) // block_size + 1)
