"""The kernel's idea in PyTorch: q turns in place, k turns on its way into its row. For machines
where kernels are interpreted.
"""

import torch
from torch import Tensor

from lessons.l04_positions.naive import RotatingKVCache


class InPlaceRotatingKVCache(RotatingKVCache):
    """RotatingKVCache without the tensors in between: no rotated q and k beside the old ones, no
    table rows gathered.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Turn q in place, append k and v, attend: q: [T, Hq, D]; k, v: [T, Hkv, D], unrotated ->
        [T, Hq, D].
        """
        start, end = self.length, self.length + len(q)
        if end > len(self.cos_sin_cache):
            raise ValueError(
                f"positions: got {start} to {end - 1}; accepted: 0 to "
                f"{len(self.cos_sin_cache) - 1}, "
                "the rows of cos_sin_cache"
            )
        # a view: the new positions are neighbours
        cos, sin = self.cos_sin_cache[start:end, None].to(q.dtype).chunk(2, dim=-1)
        turn_into(q, q, cos, sin)
        self.cos, self.sin = cos, sin  # for `write`, which the base class calls with k and v alone
        return super(RotatingKVCache, self).attend(layer, q, k, v)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        rows = slice(self.length, self.length + len(k))
        turn_into(self.keys[layer, rows], k, self.cos, self.sin)
        self.values[layer, rows] = v


def turn_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write x: [T, H, D], turned in the half-rotated layout, to out: [T, H, D], which may be x.
    cos, sin: [T, 1, D / 2].
    """
    (first, second), (out_first, out_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    # kept aside, because the second half still needs the old first
    turned = torch.addcmul(first * cos, second, sin, value=-1)
    torch.addcmul(second * cos, first, sin, out=out_second)
    out_first.copy_(turned)
