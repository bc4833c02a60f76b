from lessons.l12_paged_kv.hopper import gluon_mla as hopper
from lessons.toolbox.kernels.compile_check import KernelSpec
def hopper_spec(page_size, listed, rank=512, rope=64):
    module = hopper.__name__
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    piece = min(page_size, hopper.BLOCK_N)
    def tile(rows, columns):
        return f"tensordesc<bf16[{rows}, {columns}],{layout}>"
    return KernelSpec(
        f"{module}:paged_mla_hopper_kernel",
        name=f"mla_hopper_bf16_page{page_size}{'_listed' if listed else ''}",
        signature={
            "q_desc": tile(64, rank // 2),
            "q_pe_desc": tile(64, rope),
            "kv_desc": tile(piece, rank // 2),
            "pe_desc": tile(piece, rope),
            "out_ptr": "*fp32",
            "lse_ptr": "*fp32",
            "items_ptr": "*i32",
            "context_lens_ptr": "*i32",
            "block_table_ptr": "*i32",
            "scale_log2e": "fp32",
            "num_heads": "i32",
            "split_size": "i32",
            "stride_table": "i32",
 "num_rows": "i32",
        },
        constexprs={
            "PAGE_SIZE": page_size,
            "LISTED": listed,
            "STAGES": hopper.STAGES,
            "BLOCK_N": hopper.BLOCK_N,
            "num_warps": hopper.NUM_WARPS,
        },
        num_warps=hopper.NUM_WARPS,
        chips=(90,),
    )
KERNELS=[hopper_spec(p, l) for p in (16, 64) for l in (False, True)]
