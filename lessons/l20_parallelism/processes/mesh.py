"""Who works with whom: ranks as a box of replicas × stages × shards.

    rank = (replica · stages + stage) · shards + shard

Neighbours in rank share a layer's matrices, because they talk most and so should sit in one
machine. Stages talk once a pass, replicas not at all. Source: Megatron-LM (Narayanan et al. 2021,
section 3).
"""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from lessons.l20_parallelism.processes.group import Group


@dataclass(frozen=True)
class Mesh:
    """Sizes of the three directions: dp replicas of the model, pp stages of layers, tp shards of a
    layer. Experts are spread over the shards, or over the shards of all replicas (`share_experts`),
    so expert parallelism needs no size of its own.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """(replica, stage, shard) of a rank."""
        return rank // (self.tp * self.pp), rank // self.tp % self.pp, rank % self.tp

    def rank(self, replica: int, stage: int, shard: int) -> int:
        """The rank at a place."""
        return (replica * self.pp + stage) * self.tp + shard

    def tensor_groups(self) -> list[list[int]]:
        """The ranks that share a layer's matrices, for every replica and stage."""
        starts = range(0, self.size, self.tp)
        return [list(range(start, start + self.tp)) for start in starts]

    def pipeline_groups(self) -> list[list[int]]:
        """The ranks that a token passes through, for every replica and shard."""
        return [
            [self.rank(replica, stage, shard) for stage in range(self.pp)]
            for replica in range(self.dp)
            for shard in range(self.tp)
        ]

    def expert_groups(self) -> list[list[int]]:
        """The ranks that share a layer's experts if replicas do, for every stage."""
        return [
            [
                self.rank(replica, stage, shard)
                for replica in range(self.dp)
                for shard in range(self.tp)
            ]
            for stage in range(self.pp)
        ]

    def context_groups(self, dcp: int) -> list[list[int]]:
        """`dcp` neighbours of each tensor group, which hold copies of the same KV head."""
        groups = []
        for members in self.tensor_groups():
            groups += [members[first : first + dcp] for first in range(0, self.tp, dcp)]
        return groups


@dataclass
class Links:
    """The groups that one rank belongs to. experts: over which whole experts are spread, if the
    replicas share them; None: over `tensor`. timeout_s: of a collective; None: PyTorch's.
    """

    mesh: Mesh
    rank: int
    tensor: Group
    pipeline: Group
    experts: Group | None = None
    timeout_s: float | None = None

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    def new_group(self, groups: list[list[int]]) -> Group:
        """The one of these groups that has this rank. Every rank of the world has to call it."""
        return _mine(groups, self.rank, self.timeout_s)


def new_links(mesh: Mesh, timeout_s: float | None = None) -> Links:
    """The groups of this process. Every rank of the world has to call it. timeout_s: of a
    collective, which a group does not take from its world.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Links(
        mesh,
        rank,
        tensor=_mine(mesh.tensor_groups(), rank, timeout_s),
        pipeline=_mine(mesh.pipeline_groups(), rank, timeout_s),
        timeout_s=timeout_s,
    )


def share_experts(links: Links) -> Links:
    """The same, with experts spread over the shards of all replicas. Every rank of the world has to
    call it.
    """
    return replace(links, experts=links.new_group(links.mesh.expert_groups()))


def _mine(groups: list[list[int]], rank: int, timeout_s: float | None) -> Group:
    """Make all groups, because torch.distributed asks every rank to; keep the one with this
    rank.
    """
    mine = Group.alone()
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    for members in groups:
        handle = dist.new_group(members, timeout) if len(members) > 1 else None
        if rank in members:
            mine = Group(members, members.index(rank), handle)
    return mine
