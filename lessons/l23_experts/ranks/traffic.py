"""What a token costs on the wire: how many ranks it is sent to, and the bytes of each form.

    expected_ranks(Layer(128, 8, 2048), 8)          # 5.34: of 8 ranks, for 8 of 128 experts

A token with several experts on one rank is sent there once (dispatch.py), so it costs fewer rows
than it has experts. How many is a question of probability (reach.py). DeepSeek-V3 limits choices:
its router keeps 4 of 8 groups of experts, and chooses in these alone. With a group for each node of
8 GPUs, a token then reaches at most 4 nodes.

Bytes are those that a Group counts. They include what a rank sends to itself. If the router is
even, (P − 1) / P of them leave the rank.

Source: DeepSeek-V3 technical report 2024, section 2.1.2 (node-limited routing).
"""

from typing import NamedTuple

import torch

from lessons.l23_experts.ranks.reach import places_reached
from lessons.l23_experts.ranks.wire import ID, Float8, Plain
from lessons.toolbox.model.arguments import check_whole

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
    and chooses experts in them with equal chances. Raises ValueError as places_reached.
    """
    num_experts, top_k, _, num_groups, kept_groups = layer
    return places_reached(num_experts, size, top_k, num_groups, kept_groups)


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
