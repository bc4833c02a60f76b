"""A prefix cache as a radix tree: an edge is a run of blocks that no prompt has split yet.

Hashing looks at every block of every prompt, and every block costs a hash. The tree compares
tokens, and one step down takes a whole run. It also knows what follows a prefix, which a scheduler
can use to run requests together that share one.

Source: Zheng et al. 2024, SGLang, section 3 (RadixAttention).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lessons.l13_prefix_caching.cache import PrefixCache

Tokens = tuple[int, ...]
Keys = list[Tokens]


@dataclass(eq=False)
class Node:
    """The edge into a node, and the nodes below. keys[i]: the tokens of blocks[i]."""

    keys: Keys = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    children: dict[Tokens, "Node"] = field(default_factory=dict)  # by the first key of their edge
    parent: "Node | None" = None


class RadixTree(PrefixCache):
    """Prompts that share a beginning share the path from the root."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.root = Node()
        self.node_of: dict[int, Node] = {}  # block -> the node whose edge holds it

    def match(self, tokens: Sequence[int]) -> list[int]:
        # - 1, because the last token has to be computed: its logits were not stored
        whole_blocks = (len(tokens) - 1) // self.block_size
        keys = self.keys(tokens, whole_blocks)
        _, _, found = self.walk(keys)
        return found

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        whole_blocks = len(tokens) // self.block_size
        keys = self.keys(tokens, whole_blocks)
        node, on_edge, known = self.walk(keys)
        new = slice(len(known), whole_blocks)
        if len(known) < whole_blocks:
            if on_edge < len(node.keys):
                self.split(node, on_edge)
            self.append(node, keys[new], blocks[new])
        return known + list(blocks[new])

    def forget(self, block: int) -> None:
        node = self.node_of.pop(block, None)
        if node is None:
            return
        # Always the end of a leaf, by the two laws of cache.py.
        assert not node.children, f"block {block} has others after it"
        assert node.blocks[-1] == block, f"block {block} has others after it"
        first = node.keys[0]
        node.keys.pop()
        node.blocks.pop()
        if not node.blocks:
            del node.parent.children[first]

    def __contains__(self, block: int) -> bool:
        return block in self.node_of

    def keys(self, tokens: Sequence[int], count: int) -> Keys:
        """The tokens of each of the first `count` blocks."""
        size = self.block_size
        starts = range(0, count * size, size)
        return [tuple(tokens[start : start + size]) for start in starts]

    def walk(self, keys: Keys) -> tuple[Node, int, list[int]]:
        """Down the tree as far as the keys go: the last node, how much of its edge fits, and the
        blocks on the way.
        """
        node = self.root
        on_edge = 0
        found = []
        while on_edge == len(node.keys) and len(found) < len(keys):
            rest = keys[len(found) :]
            child = node.children.get(rest[0])
            if child is None:
                break
            node = child
            on_edge = common_length(node.keys, rest)
            found += node.blocks[:on_edge]
        return node, on_edge, found

    def append(self, node: Node, keys: Keys, blocks: Sequence[int]) -> None:
        """Blocks after the end of a node's edge: a leaf's edge grows, others get a child."""
        if node.children or node is self.root:
            child = Node(parent=node)
            node.children[keys[0]] = child
            node = child
        node.keys += keys
        node.blocks += blocks
        self.own(node, blocks)

    def split(self, node: Node, at: int) -> None:
        """Cut a node's edge in two: the node keeps the first `at` blocks, a child gets the rest."""
        below = Node(parent=node)
        below.keys = node.keys[at:]
        below.blocks = node.blocks[at:]
        below.children = node.children
        for child in below.children.values():
            child.parent = below
        self.own(below, below.blocks)
        node.keys = node.keys[:at]
        node.blocks = node.blocks[:at]
        node.children = {below.keys[0]: below}

    def own(self, node: Node, blocks: Sequence[int]) -> None:
        """Note whose edge holds these blocks."""
        for block in blocks:
            self.node_of[block] = node


def common_length(a: Keys, b: Keys) -> int:
    """How many keys are the same, from the first on."""
    count = 0
    for one, other in zip(a, b):
        if one != other:
            break
        count += 1
    return count
