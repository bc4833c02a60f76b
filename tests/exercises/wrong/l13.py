"""Wrong answers to lesson 13's exercises: real slips and the museum, each with a hint."""

import hashlib

from lessons.l13_prefix_caching.optimized import Node
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 13.1 predict

answers.slips(
    "13.1",
    """
    partial_blocks: You reuse single tokens. Only whole blocks are kept.
    - min(same, length - 1) // block_size * block_size
    + min(same, length - 1)

    rounds_up: You count the block that is only begun. Its other tokens are another prompt's.
    - min(same, length - 1) // block_size * block_size
    + min(-(-same // block_size) * block_size, length - 1)

    nothing_runs: With every block known you run nothing. What gives the logits of the last token?
    - min(same, length - 1)
    + min(same, length)

    last_block_always_runs: You give up a block in every case. Only the block around the prompt's
        last token runs.
    - min(same, length - 1) // block_size * block_size
    + max(0, min(same, length - 1) // block_size - 1) * block_size

    a_common_token_is_a_hit: You count a hit for a common token. Without a whole block nothing is
        reused.
    - hits += known > 0
    + hits += same > 0

    only_full_hits: You count prompts that are known to the end. One block reused is a hit as well.
    - hits += known > 0
    + hits += same >= length

    mean_of_rates: You average the requests' rates, so a short prompt weighs as much as a long one.
    - run = hits = total = 0
    + run = hits = shares = 0
    - total += length
    + shares += known / length
    - 1 - run / total
    + shares / len(requests)

    share_that_runs: This is the share that runs. Hits are the rest.
    - 1 - run / total
    + run / total

    one_rate_for_both: The two rates are the same in yours. How many tokens does a hit save?
    - 1 - run / total
    + hits / len(requests)

    swapped_rates: The rate per request comes first.
    - hits / len(requests), 1 - run / total
    + 1 - run / total, hits / len(requests)
    """,
)


@answers.alternative("13.1")
def by_listing(requests, block_size):
    reused = [max(b for b in range(0, n, block_size) if b <= same) for n, same in requests]
    lengths = [n for n, _ in requests]
    rate = sum(map(bool, reused)) / len(reused)
    return sum(lengths) - sum(reused), rate, sum(reused) / sum(lengths)


@answers.alternative("13.1")
def token_by_token(requests, block_size):
    saved = [
        sum(
            block_size
            for start in range(0, length, block_size)
            if start + block_size <= same and start + block_size < length
        )
        for length, same in requests
    ]
    total = sum(length for length, _ in requests)
    return total - sum(saved), sum(s > 0 for s in saved) / len(saved), sum(saved) / total


# ---------------------------------------------------------------- 13.2 hashed blocks

answers.slips(
    "13.2",
    """
    unchained: You know a block by its own tokens. K and V depend on everything before it too.
    - (before, *tokens[start : start + self.block_size])
    + (*tokens[start : start + self.block_size],)
    - (before, *own)
    + (*own,)

    by_position: The block's place is not its prefix: another prompt has other tokens in front.
    - (before, *tokens[start : start + self.block_size])
    + (start, *tokens[start : start + self.block_size])
    - (before, *own)
    + (index * self.block_size, *own)

    sum_of_tokens: You add the tokens up. In another order they are another prompt.
    - (before, *tokens[start : start + self.block_size])
    + (before, sum(tokens[start : start + self.block_size]))
    - (before, *own)
    + (before, sum(own))

    glued_digits: You glue digits together, so 1 and 12 look like 11 and 2.
    - (before, *tokens[start : start + self.block_size])
    + (before, "".join(map(str, tokens[start : start + self.block_size])))
    - (before, *own)
    + (before, "".join(map(str, own)))

    one_byte_a_token: You keep one byte of each token: 257 becomes 1.
    - (before, *tokens[start : start + self.block_size])
    + (before, *(t % 256 for t in tokens[start : start + self.block_size]))
    - (before, *own)
    + (before, *(t % 256 for t in own))

    four_bytes_a_token: You keep a few bytes of each token: ids of any size are allowed.
    - (before, *tokens[start : start + self.block_size])
    + (before, *(t % 2**32 for t in tokens[start : start + self.block_size]))
    - (before, *own)
    + (before, *(t % 2**32 for t in own))

    hash_as_name: Two beginnings may have one hash(). Keep the tokens in the name: a dictionary
        compares them.
    - (before, *tokens[start : start + self.block_size])
    + hash((before, *tokens[start : start + self.block_size]))
    - (before, *own)
    + hash((before, *own))

    previous_block_only: You look one block back. The prefix reaches back to the first token.
    - (before, *tokens[start : start + self.block_size])
    + tuple(tokens[max(0, start - self.block_size) : start + self.block_size])
    - (before, *own)
    + tuple(tokens[max(0, index - 1) * self.block_size : (index + 1) * self.block_size])

    nothing_is_left: All blocks of the prompt are reported. At least one token has to run.
    - (len(tokens) - 1) // self.block_size
    + len(tokens) // self.block_size

    beyond_the_last_block: You report a block of which the prompt fills only a part.
    - (len(tokens) - 1) // self.block_size * self.block_size
    + len(tokens) - self.block_size * (len(tokens) % self.block_size == 0)
    - range(len(tokens) // self.block_size)
    + range(-(-len(tokens) // self.block_size))

    keeps_the_partial_block: You remember a block that is not full. Its owner goes on writing into
        it.
    - range(len(tokens) // self.block_size)
    + range(-(-len(tokens) // self.block_size))

    the_last_one_wins: You replace a block that was remembered first, while others may share it.
    - if name not in self.number_of:
    -     # a new number, because a block may come back with other tokens
    -     self.count += 1
    -     self.number_of[name] = self.count
    -     self.block_of[self.count], self.name_of[block] = block, name
    + if name not in self.number_of:
    +     self.count += 1
    +     self.number_of[name] = self.count
    + self.block_of[self.number_of[name]], self.name_of[block] = block, name

    returns_its_own: insert returns what is remembered, not what came.
    - return known
    + return list(blocks)[: len(known)]

    returns_the_new: insert returns a block for each whole block.
    - self.block_of[self.count], self.name_of[block] = block, name
    + self.block_of[self.count], self.name_of[block] = block, name
    + known.append(block)
    - known.append(self.block_of[before])

    returns_all_blocks: Blocks after the last whole one do not count.
    - return known
    + return known + list(blocks)[len(known) :]

    returns_a_count: insert returns the blocks, not how many are new.
    - known, before = [], None
    + known, before, first = [], None, self.count
    - return known
    + return self.count - first

    no_eviction: You forget nothing, so you hand out blocks that hold another prompt's tokens.
    - if block in self.name_of:
    + if False:

    forgets_everything: One block is taken and you forget all of them. The others still hold what
        they held.
    - del self.block_of[self.number_of.pop(self.name_of.pop(block))]
    + for held in (self.block_of, self.name_of, self.number_of):
    +     held.clear()

    forgets_one_way: You forget the block's name and still find the block under it.
    - del self.block_of[self.number_of.pop(self.name_of.pop(block))]
    + del self.name_of[block]

    minds_strangers: forget is told of blocks that you never knew, too.
    - if block in self.name_of:
    -     del self.block_of[
    + if True:
    +     del self.block_of[

    removes_what_it_finds: match only looks. The next one asks again.
    - self.number_of.get((before, *tokens[start : start + self.block_size]))
    + self.number_of.pop((before, *tokens[start : start + self.block_size]), None)

    quadratic: Each name is made from all tokens before it: n blocks cost n². Make it from the name
        before.
    - (before, *tokens[start : start + self.block_size])
    + tuple(tokens[: start + self.block_size])
    - (before, *own)
    + tuple(tokens[: (index + 1) * self.block_size])
    """,
)


@answers.alternative("13.2")
class Digests:
    """The name of a block is the digest of the name before it and its own tokens."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.block_of, self.name_of = {}, {}

    def names(self, tokens, count):
        before = b""
        for start in range(0, count * self.block_size, self.block_size):
            own = tokens[start : start + self.block_size]
            before = hashlib.sha256(
                before + b"".join(token.to_bytes(8, "little") for token in own)
            ).digest()
            yield before

    def match(self, tokens):
        found = []
        for name in self.names(tokens, (len(tokens) - 1) // self.block_size):
            if name not in self.block_of:
                break
            found.append(self.block_of[name])
        return found

    def insert(self, tokens, blocks):
        known = []
        for name, block in zip(self.names(tokens, len(tokens) // self.block_size), blocks):
            if name not in self.block_of:
                self.block_of[name], self.name_of[block] = block, name
            known.append(self.block_of[name])
        return known

    def forget(self, block):
        if block in self.name_of:
            del self.block_of[self.name_of.pop(block)]

    def __contains__(self, block):
        return block in self.name_of


@answers.alternative("13.2")
class Trie:
    """Nested dictionaries: the path is the prefix."""

    def __init__(self, block_size):
        self.size, self.root, self.place = block_size, {}, {}

    def pieces(self, tokens, count):
        return (tuple(tokens[n * self.size : (n + 1) * self.size]) for n in range(count))

    def match(self, tokens):
        node, found = self.root, []
        for piece in self.pieces(tokens, (len(tokens) - 1) // self.size):
            if piece not in node:
                break
            block, node = node[piece]
            found.append(block)
        return found

    def insert(self, tokens, blocks):
        node, found = self.root, []
        for piece, block in zip(self.pieces(tokens, len(tokens) // self.size), blocks):
            if piece not in node:
                node[piece] = block, {}
                self.place[block] = node, piece
            block, node = node[piece]
            found.append(block)
        return found

    def forget(self, block):
        if block in self.place:
            node, piece = self.place.pop(block)
            del node[piece]

    def __contains__(self, block):
        return block in self.place


# ---------------------------------------------------------------- 13.3 a radix tree

answers.slips(
    "13.3",
    """
    a_trie: A node for each block is a trie. An edge of a radix tree holds a whole run.
    - if new and node is not root and not node.children:
    -     node.keys += new
    -     node.blocks += new_blocks
    - elif new:
    -     node.children[new[0]] = Node(new, new_blocks, {}, node)
    + for key, block in zip(new, new_blocks):  # a node for each block
    +     node.children[key] = node = Node([key], [block], {}, node)

    never_cuts: You hang what differs after the whole edge, also after the part that does not fit.
    - cut(child, same)
    - node
    + node

    loses_children: The children of the edge that you cut are gone. They belong below its second
        part.
    - node.blocks[at:], node.children, node)
    + node.blocks[at:], {}, node)

    old_parents: The children that moved below still name the upper node as their parent.
    - for child in below.children.values():
    -     child.parent = below

    blocks_stay_above: You cut the keys and not the blocks: one path, two owners of the same blocks.
    - node.keys, node.blocks = node.keys[:at], node.blocks[:at]
    + node.keys = node.keys[:at]

    a_leaf_never_grows: A leaf's edge is as long as it can be: what follows it belongs to the same
        edge.
    - if new and node is not root and not node.children:
    -     node.keys += new
    -     node.blocks += new_blocks
    - elif new:
    + if new:

    no_parent: The new node does not know its parent.
    - Node(new, new_blocks, {}, node)
    + Node(new, new_blocks, {}, None)

    keeps_the_callers_lists: You keep the caller's lists, not copies.
    - new, new_blocks = list(keys[len(found) :]), list(blocks[len(found) :])
    + new, new_blocks = keys, blocks
    + if found:
    +     new, new_blocks = keys[len(found) :], blocks[len(found) :]

    the_last_one_wins: You replace blocks that were remembered first, while others may share them.
    - found += child.blocks[:same]
    + child.blocks[:same] = blocks[len(found) : len(found) + same]
    + found += child.blocks[:same]

    by_the_last_key: A child is found by the first key of its edge.
    - node.children[new[0]]
    + node.children[new[-1]]
    - {below.keys[0]: below}
    + {below.keys[-1]: below}

    returns_its_own: Returned are the blocks that are remembered.
    - return found + new_blocks
    + return list(blocks)

    returns_the_new: Returned is a block for each key, old ones too.
    - return found + new_blocks
    + return list(new_blocks)

    returns_the_found: The new blocks are remembered now as well.
    - return found + new_blocks
    + return found

    cuts_where_a_prompt_ends: A prompt that ends inside an edge parts nothing, so nothing is cut.
    - if len(found) < len(keys):
    + if True:

    one_block_for_a_path: One block is returned for the whole path. Every block of it is needed.
    - return found + new_blocks
    + return (found + new_blocks)[-1:] * len(keys)

    needs_a_key: A prompt may fill no block at all: then there is no first key.
    - node, found = root, []
    + assert keys[0] is not None
    + node, found = root, []
    """,
)


@answers.alternative("13.3")
def step_by_step(root, keys, blocks):
    """One key at a time, with a place inside an edge."""
    node, at, found = root, 0, []
    for n, (key, block) in enumerate(zip(keys, blocks)):
        if at < len(node.keys) and node.keys[at] == key:
            at += 1
        elif at == len(node.keys) and key in node.children:
            node, at = node.children[key], 1
        elif at == len(node.keys) and node.parent is not None and not node.children:
            node.keys.append(key)
            node.blocks.append(block)
            at += 1
        else:
            if at < len(node.keys):
                below = Node(node.keys[at:], node.blocks[at:], node.children, node)
                for child in below.children.values():
                    child.parent = below
                del node.keys[at:], node.blocks[at:]
                node.children = {below.keys[0]: below}
            node.children[key] = Node(list(keys[n:]), list(blocks[n:]), {}, node)
            return found + list(blocks[n:])
        found.append(node.blocks[at - 1])
    return found


@answers.alternative("13.3")
def by_recursion(root, keys, blocks):
    """Each call looks at one child."""
    child = root.children.get(keys[0]) if keys else None
    if child is None:
        if keys and root.parent is not None and not root.children:
            root.keys, root.blocks = root.keys + list(keys), root.blocks + list(blocks)
        elif keys:
            root.children[keys[0]] = Node(list(keys), list(blocks), {}, root)
        return list(blocks)
    pairs = list(zip(child.keys, keys))
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if same < len(child.keys):
        known = child.blocks[:same]
        if same == len(keys):
            return known
        upper = Node(child.keys[:same], known, {}, root)
        child.keys, child.blocks = child.keys[same:], child.blocks[same:]
        child.parent, upper.children = upper, {child.keys[0]: child}
        root.children[keys[0]] = upper
        upper.children[keys[same]] = Node(list(keys[same:]), list(blocks[same:]), {}, upper)
        return [*known, *blocks[same:]]
    return child.blocks[:same] + by_recursion(child, keys[same:], blocks[same:])
