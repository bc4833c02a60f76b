"""One small Gluon kernel for the tests of the simulator: each test plants one slip in it.

out = a @ b for one tile; a producer partition fetches, the other computes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def load(a_desc, b_desc, a, b, ready):
    mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(a_desc, [0, 0], ready, a)
    tma.async_copy_global_to_shared(b_desc, [0, 0], ready, b)


@gluon.jit
def compute(out_desc, a, b, ready, LAYOUT: gl.constexpr):
    mbarrier.wait(ready, 0)
    acc = warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, LAYOUT), is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    a.store(acc.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [0, 0], a)
    tma.store_wait(pendings=0)


@gluon.jit
def tile_kernel(a_desc, b_desc, out_desc, num_warps: gl.constexpr):
    """a, b, out: [64, 64] bfloat16."""
    a = gl.allocate_shared_memory(a_desc.dtype, [64, 64], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [64, 64], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, 64, 16]
    )
    gl.warp_specialize(
        [
            (compute, (out_desc, a, b, ready, LAYOUT)),
            (load, (a_desc, b_desc, a, b, ready)),
        ],
        [1],
        [24],
    )
