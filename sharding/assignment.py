"""Which parameter belongs to which unit, and what stays out of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sharding import names
from sharding.bucket import Member
from sharding.errors import WrapError
from sharding.hooks import hooks_below, hooks_of
from sharding.names import Place

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, slots=True)
class Ignored:
    """Modules and parameters that stay as they are; buffers of ignored modules too."""

    modules: set[nn.Module]
    parameters: set[nn.Parameter]

    @classmethod
    def of(cls, modules: Iterable[nn.Module], states: Iterable[nn.Parameter | nn.Module]) -> Ignored:
        """Collect all that is below the given modules, and the given parameters.

        Raises:
            WrapError: If what is given is neither, or both at once, or sharded already.
        """
        modules, states = _listed("ignored_modules", modules), _listed("ignored_states", states)
        if modules and states:
            raise WrapError(
                "Cannot pass both ignored_modules and ignored_states at the same time; name all in the latter"
            )
        _check("ignored_modules", modules, (nn.Module,))
        _check("ignored_states", states, (nn.Module, nn.Parameter))
        given = [*modules, *(state for state in states if isinstance(state, nn.Module))]
        below = {module for one in given for module in one.modules()}
        parameters = {parameter for module in below for parameter in module.parameters(recurse=False)}
        return cls(below, parameters | {state for state in states if isinstance(state, nn.Parameter)})


def _listed(name: str, values: object) -> list[Any]:
    if isinstance(values, (nn.Module, torch.Tensor)) or not isinstance(values, Iterable):
        raise WrapError(f"{name} should be an iterable, but got a {type(values).__name__}; put it in a list")
    return list(values)


def _check(name: str, values: list[Any], kinds: tuple[type, ...]) -> None:
    found = sorted({type(value).__name__ for value in values if not isinstance(value, kinds)})
    wanted = " or all ".join(f"nn.{kind.__name__}" for kind in reversed(kinds))
    if found or sum(any(isinstance(value, kind) for value in values) for kind in kinds) > 1:
        types = ", ".join(found or sorted({type(value).__name__ for value in values}))
        raise WrapError(f"{name} should contain all {wanted} but found types {types}; give one kind")
    wrapped = [
        getattr(value, names.wrapped_child(value) or "", value) for value in values if isinstance(value, nn.Module)
    ]
    if any(hooks_of(module) is not None for module in wrapped):
        raise WrapError(f"{name} should not include FSDP modules; name them before they are wrapped")


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
        sparse = [p.fqn for p in places if isinstance(p.module, _EMBEDDINGS) and p.module.sparse]
        if sparse:
            raise WrapError(
                f"{sparse[0]!r} takes sparse gradients, which cannot be cut over ranks; build its "
                f"{type(places[0].module).__name__} with sparse=False, or name it in ignored_modules"
            )
        members[common[0]].append(Member(places, parameter))
    return members
