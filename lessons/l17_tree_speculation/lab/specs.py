"""The kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l17_tree_speculation.lab.specs
"""

from lessons.l12_paged_kv.kernels.hooks import equal_split, listed_split, paged_row
from lessons.l12_paged_kv.lab.specs import WITH_MATRIX_UNITS, common
from lessons.l17_tree_speculation.optimized import sizes_of, warps_of
from lessons.l17_tree_speculation.trees.kernel import all_old, in_tree, old_in_window
from lessons.toolbox.kernels.compile_check import KernelSpec


def spec(
    dtype: str,
    group: int,
    head_dim: int,
    nodes: int,
    chips: tuple[int, ...] = WITH_MATRIX_UNITS,
    page_size: int = 16,
    sees_old=all_old,
    split_of=equal_split,
) -> KernelSpec:
    """tree_kernel as tree_attention launches it on these chips for a tree of so many nodes, with a
    single split, or (listed_split) by a list of splits.
    """
    parts = common(dtype, ("stride_qm", "stride_qh"), page_size, paged_row, in_tree)
    is_listed = split_of is listed_split
    hooks = "_window" * (sees_old is old_in_window) + "_listed" * is_listed
    has_matrix_units = dtype != "fp32" and 75 not in chips
    size = sizes_of(group * nodes, head_dim, head_dim, has_matrix_units)
    return KernelSpec(
        "lessons.l17_tree_speculation.trees.kernel:tree_kernel",
        name=f"tree_{dtype}_{group}x{head_dim}_{nodes}{hooks}",
        signature=parts["signature"]
        | {
            "lse_ptr": "*fp32",
            "cu_seqlens_q_ptr": "*i32",
            "tree_ptr": "*i8",
            **dict.fromkeys(
                ("reach", "split_size", "num_kv_heads", "num_places", "stride_tree"), "i32"
            ),
        }
        | ({"items_ptr": "*i32", "places_ptr": "*i32", "out_ptr": "*fp32"} if is_listed else {}),
        constexprs={
            **({} if is_listed else {"items_ptr": None, "places_ptr": None}),
            "SEES_OLD": sees_old,
            "SPLIT_OF": split_of,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": head_dim,
            **size,
            **parts["constexprs"],
        },
        num_warps=warps_of(size, has_matrix_units),
        divisible_by_16=parts["divisible_by_16"],
        chips=chips,
    )


# (query heads a KV head, head_dim) of Llama-3-8B and 70B and of the embedded model; wide heads.
SHAPES = ((4, 128), (8, 128), (3, 64), (4, 256))
KERNELS = [spec("bf16", group, dim, nodes) for group, dim in SHAPES for nodes in (1, 26)]
KERNELS += [
    spec("bf16", 4, 128, 26, split_of=listed_split),
    spec("bf16", 4, 128, 26, sees_old=old_in_window),
    spec("bf16", 4, 128, 26, sees_old=old_in_window, split_of=listed_split),
]
KERNELS += [spec("fp16", 4, 128, 26, (75,)), spec("fp32", 4, 128, 26)]
