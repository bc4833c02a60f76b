"""Fewer KV heads for a model that was trained with more: the heads of a group become one, by their
mean or by the first of them.

The projections are linear and RoPE turns every head alike, so merging rows of W_k merges the keys
themselves:

    mean over h of (x · W_h) = x · (mean over h of W_h)

Exact only where a group's heads already agree; otherwise the model needs some more training
("uptraining").

Source: Ainslie et al. 2023, GQA, section 2.1.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder

Merge = Callable[[Tensor], Tensor]


def mean_head(heads: Tensor) -> Tensor:
    """The mean of each group's heads: [groups, heads of a group, D, ...] -> [groups, D, ...]. The
    nearest one head to all.
    """
    return heads.mean(dim=1)


def first_head(heads: Tensor) -> Tensor:
    """The first head of each group, the others dropped: [groups, heads of a group, D, ...] ->
    [groups, D, ...].
    """
    return heads[:, 0]


def merge_heads(weight: Tensor, num_kv_heads: int, new_num_kv_heads: int, merge: Merge) -> Tensor:
    """Rows of k_proj or v_proj, head after head: [num_kv_heads · D, ...] -> [new_num_kv_heads · D,
    ...]; a bias likewise.

    Neighbours are merged, because the query heads of neighbours are neighbours: query head h keeps
    reading KV head h // group.
    """
    # [groups, heads of a group, D, ...]
    heads = weight.unflatten(0, (new_num_kv_heads, num_kv_heads // new_num_kv_heads, -1))
    return merge(heads).flatten(0, 1)


def merged(model: Decoder, num_kv_heads: int, merge: Merge) -> Decoder:
    """The model with fewer KV heads, each `merge` of a group; all other weights are shared with it.
    Raises ValueError.
    """
    have = model.config.num_key_value_heads
    _check(num_kv_heads, [n for n in range(1, have + 1) if have % n == 0])
    return _with_kv_heads(
        model, num_kv_heads, lambda weight: merge_heads(weight, have, num_kv_heads, merge)
    )


def repeated(model: Decoder, num_kv_heads: int) -> Decoder:
    """The model with more KV heads, copies of those it has: the same logits from a larger cache.
    Raises ValueError.
    """
    have, query_heads = model.config.num_key_value_heads, model.config.num_attention_heads
    _check(
        num_kv_heads,
        [n for n in range(have, query_heads + 1) if n % have == 0 and query_heads % n == 0],
    )
    return _with_kv_heads(
        model,
        num_kv_heads,
        lambda weight: (
            weight.unflatten(0, (have, -1))
            .repeat_interleave(num_kv_heads // have, dim=0)
            .flatten(0, 1)
        ),
    )


def _check(num_kv_heads: int, accepted: list[int]) -> None:
    if num_kv_heads not in accepted:
        raise ValueError(
            f"num_kv_heads: got {num_kv_heads}; accepted: {', '.join(map(str, accepted))}"
        )


def _with_kv_heads(
    model: Decoder, num_kv_heads: int, change: Callable[[Tensor], Tensor]
) -> Decoder:
    """The model with `change` applied to the rows of k_proj and v_proj, [Hkv · D, ...], weights and
    biases.
    """
    with torch.device("meta"):  # no memory: every weight comes from `model`
        twin = Decoder(replace(model.config, num_key_value_heads=num_kv_heads))
    weights = {
        name: change(weight) if ".k_proj." in name or ".v_proj." in name else weight
        for name, weight in model.state_dict().items()
    }
    twin.load_state_dict(weights, assign=True)
    if model.config.tie_word_embeddings:
        # because assigning made two parameters of the one tensor
        twin.lm_head.weight = twin.embed_tokens.weight
    return twin.eval().requires_grad_(False)
