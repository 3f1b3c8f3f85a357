"""Marks that wrappers leave in the names of a module's tensors, for states that were saved with them."""

from __future__ import annotations

from dataclasses import replace

from shardckpt.errors import MismatchError, listing
from shardckpt.tools.selection import Selection

_MARKS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
"""Of torch.compile, FSDP1, activation checkpointing and DeepSpeed: no module of a model has such a name."""
_PREFIX = "module."
"""Of DDP and DataParallel: a wrapper's only if all names have it."""


def without_wrappers(selection: Selection) -> Selection:
    """Give the selection with the names that the bare model has.

    Raises:
        MismatchError: If two tensors would get one name.
    """
    every = [name for tensor in selection.tensors for name in (tensor.name, *tensor.aliases)]
    bare = {name: ".".join(part for part in name.split(".") if part not in _MARKS) for name in every}
    while bare and all(name.startswith(_PREFIX) for name in bare.values()):
        bare = {old: name.removeprefix(_PREFIX) for old, name in bare.items()}
    if len(set(bare.values())) < len(bare):
        twice = [name for name in bare if list(bare.values()).count(bare[name]) > 1]
        raise MismatchError(
            f"without the marks of wrappers, several tensors would have one name: {listing(twice)}; choose some with "
            "--only or --skip"
        )
    tensors = tuple(
        replace(tensor, name=bare[tensor.name], aliases=tuple(bare[alias] for alias in tensor.aliases))
        for tensor in selection.tensors
    )
    return Selection(tensors, {bare[name]: pieces for name, pieces in selection.pieces.items()})
