"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l10_flash_decoding.lab.specs
"""

import re
from dataclasses import replace

from lessons.l05_gqa.lab import specs as gqa
from lessons.l06_mla.lab import specs as mla
from lessons.l08_online_softmax.partials import STAGES, merge_warps
from lessons.l10_flash_decoding.mla import split_tiles
from lessons.l10_flash_decoding.optimized import BLOCK_S
from lessons.toolbox.kernels.compile_check import CHIPS, KernelSpec

ROOM = "lessons.l10_flash_decoding"

# The heads and tiles of lesson 5, and below of lesson 6.
KERNELS = [
    replace(
        spec,
        kernel=f"{ROOM}.optimized:split_decode_kernel",
        name=spec.name.replace("gqa", "split"),
        signature=spec.signature | {"out_ptr": "*fp32", "lse_ptr": "*fp32", "split_size": "i32"},
    )
    for spec in gqa.KERNELS
]
KERNELS += [
    KernelSpec(
        f"{ROOM}.optimized:combine_kernel",
        name=f"combine_{dtype}_{dim}",
        signature={
            "partial_out_ptr": "*fp32",
            "partial_lse_ptr": "*fp32",
            "out_ptr": f"*{dtype}",
            "lse_ptr": "*fp32",
            "num_splits": "i32",
        },
        constexprs={"HEAD_DIM": dim, "BLOCK_D": dim, "BLOCK_S": BLOCK_S, "NUM_STAGES": STAGES},
        num_warps=merge_warps(dim),
    )
    for dtype, dim in (("bf16", 128), ("bf16", 512), ("fp32", 64))
]


def latent_spec(spec: KernelSpec, chip: int) -> KernelSpec:
    """A spec of lesson 6 as `mla_flash_decode` launches it on one chip."""
    itemsize, shared_bytes = 4 if "fp32" in spec.name else 2, CHIPS[chip].shared_limit_bytes
    tiles = split_tiles(spec.constexprs["BLOCK_H"], itemsize, shared_bytes, chip)
    return replace(
        spec,
        kernel=f"{ROOM}.mla:mla_split_kernel",
        name=re.sub(r"decode_(.*_sm).*", rf"split_\g<1>{chip}", spec.name),
        signature=spec.signature | {"out_ptr": "*fp32", "capacity": "i32", "split_size": "i32"},
        constexprs=spec.constexprs | {"BLOCK_N": tiles.block_n},
        chips=(chip,),
    )


KERNELS += [latent_spec(spec, chip) for spec in mla.KERNELS for chip in spec.chips]
