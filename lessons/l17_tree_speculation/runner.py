"""A paged model that runs trees, keeps one path of each, and hands out hidden states.

    run = runner.run_trees({0: [newest, *guesses]}, {0: tree})
    runner.keep(0, begin, path)      # sequence 0 held `begin` tokens; now it holds the path as well

A tree's nodes are in the cache in the order of their numbers, but they are rotated to the position
of their depth. So after the choice the path's K and V only move together: what they hold is right.
"""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import Rung
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l12_paged_kv.runner import new_pool
from lessons.l16_speculative_sampling.runner import RewindingRunner
from lessons.l17_tree_speculation.heads.heads import tapped_features
from lessons.l17_tree_speculation.optimized import LESSON_17, row_tiles_of
from lessons.l17_tree_speculation.stand_ins import LESSON_17_TORCH
from lessons.l17_tree_speculation.trees.plan import pays
from lessons.l17_tree_speculation.trees.tree import Tree

TREES = Rung("token trees", LESSON_17, LESSON_17_TORCH, prepare=fused)


class TreeRun(NamedTuple):
    """What a step computed, for T new tokens packed one sequence after the other.

    rows: of each sequence, where its new tokens are among the T.
    """

    hidden: Tensor  # [T, hidden_size]
    features: Tensor  # [T, F]
    rows: dict[int, slice]


class TreeRunner(RewindingRunner):
    """Lesson 16's runner, with trees. taps: where the model is read for features, as in
    heads.py.
    """

    taps: tuple[int, ...] = ()

    @classmethod
    def for_trees(
        cls,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        max_context_len: int,
        taps: tuple[int, ...] = (),
    ) -> "TreeRunner":
        """A runner over a new pool. max_context_len: the longest that a sequence may become."""
        model = TREES.prepare(model)
        runner = cls(model, new_pool(model, num_blocks, block_size, max_context_len, TREES))
        runner.taps = taps
        return runner

    @torch.inference_mode()
    def run_trees(self, new: dict[int, list[int]], trees: dict[int, Tree]) -> TreeRun:
        """Run new tokens of some sequences: where `trees` has a tree, those of its nodes, else the
        next tokens of the text. Raises OutOfBlocks, as `step`.
        """
        batch = self.grown(new)
        batch = with_trees(batch, [trees.get(sequence) for sequence in new], self.pool)
        hidden, features = self.compute(batch)
        rows, end = {}, 0
        for sequence, tokens in new.items():
            rows[sequence] = slice(end, end + len(tokens))
            end += len(tokens)
        return TreeRun(hidden, features, rows)

    def compute(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(hidden: [T, hidden_size], features: [T, F]) of a step."""
        return tapped_features(self.model, batch.tokens, self.pool.attending(batch), self.taps)

    def keep(self, sequence: int, begin: int, path: list[int]) -> None:
        """Of a tree whose root is at place `begin`, keep the nodes on `path`, which starts with
        the root, and forget the others.
        """
        table = self.blocks.tables[sequence]
        compact(self.pool, path_moves(path, begin, table, self.pool.block_size))
        self.rewind(sequence, begin + len(path))


Moves = list[tuple[int, int]]  # (from, to), slots of a pool


def path_moves(path: list[int], begin: int, table: list[int], block_size: int) -> Moves:
    """What has to move so that the nodes on `path` are in one piece. begin: the root's place in its
    sequence; table: the sequence's blocks.
    """
    places = [(begin + node, begin + place) for place, node in enumerate(path) if node != place]
    return [
        tuple(table[place // block_size] * block_size + place % block_size for place in move)
        for move in places
    ]


def compact(pool: KVPool, moves: Moves) -> None:
    """Move K and V of all layers, of one sequence or of several together."""
    if not moves:
        return
    source, target = torch.tensor(moves, device=pool.k_slots.device).unbind(1)
    # All are read before one is written, because a path's slots may overlap with its new ones.
    found = [kept[:, source] for kept in pool.tensors]
    for kept, moved in zip(pool.tensors, found):
        kept[:, target] = moved


def with_trees(batch: Batch, trees: list[Tree | None], pool: KVPool | None = None) -> Batch:
    """The step of `new_batch` whose sequences run trees where they have one: positions by depth,
    and the table of who sees whom. Slots stay in the order of the nodes. pool: what the step reads;
    on a GPU it gets room for lists of splits, if its lengths differ much.

    Raises ValueError for a tree that has not as many nodes as its sequence has new tokens.
    """
    if all(tree is None for tree in trees):
        return batch
    width = max(len(tree) for tree in trees if tree is not None)
    table = torch.zeros(len(batch.tokens), width, dtype=torch.int8)
    back = torch.zeros(len(batch.tokens), dtype=torch.int64)  # from the order to the depth
    numbers = torch.cat([batch.cu_seqlens_q, batch.context_lens]).tolist()  # once, because it waits
    starts, lengths = numbers[: len(trees) + 1], numbers[len(trees) + 1 :]
    for tree, first, end in zip(trees, starts, starts[1:]):
        if tree is None:
            continue
        if len(tree) != end - first:
            raise ValueError(
                f"trees: got one of {len(tree)} nodes for {end - first} new tokens; accepted: a "
                "token for each node, the root's first"
            )
        table[first:end, : len(tree)] = tree.table
        back[first:end] = torch.arange(len(tree)) - torch.tensor(tree.depths)
    device, count = batch.tokens.device, trees_in_front(trees, starts)
    # A prompt among the trees would ask for places of all of its tokens.
    through_kernel = count or (0 if any(prompts_of(trees, starts)) else len(trees))
    is_listed = pool is not None and list_pays(pool, lengths[:through_kernel], width)
    return replace(
        batch,
        positions=batch.positions - back.to(device),
        tree=table.to(device),
        plans={} if is_listed else None,
        num_decodes=count,
        num_decode_tokens=starts[count],
    )


def trees_in_front(trees: list[Tree | None], starts: list[int]) -> int:
    """How many sequences run a tree or one token and come before the prompts. 0 if there are no
    prompts, or if a tree comes after one. starts: where the tokens of each sequence begin, and
    the end.
    """
    is_prompt = prompts_of(trees, starts)
    count = is_prompt.index(True) if any(is_prompt) else 0
    return count if all(tree is None for tree in trees[count:]) else 0


def prompts_of(trees: list[Tree | None], starts: list[int]) -> list[bool]:
    """Which sequences run several tokens that are no tree. Arguments as above."""
    lengths = [end - first for first, end in pairwise(starts)]
    return [tree is None and length > 1 for tree, length in zip(trees, lengths)]


def list_pays(pool: KVPool, context_lens: list[int], most_nodes: int) -> bool:
    """Whether trees of at most so many nodes, after these contexts, are worth a list of splits."""
    device, num_kv_heads = pool.k_slots.device, pool.k_slots.shape[-2]
    if device.type != "cuda":
        return False
    group = pool.config.num_attention_heads // pool.config.num_key_value_heads
    return pays(context_lens, num_kv_heads * row_tiles_of(most_nodes, group), device)
