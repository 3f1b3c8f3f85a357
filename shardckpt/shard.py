"""What one rank holds of one named tensor, whoever sharded it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardckpt.dtensors import MeshCut, local_region, local_tensor, mesh_cut
from shardckpt.region import Region, Shape, whole


@dataclass(frozen=True, slots=True)
class Shard:
    """What this rank holds of one named tensor.

    Attributes:
        fqn: Its name, wrapper prefixes gone.
        aliases: Further names of it.
        tensor: The parameter object that the optimizer sees, or a buffer or other tensor.
        region: Which elements of the global tensor this rank holds.
        shape: Global shape.
        is_replicated: True if every rank holds the whole tensor.
        mesh: How it lies on a mesh, for DTensors.
    """

    fqn: str
    aliases: tuple[str, ...]
    tensor: torch.Tensor
    region: Region
    shape: Shape
    is_replicated: bool
    mesh: MeshCut | None = None

    @property
    def local(self) -> torch.Tensor:
        """The elements of the region, as they lie in this rank's memory."""
        return local_tensor(self.tensor)


def shard_of_tensor(fqn: str, tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> Shard:
    """Give the shard that a tensor is by itself: a DTensor by its placements, any other the whole, on every rank.

    Raises:
        UnsupportedError: If a DTensor's placements cannot be stored.
    """
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        return Shard(fqn, aliases, tensor, local_region(tensor, fqn=fqn), shape, False, mesh_cut(tensor, fqn=fqn))
    return Shard(fqn, aliases, tensor, whole(shape), shape, True)
