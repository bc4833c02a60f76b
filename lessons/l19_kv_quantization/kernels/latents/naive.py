"""DeepSeek's latents in FP8: what a row of the cache holds, and attention to rows that become
numbers first.

    rows = LatentRows(512, 64, torch.bfloat16)
    cache[slot] = rows.quantize(latents)          # [T, 576] -> [T, 656] uint8
    latents_again = rows.dequantize(cache[slot])  # [T, 576]

A row of DeepSeek-V3 has 656 bytes, and it is finished when its token is written:

    byte      0        128        256        384        512           528              656
              ├──────────┼──────────┼──────────┼──────────┼─────────────┼────────────────┤
              │ codes of the latent, E4M3, groups of 128  │ 4 scales,   │ 64 rotary      │
              │                                           │ float32     │ values, 16 bits│

Each group of 128 values has a scale of its own, so an outlier costs its own group alone. The rotary
values keep the model's dtype: they are few, and every error of theirs is in every score. vLLM and
FlashMLA name the format fp8_ds_mla. 576 values of 16 bits take 1152 bytes.

Two things differ from vLLM's kernel. A group with a NaN gets a scale of NaN here, so that the fault
stays visible. And sizes other than 512 and 64 are accepted: a rank below 128 is one group.

Sources: FlashMLA, docs/20250929-hopper-fp8-sparse-deep-dive.md; vLLM, csrc/cache_kernels.cu,
concat_and_cache_ds_mla_kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l12_paged_kv.naive import gathered_attention
from lessons.l19_kv_quantization.formats import E4M3_MAX, divided, wide
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig

NAME = "fp8_ds_mla"
GROUP = 128  # values of a latent that share a scale
ALIGNED = 16  # bytes: scales, rotary values and the next row begin at a multiple of it
LEAST_SCALE = torch.finfo(torch.float32).tiny  # of a group of zeros, so that nothing divides by 0


@dataclass(frozen=True)
class LatentRows:
    """How a latent of `rank` values and `rope` rotary ones of a dtype is stored in bytes."""

    rank: int
    rope: int
    dtype: torch.dtype
    name: str = NAME

    def __post_init__(self):
        if self.rank % self.group:
            refuse("kv_lora_rank", self.rank, f"below {GROUP}, or a multiple of it, for {NAME}")

    @property
    def group(self) -> int:
        """Values that share a scale."""
        return min(GROUP, self.rank)

    @property
    def groups(self) -> int:
        return self.rank // self.group

    @property
    def scales_at(self) -> int:
        """The byte of a row at which its scales begin."""
        return rounded_up(self.rank)

    @property
    def rope_at(self) -> int:
        """The byte at which the rotary values begin."""
        return rounded_up(self.scales_at + 4 * self.groups)

    @property
    def row_bytes(self) -> int:
        return rounded_up(self.rope_at + self.rope * self.dtype.itemsize)

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of rows: [..., row_bytes] uint8, whose distances are multiples of 16 bytes: codes
        [..., rank] of E4M3, scales [..., groups] float32, rotary values [..., rope].
        """
        codes = rows[..., : self.rank].view(torch.float8_e4m3fn)
        scales = rows[..., self.scales_at : self.scales_at + 4 * self.groups].view(torch.float32)
        end = self.rope_at + self.rope * self.dtype.itemsize
        return codes, scales, rows[..., self.rope_at : end].view(self.dtype)

    def quantize(self, latents: Tensor) -> Tensor:
        """latents: [..., rank + rope], c_kv ‖ k_pe of the dtype -> rows: [..., row_bytes] uint8."""
        shape = latents.shape[:-1]
        rows = torch.zeros(*shape, self.row_bytes, dtype=torch.uint8, device=latents.device)
        codes, scales, rotary = self.parts(rows)
        c_kv, k_pe = latents.split([self.rank, self.rope], dim=-1)
        groups = wide(c_kv).unflatten(-1, (self.groups, self.group))
        largest = groups.abs().amax(-1)
        # The scale as it is stored makes the codes, so rounding it costs no accuracy.
        scales.copy_(divided(largest, E4M3_MAX).float().clamp(min=LEAST_SCALE))
        # Clamped, because a cast beyond 448 gives NaN.
        ratio = (groups / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
        codes.copy_(ratio.flatten(-2).float().to(torch.float8_e4m3fn))
        rotary.copy_(k_pe)
        return rows

    def dequantize(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The inverse, up to rounding: [..., row_bytes] -> [..., rank + rope] of dtype (None: the
        one that was stored).
        """
        codes, scales, rotary = self.parts(rows)
        dtype = dtype or self.dtype
        inside = torch.float64 if dtype == torch.float64 else torch.float32
        groups = codes.to(inside).unflatten(-1, (self.groups, self.group))
        c_kv = (groups * scales[..., None]).flatten(-2)
        return torch.cat([c_kv.to(dtype), rotary.to(dtype)], dim=-1)


def rows_of(config: ModelConfig, dtype: torch.dtype) -> LatentRows:
    """The rows for a model's latents. Raises ValueError for a model that has none."""
    if config.mla is None or config.state is not None:
        refuse("kv_cache_dtype", NAME, "another format, because such models store no latents")
    return LatentRows(config.mla.kv_lora_rank, config.mla.qk_rope_head_dim, dtype)


def row_bytes_of(config: ModelConfig, itemsize: int) -> int:
    """Bytes of a token in one layer. itemsize: of a number in the model's dtype."""
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    return rows_of(config, dtype).row_bytes


def rounded_up(count: int) -> int:
    """count bytes, up to the next multiple of ALIGNED."""
    return -(-count // ALIGNED) * ALIGNED


def dequantized_mla_decode(
    q: Tensor,
    rows: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    format: LatentRows,
    softmax_scale: float,
) -> Tensor:
    """One absorbed query per sequence over its blocks: all rows become numbers of q's dtype, then
    lesson 12 gathers and attends. q: [B, H, rank + rope]; rows: [num_blocks, block_size, row_bytes]
    uint8 -> [B, H, rank].
    """
    latents = format.dequantize(rows, q.dtype)[:, :, None]
    starts = torch.arange(len(q) + 1, device=q.device)
    c_kv = latents[..., : format.rank]
    return gathered_attention(
        q, latents, c_kv, block_table, starts, context_lens, softmax_scale=softmax_scale
    )
