"""DTensors as cuts over a mesh: which region of the global tensor a rank holds.

Knows DTensor's placements; refuses to know files and states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardckpt.errors import UnsupportedError
from shardckpt.layout import cut_along
from shardckpt.region import Box, Region, Span, normalise


@dataclass(frozen=True, slots=True)
class MeshCut:
    """How a tensor lies on a mesh.

    Attributes:
        axes: Size of each mesh axis.
        cuts: (axis, dim) in the order in which they apply; along the other axes, ranks hold the same.
        ranks: The ranks of the mesh, row-major.
    """

    axes: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    @property
    def has_replicas(self) -> bool:
        """True if several ranks hold the same region."""
        cut = {axis for axis, _ in self.cuts}
        return any(size > 1 for axis, size in enumerate(self.axes) if axis not in cut)


def mesh_cut(tensor: DTensor, *, fqn: str) -> MeshCut:
    """Give the cut that a DTensor's placements mean.

    A strided shard (FSDP2 over tensor parallelism on one dim) is cut after the axes to its right.

    Raises:
        UnsupportedError: If a placement is partial or of another kind.
    """
    mesh = tensor.device_mesh
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise UnsupportedError(
                f"{fqn!r} holds partial sums on a mesh axis; redistribute it before saving or loading"
            )
        if isinstance(placement, Replicate):
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise UnsupportedError(
                f"{fqn!r} has the placement {placement}, which is not supported; redistribute it to Shard"
            )
        split_factor = getattr(placement, "split_factor", None)
        if split_factor in (None, 1):
            plain.append((axis, dim))
            continue
        right = [a for a, other in enumerate(tensor.placements) if a > axis and getattr(other, "dim", None) == dim]
        if split_factor != math.prod(mesh.size(a) for a in right):
            raise UnsupportedError(
                f"{fqn!r} has the placement {placement}, which is not supported; redistribute it to Shard"
            )
        strided.insert(0, (axis, dim))
    return MeshCut(tuple(mesh.shape), (*plain, *strided), tuple(mesh.mesh.flatten().tolist()))


def local_region(tensor: DTensor, *, fqn: str) -> Region:
    """Give the region that this rank holds; empty outside the mesh.

    Raises:
        UnsupportedError: If the local tensor's shape is not that of the region, or the placements are not supported.
    """
    cut, coordinate = mesh_cut(tensor, fqn=fqn), tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Span(0, 0)
    offset, shape = cut_along(cut.cuts, cut.axes, np.array([coordinate], np.int64), tensor.shape, fqn=fqn)
    box = Box(tuple(offset[0].tolist()), tuple(shape[0].tolist()))
    local = tuple(local_tensor(tensor).shape)
    if local != box.shape and math.prod(local) + box.numel > 0:
        raise UnsupportedError(
            f"{fqn!r} has the local shape {local} where its placements {tensor.placements} on a mesh of {cut.axes} "
            "mean "
            f"{box.shape}; redistribute it to Shard"
        )
    return normalise(box, tuple(tensor.shape), fqn=fqn)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Give what this rank holds of a tensor: a DTensor's own part, any other tensor itself; shares its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
