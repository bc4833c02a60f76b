"""Profiles of a sample of the programs that a layer's products launch.

A sample takes programs of the grid at equal distances. The grid has tiles that no expert uses, and
the distance may be one at which it meets them alone. Then nearly nothing would be counted. So the
tiles that are not used are left out here: they cost nearly nothing on a GPU, too.
"""

from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from lessons.l23_experts.align import Alignment, align


def chosen_evenly(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """The experts of each token by an even router, [T, k] int64, the same at each call."""
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(23))
    return scores.topk(top_k).indices


def align_used(chosen: Tensor, num_experts: int, block_m: int) -> Alignment:
    """As align.align, but as long as the tiles that are used. Python waits for the values."""
    pairs, experts, _ = align(chosen, num_experts, block_m)
    used = int((experts >= 0).sum())
    return Alignment(pairs[: used * block_m], experts[:used], block_m)


def profiled(run: Callable, *modules: ModuleType) -> list:
    """Profiles of the products that `run` launches. modules: those whose align it calls; the sort
    runs in PyTorch, because a sample of its programs would leave tiles out.
    """
    from lessons.toolbox.profile.points import profiled_sample

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "align", align_used))
        return profiled_sample(run)
