"""Verifications of trees with one slip each, as they are in guides and teaching code.

Each takes and returns what naive.verify_tree does.
"""

import torch

from lessons.l02_naive_attention.sampling import draw
from lessons.l16_speculative_sampling.naive import residual


def walked(p, q, tree, tokens, u, *, next_rest, next_share, weights_of=None):
    """verify_tree, whose next p, next q and last weights are another sequence's."""
    path = [0]
    while True:
        node = path[-1]
        rest, share = p[node], q[node]
        stays = None
        for child in tree.children[node]:
            token = tokens[child]
            if u[child, 0] * share[token] * rest.sum() < rest[token] * share.sum():
                stays = child
                break
            rest, share = next_rest(p[node], rest, share, token), next_share(share, token)
        if stays is None:
            weights = rest if weights_of is None else weights_of(p, q, path, rest)
            return [*path, int(draw(weights, u[node, 1:]))]
        path.append(stays)


def without(share, token):
    """q without a token that was drawn, as a distribution."""
    left = torch.where(torch.arange(len(share)) == token, 0, share)
    return left / left.sum() if left.sum() > 0 else left


def next_residual(p, rest, share, token):
    """Lesson 16's residual, as a distribution."""
    over = residual(rest / rest.sum(), share / share.sum() if share.sum() > 0 else share)
    return over / over.sum()


def residual_not_updated(p, q, tree, tokens, u):
    """Every sibling is held against the same p; only the last draw uses a residual."""

    def last_rest(p, q, path, rest):
        node = path[-1]
        return residual(p[node], q[node]) if tree.children[node] else rest

    return walked(
        p,
        q,
        tree,
        tokens,
        u,
        next_rest=lambda p, rest, share, token: p,
        next_share=without,
        weights_of=last_rest,
    )


def residual_of_the_first_q(p, q, tree, tokens, u):
    """The second sibling is judged by q as it was, although it was drawn from q without the
    first.
    """
    return walked(
        p, q, tree, tokens, u, next_rest=next_residual, next_share=lambda share, token: share
    )


def drawn_from_p(p, q, tree, tokens, u):
    """After all siblings are rejected the token is drawn from p."""
    return walked(
        p,
        q,
        tree,
        tokens,
        u,
        next_rest=next_residual,
        next_share=without,
        weights_of=lambda p, q, path, rest: p[path[-1]],
    )


def bonus_from_the_root(p, q, tree, tokens, u):
    """The token after an accepted path is drawn from the root's row."""

    def weights(p, q, path, rest):
        return rest if len(path) == 1 else p[0]

    return walked(
        p,
        q,
        tree,
        tokens,
        u,
        next_rest=next_residual,
        next_share=without,
        weights_of=weights,
    )


def typical_as_exact(p, q, tree, tokens, u):
    """A guess stays if it is likely enough (Medusa's typical acceptance)."""
    path = [0]
    while True:
        node = path[-1]
        bound = min(0.09, 0.3 * float(torch.exp(-torch.special.entr(p[node]).sum())))
        stays = [child for child in tree.children[node] if p[node, tokens[child]] > bound]
        if not stays:
            return [*path, int(draw(p[node], u[node, 1:]))]
        path.append(stays[0])


VERIFICATIONS = (
    residual_not_updated,
    residual_of_the_first_q,
    drawn_from_p,
    bonus_from_the_root,
    typical_as_exact,
)
