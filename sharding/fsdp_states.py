"""The part of `FullyShardedDataParallel` about states: what `state_dict` gives, and whole parameters for people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from sharding.errors import StateError, UnsupportedError, WrapError
from sharding.hooks import Hooks, hooks_below
from sharding.names import Wrapper
from sharding.optimizer_state import full_optimizer_state_dict, local_optimizer_state_dict
from sharding.state_options import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from sharding.summon import summon

Self = TypeVar("Self", bound="StatefulWrapper")


class StatefulWrapper(Wrapper):
    """A wrapper around a unit's module, whose states are whole or sharded as one asks for."""

    _hooks: Hooks

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Say what `state_dict` is to give for all units in `module`.

        Args:
            module: With units in it.
            state_dict_type: Whole tensors, spans, or sharded tensors.
            state_dict_config: Its options; None for the defaults of the kind.
            optim_state_dict_config: Options for optimizer states; None for the defaults of the kind.

        Returns:
            What was set before.

        Raises:
            WrapError: If the options belong to another kind.
        """
        kinds = _CONFIGS[state_dict_type]
        config, optim_config = state_dict_config or kinds[0](), optim_state_dict_config or kinds[1]()
        if type(config) is not kinds[0] or type(optim_config) is not kinds[1]:
            raise WrapError(
                f"{state_dict_type.name} takes {kinds[0].__name__} and {kinds[1].__name__}, "
                f"not {type(config).__name__} and {type(optim_config).__name__}"
            )
        before = StatefulWrapper.get_state_dict_type(module)
        for hooks in hooks_below(module):
            hooks.states.settings = StateDictSettings(state_dict_type, config, optim_config)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Give what `state_dict` gives for the units in `module`.

        Raises:
            StateError: If they differ.
        """
        found = [hooks.states.settings for hooks in hooks_below(module)] or [StateDictSettings()]
        if any(settings != found[0] for settings in found):
            raise StateError(f"units differ in their state_dict_type: {found}; set it on the outermost module")
        return found[0]

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Say it, as `set_state_dict_type` does, while the context is open."""
        before = {hooks: hooks.states.settings for hooks in hooks_below(module)}
        StatefulWrapper.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for hooks, settings in before.items():
                hooks.states.settings = settings

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Make parameters whole while the context is open; see `sharding.summon.summon`.

        Args:
            module: With units in it.
            recurse: All of its units, or only its own.
            writeback: Keep what was changed.
            rank0_only: Leave the other ranks their spans.
            offload_to_cpu: Lay whole tensors in host memory.
            with_grads: Make gradients whole, too.

        Collective:
            All ranks, at the beginning; blocks.
        """
        inner = getattr(module, module.wrapped_name) if isinstance(module, StatefulWrapper) else module
        units = [hooks.unit for hooks in hooks_below(module) if recurse or hooks.unit.module is inner]
        with summon(
            units, writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads
        ):
            yield

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: None = None, group: None = None
    ) -> dict[str, Any]:
        """Give the whole state of an optimizer by parameter name, as `state_dict_type` says.

        Args:
            model: With units in it.
            optim: Made from its parameters.
            optim_state_dict, group: None; the state is taken from `optim`, the ranks from the units.

        Raises:
            UnsupportedError: For local and sharded states: `shardckpt` saves those.

        Collective:
            All ranks; blocks.
        """
        settings = StatefulWrapper.get_state_dict_type(model)
        if optim_state_dict is not None or group is not None:
            raise UnsupportedError("optim_state_dict and group: the optimizer and its units say both; leave them out")
        if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
            raise UnsupportedError(
                f"optim_state_dict with {settings.state_dict_type.name}: only whole states are given here; set "
                "FULL_STATE_DICT, or save the shards with shardckpt.save"
            )
        full = full_optimizer_state_dict(model, optim)
        config = settings.optim_state_dict_config
        if isinstance(config, FullOptimStateDictConfig) and config.rank0_only:
            full = full if all(hooks.unit.is_first_rank for hooks in hooks_below(model)) else {}
        if config.offload_to_cpu:
            for state in full.get("state", {}).values():
                state.update({key: value.cpu() for key, value in state.items() if isinstance(value, torch.Tensor)})
        return full

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: None = None,
    ) -> dict[str, Any]:
        """Give this rank's part of a whole state, for `optim.load_state_dict`.

        Args:
            model: With units in it.
            optim: Made from its parameters.
            optim_state_dict: As `optim_state_dict` gives it; every rank has it.
            is_named_optimizer: False; others are not served.
            load_directly: Load it, too.
            group: None.

        Collective:
            None.
        """
        if is_named_optimizer or group is not None:
            raise UnsupportedError("is_named_optimizer and group are not served; leave them out")
        local = local_optimizer_state_dict(model, optim, optim_state_dict)
        if load_directly:
            optim.load_state_dict(local)
        return local

    def apply(self: Self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` with every module in this one, inner ones first, its parameters whole; keep what it changes.

        Collective:
            All ranks; blocks.
        """
        with self.summon_full_params(self, recurse=False):
            return super().apply(fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by their names without the wrappers' own; arguments as of `Module.named_parameters`."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace(f"{self.wrapped_name}.", ""), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield buffers by their names without the wrappers' own; arguments as of `Module.named_buffers`."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(f"{self.wrapped_name}.", ""), buffer


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
