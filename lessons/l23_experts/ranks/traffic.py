"""What a token costs on the wire: how many ranks it is sent to, and the bytes of each form.

    expected_ranks(Layer(128, 8, 2048), 8)          # 5.34: of 8 ranks, for 8 of 128 experts

A token with several experts on one rank is sent there once (dispatch.py), so it costs fewer rows
than it has experts. How many is a question of probability. A rank holds E / P of the E experts. The
k chosen ones all miss it in C(E − E / P, k) of C(E, k) cases, if all choices are equally likely:

    ranks of a token = P · (1 − C(E − E / P, k) / C(E, k))

DeepSeek-V3 limits choices: its router keeps 4 of 8 groups of experts, and chooses in these alone.
With a group for each node of 8 GPUs, a token then reaches at most 4 nodes.

Bytes are those that a Group counts. They include what a rank sends to itself. If the router is
even, (P − 1) / P of them leave the rank.

Source: DeepSeek-V3 technical report 2024, section 2.1.2 (node-limited routing).
"""

from math import comb
from typing import NamedTuple

import torch

from lessons.l23_experts.ranks.wire import ID, Float8, Plain
from lessons.toolbox.model.arguments import check_whole, refuse

DTYPE = torch.bfloat16  # of hidden states
WEIGHT_BYTES = 4  # of a router's weight, float32


class Layer(NamedTuple):
    """A layer of experts. num_groups, kept_groups: the router chooses in some groups alone."""

    num_experts: int
    top_k: int
    hidden_size: int
    num_groups: int = 1
    kept_groups: int = 1


def expected_ranks(layer: Layer, size: int) -> float:
    """How many of `size` ranks have some of a token's experts, on average. The router keeps groups
    and chooses experts in them with equal chances. Raises ValueError unless experts and groups can
    be dealt out evenly.
    """
    check_whole(size=size)
    num_experts, top_k, _, num_groups, kept_groups = layer
    if num_experts % size:
        refuse("size", size, f"a divisor of {num_experts}, the number of experts")
    if num_groups % size and size % num_groups:
        refuse("size", size, f"a divisor or a multiple of {num_groups}, the number of groups")
    groups_of_rank = max(1, num_groups // size)
    # experts of one group that a rank has: all, or a part where a group is on several ranks
    in_group = num_experts // max(size, num_groups)
    candidates = num_experts // num_groups * kept_groups
    others = num_groups - groups_of_rank
    missed = 0.0
    for own in range(min(groups_of_rank, kept_groups) + 1):  # of the kept groups on this rank
        chance = comb(groups_of_rank, own) * comb(others, kept_groups - own)
        chance /= comb(num_groups, kept_groups)
        missed += chance * comb(candidates - own * in_group, top_k) / comb(candidates, top_k)
    return size * (1 - missed)


def token_bytes(layer: Layer, rows: float, form: Plain | Float8) -> float:
    """Bytes of a token that is sent `rows` times with its experts' numbers and weights, and gets as
    many rows back in 16 bits.
    """
    there = form.row_bytes(layer.hidden_size, DTYPE)
    there += layer.top_k * (ID.itemsize + WEIGHT_BYTES)
    return rows * (there + Plain().row_bytes(layer.hidden_size, DTYPE))


def slot_bytes(layer: Layer, max_tokens: int, form: Plain | Float8) -> tuple[int, int]:
    """Bytes of the slots of a rank, there and back: FixedSlotsMoE reserves them whatever is in
    them.
    """
    check_whole(max_tokens=max_tokens)
    slots = layer.num_experts * max_tokens
    there, back = (f.row_bytes(layer.hidden_size, DTYPE) for f in (form, Plain()))
    return slots * there, slots * back
