"""A CPU's cores in the place of a GPU's SMs: every split is a task, and as many tasks run at once
as there are cores.

What takes the kernels' place where they would be interpreted: the same splits, the same merge, real
waiting for free places.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from lessons.l08_online_softmax.naive import finish
from lessons.l10_flash_decoding.naive import attend_to_split, combine
from lessons.l10_flash_decoding.splits import cdiv, split_bounds
from lessons.toolbox.measure.device import core_count


@lru_cache
def pool_of(num_workers: int) -> ThreadPoolExecutor:
    """Threads that do one task at a time, each on one core: PyTorch lets go of Python's lock while
    it computes.
    """
    return ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,))


def decode_on_workers(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    num_splits: int | None = None,
    split_size: int | None = None,
    num_workers: int | None = None,
) -> Tensor:
    """flash_decode on a CPU's cores. q: [B, Hq, D]; k_cache, v_cache: [B, capacity, Hkv, D];
    context_lens: [B] -> [B, Hq, D].

    A task is one split of one sequence, all its KV heads. num_splits, split_size: as in naive.py.
    num_workers: default all cores.
    """
    if split_size is not None:
        num_splits = max(1, cdiv(int(context_lens.max()), split_size))
    tasks = [
        (b, start, end)
        for b, length in enumerate(context_lens.tolist())
        for start, end in split_bounds(length, num_splits or 1, split_size or 0)
    ]
    scale = q.shape[-1] ** -0.5

    def attend(task: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        b, start, end = task
        return finish(attend_to_split(q[b], k_cache[b, start:end], v_cache[b, start:end], scale))

    partial_out, partial_lse = map(
        torch.stack, zip(*pool_of(num_workers or core_count()).map(attend, tasks))
    )
    partial_out, partial_lse = (
        x.unflatten(0, (len(q), -1)).transpose(1, 2) for x in (partial_out, partial_lse)
    )
    return combine(partial_out, partial_lse)[0].to(q.dtype)
