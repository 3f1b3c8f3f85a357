"""The part of `FullyShardedDataParallel` about states: what `state_dict` gives, and whole parameters for people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from sharding.errors import StateError, WrapError
from sharding.hooks import Hooks, hooks_below
from sharding.names import Wrapper
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
