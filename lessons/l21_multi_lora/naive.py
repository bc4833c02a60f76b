"""Many adapters on one base, one after the other: y = x Wᵀ + scaling · (x Aᵀ) Bᵀ, where each row has
its own A, B and scaling.

The base product is shared by all rows. The correction is computed adapter by adapter: pick its rows,
multiply twice, add. Read it beside kernels.py, which runs all adapters in two launches.

Sources: Hu et al. 2021, LoRA, section 4.1; Kalajdzievski 2023, rsLoRA (alpha / √r in place of alpha / r).
"""

from torch import Tensor

from lessons.l21_multi_lora.batch import AdapterBatch
from lessons.l21_multi_lora.weights import SlotWeights


def add_lora(out: Tensor, x: Tensor, weights: SlotWeights, batch: AdapterBatch) -> Tensor:
    """out += the correction of each row's adapter, in place; returns out.

    out: [T, N], the base product; x: [T, K]; both in the adapters' dtype. A row without an adapter
    stays as it is.
    """
    for slot in range(len(weights.ranks)):
        rows = (batch.row_slots == slot).nonzero().flatten()  # on a GPU, Python waits for it here
        rank = int(weights.ranks[slot])
        if len(rows) and rank:
            a, b = weights.a[slot, :rank], weights.b[slot, :rank]  # [r, K], [r, N]
            delta = x[rows] @ a.T @ b
            out[rows] += weights.scaling[slot].to(out.dtype) * delta
    return out
