"""A prefix cache as a radix tree: an edge is a run of blocks that no prompt has parted yet.

Hashing looks at every block of every prompt, and every block costs a hash. The tree compares tokens,
and one step down takes a whole run. It also knows what follows a prefix, which a scheduler can use
to run requests together that share one.

Source: Zheng et al. 2024, SGLang, section 3 (RadixAttention).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """The edge into a node, and the nodes below. keys[i]: the tokens of blocks[i]."""

    keys: list[Tokens] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    children: dict[Tokens, "Node"] = field(default_factory=dict)  # by the first key of their edge
    parent: "Node | None" = None


class RadixTree:
    """Prompts that share a beginning share the path from the root."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.root = Node()
        self.node_of: dict[int, Node] = {}  # block -> the node whose edge holds it

    def match(self, tokens: Sequence[int]) -> list[int]:
        keys = self.keys(tokens, (len(tokens) - 1) // self.block_size)
        return self.walk(keys)[2]

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        keys = self.keys(tokens, len(tokens) // self.block_size)
        node, on_edge, known = self.walk(keys)
        rest, new = keys[len(known) :], list(blocks[len(known) : len(keys)])
        if new:
            if on_edge < len(node.keys):
                self.split(node, on_edge)
            if node is not self.root and not node.children:
                node.keys += rest  # a leaf's edge grows
                node.blocks += new
            else:
                child = Node(rest, new, parent=node)
                node.children[rest[0]] = node = child
            self.node_of.update(dict.fromkeys(new, node))
        return known + new

    def forget(self, block: int) -> None:
        node = self.node_of.pop(block, None)
        if node is None:
            return
        # Always the end of a leaf, by the two laws of cache.py.
        assert not node.children and node.blocks[-1] == block, f"block {block} has others behind it"
        first = node.keys[0]
        node.keys.pop()
        node.blocks.pop()
        if not node.blocks:
            del node.parent.children[first]

    def __contains__(self, block: int) -> bool:
        return block in self.node_of

    def keys(self, tokens: Sequence[int], count: int) -> list[Tokens]:
        """The tokens of each of the first `count` blocks."""
        size = self.block_size
        return [tuple(tokens[i * size : (i + 1) * size]) for i in range(count)]

    def walk(self, keys: list[Tokens]) -> tuple[Node, int, list[int]]:
        """Down the tree as far as the keys go: the last node, how much of its edge fits, and the
        blocks on the way.
        """
        node, on_edge, found = self.root, 0, []
        while (at := len(found)) < len(keys) and on_edge == len(node.keys):
            child = node.children.get(keys[at])
            if child is None:
                break
            pairs = zip(child.keys, keys[at:])
            node, on_edge = child, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            found += child.blocks[:on_edge]
        return node, on_edge, found

    def split(self, node: Node, at: int) -> None:
        """Cut a node's edge in two: the node keeps the first `at` blocks, a child gets the rest."""
        below = Node(node.keys[at:], node.blocks[at:], node.children, node)
        for child in below.children.values():
            child.parent = below
        self.node_of.update(dict.fromkeys(below.blocks, below))
        node.keys, node.blocks = node.keys[:at], node.blocks[:at]
        node.children = {below.keys[0]: below}
