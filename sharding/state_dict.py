"""States of modules by name: what this rank holds, and the whole.

Names have no wrapper prefixes, and are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from sharding import names
from sharding.bucket import Bucket
from sharding.errors import LoadError, StateError
from sharding.layout import BucketLayout
from sharding.unit import Unit


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What this rank holds of one parameter or buffer.

    Attributes:
        tensor: The parameter object that the optimizer sees, or the buffer.
        start, stop: The span of the flattened global tensor that it is, in elements; (0, 0) for none of it.
        shape: Global shape.
        is_replicated: True if every rank holds all of it.
    """

    tensor: torch.Tensor
    start: int
    stop: int
    shape: tuple[int, ...]
    is_replicated: bool


def units_below(root: nn.Module) -> list[Unit]:
    """Give all units in `root`, parents before children."""
    found = []
    for module in root.modules():
        hooks = getattr(module, "sharding_hooks", None)
        unit = getattr(hooks, "unit", None)
        if isinstance(unit, Unit) and unit.module is module:
            found.append(unit)
    return found


def is_sharded(module: nn.Module) -> bool:
    """Tell whether some unit in `module` has shards."""
    return any(unit.shards.size > 1 for unit in units_below(module))


def local_state_dict(module: nn.Module) -> dict[str, LocalTensor]:
    """Give what this rank holds of every parameter and persistent buffer, by name.

    The order and the names are the same on every rank. Tied parameters appear under each name, with the same tensor.

    Raises:
        StateError: If parameters are whole: call it between steps.

    Collective:
        None.
    """
    held = members_of(module)
    found: dict[str, LocalTensor] = {}
    for place, parameter in names.named_parameters(module):
        if id(parameter) not in held:
            found[place.fqn] = LocalTensor(parameter, 0, parameter.numel(), tuple(parameter.shape), True)
            continue
        unit, bucket, index = held[id(parameter)]
        slot = bucket.layout.slots[index]
        start, stop = bucket.span(index)
        found[place.fqn] = LocalTensor(parameter, start, stop, slot.shape, unit.is_replicated)
    for place, buffer in names.named_persistent_buffers(module):
        found[place.fqn] = LocalTensor(buffer, 0, buffer.numel(), tuple(buffer.shape), True)
    return found


def bucket_layouts(module: nn.Module) -> tuple[BucketLayout, ...]:
    """Give the layouts of all sharded buckets, in the order of their units, slots named from `module`.

    Collective:
        None.
    """
    first: dict[int, str] = {}
    for place, parameter in names.named_parameters(module):
        first.setdefault(id(parameter), place.fqn)
    layouts = []
    for unit in units_below(module):
        for bucket in [] if unit.is_replicated else unit.buckets:
            slots = tuple(
                replace(slot, fqn=first[id(member.shard)])
                for slot, member in zip(bucket.layout.slots, bucket.members, strict=True)
            )
            layouts.append(replace(bucket.layout, slots=slots))
    return tuple(layouts)


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = False, offload_to_cpu: bool = False
) -> dict[str, torch.Tensor]:
    """Give the whole of every parameter and persistent buffer, by name, as the module without sharding would.

    Args:
        module: A module with units in it.
        rank0_only: Give an empty dict on the other ranks.
        offload_to_cpu: Give CPU tensors.

    Collective:
        All ranks; blocks. One bucket at a time is whole beside the result.
    """
    whole: dict[int, torch.Tensor] = {}
    keeps = True
    for unit in units_below(module):
        keeps = not rank0_only or unit.shards.rank == unit.replicas.rank == 0
        for bucket in unit.buckets:
            whole |= {
                id(m.shard): t for m, t in zip(bucket.members, bucket.gather_values(bucket.shard), strict=True) if keeps
            }
    if not keeps:
        return {}
    found: dict[str, torch.Tensor] = {}
    for place, parameter in names.named_parameters(module):
        found[place.fqn] = whole.get(id(parameter), parameter.detach())
    for place, buffer in names.named_persistent_buffers(module):
        found[place.fqn] = buffer.detach()
    return {name: tensor.cpu() for name, tensor in found.items()} if offload_to_cpu else found


@torch.no_grad()
def load_full_state_dict(
    module: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Fill the shards and buffers from a full state dict that this rank has.

    Returns:
        Names that were missing, and names that were not expected.

    Raises:
        LoadError: With `strict`, if there are any; always, if a shape differs.

    Collective:
        None; each rank takes its own part.
    """
    local = local_state_dict(module)
    missing = [name for name in local if name not in state]
    unexpected = [name for name in state if name not in local]
    if strict and (missing or unexpected):
        raise LoadError(
            f"the state dict lacks {missing[:5]} and has {unexpected[:5]} too much; load it into the same model"
        )
    found = [(name, held, state[name]) for name, held in local.items() if name in state]
    for name, held, value in found:
        if tuple(value.shape) != held.shape:
            raise LoadError(
                f"cannot load {name!r}: the state dict has shape {tuple(value.shape)}, the module {held.shape}; "
                "build the model from the config that was saved"
            )
    for _, held, value in found:
        held.tensor.copy_(value.reshape(-1)[held.start : held.stop].view(held.tensor.shape))
    return missing, unexpected


def members_of(module: nn.Module) -> dict[int, tuple[Unit, Bucket, int]]:
    """Give, by identity of its shard, where each parameter of a unit lies."""
    found: dict[int, tuple[Unit, Bucket, int]] = {}
    for unit in units_below(module):
        if unit.is_in_backward:
            raise StateError(
                "a backward is under way, or an exception cut one short; take states after it, or call "
                "sharding.reset(module)"
            )
        unit.reshard()
        for bucket in unit.buckets:
            if bucket.is_summoned:
                raise StateError("parameters are summoned; take states by name after the context")
            found |= {id(member.shard): (unit, bucket, index) for index, member in enumerate(bucket.members)}
    return found
