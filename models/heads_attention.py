"""How the heads of lesson 17 attend while they are trained: many windows at once, and EAGLE-3 to
what it made itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lessons.l02_naive_attention.rope import apply_rope, rope_tables
from lessons.toolbox.measure.device import default_device


def windowed_attend(config, rows: int, length: int):
    """`attend` for `rows` independent windows, packed: causal inside each, positions from 0."""

    def attend(layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = rope_tables(config, torch.arange(length, device=q.device), q.dtype)
        cos, sin = cos.repeat(rows, 1, 1), sin.repeat(rows, 1, 1)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        q, k, v = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return attend


class OwnSteps:
    """`attend` of EAGLE-3's training: step s runs on what step s - 1 made, all positions at once.

    At step s position i stands at the end of a chain that left the target's features at position
    i - s. So it sees the keys of step 0 up to i - s, then one key of each step: that of step j at
    position i - s + j.
    """

    def __init__(self, config, rows: int, length: int):
        self.config, self.rows, self.length = config, rows, length
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        positions = torch.arange(length, device=default_device())
        cos, sin = rope_tables(config, positions, torch.float32)
        self.tables = cos.transpose(0, 1), sin.transpose(0, 1)  # [1, length, D]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        q, k, v = (x.unflatten(0, (self.rows, self.length)).transpose(1, 2) for x in (q, k, v))
        cos, sin = self.tables
        q, k = apply_rope(q, cos.to(q), sin.to(q)), apply_rope(k, cos.to(k), sin.to(k))
        self.keys.append(k.repeat_interleave(group, dim=1))
        self.values.append(v.repeat_interleave(group, dim=1))
        step = len(self.keys) - 1
        scale = self.config.softmax_scale
        position = torch.arange(self.length, device=q.device)
        sees = position <= position[:, None] - step
        scores = [(q @ self.keys[0].transpose(-1, -2) * scale).masked_fill(~sees, -torch.inf)]
        values = []
        for index in range(1, step + 1):
            back = step - index
            # Rolled, so that row i holds what stands at i - back. Rows that wrap are not trained.
            scores.append((q * self.keys[index].roll(back, dims=2)).sum(-1, keepdim=True) * scale)
            values.append(self.values[index].roll(back, dims=2))
        # A position before the chain's begin sees no key of step 0; its own key keeps it finite.
        p = torch.cat(scores, dim=-1).float().softmax(-1).nan_to_num().to(q.dtype)
        out = p[..., : self.length] @ self.values[0]
        for index, value in enumerate(values):
            out = out + p[..., self.length + index, None] * value
        return out.transpose(1, 2).flatten(0, 1)
