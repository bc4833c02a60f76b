"""What tests and exercises share: trees over pages, and heads that are right often, but not
always.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l12_paged_kv.lab.testing import DEVICE, PagedInputs, paged
from lessons.l17_tree_speculation.heads.heads import KINDS as HEADS
from lessons.l17_tree_speculation.heads.heads import Heads, MedusaHeads
from lessons.l17_tree_speculation.trees.tree import Tree, chain, full_tree

BRANCHES = Tree((-1, 0, 0, 1, 1, 2))
TREES = {
    "root alone": chain(0),
    "chain": chain(5),
    "branches": BRANCHES,
    "siblings only": full_tree([6]),
    "two levels": full_tree([3, 2]),
}


def tree_inputs(
    trees: list[Tree | None], new: list[int], lengths: list[int], **options
) -> tuple[PagedInputs, Tensor]:
    """(the arguments of path_attention up to `tree`, tree: [T, W] int8). None: a piece of a prompt
    of new[b] tokens; lengths: tokens of each sequence with the new ones; options: of `paged`.
    """
    new = [count if tree is None else len(tree) for tree, count in zip(trees, new)]
    inputs = paged(lengths, new, **options)
    width = max([len(tree) for tree in trees if tree is not None] or [1])
    table = torch.zeros(sum(new), width, dtype=torch.int8)
    first = 0
    for tree, count in zip(trees, new):
        if tree is not None:
            table[first : first + count, :count] = tree.table
        first += count
    return inputs, table.to(DEVICE)


def random_heads(
    target: Decoder,
    kind: str,
    depth: int = 3,
    scale: float = 0.5,
    guessed: Sequence[int] | None = None,
) -> Heads:
    """Untrained heads of any kind, in the target's dtype. guessed: the tokens that they can guess,
    if not all.
    """
    sizes = dict(intermediate_size=24)
    if kind == MedusaHeads.kind:
        sizes = dict(hidden_size=target.config.hidden_size, count=depth)
    if guessed is not None:
        sizes["draft_vocab_size"] = len(guessed)
    heads = HEADS[kind].for_target(target.config, sizes)
    heads = heads.to(target.device, target.dtype).eval().requires_grad_(False)
    for weight in heads.parameters():
        weight.normal_(std=scale * weight.shape[-1] ** -0.5)
    if guessed is not None:
        heads.lm_head.read(target, torch.tensor(list(guessed), device=target.device))
    return heads


class Oracle(MedusaHeads):
    """Heads that know the answer: what a target says i + 1 tokens later, at every position."""

    def __init__(self, target: Decoder, text: list[int], count: int):
        super().__init__(target.config.hidden_size, count)
        tokens = torch.tensor(text)
        hidden = target(tokens, whole_sequence(target, len(tokens)))
        self.heads = nn.ModuleList(Later(hidden, index + 1) for index in range(count))


class Later(nn.Module):
    """From a hidden state to the one that came `ahead` tokens later."""

    def __init__(self, hidden, ahead: int):
        super().__init__()
        self.hidden, self.ahead = hidden, ahead

    def forward(self, x):
        nearest = torch.cdist(x, self.hidden).argmin(-1)
        return self.hidden[(nearest + self.ahead).clamp(max=len(self.hidden) - 1)]


def perfect(model, prompt: list[int], limit: int, count: int = 3) -> tuple[Oracle, list[int]]:
    """Heads for one prompt that are always right, and the answer."""
    (answer,) = one_at_a_time.generate(model, [prompt], limit + count)
    return Oracle(model, [*prompt, *answer], count), answer[:limit]
