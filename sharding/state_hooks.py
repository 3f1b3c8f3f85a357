"""What `state_dict` and `load_state_dict` of a module do with the parameters of a unit in it.

[Note: hooks for states] A hook on each module that holds a parameter of the unit sees that parameter under exactly
`prefix + name`, whatever wrappers stand above: so no names are parsed. Each gather serves a whole bucket; the results
are kept from the pre-hook of the unit's module to its post-hook.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import nn

from sharding.bucket import Bucket, BucketState
from sharding.errors import UnsupportedError
from sharding.sharded_tensor import from_sharded_tensor, is_sharded_tensor, to_sharded_tensor
from sharding.state_options import FullStateDictConfig, StateDictSettings, StateDictType
from sharding.unit import Unit

State = MutableMapping[str, Any]
Held = dict[str, tuple[Bucket, int]]  # a module's own name of a parameter -> where that lies


class StateHooks:
    """The hooks of one unit for states.

    Attributes:
        unit: Its parameters.
        settings: What `state_dict` gives.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.settings = StateDictSettings()
        self._is_open = False  # between the pre-hook and the post-hook of the unit's module
        self._gathered: dict[int, list[torch.Tensor]] = {}  # by identity of the bucket
        # Partials, not methods: torch sets an attribute on the hooks that it gets.
        unit.module.register_state_dict_pre_hook(partial(self._begin))  # type: ignore[no-untyped-call]
        for module, held in _holders(unit):
            module.register_state_dict_post_hook(partial(self._save, held))  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(partial(self._load, held))  # type: ignore[no-untyped-call]
        unit.module.register_state_dict_post_hook(partial(self._end))  # type: ignore[no-untyped-call]

    @property
    def _is_empty_here(self) -> bool:
        config = self.settings.state_dict_config
        return isinstance(config, FullStateDictConfig) and config.rank0_only and not self.unit.is_first_rank

    def _begin(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._is_open = True
        self._gathered = {}

    def _end(self, module: nn.Module, state: State, prefix: str, metadata: object) -> None:
        self._is_open = False
        self._gathered = {}
        for key in [key for key in state if key.startswith(prefix)]:
            if self._is_empty_here:
                del state[key]
            elif self.settings.state_dict_config.offload_to_cpu and isinstance(state[key], torch.Tensor):
                state[key] = state[key].cpu()

    def _save(self, held: Held, module: nn.Module, state: State, prefix: str, metadata: object) -> None:
        for name, (bucket, index) in held.items():
            key = prefix + name
            if key in state and not bucket.is_always_whole and bucket.state is not BucketState.SUMMONED:
                state[key] = self._value(bucket, index)

    def _value(self, bucket: Bucket, index: int) -> object:
        shard = bucket.members[index].shard.detach()
        kind, group = self.settings.state_dict_type, bucket.group.process_group
        if kind is StateDictType.LOCAL_STATE_DICT:
            return shard
        if kind is StateDictType.SHARDED_STATE_DICT and group is not None:
            spans = [bucket.layout.span(index, rank) for rank in range(bucket.layout.world_size)]
            return to_sharded_tensor(shard, bucket.layout.slots[index].shape, spans, group)
        values = self._gathered.get(id(bucket))
        if values is None:
            values = bucket.gather_values(bucket.shard)
            if self._is_open:
                self._gathered[id(bucket)] = values
        return values[index]

    def _load(
        self,
        held: Held,
        module: nn.Module,
        state: State,
        prefix: str,
        metadata: dict[str, object],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UnsupportedError("load_state_dict(assign=True) would part parameters from their shard; leave it out")
        self.unit.reshard()
        for name, (bucket, index) in held.items():
            key = prefix + name
            if key not in state or bucket.state is BucketState.SUMMONED:
                continue
            parameter = bucket.members[index].shard
            try:
                state[key] = _span(state[key], bucket, index)
            except ValueError as error:
                errors.append(f"cannot load {key!r}: {error}; build the module as the one that was saved")
                state[key] = parameter.detach()  # so that torch has nothing to add


def _span(value: object, bucket: Bucket, index: int) -> object:
    """Give what this rank loads of a whole or sharded tensor, or of its own span."""
    shape, shard = bucket.layout.slots[index].shape, bucket.members[index].shard
    start, stop = bucket.span(index)
    if is_sharded_tensor(value):
        return from_sharded_tensor(value, shape, start, stop).view(shard.shape)  # type: ignore[arg-type]  # just asked
    if not isinstance(value, torch.Tensor) or (value.shape == shard.shape and value.shape != shape):
        return value
    if tuple(value.shape) != shape:
        raise ValueError(f"the state dict has shape {tuple(value.shape)}, the module {shape}")
    return value.detach().reshape(-1)[start:stop].view(shard.shape)


def _holders(unit: Unit) -> Iterable[tuple[nn.Module, Held]]:
    """Give the modules that hold parameters of a unit, with their names of them."""
    found: dict[int, tuple[nn.Module, Held]] = {}
    for bucket in unit.buckets:
        for index, member in enumerate(bucket.members):
            for place in member.places:
                found.setdefault(id(place.module), (place.module, {}))[1][place.name] = (bucket, index)
    return found.values()
