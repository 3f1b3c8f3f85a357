"""Modules that compute in full precision inside of a model that does not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sharding.wrap import WrapArguments, post_order


def except_from_precision(
    root: nn.Module,
    units: Mapping[nn.Module, WrapArguments],
    classes: tuple[type[nn.Module], ...],
    *,
    but: set[nn.Module],
) -> dict[nn.Module, WrapArguments]:
    """Make modules of some classes units without mixed precision, and cast what goes in and out of them.

    Args:
        root: Not itself among them.
        units: Modules that are to be units below it, with their own arguments.
        classes: What runs in full precision.
        but: Modules that are left alone.

    Returns:
        The units with these among them, children before parents.
    """
    found = [m for m in post_order(root) if isinstance(m, classes) and m is not root and m not in but]
    if not found:
        return dict(units)
    for module in found:
        _InOwnDtype(module)
    names = ", ".join(sorted({type(module).__name__ for module in found}))
    warnings.warn(
        f"the model has modules of type {names}, which MixedPrecision names in _module_classes_to_ignore. These "
        "modules will be wrapped as separate FSDP units with mixed precision disabled; pass an empty tuple to have "
        "them in low precision",
        stacklevel=3,
    )
    own = {module: {**units.get(module, {}), "mixed_precision": None} for module in found}
    return {module: own.get(module) or units[module] for module in post_order(root) if module in own or module in units}


class _InOwnDtype:
    """Two hooks: floating inputs become what the module's parameters are, outputs what the inputs were."""

    def __init__(self, module: nn.Module) -> None:
        floating = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
        self._dtype = next(floating, torch.float32)
        self._given: torch.dtype | None = None  # of the last input that was cast
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self._given = None
        return cast(tuple[Any, Any], pytree.tree_map_only(torch.Tensor, self._raise, (args, kwargs)))

    def _raise(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == self._dtype:
            return tensor
        self._given = tensor.dtype
        return tensor.to(self._dtype)

    def _after(self, module: nn.Module, args: object, output: object) -> object:
        given = self._given
        if given is None:
            return output
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(given) if t.is_floating_point() else t, output)
