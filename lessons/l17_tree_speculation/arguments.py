"""What the tree's attention and its loop accept."""

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.arguments import check_one_device
from lessons.l10_flash_decoding.splits import WorkItems
from lessons.l12_paged_kv.kernels.arguments import check_items, check_places, check_prefill
from lessons.l17_tree_speculation.trees.tree import MOST_NODES
from lessons.toolbox.model.arguments import refuse


def check_tree(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    tree: Tensor,
    window: int | None,
) -> None:
    """Raise ValueError unless tree: [T, W] int8 and the rest, as in `tree_attention`, fit."""
    check_prefill(q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, window)
    check_places(block_table, context_lens, *k_cache.shape[:2])
    fits = tree.dtype == torch.int8 and tree.ndim == 2 and len(tree) == len(q)
    if not fits or not 1 <= tree.shape[1] <= MOST_NODES or not tree.is_contiguous():
        got = f"{tree.dtype} {list(tree.shape)} with strides {list(tree.stride())}"
        refuse("tree", got, f"int8 [{len(q)}, 1 to {MOST_NODES}], dense")
    check_one_device(q=q, tree=tree)


def check_tree_items(
    items: WorkItems, q: Tensor, num_splits: int | None, split_size: int | None
) -> None:
    """Raise ValueError unless items is a list for q: [T, Hq, D], with places for each of T tokens,
    given instead of a number or size of splits.
    """
    check_items(items, q[:, 0, 0], num_splits, split_size)


def check_model(model: Decoder) -> None:
    """Raise ValueError for a model whose attention is not the one that knows trees."""
    config = model.config
    if config.mla is not None or config.has_score_rules:
        raise ValueError(
            f"model: got a {config.model_type}; accepted: one without latents, soft-caps and "
            "sinks, because their attention knows no trees here"
        )
