"""How long Python works before a decode kernel is launched, wrapper by wrapper; the launch itself
is left out.

    python -m lessons.l10_flash_decoding.lab.host_time

A short kernel waits for this in every layer of every step that is not captured in a graph. It needs
no GPU: launches are replaced by nothing, and what is left is checks, plans and `torch.empty`.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch

from lessons.l03_kv_cache.optimized import append_rows
from lessons.l03_kv_cache.optimized import decode_attention as one_program_a_query_head
from lessons.l05_gqa.optimized import decode_attention as one_program_a_kv_head
from lessons.l06_mla.optimized import mla_decode
from lessons.l10_flash_decoding.mla import mla_flash_decode
from lessons.l10_flash_decoding.optimized import flash_decode
from lessons.toolbox.kernels.triton_ import triton

ROUNDS, CALLS = 50, 20  # the median of so many rounds of so many calls


def without_launches():
    """Within it `kernel[grid](...)` does nothing."""
    launch = lambda *arguments, **options: None
    return patch.object(triton.runtime.KernelInterface, "__getitem__", lambda kernel, grid: launch)


def microseconds(function: Callable[[], object]) -> float:
    """Of one call, in the middle of ROUNDS rounds."""
    rounds = []
    for _ in range(ROUNDS):
        start = perf_counter()
        for _ in range(CALLS):
            function()
        rounds.append((perf_counter() - start) / CALLS * 1e6)
    return median(rounds)


def wrappers() -> dict[str, Callable[[], object]]:
    """{name: a call of it}: one sequence of 4096 keys, 32 query heads over 8 of keys, or
    latents.
    """
    q = torch.zeros(1, 32, 128, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 1, 4096, 8, 128, dtype=torch.bfloat16)
    lens, slots = torch.tensor([4096], dtype=torch.int32), torch.tensor([7])
    absorbed = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    latents = torch.zeros(1, 4096, 576, dtype=torch.bfloat16)
    return {
        "03 append_rows": lambda: append_rows(k[:, 0], v[:, 0], k[0], v[0], slots),
        "03 decode_attention": lambda: one_program_a_query_head(q, k, v, lens),
        "05 decode_attention": lambda: one_program_a_kv_head(q, k, v, lens),
        "06 mla_decode": lambda: mla_decode(absorbed, latents, lens, 0.1),
        "10 flash_decode": lambda: flash_decode(q, k, v, lens),
        "10 flash_decode, 8 splits": lambda: flash_decode(q, k, v, lens, num_splits=8),
        "10 mla_flash_decode": lambda: mla_flash_decode(absorbed, latents, lens, 0.1),
    }


@torch.inference_mode()
def main() -> None:
    with without_launches():
        for name, call in wrappers().items():
            print(f"{name:<28}{microseconds(call):6.1f} µs before its launches are done")


if __name__ == "__main__":
    main()
