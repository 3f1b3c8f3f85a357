"""Activations: computed again in backward, or kept in host memory until then. Wrappers that leave no trace in names."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from sharding.names import Wrapper
from sharding.wrap import Policy, lambda_auto_wrap_policy, replace_child, units_to_wrap


class CheckpointImpl(Enum):
    """How torch computes again: inside the graph of the outer backward, or in one of its own."""

    REENTRANT = auto()
    NO_REENTRANT = auto()


class ActivationWrapper(Wrapper):
    """A wrapper that changes how long the activations of its module are kept."""

    wrapped_name = "_checkpoint_wrapped_module"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module

    def __getattr__(self, name: str) -> Any:
        """Pass on to the wrapped module what this one does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == self.wrapped_name:
                raise
            return getattr(self._checkpoint_wrapped_module, name)

    def __getitem__(self, key: int) -> object:
        """Pass on to a wrapped `Sequential` or list."""
        return self._checkpoint_wrapped_module[key]  # type: ignore[index]  # as the wrapped module allows


class CheckpointWrapper(ActivationWrapper):
    """Keeps the inputs of its module only, and runs it again in backward."""

    def __init__(
        self,
        module: nn.Module,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable[..., object] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(module)
        self.checkpoint_impl = checkpoint_impl
        self._checkpoint = checkpoint if checkpoint_fn is None else checkpoint_fn
        if checkpoint_fn is None:
            options["use_reentrant"] = checkpoint_impl is CheckpointImpl.REENTRANT
        self._options = options

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module; see the class."""
        names = list(kwargs)  # reentrant checkpoints take positions only

        def run(*values: object) -> object:
            named = dict(zip(names, values[len(args) :], strict=True))
            return self._checkpoint_wrapped_module(*values[: len(args)], **named)

        return self._checkpoint(run, *args, *kwargs.values(), **self._options)


class OffloadWrapper(ActivationWrapper):
    """Keeps what its module saves for backward in host memory; parameters stay where they are."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module; see the class."""
        parameters = {p.untyped_storage().data_ptr() for p in self._checkpoint_wrapped_module.parameters()}
        pins = torch.accelerator.is_available()

        def pack(saved: torch.Tensor) -> tuple[torch.Tensor, torch.device]:
            if saved.untyped_storage().data_ptr() in parameters:
                return saved, saved.device
            host = torch.empty(saved.size(), dtype=saved.dtype, pin_memory=pins)
            return host.copy_(saved), saved.device

        with saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1], non_blocking=pins)):
            return self._checkpoint_wrapped_module(*args, **kwargs)


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., object] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """Wrap a module so that it keeps its inputs only, and runs again in backward.

    Args:
        module: Inside or around a unit, or neither.
        checkpoint_impl: How torch computes again.
        checkpoint_fn: In place of `torch.utils.checkpoint.checkpoint`: called with a function, its arguments, and the
            options.
        checkpoint_fn_kwargs: Options for it.
    """
    return CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


def offload_wrapper(module: nn.Module) -> nn.Module:
    """Wrap a module so that what it saves for backward waits in host memory, pinned where there is an accelerator."""
    return OffloadWrapper(module)


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda module: True,
    auto_wrap_policy: Policy | None = None,
) -> None:
    """Wrap modules below `model`, before or after it is sharded.

    Args:
        model: Itself it stays as it is.
        checkpoint_wrapper_fn: Wraps one module: `checkpoint_wrapper`, `offload_wrapper`, or a partial of them.
        check_fn: Tells which modules.
        auto_wrap_policy: In place of it.
    """

    def by_check(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return lambda_auto_wrap_policy(module, recurse, nonwrapped_numel, check_fn)

    for module in units_to_wrap(model, auto_wrap_policy or by_check, set()):
        replace_child(model, module, checkpoint_wrapper_fn(module))
