"""What the ranks of a test of experts.py and dispatch.py run: layers of experts with random
weights, on tokens that all ranks have, or that are split over them.
"""

import contextlib
import inspect
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from lessons.l06_mla.moe import MoE
from lessons.l20_parallelism.processes.group import Group
from lessons.l23_experts import grouped
from lessons.l23_experts.naive import layer_config
from lessons.l23_experts.ranks import dispatch, experts, wire
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
    """A layer, its tokens, and what is wrong with it. form: a name in FORMS. split: how many tokens
    each rank has, if they are split. row: "Plain" or "Float8", what dispatch.py sends. bug: (old,
    new) in one of MODULES.
    """

    form: str
    config: str
    seed: int
    dtype: torch.dtype = torch.float32
    split: tuple[int, ...] = ()
    capacity_factor: float = 1.0
    bug: tuple[str, str] | None = None
    row: str = "Plain"

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
    with planted(case.bug) as modules, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        layer = layer_of(modules, case, world)
        world.wire.clear()
        out = layer(x)
    return dict(
        out=out,
        calls=dict(world.wire.calls),
        bytes=dict(world.wire.bytes),
        dropped=int(getattr(layer, "dropped", 0)),
        rows_sent=getattr(layer, "rows_sent", None),
        said=[str(warning.message) for warning in said],
    )


FORMS = {  # name: (module, class)
    "replicated": ("experts", "ExpertParallelMoE"),
    "split": ("experts", "SplitTokensMoE"),
    "capacity": ("experts", "CapacityMoE"),
    "broadcast": ("dispatch", "BroadcastMoE"),
    "gathered": ("dispatch", "GatherScatterMoE"),
    "counted": ("dispatch", "CountedDispatchMoE"),
    "slots": ("dispatch", "FixedSlotsMoE"),
}
MODULES = dict(experts=experts, dispatch=dispatch, wire=wire, grouped=grouped)


def layer_of(modules: SimpleNamespace, case: Case, world: Group) -> nn.Module:
    """The case's layer, as MODULES or their buggy copies make it."""
    moe = new_moe(CONFIGS[case.config], case.seed, case.dtype)
    module, name = FORMS[case.form]
    new = getattr(getattr(modules, module), name)
    if case.form == "capacity":
        return new(moe, world, case.capacity_factor)
    if module == "dispatch":
        return new(moe, world, form=getattr(modules.wire, case.row)())
    return new(moe, world)


@contextlib.contextmanager
def planted(bug: tuple[str, str] | None) -> Iterator[SimpleNamespace]:
    """MODULES, of which the one that says bug[0] is a copy with the bug. What others took from
    grouped.py or wire.py is the copy's, too.
    """
    if bug is None:
        yield SimpleNamespace(**MODULES)
        return
    name = next(name for name, module in MODULES.items() if bug[0] in inspect.getsource(module))
    buggy = with_bug(MODULES[name], Path(tempfile.mkdtemp()), *bug)
    with contextlib.ExitStack() as stack:
        for user, names in {"experts": ["GroupedMoE"], "dispatch": MESSAGES}.items():
            for taken in filter(lambda taken: hasattr(buggy, taken), names):
                patch = mock.patch.object(MODULES[user], taken, getattr(buggy, taken))
                stack.enter_context(patch)
        yield SimpleNamespace(**{**MODULES, name: buggy})


MESSAGES = ["read_message", "write_message"]


TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def assert_equal(case: Case, out: Tensor, expected: Tensor) -> None:
    """Raise AssertionError unless out and expected: [T, hidden_size] agree to the dtype's
    rounding.
    """
    tolerance = TOLERANCES[case.dtype]
    assert (out - expected).norm() <= tolerance * expected.norm(), case
