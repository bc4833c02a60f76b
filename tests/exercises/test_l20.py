"""Checks of lesson 20's exercises. Each exists because it rejects a named wrong answer
(wrong/l20.py).
"""

import copy
import math
from functools import cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lessons.l20_parallelism.processes.ranks import Ranks
from solutions.l20_parallelism import AttentionWeights
from tests.exercises.checking import (
    assert_close,
    assert_equal,
    call,
    check,
    compare_ranks,
    note,
)
from tests.exercises.ranks_apart import assert_apart

INF, NAN = math.inf, math.nan

# ---------------------------------------------------------------- 20.1 attention


def whole_attention(x, weights, head_dim):
    """The layer on one rank, head by head, in float64."""
    x = x.double()
    q_proj, k_proj, v_proj, o_proj, q_bias, o_bias = (part.double() for part in weights)
    heads, kv_heads = len(q_proj) // head_dim, len(k_proj) // head_dim
    sees = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    out = o_bias.repeat(len(x), 1)
    for head in range(heads):
        own = slice(head * head_dim, (head + 1) * head_dim)
        first = head * kv_heads // heads * head_dim
        shared = slice(first, first + head_dim)
        q, k, v = x @ q_proj[own].T + q_bias[own], x @ k_proj[shared].T, x @ v_proj[shared].T
        scores = (q @ k.T / head_dim**0.5).masked_fill(~sees, -INF)
        out += scores.softmax(-1) @ v @ o_proj[:, own].T
    return out


def _attention(seed, heads, kv_heads):
    """x, weights and the result: copies, because an answer might write into them."""
    return copy.deepcopy(_attention_of(seed, heads, kv_heads))


@cache
def _attention_of(seed, heads, kv_heads, tokens=3, head_dim=4, hidden=10):
    g = torch.Generator().manual_seed(seed)
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    shapes = [(q_size, hidden), (kv_size, hidden), (kv_size, hidden), (hidden, q_size)]
    tensors = [torch.randn(shape, generator=g) / 3 for shape in shapes]
    biases = [torch.randn(size, generator=g) for size in (q_size, hidden)]
    x, weights = torch.randn(tokens, hidden, generator=g), AttentionWeights(*tensors, *biases)
    return x, weights, whole_attention(x, weights, head_dim)


ATTENTION_CASES = {  # name: (query heads, KV heads, ranks, why)
    "two": (4, 4, 2, "every rank its own KV heads"),
    "groups": (8, 4, 2, "two query heads read a KV head"),
    "copies": (8, 2, 4, "more ranks than KV heads: two ranks hold a copy of each"),
    "one_kv_head": (4, 1, 4, "MQA: every rank holds the same KV head"),
    "one_head_each": (4, 4, 4, "a head on each rank"),
    "alone": (4, 2, 1, "one rank is the whole layer"),
}


@check("20.1", {case: why for case, (*_, why) in ATTENTION_CASES.items()}, seconds=5)
def test_attention(impl, case, seed):
    heads, kv_heads, size, _ = ATTENTION_CASES[case]
    x, weights, want = _attention(seed, heads, kv_heads)
    ranks = Ranks(size)
    got = call(impl, dict(x=x, weights=weights, head_dim=4, ranks=ranks))
    compare_ranks(got, [want] * size)
    assert_equal(ranks.calls, [("all_reduce", want.numel())], label="the collectives")


@check("20.1", seconds=5)
def test_attention_example(impl, seed):
    o_proj = torch.tensor([[1.0, 0.0], [10.0, 1.0]])
    ones, zeros = torch.ones(1, 2), torch.zeros(2)
    weights = AttentionWeights(torch.zeros(2, 2), ones, ones, o_proj, zeros, torch.ones(2))
    inputs = dict(x=torch.tensor([[1.0, 2.0]]), weights=weights, head_dim=1, ranks=Ranks(2))
    compare_ranks(call(impl, inputs), [torch.tensor([[4.0, 34.0]])] * 2)


@check("20.1", {"own": "2 of 4 KV heads each", "copies": "one of 2 KV heads each"}, seconds=5)
def test_attention_work(impl, case, seed):
    """No rank does another rank's work."""
    kv_heads, size = (4, 2) if case == "own" else (2, 4)
    x, weights, _ = _attention(seed, 8, kv_heads)
    own_kv = max(1, kv_heads // size)
    tokens, hidden = x.shape
    projected = size * (2 * 8 // size + 2 * own_kv) * 4 * tokens * hidden
    attended = 2 * 8 * 4 * tokens * tokens
    with Products() as products:
        impl(x, weights, 4, Ranks(size))
    used, most = products.flops, 2 * (projected + attended)
    assert used <= most, (
        f"your ranks together compute {used} FLOPs, and {most} are enough: does a rank repeat what "
        "another rank does?"
    )


@check("20.1", {"own": "2 of 4 KV heads each", "copies": "one of 2 KV heads each"}, seconds=5)
def test_each_rank_has_its_heads(impl, case, seed):
    """Other weights of a rank's query heads change what this rank adds, and no other part."""
    kv_heads, size = (4, 2) if case == "own" else (2, 4)
    x, weights, _ = _attention(seed, 8, kv_heads)

    def change(rank):
        rows = slice(rank * 8 // size * 4, (rank + 1) * 8 // size * 4)
        q_proj, o_proj = weights.q_proj.clone(), weights.o_proj.clone()
        q_proj[rows] *= -3
        o_proj[:, rows] *= 2
        return dict(inputs, weights=weights._replace(q_proj=q_proj, o_proj=o_proj))

    inputs = dict(x=x, weights=weights, head_dim=4)
    assert_apart(impl, inputs, size, change, what="the weights of the query heads")


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "mv", "addmm", "baddbmm", "addmv"):
            left = args[1] if "add" in name else args[0]
            self.flops += 2 * out.numel() * left.shape[-1]
        return out


@check("20.1", {"3": "for 4 query heads", "8": "more ranks than heads"}, seconds=5)
def test_attention_refuses(impl, case, seed):
    x, weights, _ = _attention(seed, 4, 4)
    try:
        impl(x, weights, 4, Ranks(int(case)))
    except ValueError as error:
        assert "size" in str(error), f"your ValueError says {error}; name size"
        return
    except Exception as error:
        kind = type(error).__name__
        raise AssertionError(
            f"your function raises {kind}: {error}; raise ValueError that names size"
        ) from None
    raise AssertionError(
        f"your function gave 4 query heads to {case} ranks; raise ValueError that names size"
    )


# ---------------------------------------------------------------- 20.2 greedy


def chosen(local_logits, vocab_size):
    """Tokens and log-probabilities by the whole rows, in float64."""
    logits = torch.cat(local_logits, -1)[:, :vocab_size].double()
    best = logits.max(-1, keepdim=True).values
    tokens = torch.tensor([(row == top).nonzero()[0] for row, top in zip(logits, best)])
    total = (logits - best).exp().sum(-1)
    return tokens, -total.log()


def drawn(seed, size, width, vocab_size, rows=4, spread=3.0, padding=None, low=0.0):
    """Random logits of `size` ranks; columns without a token hold `padding`."""
    g = torch.Generator().manual_seed(seed)
    whole = torch.randn(rows, size * width, generator=g) * spread + low
    if padding is not None:
        whole[:, vocab_size:] = padding
    return [part.clone() for part in whole.chunk(size, dim=-1)]


def with_ties(seed):
    parts = drawn(seed, 3, 4, 12)
    for part in parts:
        part[0] = 1.5
    parts[1][1, 2] = parts[2][1, 0] = parts[1][1, 3] = 50.0
    return parts


def nearly_equal(seed):
    """The largest logit is the next float32 number after that of an earlier token."""
    parts = drawn(seed, 3, 4, 12, spread=1.0)
    parts[0][:, 1], larger = 8.0, 8.0 + 2**-20
    for row, (rank, column) in enumerate(((2, 3), (0, 2), (1, 0), (2, 0))):
        parts[rank][row, column] = larger
    return parts


def with_forbidden(seed, low=0.0):
    parts = drawn(seed, 3, 4, 12, low=low)
    parts[0][0] = parts[2][0] = -INF  # all tokens of two ranks
    parts[1][1] = -INF
    parts[2][2, 1:] = -INF
    return parts


def far_below(seed):
    """All logits are below any number that one might write for "nothing": of each row one is
    larger than the rest by so much that its probability is 1. Padding is 0.
    """
    steps = torch.randperm(4 * 20, generator=torch.Generator().manual_seed(seed)).view(4, 20)
    sizes = torch.tensor([1e5, 1e7, 2e9, 1e30])[:, None]
    whole = -sizes * (1 + steps / 100)
    whole[:, 9:] = 0.0
    whole[1, :5] = -INF
    return [part.clone() for part in whole.chunk(4, dim=-1)]


def of_many_tokens(seed):
    """Winners whose numbers need more bits than 16-bit floats have."""
    parts = drawn(seed, 2, 35_000, 69_999, padding=9.0)
    for row, token in enumerate((4_099, 34_999, 35_001, 69_997)):
        parts[token // 35_000][row, token % 35_000] = 50.0
    return parts


GREEDY_CASES = {  # name: (logits by seed, vocab_size, why)
    "spread": (lambda seed: drawn(seed, 4, 5, 20), 20, "every rank may hold the winner"),
    "flat": (lambda seed: drawn(seed, 2, 8, 16, spread=0.1), 16, "all ranks count in the sum"),
    "large": (
        lambda seed: drawn(seed, 2, 5, 10, spread=30.0, low=300.0),
        10,
        "exp overflows without the maximum",
    ),
    "quiet": (
        lambda seed: drawn(seed, 2, 5, 9, low=-200.0, padding=0.0),
        9,
        "all logits are negative, and padding is 0",
    ),
    "padding": (lambda seed: drawn(seed, 4, 5, 17, padding=NAN), 17, "a part of a rank is padding"),
    "empty_rank": (
        lambda seed: drawn(seed, 4, 4, 11, padding=7.0),
        11,
        "the last rank has padding alone",
    ),
    "ties": (with_ties, 12, "of equals the lowest number"),
    "nearly_equal": (nearly_equal, 12, "two logits that differ in their last bit are not equal"),
    "forbidden": (with_forbidden, 12, "−inf on all tokens of a rank"),
    "forbidden_and_quiet": (
        lambda seed: with_forbidden(seed, low=-200.0),
        12,
        "a rank without a token says nothing of how large the others' logits are",
    ),
    "far_below": (far_below, 9, "-1e4 or -1e9 is a number, and a logit may be smaller"),
    "many_tokens": (of_many_tokens, 69_999, "a token's number has to arrive as it was"),
    "alone": (lambda seed: drawn(seed, 1, 6, 6), 6, "one rank"),
}


@check("20.2", {case: why for case, (*_, why) in GREEDY_CASES.items()}, seconds=5)
def test_greedy(impl, case, seed):
    make, vocab_size, _ = GREEDY_CASES[case]
    logits = make(seed)
    ranks = Ranks(len(logits))
    got = call(impl, dict(local_logits=logits, vocab_size=vocab_size, ranks=ranks))
    compare_greedy(got, chosen(logits, vocab_size))
    numbers = sum(count for _, count in ranks.calls)
    if ranks.size > 1:
        assert 0 < numbers <= 3 * len(logits[0]), (
            f"your collectives carry {numbers} numbers of a rank for {len(logits[0])} rows; 3 for "
            "each row are enough, and without any the ranks cannot agree"
        )


def compare_greedy(got, want):
    note(got)
    assert isinstance(got, tuple) and len(got) == 2, (
        f"your result is a {type(got).__name__}, expected a tuple: tokens, log-probabilities"
    )
    assert_close(got[0], want[0].flatten(), atol=0.0, dtype=torch.int64, label="the tokens")
    assert_close(got[1], want[1], atol=1e-4, dtype=torch.float32, label="the log-probabilities")


@check("20.2", seconds=5)
def test_greedy_example(impl, seed):
    logits = [torch.zeros(1, 2), torch.tensor([[math.log(2), 9.0]])]
    got = call(impl, dict(local_logits=logits, vocab_size=3, ranks=Ranks(2)))
    compare_greedy(got, (torch.tensor([2]), torch.tensor([-math.log(2)])))


@check("20.2", seconds=5)
def test_logits_stay_where_they_are(impl, seed):
    """The result is that of one rank, so one rank's own logits may be in it."""
    size = 3
    inputs = dict(local_logits=drawn(seed, size, 4, 12), vocab_size=12)

    def change(rank):
        own = [logits.clone() for logits in inputs["local_logits"]]
        own[rank] = own[rank].flip(-1) - 2
        return dict(inputs, local_logits=own)

    follows = []
    for holder in range(size):  # as if the result were that of this rank

        def of_holder(got, holder=holder):
            return [got if rank == holder else "nothing" for rank in range(size)]

        try:
            assert_apart(impl, inputs, size, change, what="the logits", results=of_holder)
            return
        except AssertionError as error:
            follows.append(error)
    raise follows[0]


# ---------------------------------------------------------------- 20.3 shared tokens


def over_all_tokens(inputs, size):
    """Each rank's result, from all tokens in their order, in float64."""
    keys, values = (torch.stack(inputs[name], 2).flatten(1, 2) for name in ("keys", "values"))
    want = []
    for q in inputs["qs"]:
        rows = []
        for b, length in enumerate(inputs["context_lens"].tolist()):
            k, v = keys[b, :length].double(), values[b, :length].double()
            p = (q[b].double() @ k.T * inputs["softmax_scale"]).softmax(-1)
            rows.append(p @ v)
        want.append(torch.stack(rows))
    return want


def shared_tokens(
    seed, size, lengths, spread=1.0, padding=0.0, low=0.0, last=0.0, heads=2, dim=4, v_dim=3
):
    """Inputs without `ranks`. Rows that hold no token are `padding`. last: how long the first key
    of the last rank is, in the direction of the first head's query; 0: as all others.
    """
    g = torch.Generator().manual_seed(seed)
    batch, rows = len(lengths), -(-max(lengths) // size) + 1

    def of_ranks(*shape):
        return [torch.randn(batch, *shape, generator=g) for _ in range(size)]

    qs = [spread * q + low for q in of_ranks(heads, dim)]
    keys, values = of_ranks(rows, dim), of_ranks(rows, v_dim)
    for rank in range(size):
        keys[rank] = keys[rank] - low
        for b, length in enumerate(lengths):
            own = len(range(rank, length, size))
            keys[rank][b, own:] = values[rank][b, own:] = padding
    if last:
        keys[-1][:, 0] = last * torch.nn.functional.normalize(qs[0][:, 0], dim=-1)
    return dict(
        qs=qs, keys=keys, values=values, context_lens=torch.tensor(lengths), softmax_scale=0.7
    )


TOKEN_CASES = {  # name: (options of shared_tokens, why)
    "even": (dict(size=2, lengths=[6, 6]), "as many tokens on each rank"),
    "uneven": (dict(size=3, lengths=[7, 5, 12]), "ranks have different numbers of tokens"),
    "padding": (
        dict(size=3, lengths=[4, 9, 2], padding=NAN),
        "rows after a rank's last token hold anything",
    ),
    "few": (dict(size=4, lengths=[1, 3, 2]), "fewer tokens than ranks: some have none"),
    "few_and_negative": (
        dict(size=4, lengths=[1, 2, 5], low=6.0),
        "all scores are far below 0, and a rank without a token says nothing",
    ),
    "large": (
        dict(size=2, lengths=[9, 4], spread=60.0, last=8.0),
        "exp overflows without the maximum, or with that of one rank",
    ),
    "v_width": (dict(size=2, lengths=[5], v_dim=6), "values wider than keys"),
    "many_heads": (dict(size=3, lengths=[8, 3], heads=4), "a rank's heads stay in their order"),
    "alone": (dict(size=1, lengths=[5, 1]), "one rank has all tokens"),
}


@check("20.3", {case: why for case, (_, why) in TOKEN_CASES.items()}, seconds=5)
def test_shared_tokens(impl, case, seed):
    options, _ = TOKEN_CASES[case]
    size, inputs = options["size"], shared_tokens(seed, **options)
    want, ranks = over_all_tokens(inputs, size), Ranks(size)
    compare_ranks(call(impl, dict(inputs, ranks=ranks)), want, atol=2e-4)
    batch, heads, dim = inputs["qs"][0].shape
    most = batch * heads * (dim + size * (want[0].shape[-1] + 2))
    put = sum(count for _, count in ranks.calls)
    assert size == 1 or 0 < put <= most, (
        f"your collectives carry {put} numbers of a rank, and {most} are enough: do keys or values "
        "travel?"
    )


@check("20.3", seconds=5)
def test_shared_tokens_example(impl, seed):
    ones = torch.ones(1, 1, 1)
    inputs = dict(
        qs=[ones, ones], keys=[ones * math.log(2), ones * 0], values=[ones * 3, ones * 6],
        context_lens=torch.tensor([2]), softmax_scale=1.0, ranks=Ranks(2),
    )  # fmt: skip
    compare_ranks(call(impl, inputs), [ones * 4, ones * 4])


@check("20.3", seconds=5)
def test_each_rank_attends_to_its_tokens(impl, seed):
    """Other keys and values of a rank change what this rank puts in, and no other's."""
    size = 3
    inputs = shared_tokens(seed, size, [7, 8])

    def change(rank):
        keys, values = ([x.clone() for x in inputs[name]] for name in ("keys", "values"))
        keys[rank], values[rank] = -2 * keys[rank], values[rank] + 3
        return dict(inputs, keys=keys, values=values)

    assert_apart(impl, inputs, size, change, what="keys and values")


@check("20.3", seconds=5)
def test_queries_come_through_a_collective(impl, seed):
    size = 2
    inputs = shared_tokens(seed, size, [5, 6])

    def change(rank):
        qs = [q.clone() for q in inputs["qs"]]
        qs[rank] = qs[rank] * -2 + 1
        return dict(inputs, qs=qs)

    assert_apart(impl, inputs, size, change, what="the queries")
