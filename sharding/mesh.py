"""Ranks as groups: those that share shards, and those that hold the same."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sharding.collectives import Group
from sharding.errors import WrapError
from sharding.policy import ShardingStrategy


@dataclass(frozen=True, slots=True)
class Groups:
    """The two groups that this rank is in."""

    shards: Group
    replicas: Group


def rank_grid(nodes: Sequence[object]) -> list[list[int]]:
    """Give the ranks of each node, nodes in the order of their first ranks.

    Args:
        nodes: The node of each rank: anything that is equal for the ranks of one.

    Raises:
        WrapError: If nodes hold different numbers of ranks.
    """
    grid = [[rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)]
    if len({len(row) for row in grid}) > 1:
        counts = ", ".join(f"{nodes[row[0]]}: {len(row)}" for row in grid)
        raise WrapError(
            f"hybrid sharding needs as many ranks on each node, there are {counts}; "
            "start them so, or give a mesh (replicas, shards)"
        )
    return grid


def _by_node(world: Group) -> Groups:
    """Shard over the ranks of this host, replicate over those with the same place on the others."""
    grid = rank_grid(world.gather_objects(socket.gethostname()))
    if len(grid) == 1:
        return Groups(world, Group(None))
    columns = [list(column) for column in zip(*grid, strict=True)]
    shards, replicas = (next(world.part(ranks) for ranks in lists if world.rank in ranks) for lists in (grid, columns))
    return Groups(shards, replicas)


def groups_for(
    strategy: ShardingStrategy,
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None,
    mesh: DeviceMesh | None,
) -> Groups:
    """Give the groups that a strategy needs.

    Args:
        strategy: Hybrid ones need two groups, the others one.
        process_group: One group, a pair (shards, replicas), or None for all ranks; then hybrid strategies shard in each
            node and replicate between nodes.
        mesh: In place of it: one axis, or (replicas, shards).

    Raises:
        WrapError: If both are given, or what is given does not fit the strategy.
    """
    if process_group is not None and mesh is not None:
        raise WrapError("both a process group and a mesh are given; give one of them")
    if not dist.is_initialized():
        raise WrapError("torch.distributed is not initialised; call init_process_group first, with one rank if need be")
    if mesh is not None:
        process_group = (mesh.get_group(1), mesh.get_group(0)) if mesh.ndim == 2 else mesh.get_group(0)
    if strategy.is_hybrid:
        if process_group is None:
            return _by_node(Group(dist.group.WORLD))
        if not isinstance(process_group, tuple):
            raise WrapError(
                "hybrid sharding needs two groups: give a pair (shards, replicas), a mesh (replicas, shards), or none "
                "of both to shard in each node"
            )
        return Groups(Group(process_group[0]), Group(process_group[1]))
    if isinstance(process_group, tuple):
        raise WrapError(f"{strategy.name} needs one group, not a pair; use a hybrid strategy, or give one")
    group = Group(process_group if process_group is not None else dist.group.WORLD)
    if strategy is ShardingStrategy.NO_SHARD:
        return Groups(Group(None), group)
    return Groups(group, Group(None))
