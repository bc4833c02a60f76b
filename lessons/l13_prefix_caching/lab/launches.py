"""Lesson 10's kernel as this lesson launches it, with more rows: what `compile_check` compiles for
five GPU generations, and tests assert. Not specs.py, because the table of proofs lists kernels, and
this one is there as lesson 10's.

    python -m lessons.toolbox.kernels.compile_check lessons.l13_prefix_caching.lab.launches
"""

from dataclasses import replace

from lessons.l05_gqa.lab.specs import spec_of
from lessons.l13_prefix_caching.cascade_kernels import sequences_in_a_tile
from lessons.toolbox.kernels.compile_check import KernelSpec

# query heads a KV head and head size: Llama-3-8B's and the embedded model's
HEADS = {"bf16": ((4, 128), (3, 64)), "fp32": ((4, 128), (3, 64))}


def prefix_spec(dtype: str, group: int, head_dim: int, chips: tuple[int, ...]) -> KernelSpec:
    """split_decode_kernel with as many sequences' queries as fit into a tile."""
    rows = group * sequences_in_a_tile(group, head_dim)
    spec = spec_of(dtype, rows, head_dim, chips)
    more = {"out_ptr": "*fp32", "lse_ptr": "*fp32", "split_size": "i32"}
    return replace(
        spec,
        kernel="lessons.l10_flash_decoding.optimized:split_decode_kernel",
        name=spec.name.replace("gqa", "prefix"),
        signature=spec.signature | more,
    )


KERNELS = [
    prefix_spec(dtype, group, head_dim, chips)
    for dtype, shapes in HEADS.items()
    for group, head_dim in shapes
    for chips in ((75,), (80, 89, 90, 100))
]
