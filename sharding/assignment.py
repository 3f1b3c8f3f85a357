"""Which parameter belongs to which unit, and what stays out of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from sharding import names
from sharding.bucket import Member
from sharding.hooks import hooks_below
from sharding.names import Place


@dataclass(frozen=True, slots=True)
class Ignored:
    """Modules and parameters that stay as they are; buffers of ignored modules too."""

    modules: set[nn.Module]
    parameters: set[nn.Parameter]

    @classmethod
    def of(cls, modules: Iterable[nn.Module], states: Iterable[nn.Parameter | nn.Module]) -> Ignored:
        """Collect all that is below the given modules, and the given parameters."""
        states = list(states)
        given = [*modules, *(state for state in states if isinstance(state, nn.Module))]
        below = {module for one in given for module in one.modules()}
        parameters = {parameter for module in below for parameter in module.parameters(recurse=False)}
        return cls(below, parameters | {state for state in states if isinstance(state, nn.Parameter)})


def assign(root: nn.Module, owners: Sequence[nn.Module], ignored: Ignored) -> dict[nn.Module, list[Member]]:
    """Give every parameter below `root` that no unit has to one of `owners`.

    That is the innermost around it; for a tied parameter the innermost around all of its places.

    Args:
        root: The last of `owners`.
        owners: What will be units, inner ones before those around them.
        ignored: What no unit gets.
    """
    taken = {id(m.shard) for hooks in hooks_below(root) for b in hooks.unit.buckets for m in b.members}
    inside = {owner: set(owner.modules()) for owner in owners}
    found: dict[int, tuple[nn.Parameter, list[Place], list[nn.Module]]] = {}
    for place, parameter in names.named_parameters(root):
        if id(parameter) in taken or parameter in ignored.parameters:
            continue
        around = [owner for owner in owners if place.module in inside[owner]]
        _, places, common = found.setdefault(id(parameter), (parameter, [], around))
        places.append(place)
        common[:] = [owner for owner in common if owner in around]
    members: dict[nn.Module, list[Member]] = {owner: [] for owner in owners}
    for parameter, places, common in found.values():
        members[common[0]].append(Member(places, parameter))
    return members
