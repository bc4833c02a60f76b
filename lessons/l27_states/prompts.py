"""Packed prompts in chunks: the wrappers of chunk_kernels.py.

out = gated_delta_prompts(q, k, v, log_decay, beta, states, slots, cu_seqlens, has_state)
out = decayed_prompts(q, k, v, log_decay, states, slots, cu_seqlens, has_state)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_grid
from lessons.l27_states.arguments import check_prompts
from lessons.l27_states.chunk_kernels import outputs_kernel, prepare_kernel, states_kernel
from lessons.toolbox.kernels.triton_ import triton

CHUNK = 32  # tokens; a power of two, 16 or more for tl.dot
NUM_STAGES = 1


class Tile(NamedTuple):
    """How a kernel is launched."""

    columns: int  # of the values, at a time
    num_warps: int
    rows: int | None = None  # of the state, at a time; None: all


# The second kernel keeps its part of a state in registers all the way, the others only read tiles.
PREPARE, STATES, OUTPUTS = Tile(32, 2), Tile(16, 4), Tile(64, 4, rows=32)


def gated_delta_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor | None = None,
    max_seqlen: int | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """naive.gated_delta_rule for B packed prompts. q, k: [T, H, Dk], v: [T, H, Dv], log_decay,
    beta: [T, H], states: [slots, H, Dk, Dv], slots: [B] int64, cu_seqlens: [B + 1] int32 ->
    [T, H, Dv].

    has_state: [B] bool, whether states[slots[b]] is what came before prompt b, or whatever an
    earlier request left there; None: it is for all. Afterwards it is the state after prompt b.
    max_seqlen: the longest prompt, or more; None: read from cu_seqlens, for which the CPU waits.
    Too small a one, which cannot be seen on a GPU without waiting, leaves rows unwritten. Raises
    ValueError.
    """
    return prompts(
        q, k, v, log_decay, beta, states, slots, cu_seqlens, has_state, max_seqlen, chunk
    )


def decayed_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor | None = None,
    max_seqlen: int | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """naive.decayed_linear_attention for B packed prompts. q, k: [T, H, Dk], v: [T, H, Dv],
    log_decay: [T, H] -> [T, H, Dv]. The rest as in `gated_delta_prompts`.
    """
    return prompts(
        q, k, v, log_decay, None, states, slots, cu_seqlens, has_state, max_seqlen, chunk
    )


def prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor | None,
    max_seqlen: int | None,
    chunk: int,
) -> Tensor:
    """The launches; without beta there is no delta rule. q, k: [T, H, Dk], v: [T, H, Dv] -> [T, H,
    Dv]. Raises ValueError.
    """
    if chunk not in (16, 32, 64):
        raise ValueError(f"chunk: got {chunk!r}; accepted: 16, 32 or 64")
    longest = check_prompts(
        q, k, v, log_decay, beta, states, slots, cu_seqlens, has_state, max_seqlen
    )
    num_chunks = triton.cdiv(longest, chunk)
    check_grid("max_seqlen", num_chunks, f"chunks of {chunk} tokens")
    launches = Launches(q, k, v, log_decay.contiguous(), cu_seqlens, num_chunks, chunk)
    u, w = (v, None) if beta is None else launches.prepare(beta.contiguous())
    before = launches.carry(u, w, states, slots, has_state)
    return launches.read(u, before)


class Launches(NamedTuple):
    """The three launches, and what they share."""

    q: Tensor  # [T, H, Dk]
    k: Tensor  # [T, H, Dk]
    v: Tensor  # [T, H, Dv]
    log_decay: Tensor  # [T, H], dense
    cu_seqlens: Tensor  # [B + 1]
    num_chunks: int  # of the longest prompt
    chunk: int  # tokens

    def sizes(self, tile: Tile) -> dict[str, int]:
        """The constants of a kernel."""
        key_dim, value_dim = self.k.shape[2], self.v.shape[2]
        block_k = triton.next_power_of_2(max(key_dim, 16))
        return dict(
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            SIZE=self.chunk,
            BLOCK_K=min(tile.rows or block_k, block_k),
            BLOCK_V=min(tile.columns, triton.next_power_of_2(max(value_dim, 16))),
            num_warps=tile.num_warps,
            num_stages=NUM_STAGES,
        )

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def count(self) -> int:
        """Of prompts."""
        return len(self.cu_seqlens) - 1

    def prepare(self, beta: Tensor) -> tuple[Tensor, Tensor]:
        """U₀: [T, H, Dv] and W: [T, H, Dk] of all chunks, float32. beta: [T, H], dense."""
        new = dict(dtype=torch.float32, device=self.q.device)
        u, w = torch.empty(self.v.shape, **new), torch.empty(self.k.shape, **new)
        if u.numel():
            prepare_kernel[self.heads, self.num_chunks, self.count](
                self.k,
                self.v,
                self.log_decay,
                beta,
                self.cu_seqlens,
                u,
                w,
                len(self.q),
                *self.k.stride()[:2],
                *self.v.stride()[:2],
                **self.sizes(PREPARE),
            )
        return u, w

    def carry(
        self, u: Tensor, w: Tensor | None, states: Tensor, slots: Tensor, has_state: Tensor | None
    ) -> Tensor:
        """The state before each chunk: [chunks, H, Dk, Dv]. Makes U of U₀, and writes the last
        states. u: [T, H, Dv]; w: [T, H, Dk], or None for u = v.
        """
        # the most chunks that so many tokens of so many prompts can have: see chunk_of
        most = len(self.q) // self.chunk + self.count
        before = torch.empty(most, *states.shape[1:], dtype=torch.float32, device=states.device)
        sizes = self.sizes(STATES)
        blocks = triton.cdiv(self.v.shape[2], sizes["BLOCK_V"])
        states_kernel[self.heads, blocks, self.count](
            self.k,
            u,
            w,
            self.log_decay,
            self.cu_seqlens,
            has_state,
            states,
            slots,
            before,
            len(self.q),
            *self.k.stride()[:2],
            *u.stride()[:2],
            states.stride(0),
            DELTA=w is not None,
            HAS_STATE=has_state is not None,
            **sizes,
        )
        return before

    def read(self, u: Tensor, before: Tensor) -> Tensor:
        """The outputs: [T, H, Dv]. u: [T, H, Dv]; before: what `carry` returned."""
        out = torch.empty(self.v.shape, dtype=self.v.dtype, device=self.v.device)
        sizes = self.sizes(OUTPUTS)
        blocks = triton.cdiv(self.v.shape[2], sizes["BLOCK_V"])
        if out.numel():
            outputs_kernel[self.heads * blocks, self.num_chunks, self.count](
                self.q,
                self.k,
                u,
                self.log_decay,
                self.cu_seqlens,
                before,
                out,
                len(self.q),
                self.heads,
                *self.q.stride()[:2],
                *self.k.stride()[:2],
                *u.stride()[:2],
                **sizes,
            )
        return out
