"""Wrong answers to lesson 13's exercises: real slips and the museum, each with a hint."""

import hashlib
from functools import partial

from lessons.l13_prefix_caching.optimized import Node
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 13.1 predict


def slipped_hits(
    requests,
    block_size,
    *,
    whole=True,  # only whole blocks are known
    leaves_one=True,  # one token always runs
    last_block_runs=False,  # … and the last block, even if it is not the prompt's last token's
    up=False,
    hit_if="a block",
    token_rate="known",
    swapped=False,
):
    """The answer with one slip; the switches exist only here."""
    run = hits = total = 0
    shares = []
    for length, same in requests:
        limit = min(same, length - 1) if leaves_one else min(same, length)
        blocks = -(-limit // block_size) if up else limit // block_size
        known = min(blocks * block_size, limit if up else length) if whole else limit
        if last_block_runs:
            known = max(0, known - block_size)
        run += length - known
        hits += {"a block": known > 0, "a token": same > 0, "all": same >= length}[hit_if]
        total += length
        shares.append(known / length)
    rates = {
        "known": 1 - run / total,
        "run": run / total,
        "mean": sum(shares) / len(shares),
        "per request": hits / len(requests),
    }
    first, second = hits / len(requests), rates[token_rate]
    return (run, second, first) if swapped else (run, first, second)


for name, slip, hint in [
    ("partial_blocks", dict(whole=False), "You reuse single tokens. Only whole blocks are kept."),
    (
        "rounds_up",
        dict(up=True),
        "You count the block that is only begun. Its other tokens are another prompt's.",
    ),
    (
        "nothing_runs",
        dict(leaves_one=False),
        "With every block known you run nothing. Who gives the logits of the last token?",
    ),
    (
        "last_block_always_runs",
        dict(last_block_runs=True),
        "You give up a block in every case. Only the block around the prompt's last token runs.",
    ),
    (
        "a_common_token_is_a_hit",
        dict(hit_if="a token"),
        "You count a hit for a common token. Without a whole block nothing is reused.",
    ),
    (
        "only_full_hits",
        dict(hit_if="all"),
        "You count prompts that are known to the end. One block reused is a hit as well.",
    ),
    (
        "mean_of_rates",
        dict(token_rate="mean"),
        "You average the requests' rates, so a short prompt weighs as much as a long one.",
    ),
    ("share_that_runs", dict(token_rate="run"), "This is the share that runs. Hits are the rest."),
    (
        "one_rate_for_both",
        dict(token_rate="per request"),
        "The two rates are the same in yours. How many tokens does a hit save?",
    ),
    ("swapped_rates", dict(swapped=True), "The rate per request comes first."),
]:
    answers.wrong("13.1", hint, name)(partial(slipped_hits, **slip))


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


def chained(before, own, start):
    """The right name: of all tokens so far."""
    return hashlib.sha256(before + b"".join(t.to_bytes(8, "little") for t in own)).digest()


class SlippedBlocks:
    """The cache with one slip, named by the keyword at the call."""

    name = staticmethod(chained)
    leaves_one = True
    takes_part = False  # match looks up the last, partial block too
    keeps_part = False  # insert remembers the last, partial block too
    overwrites = False
    returns = "remembered"
    forgets = "both"
    minds = False  # forget of an unknown block raises
    removes = False  # match takes what it finds out of the cache

    def __init__(self, block_size, **slips):
        vars(self).update(slips)
        self.block_size = block_size
        self.block_of, self.name_of = {}, {}

    def names(self, tokens, count):
        before = b""
        for n in range(count):
            start = n * self.block_size
            before = self.name(before, tokens[start : start + self.block_size], start)
            yield before

    def match(self, tokens):
        found = []
        count = (len(tokens) - self.leaves_one) // self.block_size
        count += self.takes_part and len(tokens) % self.block_size > 0
        for name in self.names(tokens, count):
            if name in self.block_of:
                found.append(self.block_of.pop(name) if self.removes else self.block_of[name])
            else:
                break
        return found

    def insert(self, tokens, blocks):
        known, new, first = [], [], len(self.block_of)
        count = len(tokens) // self.block_size
        count += self.keeps_part and len(tokens) % self.block_size > 0
        for name, block in zip(self.names(tokens, count), blocks):
            if name not in self.block_of or self.overwrites:
                self.block_of[name], self.name_of[block] = block, name
                new.append(block)
            known.append(self.block_of[name])
        return {
            "remembered": known,
            "own": list(blocks)[: len(known)],
            "new": new,
            "all": known + list(blocks)[len(known) :],
            "count": len(self.block_of) - first,
        }[self.returns]

    def forget(self, block):
        if self.minds and block not in self.name_of:
            raise KeyError(block)
        if block not in self.name_of or self.forgets == "nothing":
            return
        if self.forgets == "everything":
            self.block_of.clear()
            self.name_of.clear()
            return
        name = self.name_of.pop(block)
        if self.forgets == "both":
            del self.block_of[name]

    def __contains__(self, block):
        return block in self.name_of


def to_the_end(make):
    """A cache whose names are made anew from all tokens up to a block's end."""

    class Anew(SlippedBlocks):
        def names(self, tokens, count):
            for n in range(1, count + 1):
                yield make(tokens[: n * self.block_size])

    return Anew


def text(own):
    return "".join(map(str, own)).encode()


for name, slip, hint in [
    (
        "unchained",
        dict(name=lambda before, own, start: bytes(str(own), "ascii")),
        "You know a block by its own tokens. K and V depend on everything before it too.",
    ),
    (
        "by_position",
        dict(name=lambda before, own, start: bytes(f"{start} {own}", "ascii")),
        "The block's place is not its prefix: another prompt has other tokens in front.",
    ),
    (
        "sum_of_tokens",
        dict(name=lambda before, own, start: before + bytes(f"{sum(own)} ", "ascii")),
        "You add the tokens up. In another order they are another prompt.",
    ),
    (
        "glued_digits",
        dict(name=lambda before, own, start: before + b"|" + text(own)),
        "You glue digits together, so 1 and 12 look like 11 and 2.",
    ),
    (
        "one_byte_a_token",
        dict(name=lambda before, own, start: before + bytes(t % 256 for t in own)),
        "You keep one byte of each token: 257 becomes 1.",
    ),
    (
        "four_bytes_a_token",
        dict(
            name=lambda before, own, start: before + bytes(f"{[t % 2**32 for t in own]}", "ascii")
        ),
        "You keep a few bytes of each token: ids of any size are allowed.",
    ),
    (
        "hash_as_name",
        dict(name=lambda before, own, start: bytes(str(hash((before, *own))), "ascii")),
        "Two beginnings may have one hash(). Keep the tokens in the name: a dictionary compares them.",
    ),
    (
        "previous_block_only",
        dict(
            name=lambda before, own, start: (
                before[before.index(b"#") + 1 :] + b"#" + bytes(str(own), "ascii")
                if before
                else b"#" + bytes(str(own), "ascii")
            )
        ),
        "You look one block back. The prefix reaches back to the first token.",
    ),
    (
        "nothing_is_left",
        dict(leaves_one=False),
        "All blocks of the prompt are reported. At least one token has to run.",
    ),
    (
        "beyond_the_last_block",
        dict(takes_part=True, keeps_part=True),
        "You report a block of which the prompt fills only a part.",
    ),
    (
        "keeps_the_partial_block",
        dict(keeps_part=True),
        "You remember a block that is not full. Its owner goes on writing into it.",
    ),
    (
        "the_last_one_wins",
        dict(overwrites=True),
        "You replace a block that was remembered first, while others may share it.",
    ),
    ("returns_its_own", dict(returns="own"), "insert returns what is remembered, not what came."),
    ("returns_the_new", dict(returns="new"), "insert returns a block for each whole block."),
    ("returns_all_blocks", dict(returns="all"), "Blocks behind the last whole one do not count."),
    ("returns_a_count", dict(returns="count"), "insert returns the blocks, not how many are new."),
    (
        "no_eviction",
        dict(forgets="nothing"),
        "You forget nothing, so you hand out blocks that hold somebody else's tokens.",
    ),
    (
        "forgets_everything",
        dict(forgets="everything"),
        "One block is taken and you forget all of them. The others still hold what they held.",
    ),
    (
        "forgets_one_way",
        dict(forgets="the block's name"),
        "You forget the block's name and still find the block under it.",
    ),
    ("minds_strangers", dict(minds=True), "forget is told of blocks that you never knew, too."),
    ("removes_what_it_finds", dict(removes=True), "match only looks. The next one asks again."),
]:
    answers.wrong("13.2", hint, name)(partial(SlippedBlocks, **slip))

answers.wrong(
    "13.2",
    "Each name is made from all tokens before it: n blocks cost n². Make it from the name before.",
    "quadratic",
)(to_the_end(lambda tokens: hashlib.sha256(str(tokens).encode()).digest()))

answers.alternative("13.2")(SlippedBlocks)


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


def slipped_insert(
    root,
    keys,
    blocks,
    *,
    cuts=True,
    keeps_children=True,
    new_parents=True,
    keeps_blocks=True,
    grows=True,
    returns="remembered",
    parent=True,
    copies=True,
    overwrites=False,
    one_key=False,
    by_last=False,
    empty_leaf=False,
):
    """Inserting with one slip; the switches exist only here."""
    node, found = root, []
    while len(found) < len(keys):
        child = node.children.get(keys[len(found)])
        if child is None:
            break
        same, rest = 0, keys[len(found) :]
        while same < min(len(rest), len(child.keys)) and rest[same] == child.keys[same]:
            same += 1
        if overwrites:
            child.blocks[:same] = blocks[len(found) : len(found) + same]
        found += child.blocks[:same]
        if same < len(child.keys):
            if len(found) < len(keys) or empty_leaf:
                if cuts:
                    below = Node(child.keys[same:], child.blocks[same:], {}, child)
                    if keeps_children:
                        below.children = child.children
                    for grandchild in below.children.values() if new_parents else ():
                        grandchild.parent = below
                    child.keys = child.keys[:same]
                    child.blocks = child.blocks[:same] if keeps_blocks else child.blocks
                    child.children = {below.keys[-1 if by_last else 0]: below}
                node = child
            break
        node = child
    new, own = keys[len(found) :], blocks[len(found) :]
    result = {
        "remembered": [*found, *own],
        "own": list(blocks),
        "new": list(own),
        "found": list(found),
    }
    if one_key:
        for key, block in zip(new, own):  # a node for each block
            node.children[key] = node = Node([key], [block], {}, node)
    elif new and grows and node is not root and not node.children:
        node.keys += new
        node.blocks += own
    elif new:
        lists = (list(new), list(own)) if copies or found else (keys, blocks)
        child = Node(*lists, {}, node if parent else None)
        node.children[new[-1] if by_last else new[0]] = child
    return result[returns]


for name, slip, hint in [
    (
        "a_trie",
        dict(one_key=True),
        "A node for each block is a trie. An edge of a radix tree holds a whole run.",
    ),
    (
        "never_cuts",
        dict(cuts=False),
        "You hang what differs behind the whole edge, also behind what does not fit.",
    ),
    (
        "loses_children",
        dict(keeps_children=False),
        "The children of the edge that you cut are gone. They belong below its second part.",
    ),
    (
        "old_parents",
        dict(new_parents=False),
        "The children that moved below still name the upper node as their parent.",
    ),
    (
        "blocks_stay_above",
        dict(keeps_blocks=False),
        "You cut the keys and not the blocks: one path, two owners of the same blocks.",
    ),
    (
        "a_leaf_never_grows",
        dict(grows=False),
        "A leaf's edge is as long as it can be: what follows it belongs to the same edge.",
    ),
    ("no_parent", dict(parent=False), "The new node does not know its parent."),
    ("keeps_the_callers_lists", dict(copies=False), "You keep the caller's lists, not copies."),
    (
        "the_last_one_wins",
        dict(overwrites=True),
        "You replace blocks that were remembered first, while others may share them.",
    ),
    ("by_the_last_key", dict(by_last=True), "A child stands by the first key of its edge."),
    ("returns_its_own", dict(returns="own"), "Returned are the blocks that are remembered."),
    ("returns_the_new", dict(returns="new"), "Returned is a block for each key, old ones too."),
    ("returns_the_found", dict(returns="found"), "The new blocks are remembered now as well."),
    (
        "cuts_where_a_prompt_ends",
        dict(empty_leaf=True),
        "A prompt that ends inside an edge parts nothing, so nothing is cut.",
    ),
]:
    answers.wrong("13.3", hint, name)(partial(slipped_insert, **slip))


@answers.wrong("13.3", "One block stands for the whole path. Every block of it is needed.")
def one_block_for_a_path(root, keys, blocks):
    found = slipped_insert(root, keys, blocks)
    return [found[-1]] * len(found) if found else []


@answers.wrong("13.3", "A prompt may fill no block at all: then there is no first key.")
def needs_a_key(root, keys, blocks):
    assert keys[0] is not None
    return slipped_insert(root, keys, blocks)


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
