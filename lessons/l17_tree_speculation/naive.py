"""A tree path by path: each path from the root to a leaf is its own sequence.

Read `path_logits`, then `accept_among` and `verify_tree`: which guess stays if there are several.
`path_attention` is the definition that the kernel is held to. `generate` is the loop without a
cache.

The rule for several guesses is lesson 16's, applied to one guess after the other. The guesses after
one node are drawn from q without replacement. If the first is rejected, the residual is what is
left to sample from, and the second guess was drawn from q without the first. So these two take the
places of p and q in the test of the second guess.

Sources: Miao et al. 2024, SpecInfer, section 4.3, algorithm 2; Li et al. 2024, EAGLE, appendix A.2;
Jeon et al. 2024, Recursive Speculative Decoding, section 3.2 (without replacement).
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention, whole_sequence
from lessons.l02_naive_attention.random_streams import streams_of, uniform
from lessons.l02_naive_attention.request import OnToken, Request, hand_out, read_requests
from lessons.l02_naive_attention.sampling import SamplingParams, draw, probabilities
from lessons.l12_paged_kv.naive import gathered
from lessons.l16_speculative_sampling.naive import residual
from lessons.l17_tree_speculation.trees.tree import Tree

# ---------------------------------------------------------------- the target over a tree


def path_logits(model: Decoder, text: list[int], tree: Tree, tokens: list[int]) -> Tensor:
    """What the target says after each node, one path after the other: [N, V].

    text: the tokens before the root; tokens: [N], the root's is the newest token. Nodes that
    several paths share are computed once for each.
    """
    logits = torch.empty(len(tree), model.config.vocab_size, dtype=model.dtype)
    for path in tree.paths:
        guesses = [tokens[node] for node in path]
        hidden = run_alone(model, text + guesses)
        on_path = hidden[-len(path) :]
        logits[list(path)] = model.logits(on_path).to(logits.device)
    return logits


def run_alone(model: Decoder, text: list[int]) -> Tensor:
    """The hidden states of a sequence without a cache: [tokens, hidden_size]."""
    tokens = torch.tensor(text, device=model.device)
    attend = whole_sequence(model, len(text))
    return model(tokens, attend)


def path_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    tree: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """The definition of optimized.tree_attention. q: [T, Hq, D] -> [T, Hq, Dv].

    Each node's path from the root is laid out after what the sequence held, and its query comes
    last, so lesson 2's attention needs no mask but its own.
    """
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    starts = cu_seqlens_q.tolist()
    for b, length in enumerate(context_lens.tolist()):
        k = gathered(k_cache, block_table[b], length)
        v = gathered(v_cache, block_table[b], length)
        first = starts[b]
        end = starts[b + 1]
        held = length - (end - first)
        for row in range(first, end):
            if tree[row, 0] == 0:
                # a token of a prompt sees all before it
                seen = list(range(held + row - first + 1))
            else:
                seen = list(range(held))
                seen += places_on_path(tree[row], held)
            query = q[row : row + 1]
            out[row] = attention(
                query,
                k[seen],
                v[seen],
                softmax_scale,
                window=window,
            )[0]
    return out


def places_on_path(above: Tensor, held: int) -> list[int]:
    """Places of the keys on a node's path, the root's first. above: [W], its row of the table."""
    on_path = above.nonzero()
    # Parents come before their children, so the order of the numbers is that of the path.
    places = held + on_path.flatten()
    return places.tolist()


# ---------------------------------------------------------------- which node stays


def accept_among(p: Tensor, q: Tensor, guesses: list[int], u: list[float]) -> tuple[int, Tensor]:
    """Which of the guesses after one node stays: (its place among them, or -1; what a token is
    drawn from if none stays). p, q: [V]; u: a random number for each guess.

    guesses: drawn from q without replacement, in this order. A negative one was never drawn.
    """
    rest = p / p.sum()
    share = q / q.sum()
    for place, token in enumerate(guesses):
        if token < 0:
            break
        if u[place] * share[token] < rest[token]:
            return place, rest
        rest = residual(rest, share)
        rest = rest / rest.sum()
        share = share.clone()
        # The next guess was drawn from what is left of q.
        share[token] = 0
        if share.sum() > 0:
            share = share / share.sum()
    return -1, rest


def verify_tree(p: Tensor, q: Tensor, tree: Tree, tokens: list[int], u: Tensor) -> list[int]:
    """The path of a step through a tree whose nodes were drawn: (nodes that stay, then the token
    that is emitted after the last of them).

    p, q: [N, V], what target and draft say after each node; q is not read at a leaf. tokens: [N];
    u: [N, 2] in [0, 1): u[i, 0] decides whether node i stays, u[i, 1] draws the token after it.
    """
    path = [0]
    while True:
        node = path[-1]
        children = tree.children[node]
        guesses = [tokens[child] for child in children]
        numbers = [float(u[child, 0]) for child in children]
        weights = p[node]
        place = -1
        if children:
            place, weights = accept_among(
                p[node],
                q[node],
                guesses,
                numbers,
            )
        if place < 0:
            token = draw(weights, u[node, 1:])
            path.append(int(token))
            return path
        path.append(children[place])


def follow(tree: Tree, tokens: list[int], sampled: list[int]) -> list[int]:
    """The path of a step through a tree whose nodes were *chosen*, not drawn: (nodes that stay,
    then the token after the last of them).

    sampled: [N], what the target itself sampled after each node. As long as one of the children
    has this token, the path goes on with it.
    """
    path = [0]
    while True:
        node = path[-1]
        token = sampled[node]
        right = [
            child
            for child in tree.children[node]
            if tokens[child] == token
        ]  # fmt: skip
        if not right:
            path.append(token)
            return path
        path.append(right[0])


# ---------------------------------------------------------------- generation


def random_number(request: Request, index: int) -> Tensor:
    """The number that plain decoding draws token `index` of the answer with: [1] float64."""
    stream = streams_of([request.sampling.seed])
    place = torch.tensor([index])
    return uniform(stream, place)


def guess_from(model: Decoder, text: list[int], tree: Tree) -> list[int]:
    """Fill a tree with the likeliest tokens of any model: [N], the root's is text[-1]."""
    tokens = [text[-1]]
    tokens += [0] * (len(tree) - 1)
    # Parents come before their children, so a node's path is filled before it.
    for node, children in enumerate(tree.children):
        if not children:
            continue
        hidden = run_alone(model, text + guesses_to(tree, tokens, node))
        logits = model.logits(hidden[-1:])
        best = logits[0].topk(len(children))
        for child, token in zip(children, best.indices.tolist()):
            tokens[child] = token
    return tokens


def guesses_to(tree: Tree, tokens: list[int], node: int) -> list[int]:
    """The tokens on the path to a node, without the root's."""
    path = tree.path_to(node)
    return [tokens[n] for n in path[1:]]


def sampled_after(
    request: Request,
    logits: Tensor,
    tree: Tree,
    tokens: list[int],
) -> list[int]:
    """What plain decoding would sample after each node. logits: [N, V] -> [N]."""
    sampled = []
    for node in range(len(tree)):
        output = request.output + guesses_to(tree, tokens, node)
        p = probabilities(
            logits[node],
            request.sampling,
            request.prompt,
            output,
        )
        number = random_number(request, len(output))
        token = draw(p, number)
        sampled.append(int(token))
    return sampled


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    *,
    draft: Decoder,
    tree: Tree,
) -> list[list[int]]:
    """A tree of the draft's likeliest tokens in each step, verified path by path.

    Other arguments, result and errors as in lesson 2's `generate`, and the tokens are the very
    same, also those of sampled requests.
    """
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    for request in requests:
        while not request.finished:
            left = request.max_new_tokens - len(request.output)
            # left - 1, because a step may emit one token more than its tree is deep
            shape = tree.cut(left - 1)
            tokens = guess_from(draft, request.tokens, shape)
            logits = path_logits(model, request.tokens[:-1], shape, tokens)
            sampled = sampled_after(request, logits, shape, tokens)
            *path, last = follow(shape, tokens, sampled)
            emitted = [tokens[node] for node in path[1:]]
            emitted.append(last)
            for token in emitted:
                if not request.finished:
                    hand_out([token], [request], on_token)
    return [request.output for request in requests]
