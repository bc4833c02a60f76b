"""Many adapters on one base, one after the other: y = x Wᵀ + scaling · (x Aᵀ) Bᵀ, where each row
has its own A, B and scaling.

The base product is shared by all rows. The correction is computed adapter by adapter: pick its
rows, multiply twice, add. Read it beside segments.py, which runs all adapters in two launches.

Sources: Hu et al. 2021, LoRA, section 4.1; Kalajdzievski 2023, rsLoRA (alpha / √r in place of alpha
/ r).
"""

from torch import Tensor

from lessons.l21_multi_lora.batch import AdapterBatch
from lessons.l21_multi_lora.kernels.weights import SlotWeights


def add_lora(out: Tensor, x: Tensor, weights: SlotWeights, batch: AdapterBatch) -> Tensor:
    """out += the correction of each row's adapter, in place; returns out.

    out: [T, N], the base product; x: [T, K]; both in the adapters' dtype. A row without an adapter
    stays as it is.
    """
    for slot in range(len(weights.ranks)):
        # On a GPU, Python waits here, because it cannot know how many rows there are.
        is_own = batch.row_slots == slot
        rows = is_own.nonzero().flatten()
        rank = int(weights.ranks[slot])
        if len(rows) == 0 or rank == 0:
            continue
        a = weights.a[slot, :rank]  # [r, K]
        b = weights.b[slot, :rank]  # [r, N]
        scaling = weights.scaling[slot]
        h = x[rows] @ a.T  # [rows, r]
        delta = h @ b  # [rows, N]
        delta *= scaling
        out[rows] += delta
    return out
