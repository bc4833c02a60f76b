"""What a GPU's kernel finds for single queries among the tokens of one rank, with its log-sum-exp,
so that parts of several ranks can be merged (shared_tokens.py).
"""

from torch import Tensor

from lessons.l03_kv_cache.batch import Batch


def kernel_states(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """States by lesson 12's kernel. q: [B, H, D] -> [B, H, Dv] and [B, H] float32."""
    # here, because a CPU needs no kernels
    from lessons.l12_paged_kv.kernels.launch import keys_of_tile, launch_decode
    from lessons.l12_paged_kv.kernels.plan import items_of_step

    where, most = (batch.block_table, batch.context_lens), batch.max_context_len
    items = items_of_step(batch, 1, keys_of_tile(q, k_cache, v_cache), None)
    return launch_decode(
        q, k_cache, v_cache, *where, softmax_scale, max_context_len=most, items=items
    )
