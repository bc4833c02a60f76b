"""Exercises of lesson 13: tokens that still run, a cache of hashed blocks, a radix tree that splits
an edge.
"""

from collections.abc import Sequence

from lessons.l13_prefix_caching.optimized import Node, Tokens
from lessons.toolbox.exercises.exercise import exercise


@exercise(
    "13.1", "Predict: which tokens still run, and two rates of hits", minutes=15, difficulty=1
)
def hits_of(requests: list[tuple[int, int]], block_size: int) -> tuple[int, float, float]:
    """(prompt tokens that run, rate of hits per request, rate of hits per token).

    requests: (tokens of the prompt, how many of its first tokens an earlier prompt had too), one
    pair for each request, one request at least. Everything computed earlier is still in the cache,
    in whole blocks of block_size tokens. A request whose prompt is known to the end still runs its
    last token, because its logits were not stored; and it runs the whole block around it, because
    only whole blocks are reused. A request has a hit if at least one of its
    blocks is reused. The rate per token is the share of all prompt tokens that do not run. Errors:
    none to raise.

    Example, blocks of 16: [(40, 0), (40, 20), (40, 40), (10, 8)]
        the four run 40, 40 - 16 = 24, 40 - 32 = 8 and 10 tokens        -> 82
        the second and third have a hit: 2 of 4 requests, 0.5; and 16 + 32 of 130 tokens, 0.369
    Write down your guess first: a prompt of 1000 tokens comes twice. How many run the second time?
    And how many if it has 1008 tokens, 63 blocks?
    """
    # SOLUTION
    run = hits = total = 0
    for length, same in requests:
        known = min(same, length - 1) // block_size * block_size
        run += length - known
        hits += known > 0
        total += length
    return run, hits / len(requests), 1 - run / total
    # END


@exercise(
    "13.2",
    "A prefix cache of hashed blocks",
    minutes=35,
    difficulty=2,
    replaces="lessons.l13_prefix_caching.naive:HashBlocks",
)
class HashBlocks:
    """Remembers which block holds which tokens after which prefix. It owns no block.

    A block of block_size tokens is known by its tokens and all tokens before them. Blocks are
    numbers. The caller sees to it that a block is forgotten before it is given to another sequence,
    and that the blocks after a block are forgotten before it.

    match(tokens): the blocks of the longest known beginning, in order. Whole blocks only, and at
        least one token must be left over. tokens: one or more ids of any size. Remembers nothing.
    insert(tokens, blocks): remember that blocks[i] holds the i-th whole block of tokens. What is
        known already stays as it is. A part of a block at the end is ignored; so are blocks
        after the last whole one. Returns the blocks that are remembered for the whole blocks,
        in order: the earlier one where a block came first.
    forget(block): the block is given to another prompt now. It may never have been remembered.
    block in cache: whether it is remembered.

    Two different beginnings must never be taken for one another: that would be another user's text.
    The arguments stay as they were. Errors: none to raise. Aim: each call reads each token at most
    four times, however long the prompt is. So a block's name cannot be made from all tokens before
    it; make it from the name before it.

    Example, block_size 2:
        insert([1, 2, 3, 4, 5], [7, 8, 9])   -> [7, 8]     token 5 fills no block
        insert([1, 2, 6, 6], [4, 5])         -> [7, 5]     [1, 2] was known
        match([1, 2, 3, 4])                  -> [7]        [7, 8] would leave no token
        match([1, 2, 3, 4, 0])               -> [7, 8]
        match([3, 4, 0])                     -> []         [3, 4] was known after [1, 2] only
        forget(8);  match([1, 2, 3, 4, 0])   -> [7]
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        # SOLUTION
        self.block_of: dict[int, int] = {}  # the number of a beginning -> the block that ends it
        self.name_of: dict[int, tuple] = {}
        self.number_of: dict[tuple, int] = {}
        self.count = 0
        # END

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks of the longest known beginning that leaves a token over."""
        # SOLUTION
        # A name is the block before and the own tokens: exact, so it needs no hash function of ours
        # (a dictionary hashes it), and it holds as long as the block before is remembered.
        found, before = [], None
        for start in range(
            0, (len(tokens) - 1) // self.block_size * self.block_size, self.block_size
        ):
            before = self.number_of.get((before, *tokens[start : start + self.block_size]))
            if before is None:
                break
            found.append(self.block_of[before])
        return found
        # END

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Remember whole blocks. Returns the blocks that are remembered for them."""
        # SOLUTION
        known, before = [], None
        for index, block in zip(range(len(tokens) // self.block_size), blocks):
            own = tokens[index * self.block_size : (index + 1) * self.block_size]
            name = (before, *own)
            if name not in self.number_of:
                # a new number, because a block may come back with other tokens
                self.count += 1
                self.number_of[name] = self.count
                self.block_of[self.count], self.name_of[block] = block, name
            before = self.number_of[name]
            known.append(self.block_of[before])
        return known
        # END

    def forget(self, block: int) -> None:
        """The block is given to another prompt now."""
        # SOLUTION
        if block in self.name_of:
            del self.block_of[self.number_of.pop(self.name_of.pop(block))]
        # END

    def __contains__(self, block: int) -> bool:
        # SOLUTION
        return block in self.name_of
        # END


@exercise("13.3", "A radix tree splits an edge", minutes=45, difficulty=3)
def insert(root: Node, keys: list[Tokens], blocks: list[int]) -> list[int]:
    """Remember that blocks[i] holds the tokens keys[i] after keys[:i]. Returns the blocks that are
    remembered for all keys, in order: an earlier one where a block came first.

    A Node has `keys` and `blocks`, lists of equal length: the edge that leads into it, keys[i]
    being the tokens of blocks[i]; `children`: {first key of a child's edge: child}; `parent`. The
    root has no edge and no parent. Change the tree in place. keys and blocks: equal lengths, 0 or
    more; they stay as they were. Errors: none to raise.

    The tree is a radix tree: an edge is as long as it can be. So a node other than the root has no
    child or at least two. A prompt that ends inside an edge changes nothing. One that goes on where
    a leaf ends makes the leaf's edge longer. Only a prompt that differs in the middle of an edge
    cuts it: the node keeps what is common, and two children get what differs. `cut` below is a
    helper, which you may leave out.

    Example, each letter a key of one block:
        insert(root, [a, b, c], [0, 1, 2])     root - (a b c: 0 1 2)
        insert(root, [a, b], [5, 6])           -> [0, 1], and nothing changes
        insert(root, [a, x], [7, 8])           -> [0, 8]: root - (a: 0) - (b c: 1 2)
                                                                       - (x: 8)
        insert(root, [a, x, y], [0, 8, 9])     -> [0, 8, 9]: the leaf is (x y: 8 9) now
    """
    # SOLUTION
    node, found = root, []
    while len(found) < len(keys):
        child = node.children.get(keys[len(found)])
        if child is None:
            break
        rest, same = keys[len(found) :], 0
        while same < min(len(rest), len(child.keys)) and rest[same] == child.keys[same]:
            same += 1
        found += child.blocks[:same]
        if same < len(child.keys):
            if len(found) < len(keys):
                cut(child, same)
                node = child
            break
        node = child
    new, new_blocks = list(keys[len(found) :]), list(blocks[len(found) :])
    if new and node is not root and not node.children:
        node.keys += new
        node.blocks += new_blocks
    elif new:
        node.children[new[0]] = Node(new, new_blocks, {}, node)
    return found + new_blocks
    # END


def cut(node: Node, at: int) -> None:
    """The node keeps the first `at` keys of its edge; a new child gets the rest, and the
    children.
    """
    # SOLUTION 13.3
    below = Node(node.keys[at:], node.blocks[at:], node.children, node)
    for child in below.children.values():
        child.parent = below
    node.keys, node.blocks = node.keys[:at], node.blocks[:at]
    node.children = {below.keys[0]: below}
    # END
