"""The way before: every request reserves room for its longest possible answer, in one piece.

`generate` is lesson 11's loop held to a given memory. A request that may become 512 tokens long
takes 512 slots from its first token to its last, so few requests fit, and most of what they have is
empty. more/waste.py counts it.

`gathered_attention` is the plain way to use a block table in PyTorch: copy each sequence's blocks
to one place, then attend as before. It is right for every block size and every table, so the
kernels are held to it. It reads K and V, writes them, and reads them again.

Source: Kwon et al. 2023, PagedAttention, sections 3.1 and 4.1.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.request import OnToken, check_call, read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.l11_cuda_graphs.naive import batch_loop, eager_step, unfinished


def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    *,
    memory_tokens: int,
) -> list[list[int]]:
    """Waves of as many requests as have room side by side, each in a block as long as the longest.

    memory_tokens: how many tokens the cache may hold. Other arguments, result and errors as in
    lesson 2's `generate`; also ValueError if the longest request does not fit.
    """
    check_call(model, on_token)
    waiting = unfinished(read_requests(model.config, prompts, max_new_tokens, sampling))
    longest = max((request.most_cached for request in waiting), default=1)
    if longest > memory_tokens:
        raise ValueError(
            f"memory_tokens: got {memory_tokens}; accepted: {longest} or more, the longest request"
        )
    places = memory_tokens // longest
    return batch_loop(
        eager_step, model, prompts, max_new_tokens, sampling, on_token, max_batch=places
    )


# ---------------------------------------------------------------- a block table in PyTorch


def gathered(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """A copy of one sequence's rows. cache: [num_blocks, block_size, Hkv, D]; blocks: [max_blocks],
    its row of the block table -> [length, Hkv, D].
    """
    in_use = blocks[: -(-length // cache.shape[1])]  # the entries after them are no blocks
    return cache[in_use.long()].flatten(0, 1)[:length]


def gathered_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """The newest tokens of each sequence over all of it. q: [T, Hq, D]; k_cache: [num_blocks,
    block_size, Hkv, D]; v_cache: [num_blocks, block_size, Hkv, Dv] -> [T, Hq, Dv].

    block_table: [B, max_blocks]; cu_seqlens_q: [B + 1], where each sequence's rows of q begin, and
    the end; context_lens: [B], tokens of each sequence with the new ones.
    """
    outs = [q.new_empty(0, q.shape[1], v_cache.shape[-1])]
    starts = cu_seqlens_q.tolist()
    for b, length in enumerate(context_lens.tolist()):
        new = q[starts[b] : starts[b + 1]]
        k, v = (gathered(cache, block_table[b], length) for cache in (k_cache, v_cache))
        if length:
            outs.append(attention(new, k, v, softmax_scale, window=window))
        else:
            outs.append(new.new_zeros(*new.shape[:2], v_cache.shape[-1]))
    return torch.cat(outs)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """`gathered_attention` of a step's batch, prompts and single tokens alike. q: [T, Hq, D] -> [T,
    Hq, Dv].
    """
    return gathered_attention(
        q,
        k_cache,
        v_cache,
        batch.block_table,
        batch.cu_seqlens_q,
        batch.context_lens,
        softmax_scale,
        window,
    )


LESSON_12_GATHERED = LESSON_03_TORCH._replace(prefill=attend, decode=attend)
