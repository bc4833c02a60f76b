"""A Gluon kernel for the tests of compile_check: one Hopper matrix multiplication, with layouts and
barriers written by hand.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from lessons.toolbox.kernels.compile_check import KernelSpec


@gluon.jit
def tile_kernel(a_desc, b_desc, out_desc, num_warps: gl.constexpr):
    """out = a @ b for one tile: a: [64, 64], b: [64, 64], out: [64, 64]."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    out = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(a_desc, [0, 0], ready, a)
    tma.async_copy_global_to_shared(b_desc, [0, 0], ready, b)
    mbarrier.wait(ready, 0)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, 64, 16]
    )
    acc = warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, layout), use_acc=False)
    out.store(acc.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [0, 0], out)
    tma.store_wait(pendings=0)


LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
TILE = f"tensordesc<bf16[64, 64],{LAYOUT!r}>"
GLUON = KernelSpec(
    "tests.toolbox.gluon_to_compile:tile_kernel",
    dict.fromkeys(("a_desc", "b_desc", "out_desc"), TILE),
    # 80: has no such instructions, the compiler crashes
    {"num_warps": 4},
    chips=(80, 90),
)
KERNELS = [GLUON]
