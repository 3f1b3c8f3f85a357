"""States of optimizers by parameter name: whole, from what each rank holds, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from sharding import names
from sharding.bucket import Bucket
from sharding.errors import LoadError
from sharding.state_dict import LocalTensor, local_state_dict, members_of

States = dict[int, dict[str, Any]]  # by identity of the parameter that the optimizer sees
_Said = tuple[dict[tuple[int, str], torch.dtype], list[dict[str, Any]]]


def full_optimizer_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Give the whole optimizer state by parameter name: {"state": {name: {key: value}}, "param_groups": [...]}.

    A parameter has a state here if it has one on any rank.

    Collective:
        All ranks; blocks. One gather for each bucket and key of its states, and one small exchange a bucket.
    """
    first: dict[int, str] = {}
    for place, parameter in names.named_parameters(module):
        first.setdefault(id(parameter), place.fqn)
    buckets = {id(bucket): bucket for _, bucket, _ in members_of(module).values()}
    whole: States = {}
    for bucket in buckets.values():
        whole |= _whole_states(bucket, optimizer)
    state: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = whole[id(parameter)] if id(parameter) in whole else _copied(optimizer.state.get(parameter, {}))
            if found:
                state[first[id(parameter)]] = found
    groups = [{**g, "params": [first[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def _whole_states(bucket: Bucket, optimizer: torch.optim.Optimizer) -> States:
    """Give the states of a bucket's parameters.

    A rank that holds nothing of a parameter may have no state for it; so ranks tell each other first which there are.
    """
    shards = [member.shard for member in bucket.members]
    mine = [optimizer.state.get(shard, {}) for shard in shards]
    cut: dict[tuple[int, str], torch.Tensor] = {
        (index, key): value
        for index, held in enumerate(mine)
        for key, value in held.items()
        if _is_cut(key, value, shards[index].shape)
    }
    others = [{key: v for key, v in held.items() if (index, key) not in cut} for index, held in enumerate(mine)]
    said = cast(list[_Said], bucket.group.gather_objects(({at: value.dtype for at, value in cut.items()}, others)))
    dtypes = {at: dtype for theirs, _ in said for at, dtype in theirs.items()}
    found: list[dict[str, Any]] = [
        {key: value for _, theirs in reversed(said) for key, value in _copied(theirs[index]).items()}
        for index in range(len(shards))
    ]
    for key in sorted({key for _, key in dtypes}):
        dtype = next(dtype for (_, other), dtype in dtypes.items() if other == key)
        values = bucket.gather_values(bucket.collect([cut.get((i, key)) for i in range(len(shards))], dtype))
        for index, value in enumerate(values):
            if (index, key) in dtypes:
                found[index][key] = value
    return {
        id(shard): {key: held[key] for key in [*own, *(key for key in held if key not in own)]}
        for shard, held, own in zip(shards, found, mine, strict=True)
    }


def _is_cut(key: str, value: object, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape and key != "step"


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


@torch.no_grad()
def load_full_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]
) -> None:
    """Fill an optimizer over shards from a whole state by name, as `full_optimizer_state_dict` gives it.

    Raises:
        LoadError: If the groups differ.

    Collective:
        None.
    """
    local = local_optimizer_state_dict(module, optimizer, full)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group, stored in zip(optimizer.param_groups, local["param_groups"], strict=True):
        group.update({key: value for key, value in stored.items() if key != "params"})
    for number, parameter in enumerate(parameters):
        optimizer.state[parameter] = local["state"].get(number, {})


def local_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]
) -> dict[str, Any]:
    """Give this rank's part of a whole state by name, in the form that `optimizer.load_state_dict` takes.

    Raises:
        LoadError: If the groups differ.

    Collective:
        None.
    """
    by_id = {id(held.tensor): (name, held) for name, held in reversed(local_state_dict(module).items())}
    stored_groups = full["param_groups"]
    if len(stored_groups) != len(optimizer.param_groups):
        raise LoadError(
            f"the state has {len(stored_groups)} param groups, the optimizer {len(optimizer.param_groups)}; "
            "make the optimizer with the groups it was saved with"
        )
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group, stored in zip(optimizer.param_groups, stored_groups, strict=True):
        groups.append({**stored, "params": list(range(number, number + len(group["params"])))})
        for parameter in group["params"]:
            name, held = by_id[id(parameter)]
            found = {key: _local_part(value, held, key) for key, value in full["state"].get(name, {}).items()}
            if found:
                state[number] = found
            number += 1
    return {"state": state, "param_groups": groups}


def _local_part(value: object, held: LocalTensor, key: str) -> object:
    if isinstance(value, torch.Tensor) and tuple(value.shape) == held.shape and key != "step":
        part = value.reshape(-1)[held.start : held.stop].clone()
        return part.view(held.tensor.shape).to(held.tensor.device)
    return value.clone() if isinstance(value, torch.Tensor) else value
