"""The state of torch optimizers by FQN: what `torch.optim` keys by position and object, keyed by name.

Knows `torch.optim.Optimizer`; refuses to know files. Local optimizer tensors that are shaped like their (sharded)
parameter are spans of a global tensor like it; all else, `step` above all, is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from shardckpt.errors import MismatchError, UnsupportedError, listing
from shardckpt.region import Shape
from shardckpt.shard import Shard, shard_of_tensor


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor of optimizer state: `state[fqn][key]`."""

    parameter: Shard
    key: str
    tensor: torch.Tensor

    @property
    def is_like_parameter(self) -> bool:
        """True if the tensor is cut as its parameter is."""
        return is_like_parameter(self.key, tuple(self.tensor.shape), tuple(self.parameter.tensor.shape))


def is_like_parameter(key: str, shape: Shape, parameter_shape: Shape) -> bool:
    """Tell whether state of this shape is cut as its parameter: same shape, but not the step counter of a scalar."""
    return shape == parameter_shape and key != "step"


class NamedOptimizer:
    """An optimizer, its parameters known by FQN."""

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Mapping[int, Shard], *, section: str) -> None:
        """Find the name of each of its parameters.

        Args:
            optimizer: The optimizer.
            shards: `id` of every parameter of the modules that are saved along -> shard.
            section: Where it stands in the state, for messages.

        Raises:
            MismatchError: If it has parameters which no module of the state has.
        """
        self.optimizer = optimizer
        self.shards = shards
        self.section = section
        unknown = [
            f"group {number}, parameter {position} of shape {tuple(parameter.shape)}"
            for number, group in enumerate(optimizer.param_groups)
            for position, parameter in enumerate(group["params"])
            if id(parameter) not in shards
        ]
        if unknown:
            raise MismatchError(
                f"state[{section!r}] has parameters that no module of the state has: {listing(unknown)}. Put the "
                "module that "
                "the optimizer was made from into the same state, and make the optimizer after wrapping the module."
            )

    def groups(self) -> list[dict[str, object]]:
        """Give the param groups, parameters replaced by their names."""
        return [
            {**group, "params": [self.shards[id(parameter)].fqn for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def parameters(self) -> Iterator[tuple[torch.Tensor, Shard]]:
        """Yield every parameter with its shard, in the order of the groups."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, self.shards[id(parameter)]

    def entries(self) -> Iterator[StateEntry]:
        """Yield all state tensors, parameter by parameter."""
        for parameter, shard in self.parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield StateEntry(shard, key, value)

    def values(self) -> dict[str, dict[str, object]]:
        """Give the non-tensor state: FQN -> key -> value."""
        found = {
            shard.fqn: {
                key: value
                for key, value in self.optimizer.state.get(parameter, {}).items()
                if not isinstance(value, torch.Tensor)
            }
            for parameter, shard in self.parameters()
        }
        return {fqn: values for fqn, values in found.items() if values}

    def shard_of(self, entry: StateEntry) -> Shard:
        """Give the shard that an entry is.

        Raises:
            UnsupportedError: If its shape is neither the sharded parameter's nor a scalar's: it differs from rank to
            rank.
        """
        name = f"state.{entry.parameter.fqn}.{entry.key}"
        shape = tuple(entry.tensor.shape)
        if entry.is_like_parameter and not isinstance(entry.tensor, DTensor):
            parameter = entry.parameter
            return replace(parameter, fqn=name, aliases=(), tensor=entry.tensor)
        is_cut = not entry.parameter.is_replicated and not isinstance(entry.tensor, DTensor)
        if is_cut and entry.parameter.mesh is None and entry.tensor.numel() != 1:
            raise UnsupportedError(
                f"cannot save {name!r} of state[{self.section!r}]: it has the local shape {shape}, its sharded "
                "parameter "
                f"{tuple(entry.parameter.tensor.shape)}; only state shaped like the parameter, or scalars, can be "
                "sharded"
            )
        return shard_of_tensor(name, entry.tensor)

    def set_groups(self, stored: list[dict[str, object]]) -> None:
        """Set the hyperparameters of every group to those of the stored group that has its parameters.

        Raises:
            MismatchError: If a group's parameters are in several stored groups, or in none.
        """
        owner = {fqn: number for number, group in enumerate(stored) for fqn in _names(group)}
        for number, group in enumerate(self.optimizer.param_groups):
            fqns = [self.shards[id(parameter)].fqn for parameter in group["params"]]
            owners = {owner[fqn] for fqn in fqns if fqn in owner}
            if not fqns and number < len(stored) and not stored[number]["params"]:
                owners = {number}
            if len(owners) > 1 or (fqns and not owners):
                found = f"in the groups {sorted(owners)}" if owners else "in no group"
                raise MismatchError(
                    f"cannot load state[{self.section!r}]: the parameters of group {number} ({listing(fqns)}) are "
                    f"{found} of the "
                    "checkpoint. Build the optimizer with the groups that it was saved with."
                )
            for source in owners:
                group.update({key: value for key, value in stored[source].items() if key != "params"})


def _names(group: Mapping[str, object]) -> list[str]:
    params = group["params"]
    return [str(fqn) for fqn in params] if isinstance(params, list) else []
