"""Ranks as groups: those that share shards, and those that hold the same."""

from __future__ import annotations

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


def groups_for(
    strategy: ShardingStrategy,
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None,
    mesh: DeviceMesh | None,
) -> Groups:
    """Give the groups that a strategy needs.

    Args:
        strategy: Hybrid ones need two groups, the others one.
        process_group: One group, a pair (shards, replicas), or None for all ranks.
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
        if not isinstance(process_group, tuple):
            raise WrapError(
                "hybrid sharding needs two groups: give a pair (shards, replicas), or a mesh (replicas, shards)"
            )
        return Groups(Group(process_group[0]), Group(process_group[1]))
    if isinstance(process_group, tuple):
        raise WrapError(f"{strategy.name} needs one group, not a pair; use a hybrid strategy, or give one")
    group = Group(process_group if process_group is not None else dist.group.WORLD)
    if strategy is ShardingStrategy.NO_SHARD:
        return Groups(Group(None), group)
    return Groups(group, Group(None))
