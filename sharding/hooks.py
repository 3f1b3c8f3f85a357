"""The hooks of one unit: where torch calls the runtime.

Knows modules' and autograd's hooks, and what a call's inputs and outputs look like. Refuses to decide: when to gather,
free and reduce is the runtime's.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sharding.bucket import Bucket
from sharding.errors import UnsupportedError
from sharding.names import named_modules
from sharding.runtime import Runtime
from sharding.settings import Settings
from sharding.state_hooks import StateHooks
from sharding.unit import Unit

Arguments = tuple[object, ...]
Keywords = dict[str, object]


class Hooks:
    """The hooks that make a module a unit, and its place in the runtime.

    Attributes:
        unit: Its parameters.
        settings: What was asked for.
        states: What `state_dict` and `load_state_dict` do.
        runtime: What the units under one root share; None until the first forward.
        is_root: True if no unit is above.
    """

    def __init__(self, unit: Unit, settings: Settings) -> None:
        self.unit = unit
        self.settings = settings
        self.runtime: Runtime | None = None
        self.is_root = False
        self._error_before: BaseException | None = None  # the one being handled when forward began
        self.states = StateHooks(unit)
        module = unit.module
        module.register_forward_pre_hook(Untraced(self._pre_forward), prepend=True, with_kwargs=True)
        module.register_forward_hook(Untraced(self._post_forward), with_kwargs=True, always_call=True)
        for bucket in unit.buckets:
            bucket.watch(partial(self._gradient_hook, bucket))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied: `copy.deepcopy`, `pickle` and `torch.save` of a module come here.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"a sharded {type(self.unit.module).__name__} can be neither copied nor pickled: it is one rank's part of "
            "a module, and its process groups are this process's. Copy the module before it is wrapped, or save its "
            "state_dict() and load that into another"
        )

    def start(self) -> Runtime:
        """Give the runtime, making this unit the root if there is none yet.

        Collective:
            The first call on each rank makes process groups: all ranks of the groups call.
        """
        if self.runtime is None:
            hooks = hooks_below(self.unit.module)
            labels = {module: name for name, module in named_modules(self.unit.module)}
            settings = self.settings
            self.runtime = Runtime(
                {one.unit: labels[one.unit.module] or "the whole model" for one in hooks},
                backward_prefetch=settings.backward_prefetch,
                forward_prefetch=settings.forward_prefetch,
            )
            for one in hooks:
                one.runtime, one.is_root = self.runtime, one is self
            _cast_buffers(hooks)
        return self.runtime

    def _pre_forward(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        self._error_before = sys.exc_info()[1]
        self.start().pre_forward(self.unit, self.is_root)
        return self._cast_inputs(args, kwargs)

    def _post_forward(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: object) -> None:
        error = sys.exc_info()[1]
        if error is not None and error is not self._error_before:  # torch calls this hook after an exception too
            self.start().fail_forward(self.unit, error)
            return
        inputs = _differentiable((args, kwargs)) if self.unit.is_partly_frozen else []
        self.start().post_forward(self.unit, self.is_root, inputs, _differentiable(output))

    def _gradient_hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            self.start().take_gradient(self.unit, bucket, index)

        return Untraced(take)

    def _cast_inputs(self, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        precision = self.unit.precision
        dtype = precision.param_dtype
        is_asked = precision.cast_forward_inputs or (self.is_root and precision.cast_root_forward_inputs)
        if dtype is None or not is_asked:
            return None

        def cast_one(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return cast(tuple[Arguments, Keywords], pytree.tree_map_only(torch.Tensor, cast_one, (args, kwargs)))


class Untraced:
    """A hook that `torch.compile` does not look into: it breaks the graph there."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the hook."""
        return self._hook(*args, **kwargs)


def hooks_of(module: nn.Module) -> Hooks | None:
    """Give the hooks of a module that is a unit, or None."""
    found = getattr(module, "sharding_hooks", None)
    return found if isinstance(found, Hooks) and found.unit.module is module else None


def hooks_below(root: nn.Module) -> list[Hooks]:
    """Give the hooks of all units in `root`, itself included, parents before children."""
    return [found for module in root.modules() if (found := hooks_of(module)) is not None]


def _differentiable(values: object) -> list[torch.Tensor]:
    """Give the tensors in nested values that take a gradient; dataclasses and packed sequences are looked into too."""
    if isinstance(values, torch.Tensor):
        return [values] if values.requires_grad else []
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        return [t for field in dataclasses.fields(values) for t in _differentiable(getattr(values, field.name, None))]
    if isinstance(values, Mapping):
        return [t for value in values.values() for t in _differentiable(value)]
    if isinstance(values, (list, tuple, set, frozenset)):
        return [t for value in values for t in _differentiable(value)]
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor) and t.requires_grad]


def _cast_buffers(hooks: Sequence[Hooks]) -> None:
    """Give each unit's buffers the dtype that it asked for; inner units come last in `hooks`."""
    seen: set[int] = set()
    for one in reversed(hooks):
        dtype = one.settings.precision.buffer_dtype
        for buffer in one.unit.module.buffers():
            if id(buffer) not in seen and dtype is not None and buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
            seen.add(id(buffer))
