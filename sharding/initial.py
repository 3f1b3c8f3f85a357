"""What parameters are before they are cut: made real where they are on the meta device, made equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sharding.assignment import Ignored
from sharding.errors import WrapError
from sharding.mesh import Groups


def materialise(
    root: nn.Module, ignored: Ignored, init: Callable[[nn.Module], None] | None, device: torch.device
) -> None:
    """Give modules with parameters or buffers on the meta device real ones.

    Args:
        root: The module to go through.
        ignored: What stays as it is.
        init: Called with each such module, to fill its own parameters; None for its `reset_parameters`.
        device: Where the real ones lie.

    Raises:
        WrapError: If there is neither `init` nor `reset_parameters`.
    """
    for module in root.modules():
        if module in ignored.modules or not _has_meta(module, ignored):
            continue
        reset = getattr(module, "reset_parameters", None)
        if init is not None:
            init(module)
        elif callable(reset):
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                reset()
        else:
            raise WrapError(
                f"{type(module).__name__} has parameters on the meta device and no reset_parameters; give param_init_fn"
            )


def _has_meta(module: nn.Module, ignored: Ignored) -> bool:
    own = [parameter for parameter in module.parameters(recurse=False) if parameter not in ignored.parameters]
    return any(tensor.is_meta for tensor in (*own, *module.buffers(recurse=False)))


@torch.no_grad()
def synchronise(module: nn.Module, ignored: Ignored, groups: Groups) -> None:
    """Give every rank the parameters and buffers of the first one.

    Collective:
        All ranks; blocks.
    """
    buffers = (buffer for inner in module.modules() if inner not in ignored.modules for buffer in inner.buffers(False))
    for tensor in (*(p for p in module.parameters() if p not in ignored.parameters), *buffers):
        groups.shards.broadcast(tensor.detach())
        groups.replicas.broadcast(tensor.detach())
