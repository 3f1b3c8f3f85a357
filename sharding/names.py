"""Fully qualified names without the prefixes of wrappers, decided by the wrappers' types, never by text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


class Wrapper(nn.Module):
    """A module that only passes on to one other; its own child's name is no part of names.

    `wrapped_name` is the attribute under which the child stands.
    """

    wrapped_name: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter or buffer stands: `getattr(module, name)`, known as `fqn` from the root."""

    fqn: str
    module: nn.Module
    name: str


def wrapped_child(module: nn.Module) -> str | None:
    """Give the name of the child that a wrapper, ours or torch's, passes on to; None if `module` is no wrapper."""
    if isinstance(module, Wrapper):
        return module.wrapped_name
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__)
    return next((_FOREIGN[kind] for kind in kinds if kind in _FOREIGN), None)


_FOREIGN = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.OffloadWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
}


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its clean name, once for each path to it, parents before children."""
    clean: dict[str, tuple[str, str | None]] = {}  # path -> clean name, and the child that it passes on to
    for path, module in root.named_modules(remove_duplicate=False):
        name = ""
        if path:
            parent, _, leaf = path.rpartition(".")
            above, inner = clean[parent]
            name = above if leaf == inner else f"{above}.{leaf}" if above else leaf
        clean[path] = (name, wrapped_child(module))
        yield name, module


def named_parameters(root: nn.Module) -> Iterator[tuple[Place, nn.Parameter]]:
    """Yield every place of every parameter, tied ones at each of their places."""
    for prefix, module in named_modules(root):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield Place(f"{prefix}.{name}" if prefix else name, module, name), parameter


def named_persistent_buffers(root: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yield every place of every buffer that belongs to the state dict."""
    for prefix, module in named_modules(root):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:  # torch offers no public question for it
                yield Place(f"{prefix}.{name}" if prefix else name, module, name), buffer
