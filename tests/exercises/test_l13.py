"""Checks of lesson 13's exercises. Each exists because it rejects a named wrong answer
(wrong/l13.py).
"""

import random

from lessons.l13_prefix_caching.optimized import Node
from tests.exercises.checking import assert_equal, call, check, compare

# ---------------------------------------------------------------- 13.1 predict

HITS_CASES = {  # name: (requests, block_size, the answer, why)
    "example": (
        [(40, 0), (40, 20), (40, 40), (10, 8)],
        16,
        (82, 0.5, 48 / 130),
        "the docstring's",
    ),
    "quiz": ([(1000, 0), (1000, 1000)], 16, (1008, 0.5, 992 / 2000), "62.5 blocks, all known"),
    "whole_blocks": (
        [(1008, 1008), (32, 32)],
        16,
        (32, 1.0, 1008 / 1040),
        "a multiple of 16: the last block runs, because its last token does",
    ),
    "one_token": ([(1, 1), (17, 17), (16, 16)], 16, (18, 1 / 3, 16 / 34), "a token must run"),
    "small_blocks": ([(5, 5), (5, 3)], 1, (3, 1.0, 0.7), "blocks of one token"),
    "many_hits_few_tokens": (
        [(1600, 20)] * 4,
        16,
        (6336, 1.0, 0.01),
        "every request has a hit, and hardly a token is saved",
    ),
    "unequal_lengths": (
        [(100, 96), (1000, 0)],
        32,
        (1004, 0.5, 96 / 1100),
        "a rate per token is no mean of the requests' rates",
    ),
    "nothing": ([(64, 0), (64, 15)], 16, (128, 0.0, 0.0), "15 tokens in common are no block"),
}


@check("13.1", {case: why for case, (*_, why) in HITS_CASES.items()}, seconds=5)
def test_hits(impl, case, seed):
    requests, block_size, want, _ = HITS_CASES[case]
    got = call(impl, dict(requests=list(requests), block_size=block_size))
    assert isinstance(got, tuple) and len(got) == 3, (
        f"your result is {got!r}, expected a tuple of three numbers"
    )
    for what, mine, right in zip(("tokens that run", "per request", "per token"), got, want):
        assert_equal(mine, right, atol=1e-9, label=what)


# ---------------------------------------------------------------- 13.2 hashed blocks


def known(cache, tokens):
    """What match says, as a list; the arguments must stay."""
    given = list(tokens)
    found = cache.match(given)
    assert given == list(tokens), "match changed its argument `tokens`"
    assert isinstance(found, list), f"match returned {type(found).__name__}, expected a list"
    return found


def told(cache, tokens, blocks):
    """What insert says, as a list; the arguments must stay."""
    given, owned = list(tokens), list(blocks)
    remembered = cache.insert(given, owned)
    assert (given, owned) == (list(tokens), list(blocks)), "insert changed an argument"
    assert isinstance(remembered, list), (
        f"insert returned {type(remembered).__name__}, expected a list"
    )
    return remembered


@check("13.2", seconds=5)
def test_example(impl, seed):
    cache = impl(2)
    assert_equal(told(cache, [1, 2, 3, 4, 5], [7, 8, 9]), [7, 8], label="insert([1, 2, 3, 4, 5])")
    assert_equal(told(cache, [1, 2, 6, 6], [4, 5]), [7, 5], label="insert([1, 2, 6, 6])")
    assert_equal(known(cache, [1, 2, 3, 4]), [7], label="match([1, 2, 3, 4])")
    assert_equal(known(cache, [1, 2, 3, 4, 0]), [7, 8], label="match([1, 2, 3, 4, 0])")
    assert_equal(known(cache, [3, 4, 0]), [], label="match([3, 4, 0])")
    cache.forget(8)
    assert_equal(known(cache, [1, 2, 3, 4, 0]), [7], label="match after forget(8)")


MATCH_CASES = {  # name: (block_size, [(tokens, blocks) inserted], prompt, the answer, why)
    "partial_tail": (4, [(range(10), [0, 1, 2])], [*range(10), 10, 11, 12], [0, 1], "8 of 10"),
    "short_prompt": (4, [(range(8), [0, 1])], [0, 1, 2], [], "shorter than a block"),
    "all_known": (4, [(range(8), [0, 1])], [*range(8)], [0], "one token has to run"),
    "one_more": (4, [(range(8), [0, 1])], [*range(9)], [0, 1], "one token is left over"),
    "other_front": (2, [([1, 2, 3, 4], [0, 1])], [9, 9, 3, 4, 0], [], "same block, other prefix"),
    "same_block_twice": (2, [([5, 5, 5, 5], [0, 1])], [5] * 9, [0, 1], "a block after itself"),
    "order": (2, [([1, 2, 3, 4], [0, 1])], [2, 1, 4, 3, 0], [], "the same tokens, another order"),
    "digits": (2, [([1, 12, 3, 4], [0, 1])], [11, 2, 3, 4, 0], [], "1 and 12 are not 11 and 2"),
    "large_ids": (1, [([70000, 256], [0, 1])], [70000, 256, 1], [0, 1], "ids beyond 16 bits"),
    "same_last_byte": (1, [([257, 3], [0, 1])], [1, 3, 0], [], "257 is not 1"),
    "same_last_bytes": (1, [([2**32, 3], [0, 1])], [0, 3, 0], [], "4 bytes a token: 2^32 is 0"),
    "equal_hashes": (1, [([2**61 - 1, 3], [0, 1])], [0, 3, 0], [], "hash(2^61 - 1) is hash(0)"),
    "middle_of_another": (
        2,
        [([1, 2, 3, 4], [0, 1]), ([7, 8, 1, 2, 3, 4], [2, 3, 4])],
        [3, 4, 1, 2, 0],
        [],
        "known blocks, but not as a beginning",
    ),
}


@check("13.2", {case: why for case, (*_, why) in MATCH_CASES.items()}, seconds=5)
def test_longest_beginning(impl, case, seed):
    block_size, inserted, prompt, want, _ = MATCH_CASES[case]
    cache = impl(block_size)
    for tokens, blocks in inserted:
        told(cache, tokens, blocks)
    assert_equal(known(cache, prompt), want, label=f"match({prompt})")
    assert_equal(known(cache, prompt), want, label="the same match again")


@check("13.2", seconds=5)
def test_who_was_first_stays(impl, seed):
    cache = impl(1)
    told(cache, [4, 5], [0, 1])
    assert_equal(told(cache, [4, 5, 6], [7, 8, 9]), [0, 1, 9], label="insert of a known beginning")
    assert_equal(known(cache, [4, 5, 6, 0]), [0, 1, 9], label="match afterwards")
    members = [block for block in range(10) if block in cache]
    assert_equal(members, [0, 1, 9], label="the blocks that are in the cache")


@check("13.2", seconds=5)
def test_blocks_come_back_with_other_tokens(impl, seed):
    """Forgotten from the end, taken again, remembered for something else."""
    cache = impl(2)
    told(cache, [1, 2, 3, 4], [0, 1])
    cache.forget(5)  # never remembered
    for block in (1, 0):
        cache.forget(block)
        cache.forget(block)  # which is no error
    assert_equal(known(cache, [1, 2, 3, 4, 9]), [], label="match after both were forgotten")
    assert_equal([block for block in (0, 1, 5) if block in cache], [], label="what is in the cache")
    assert_equal(told(cache, [3, 4, 1, 2], [1, 0]), [1, 0], label="insert of other tokens")
    assert_equal(known(cache, [1, 2, 9]), [], label="match of what block 0 held before")
    assert_equal(known(cache, [3, 4, 1, 2, 9]), [1, 0], label="match of what they hold now")


@check("13.2", seconds=10)
def test_random_histories(impl, seed):
    """Held against a dictionary of whole beginnings."""
    draw = random.Random(seed)
    for _ in range(20):
        size, cache, right, free = draw.choice((1, 2, 3)), None, {}, list(range(40))
        cache = impl(size)
        for _ in range(30):
            tokens = [draw.randint(0, 2) for _ in range(draw.randint(1, 9))]
            if draw.random() < 0.3 and right:
                deepest = max(right, key=lambda beginning: (len(beginning), beginning))
                free.append(right[deepest])
                cache.forget(right.pop(deepest))
            elif draw.random() < 0.5 and len(free) > 9:
                blocks, want = free[: len(tokens) // size], []
                for index, block in enumerate(blocks):
                    beginning = tuple(tokens[: (index + 1) * size])
                    want.append(right.setdefault(beginning, block))
                free = [block for block in free if block not in right.values()]
                assert_equal(told(cache, tokens, blocks), want, label=f"insert({tokens})")
            want = []
            for end in range(size, len(tokens), size):
                if tuple(tokens[:end]) not in right:
                    break
                want.append(right[tuple(tokens[:end])])
            assert_equal(known(cache, tokens), want, label=f"match({tokens})")
            members = [block for block in range(40) if block in cache]
            assert_equal(members, sorted(right.values()), label="the blocks that are in the cache")


class Counted(list):
    """Counts how many of its tokens are read."""

    read = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self):
        for token in super().__iter__():
            self.read += 1
            yield token


@check("13.2", {"insert": "remembering", "match": "looking up"}, seconds=10)
def test_each_token_is_read_a_few_times(impl, case, seed):
    cache, tokens = impl(4), list(range(1024))
    if case == "match":
        cache.insert(tokens, list(range(256)))
    counted = Counted(tokens)
    cache.match(counted) if case == "match" else cache.insert(counted, list(range(256)))
    assert counted.read <= 4 * len(tokens), (
        f"{case} of {len(tokens)} tokens read {counted.read}, {counted.read / len(tokens):.0f} "
        "times each: make a block's name from the name before it"
    )


# ---------------------------------------------------------------- 13.3 a radix tree


def shape(node):
    """A tree as nested lists, children in the order of their keys: [keys, blocks, children]."""
    children = [shape(node.children[key]) for key in sorted(node.children)]
    return [list(node.keys), list(node.blocks), children]


def grown(prompts):
    """The shape of the right tree after (keys, blocks) of some prompts, from a plain dictionary."""
    right, answers = {}, []
    for keys, blocks in prompts:
        answers.append([right.setdefault(tuple(keys[: n + 1]), b) for n, b in enumerate(blocks)])

    def edge(beginning):
        keys, blocks = [beginning[-1]], [right[beginning]]
        while len(after := follow(beginning)) == 1:
            (beginning,) = after
            keys.append(beginning[-1])
            blocks.append(right[beginning])
        return [keys, blocks, [edge(one) for one in sorted(after)]]

    def follow(beginning):
        return [x for x in right if len(x) == len(beginning) + 1 and x[:-1] == beginning]

    return [[], [], [edge(one) for one in sorted(follow(()))]], answers


def letters(text):
    """A key for each letter: a block of one token."""
    return [(ord(letter),) for letter in text]


TREE_CASES = {  # name: (prompts, each letter a block, why)
    "one": (["abc"], "one edge for a whole prompt"),
    "nothing": ([""], "no block, no node"),
    "apart": (["abc", "xy"], "two edges below the root"),
    "ends_inside": (["abc", "ab"], "a prompt that ends inside an edge changes nothing"),
    "the_same": (["abc", "abc"], "the same prompt again"),
    "goes_on": (["abc", "abcde"], "a leaf's edge grows"),
    "parts": (["abc", "axy"], "an edge is cut"),
    "parts_twice": (["abcdef", "abcxyz", "abpq"], "an edge is cut, and then its first part again"),
    "third_way": (["abc", "axy", "apq"], "a third child where two were"),
    "parts_above_children": (
        ["abcd", "abcx", "ay"],
        "an edge with children below it is cut: they move below",
    ),
    "goes_on_at_a_branch": (["ab", "abc", "abd", "abe"], "after a branch there is a new leaf"),
    "a_leaf_below_grows": (["abc", "axy", "axyz"], "the leaf of a cut edge grows"),
    "the_first_key_again": (["aaa", "aab", "aaaa"], "equal keys one after the other"),
}


def check_tree(impl, prompts):
    """Insert prompts one by one, and hold results, shape and parents against the right ones."""
    root, block, given = Node(), 0, []
    for keys in prompts:
        given.append((keys, list(range(block, block + len(keys)))))
        block += len(keys)
    want, answers = grown(given)
    for (keys, blocks), answer in zip(given, answers):
        before = list(keys), list(blocks)
        got = impl(root, keys, blocks)
        assert (keys, blocks) == before, "your function changed its argument `keys` or `blocks`"
        assert_equal(got, answer, label=f"insert of {len(keys)} keys returned: your result")
    assert_equal(shape(root), want, label="your tree, as [keys, blocks, children],")
    assert root.parent is None, "your root has a parent"
    nodes = [root]
    for node in nodes:
        for key, child in node.children.items():
            assert child.parent is node, (
                f"the parent of the node with blocks {child.blocks} is wrong"
            )
            assert key == child.keys[0], f"the child {child.blocks} is not found by its first key"
            nodes.append(child)


@check("13.3", {case: why for case, (_, why) in TREE_CASES.items()}, seconds=5)
def test_tree(impl, case, seed):
    check_tree(impl, [letters(text) for text in TREE_CASES[case][0]])


@check("13.3", seconds=10)
def test_random_prompts(impl, seed):
    draw = random.Random(seed)
    for _ in range(60):
        count = draw.randint(1, 8)
        texts = ["".join(draw.choices("ab", k=draw.randint(0, 7))) for _ in range(count)]
        check_tree(impl, [letters(text) for text in texts])


@check("13.3", seconds=5)
def test_the_tree_keeps_no_argument(impl, seed):
    """The caller's lists and the result may change afterwards: the tree has lists of its own."""
    root, keys, blocks = Node(), letters("abc"), [0, 1, 2]
    result = impl(root, keys, blocks)
    keys.append((9,))
    blocks[0] = 77
    result.append(78)
    (child,) = root.children.values()
    compare(lambda: (child.keys, child.blocks), {}, (letters("abc"), [0, 1, 2]))
