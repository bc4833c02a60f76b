"""Captured decode steps of workers: processes that replay simulated graphs, with the sums of their
shards inside and the messages of their stages outside, give the tokens of one process.
"""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lessons.l02_naive_attention.naive import generate as alone
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l11_cuda_graphs.simulator import SimulatedGraphs
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import RankError, run_ranks
from lessons.l20_parallelism.processes.mesh import Links, Mesh, new_links
from lessons.toolbox.measure.device import has_triton
from reference.parallel.shared_tokens import TokenShare, kernel_states, sharing
from reference.parallel.stage_graphs import StageGraphs
from reference.parallel.worker import StageRunner
from tests.engine_cases import CONFIG, new_model

pytestmark = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")
ONE_HEAD = replace(CONFIG, num_key_value_heads=1)
LIBRARY = torch.library.Library("worker_graphs", "DEF")
LIBRARY.define("all_reduce(Tensor(a!) x, int group) -> Tensor(a!)")
LIBRARY.define("all_gather(Tensor x, int group) -> Tensor")
LIBRARY.define("reduce_scatter(Tensor x, int group) -> Tensor")
GROUPS = {}  # by a number of their members


def summed(x, group: int):
    dist.all_reduce(x, group=GROUPS[group].handle)
    return x


def gathered(x, group: int):
    return Group.all_gather(GROUPS[group], x[None], dim=0)


def scattered(x, group: int):
    return Group.reduce_scatter(GROUPS[group], x)


OPERATIONS = dict(all_reduce=summed, all_gather=gathered, reduce_scatter=scattered)
for name, operation in OPERATIONS.items():
    LIBRARY.impl(name, operation, "CompositeExplicitAutograd")


class RecordedGroup(Group):
    """What ranks send is an operation that the simulator records, as NCCL's are kernels that a
    graph holds.
    """

    can_be_captured = True

    @property
    def number(self) -> int:
        found = sum(1 << member for member in self.members)
        GROUPS[found] = self
        return found

    def all_reduce(self, x):
        if self.size == 1:
            return x
        return torch.ops.worker_graphs.all_reduce(x.contiguous(), self.number)

    def all_gather(self, x, dim=-1):
        if self.size == 1:
            return x
        of_all = torch.ops.worker_graphs.all_gather(x.contiguous(), self.number)
        return torch.cat(of_all.unbind(0), dim)

    def reduce_scatter(self, x):
        if self.size == 1:
            return x
        return torch.ops.worker_graphs.reduce_scatter(x.contiguous(), self.number)


class OutsideGroup(RecordedGroup):
    """A slip: the sums are made while the step is captured, and never again."""

    def all_reduce(self, x):
        if self.size > 1:
            with torch.utils._python_dispatch._disable_current_modes():
                dist.all_reduce(x, group=self.handle)
        return x


class OtherBuffer(StageGraphs):
    """A slip: what the stage before sends is received into memory that no graph reads."""

    def __call__(self, chunks, *arguments):
        if self.given is not None:
            kept, self.given = self.given, torch.empty_like(self.given)
            try:
                return super().__call__(chunks, *arguments)
            finally:
                self.given = kept
        return super().__call__(chunks, *arguments)


class Noted(StageGraphs):
    """Counts the tokens of replayed steps."""

    def __call__(self, chunks, *arguments):
        self.replays = [*getattr(self, "replays", []), len(chunks)]
        return super().__call__(chunks, *arguments)


def share_of(links: Links, interleave: int, group) -> TokenShare:
    """Of all shards."""
    context = links.new_group(links.mesh.context_groups(links.mesh.tp))
    return TokenShare(group(context.members, context.rank, context.handle), interleave)


def generated(
    world,
    sizes,
    prompts,
    limits,
    group=RecordedGroup,
    graphs=Noted,
    interleave=0,
    shares=share_of,
    splits_rows=False,
):
    """What a rank does: (the tokens of each prompt, how many sequences each replay had).
    interleave: of shards that share the tokens of one KV head; 0: they do not. splits_rows: whether
    they have some rows each between their sums.
    """
    links, share, config = new_links(Mesh(*sizes)), None, CONFIG
    links.tensor = group(links.tensor.members, links.tensor.rank, links.tensor.handle)
    if interleave:
        share, config = shares(links, interleave, group), ONE_HEAD
    model, how = fused(shard(new_model(config), links)), dict(splits_rows=splits_rows)
    runner = StageRunner(links, model, 30, 4, 24, share=share, **how)
    for slots in runner.pool.tensors:
        slots.fill_(torch.nan)  # no row may be read that was not written
    runner.pool.ops = LESSON_12 if share is None else sharing(LESSON_12, share, kernel_states, 4)
    what = runner.model, runner.pool, SimulatedGraphs(1), [1, 3], 24
    runner.captured = graphs(links, *what)
    tables = [list(range(6 * row, 6 * row + 6)) for row in range(len(prompts))]
    held, new = [0] * len(prompts), [list(prompt) for prompt in prompts]
    outputs = [[] for _ in prompts]
    while here := [row for row, limit in enumerate(limits) if len(outputs[row]) < limit]:
        chunks = [(new[row], held[row]) for row in here]
        hidden = runner.run(chunks, [tables[row] for row in here])
        tokens = torch.zeros(len(here), dtype=torch.int64)
        if links.is_last_stage:
            ends = torch.tensor([len(new[row]) for row in here]).cumsum(0) - 1
            tokens = torch.tensor(runner.likeliest(hidden, ends.tolist()))
        dist.broadcast(tokens, world.size - 1)
        for row, token in zip(here, tokens.tolist()):
            held[row] += len(new[row])
            new[row] = [token]
            outputs[row].append(token)
    # three numbers a row, and no logits
    if links.is_last_stage and links.tensor.size > 1 and not (share or splits_rows):
        assert links.tensor.wire.bytes["all_gather"] == 12 * sum(limits)
    assert runner.pool.k_slots[:, -1].isnan().all(), "a row of padding was written"
    return outputs, getattr(runner.captured, "replays", None)


def asked():
    prompts = [random.choices(range(60), k=k) for k in (3, 9, 5)]
    return prompts, [5, 2, 6]


def shared(world, sizes, prompts, limits, how):
    return generated(world, sizes, prompts, limits, **how)


SHARED = [
    ((2, 1), dict(interleave=1)),
    ((2, 1), dict(interleave=2)),
    ((2, 2), dict(interleave=1)),
    ((2, 1), dict(splits_rows=True)),
    ((2, 1), dict(splits_rows=True, interleave=1)),
]


@pytest.mark.parametrize("sizes, how", SHARED, ids=str)
@pytest.mark.sample(1, of="captured workers")
def test_shared_tokens_and_split_rows_are_replayed(sizes, how, seed):
    """Which slot is a rank's, and how many tokens it has, are found inside the graph."""
    prompts, limits = asked()
    want = alone(new_model(ONE_HEAD if "interleave" in how else CONFIG), prompts, limits)
    for outputs, replays in run_ranks(sizes[0] * sizes[1], shared, sizes, prompts, limits, how):
        assert outputs == want
        assert replays == [3, 2, 2, 2, 1]


class FixedLens(TokenShare):
    """A slip: lengths are found while a step is captured, and never again."""

    def own_lens(self, lens):
        with torch.utils._python_dispatch._disable_current_modes():
            return super().own_lens(lens).clone()


def with_fixed_lens(world, sizes, prompts, limits):
    def share(links, interleave, group):
        return FixedLens(share_of(links, interleave, group).group, interleave)

    return generated(world, sizes, prompts, limits, interleave=1, shares=share)


@pytest.mark.sample(1, of="captured workers")
def test_lengths_that_no_replay_finds_are_seen(seed):
    prompts, limits = asked()
    want = alone(new_model(ONE_HEAD), prompts, limits)
    ranks = run_ranks(2, with_fixed_lens, (2, 1), prompts, limits)
    assert any(outputs != want for outputs, _ in ranks)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)], ids=["shards", "stages", "both"])
@pytest.mark.sample(1, of="captured workers")
def test_replayed_parts_give_the_tokens_of_one_process(sizes, seed):
    prompts, limits = asked()
    want = alone(new_model(), prompts, limits)
    for outputs, replays in run_ranks(sizes[0] * sizes[1], generated, sizes, prompts, limits):
        assert outputs == want
        assert replays == [3, 2, 2, 2, 1], "the prompts run eagerly, all other steps are replayed"


@pytest.mark.parametrize(
    "sizes, slip",
    [((2, 1), dict(group=OutsideGroup)), ((1, 2), dict(graphs=OtherBuffer))],
    ids=["sums outside", "another buffer"],
)
@pytest.mark.sample(1, of="captured workers")
def test_a_slip_is_seen(sizes, slip, seed):
    prompts, limits = asked()
    want = alone(new_model(), prompts, limits)
    try:
        ranks = run_ranks(2, with_slip, sizes, prompts, limits, slip)
    except RankError as error:
        assert "not finite" in str(error), error
        return
    assert any(outputs != want for outputs, _ in ranks)


def with_slip(world, sizes, prompts, limits, slip):
    return generated(world, sizes, prompts, limits, **slip)


def refused(world):
    links = new_links(Mesh(2))
    try:
        StageGraphs(links, None, None, None, [1], 24)
    except ValueError as error:
        return str(error)


def test_sums_that_run_on_a_cpu_are_refused_by_name():
    for said in run_ranks(2, refused):
        assert said.startswith("backend: got 'gloo'; accepted: nccl in captured steps")
    assert Group.alone().can_be_captured
