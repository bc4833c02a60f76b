"""Both kernels as they are launched: what `compile_check` compiles for five GPU generations, and
tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l26_kv_transfer.lab.specs
"""

from lessons.l26_kv_transfer.optimized import WORDS, piece_for
from lessons.toolbox.kernels.compile_check import KernelSpec

# {name: (bytes of a page, bytes of which all addresses are multiples)}: Llama-3-8B's 8 KV heads of
# 128 in 16 bits, pages of 16; DeepSeek's latents of 576 codes; a head's scales; an odd page.
PAGES = {"llama": (32768, 16), "latents": (9216, 16), "scales": (32, 4), "odd": (27, 1)}
TYPES = {8: "*i64", 4: "*i32", 2: "*i16", 1: "*u8"}


def copy_spec(kernel: str, name: str, page_bytes: int, unit: int) -> KernelSpec:
    """`gather` or `scatter` for pages of this size."""
    word = min(unit, max(WORDS))
    page, aligned = page_bytes // word, unit // word
    piece, num_warps = piece_for(page, aligned)
    return KernelSpec(
        f"lessons.l26_kv_transfer.optimized:{kernel}_kernel",
        name=f"{kernel}_{name}",
        signature={
            **dict.fromkeys(("pages_ptr", "packed_ptr"), TYPES[word]),
            "blocks_ptr": "*i64",
            "parts": "i32",
            **dict.fromkeys(("stride_layer", "stride_part", "stride_row"), "i32"),
        },
        constexprs={"PAGE": page, "PIECE": piece, "ALIGNED": aligned},
        num_warps=num_warps,
    )


KERNELS = [
    copy_spec(kernel, name, *page)
    for kernel in ("gather", "scatter")
    for name, page in PAGES.items()
]
