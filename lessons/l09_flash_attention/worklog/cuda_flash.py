"""Launches the five versions of FlashAttention in CUDA C++: attention of one sequence, from a
thread a query to tensor cores with tiles that are copied ahead. README.md goes through them.

On CPU tensors `lessons.toolbox.gpu` runs their compiled code.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_grid
from lessons.l09_flash_attention.arguments import check_heads, check_options
from lessons.toolbox.kernels.cuda_cpp import CudaKernel

HERE = Path(__file__).parent
SOURCE = HERE.parent / "optimized.cu"
HEAD_DIMS = (64, 128)
BF16 = {torch.bfloat16: ""}


@dataclass(frozen=True)
class Version:
    """One version. name: of its kernels, with {} for the type; block_m: queries of a block."""

    source: Path
    name: str
    threads: int
    block_m: int
    types: dict[torch.dtype, str] = field(default_factory=lambda: BF16)

    def kernels(self) -> dict[tuple[torch.dtype, int], CudaKernel]:
        """By dtype and head size."""
        return {
            (dtype, head_dim): CudaKernel(self.source, f"{self.name.format(name)}_{head_dim}")
            for dtype, name in self.types.items()
            for head_dim in HEAD_DIMS
        }


TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
VERSIONS = {
    "naive": Version(HERE / "naive.cu", "flash_naive", 64, 64),
    "tiled": Version(SOURCE, "flash_{}", 256, 16, TYPES),
    "tensor cores": Version(HERE / "tensor_cores.cu", "flash_rows", 128, 64),
    "swizzled": Version(HERE / "tensor_cores.cu", "flash_swizzled", 128, 64),
    "pipelined": Version(HERE / "tensor_cores.cu", "flash_pipelined", 128, 64),
}
FLASH = {name: version.kernels() for name, version in VERSIONS.items()}


def flash_attention_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    version: str = "tiled",
) -> tuple[Tensor, Tensor]:
    """One sequence. q: [T, Hq, D], k, v: [Tk, Hkv, D], bfloat16 ("tiled" takes float32 too), dense,
    D 64 or 128 -> out: [T, Hq, D], lse: [T, Hq].

    Raises ValueError, and CompileError where NVRTC is missing.
    """
    if version not in VERSIONS:
        raise ValueError(f"version: got {version!r}; accepted: {', '.join(VERSIONS)}")
    chosen, kernels = VERSIONS[version], FLASH[version]
    check_heads(q, k, v, tuple(chosen.types))
    check_options(q, softmax_scale, causal, None, None, None, None)
    if (
        (q.dtype, q.shape[2]) not in kernels
        or v.shape[2] != q.shape[2]
        or not all(x.is_contiguous() for x in (q, k, v))
    ):
        raise ValueError(
            f"q, k, v: got head sizes {q.shape[2]} and {v.shape[2]}, strides "
            f"{[x.stride() for x in (q, k, v)]}; "
            "accepted: 64 or 128 for all, dense"
        )
    blocks = -(-len(q) // chosen.block_m)
    check_grid("q", blocks, f"blocks of {chosen.block_m} queries")
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if out.numel():
        kernels[q.dtype, q.shape[2]][(q.shape[1], blocks), chosen.threads](
            q,
            k,
            v,
            out,
            lse,
            len(q),
            len(k),
            k.shape[1],
            float(q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale),
            int(causal),
        )
    return out, lse
