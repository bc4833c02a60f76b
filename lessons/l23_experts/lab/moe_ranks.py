"""What the ranks of a test of experts.py run: layers of experts with random weights, on tokens that
all ranks have, or that are split over them.
"""

import contextlib
import inspect
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from lessons.l06_mla.moe import MoE
from lessons.l20_parallelism.processes.group import Group
from lessons.l23_experts import grouped
from lessons.l23_experts.naive import layer_config
from lessons.l23_experts.ranks import experts
from lessons.toolbox.model.config import MoEConfig
from lessons.toolbox.proof.planted import with_bug

SIZE = 12  # hidden_size
CONFIGS = {
    "mixtral": MoEConfig(8, 2, 10, norm_topk_prob=True),
    "qwen2_moe": MoEConfig(9, 2, 6, shared_expert_intermediate_size=9),
    "qwen3_moe": MoEConfig(10, 3, 6, norm_topk_prob=True),  # no multiple of 4 ranks
    "deepseek_v2": MoEConfig(
        12, 4, 6, 2, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek_v3": MoEConfig(
        16,
        4,
        6,
        1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
}


class Case(NamedTuple):
    """A layer, its tokens, and what is wrong with it. form: "replicated", "split" or "capacity".
    split: how many tokens each rank has, if they are split. bug: (old, new) in experts.py or
    grouped.py.
    """

    form: str
    config: str
    seed: int
    dtype: torch.dtype = torch.float32
    split: tuple[int, ...] = ()
    capacity_factor: float = 1.0
    bug: tuple[str, str] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.split) if self.split else 13


@torch.no_grad()
def new_moe(config: MoEConfig, seed: int, dtype: torch.dtype) -> MoE:
    """Random weights, the same for the same seed on every rank."""
    torch.manual_seed(seed)
    moe = MoE(layer_config(SIZE, config))
    for name, parameter in moe.named_parameters():
        parameter.normal_(std=1.5 * SIZE**-0.5 if "bias" not in name else 0.1)
    return moe.to(dtype).eval().requires_grad_(False)


def tokens_of(case: Case) -> Tensor:
    """The hidden states of all tokens: [T, hidden_size]."""
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randn(case.num_tokens, SIZE, generator=generator).to(case.dtype)


def run_cases(world: Group, cases: list[Case]) -> list[dict]:
    """What this rank computes of each case, and what it sent."""
    return [run_case(world, case) for case in cases]


@torch.no_grad()
def run_case(world: Group, case: Case) -> dict:
    """out: [T, hidden_size] of this rank; calls and bytes of its collectives; pairs that it
    dropped, and whether it said so.
    """
    x = tokens_of(case)
    if case.split:
        x = x.split(case.split)[world.rank]
    with planted(case.bug) as module, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        layer = layer_of(module, case, world)
        world.wire.clear()
        out = layer(x)
    return dict(
        out=out,
        calls=dict(world.wire.calls),
        bytes=dict(world.wire.bytes),
        dropped=int(getattr(layer, "dropped", 0)),
        said=[str(warning.message) for warning in said],
    )


def layer_of(module: ModuleType, case: Case, world: Group) -> nn.Module:
    """The case's layer, as `module`, experts.py or a buggy copy of it, makes it."""
    moe = new_moe(CONFIGS[case.config], case.seed, case.dtype)
    if case.form == "replicated":
        return module.ExpertParallelMoE(moe, world)
    if case.form == "split":
        return module.SplitTokensMoE(moe, world)
    return module.CapacityMoE(moe, world, case.capacity_factor)


@contextlib.contextmanager
def planted(bug: tuple[str, str] | None) -> Iterator[ModuleType]:
    """experts.py, or a copy of it with a bug, or itself over a copy of grouped.py with the bug."""
    if bug is None:
        yield experts
        return
    folder = Path(tempfile.mkdtemp())
    if bug[0] in inspect.getsource(experts):
        yield with_bug(experts, folder, *bug)
        return
    buggy = with_bug(grouped, folder, *bug)
    with mock.patch.object(experts, "GroupedMoE", buggy.GroupedMoE):
        yield experts


def assert_equal(case: Case, out: Tensor, expected: Tensor) -> None:
    """Raise AssertionError unless out and expected: [T, hidden_size] agree to the dtype's
    rounding.
    """
    tolerance = 1e-12 if case.dtype == torch.float64 else 2e-5
    assert (out - expected).norm() <= tolerance * expected.norm(), case
