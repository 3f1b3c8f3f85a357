"""Fully qualified names without the prefixes of wrappers, decided by the wrappers' types, never by text."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import torch
from torch import nn


class Wrapper(nn.Module):
    """A module that only passes on to one other; its own child's name is no part of names.

    Its `state_dict` and `load_state_dict` use the child's names. `wrapped_name` is the attribute under which the child
    stands.
    """

    wrapped_name: str

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_leave_out_name)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_put_in_name)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_clean_report)  # type: ignore[no-untyped-call]


def _leave_out_name(module: Wrapper, state: MutableMapping[str, object], prefix: str, metadata: object) -> None:
    _rename(state, f"{prefix}{module.wrapped_name}.", prefix)


def _put_in_name(
    module: Wrapper, state: MutableMapping[str, object], prefix: str, metadata: object, *report: object
) -> None:
    _rename(state, prefix, f"{prefix}{module.wrapped_name}.")


def _rename(state: MutableMapping[str, object], before: str, after: str) -> None:
    for key in [key for key in state if key.startswith(before)]:
        state[after + key[len(before) :]] = state.pop(key)


def _clean_report(module: Wrapper, report: object) -> None:
    """Take the child's name out of missing and unexpected keys; torch does not tell this hook where it stands."""
    for keys in report if isinstance(report, tuple) else ():
        keys[:] = [key.replace(f"{module.wrapped_name}.", "") for key in keys]


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
