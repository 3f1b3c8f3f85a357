"""By which rule a state is cut over ranks, and which ranks hold the same. Pure integers; no bytes, no other ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardckpt.dtensors import MeshCut
from shardckpt.layout import Bucket, Layout, Mesh
from shardckpt.state import LocalState


def layout_of(local: LocalState, rank: int, world_size: int) -> Layout | None:
    """Give the rule by which a state is cut, or None if some tensor follows none: it lies on a mesh of other ranks.

    Of tensors that differ per rank it has those of `rank` alone.
    """
    index = {one.tensor.name: i for i, one in enumerate(local.tensors)}
    buckets = [
        Bucket(
            bucket.align,
            list(bucket.numel),
            list(bucket.granularity),
            [[-1 if name is None else index[name] for name in column] for column in bucket.columns],
            0 if bucket.num_shards == world_size else bucket.num_shards,
        )
        for bucket in local.buckets
    ]
    placed = {name for bucket in local.buckets for column in bucket.columns for name in column}
    replicated = [i for i, one in enumerate(local.tensors) if one.shard.is_replicated and not one.is_per_rank]
    per_rank = [(i, rank) for i, one in enumerate(local.tensors) if one.is_per_rank]
    meshes: dict[MeshCut, list[int]] = {}
    for i, one in enumerate(local.tensors):
        if one.shard.mesh is not None:
            if one.shard.mesh.ranks != tuple(range(world_size)):
                return None
            meshes.setdefault(one.shard.mesh, []).append(i)
        elif not one.shard.is_replicated and one.tensor.name not in placed:
            return None
    rules = [Mesh(list(mesh.axes), list(mesh.cuts), tensors) for mesh, tensors in meshes.items()]
    return Layout(buckets, replicated, rules, per_rank)


def shared_tensors(local: LocalState, world_size: int) -> list[tuple[int, NDArray[np.int64]]]:
    """Give the tensors that several ranks hold alike: place in the state, and a number by rank, equal where they do."""
    ranks = np.arange(world_size)
    hybrid = {
        name: bucket.num_shards
        for bucket in local.buckets
        if bucket.num_shards < world_size
        for column in bucket.columns
        for name in column
    }
    found = []
    for position, one in enumerate(local.tensors):
        mesh = one.shard.mesh
        if one.is_per_rank:
            continue
        if one.shard.is_replicated:
            found.append((position, ranks * 0))
        elif one.tensor.name in hybrid:
            found.append((position, ranks % hybrid[one.tensor.name]))
        elif mesh is not None and mesh.has_replicas:
            axes = [axis for axis, _ in mesh.cuts]
            coordinates = np.unravel_index(ranks, mesh.axes)
            sizes = [mesh.axes[axis] for axis in axes]
            held_by = np.ravel_multi_index([coordinates[axis] for axis in axes], sizes) if axes else ranks * 0
            found.append((position, np.asarray(held_by, np.int64)))
    return found
