"""What each program of the decode kernel touches, recorded from its compiled code: a film strip,
one panel a program.

    draw_walk(lengths=[10, 7, 13])
"""

import torch
from matplotlib.patches import Patch
from torch import Tensor

from lessons.l12_paged_kv.lab.testing import NO_BLOCK, PagedInputs, paged
from lessons.l12_paged_kv.optimized import paged_decode
from lessons.toolbox.draw.figure import PALETTE, ClassFigure, frame, key, style
from lessons.toolbox.draw.film_panels import record

EMPTY, OWNED, LOADED = "#F4F4F4", "#BFD9EA", PALETTE[0]


def loads_of_programs(inputs: PagedInputs) -> tuple[list[Tensor], str]:
    """How often the program of each sequence loads each row of K, a tensor [num_blocks, block_size]
    each; and in words, where that was recorded.
    """
    q, k_cache, v_cache, table, _, lens = inputs
    recording, _ = record(lambda: paged_decode(q, k_cache, v_cache, table, lens, num_splits=1))
    loads = [torch.zeros_like(k_cache, dtype=torch.int64) for _ in range(len(q))]
    for access in recording.accesses:
        if access.kind == "load":
            loads[access.program[2]] += access.elements(k_cache)
    return [counts.amax((-1, -2)) for counts in loads], recording.source


@style()
def draw_walk(lengths: list[int], block_size: int = 4, seed: int = 12) -> ClassFigure:
    """Rows of the pool that each sequence's program loads; pale: what others own."""
    inputs = paged(lengths, block_size=block_size, heads=(1, 1, 16, 16), seed=seed)
    num_blocks = len(inputs.k_cache)
    loads_of_each, source = loads_of_programs(inputs)
    owned = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for table, length in zip(inputs.block_table, lengths):
        blocks = table[table < NO_BLOCK].long()
        for key_ in range(length):
            owned[blocks[key_ // block_size], key_ % block_size] = True
    fig, axes = frame(
        "Each program loads its own keys, wherever their pages are, and nothing else",
        f"{source}; decode_kernel, K of one layer, pages of {block_size}",
        (9.5, 1.6 + 0.34 * num_blocks),
        widths=(1,) * len(lengths),
    )
    for sequence, ax in enumerate(axes):
        loads = loads_of_each[sequence]
        for block in range(num_blocks):
            for row in range(block_size):
                colour = OWNED if owned[block, row] else EMPTY
                colour = LOADED if loads[block, row] else colour
                ax.barh(block, 0.94, 0.9, row, facecolor=colour, align="center")
        table = inputs.block_table[sequence].tolist()
        named = [block for block in table if block < NO_BLOCK]
        ax.set_xlabel(f"program {sequence}: table {named}")
        ax.set_ylim(num_blocks - 0.4, -0.6)
        ax.set_xticks([])
        ax.set_yticks(range(num_blocks) if sequence == 0 else [])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("block")
    looks = {"loaded": LOADED, "in use": OWNED, "NaN: never written": EMPTY}
    key(axes[0], [Patch(facecolor=colour, label=name) for name, colour in looks.items()])
    return fig
