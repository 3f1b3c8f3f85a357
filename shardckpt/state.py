"""What a state holds: nested Python values, modules and optimizers <-> named local tensors and objects.

The one file that knows how modules are sharded (`sharding`). It collects references; no byte is copied here, and it
refuses to know files and other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

import sharding
from shardckpt import names
from shardckpt.catalogue import Tensor
from shardckpt.errors import UnsupportedError
from shardckpt.manifest import Json
from shardckpt.names import Path
from shardckpt.objects import encode, path_text, per_rank_names
from shardckpt.optimizer_state import NamedOptimizer
from shardckpt.per_rank import RankOf
from shardckpt.region import Span, normalise
from shardckpt.shard import Shard, shard_of_tensor
from shardckpt.tensors import dtype_name


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state as a nested dict and takes it back."""

    def state_dict(self) -> dict[str, object]:
        """Give the state."""

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Take the state."""


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of the checkpoint, and what this rank holds of it."""

    tensor: Tensor
    shard: Shard
    path: Path
    is_per_rank: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return self.shard.region.numel * self.tensor.item_bytes


@dataclass(frozen=True, slots=True)
class NamedBucket:
    """A flat bucket of the runtime by names: `columns[kind][slot]` is None where the slot has no such tensor."""

    align: int
    num_shards: int
    numel: tuple[int, ...]
    granularity: tuple[int, ...]
    columns: tuple[tuple[str | None, ...], ...]


@dataclass(frozen=True)
class LocalState:
    """A state as this rank sees it.

    Attributes:
        tensors: All tensors that the checkpoint will hold, also those of which this rank has no element.
        sections: Top-level key -> kind ("module", "optimizer", "state", "value").
        objects: Everything that is no tensor.
        buckets: How the sharded ones among the tensors are cut.
    """

    tensors: tuple[LocalTensor, ...]
    sections: dict[str, str]
    objects: Json
    buckets: tuple[NamedBucket, ...]


def collect(state: Mapping[str, object], place: RankOf) -> LocalState:
    """Walk a state and give what it holds; nothing in it is changed.

    Args:
        state: Section -> module, optimizer, object with a state dict, tensor, or nested values.
        place: This rank among those that save.

    Raises:
        UnsupportedError: If something cannot be stored; names its place.
        MismatchError: If an optimizer belongs to no module of the state.
    """
    check_sections(state)
    modules = {section: value for section, value in state.items() if isinstance(value, torch.nn.Module)}
    optimizers = named_optimizers(state)
    values = {section: _plain_value(section, value, optimizers) for section, value in state.items()}
    leaves = [leaf for section, module in modules.items() for leaf in _module_leaves(section, module)]
    leaves += [leaf for section, optimizer in optimizers.items() for leaf in _optimizer_leaves(section, optimizer)]
    leaves += [leaf for section, value in values.items() for leaf in _value_leaves(section, value, place)]
    assigned = names.assign(path for leaf in leaves for path in leaf.paths)

    def name_tensor(path: Path, value: object) -> str | None:
        return assigned[path] if isinstance(value, torch.Tensor) else None

    objects: Json = {section: encode(value, (section,), name_tensor, place) for section, value in values.items()}
    of_rank = per_rank_names(objects)
    tensors = [_local_tensor(leaf, assigned, of_rank) for leaf in leaves]
    tensors.sort(key=lambda one: one.is_per_rank)  # stable: those of this rank alone come last
    return LocalState(
        tuple(tensors),
        {section: kind_of(section, value) for section, value in state.items()},
        objects,
        tuple(_buckets(modules, optimizers, assigned)),
    )


def check_sections(state: object) -> None:
    """Refuse what is no mapping from section names.

    Raises:
        UnsupportedError: Says what was given.
    """
    if not isinstance(state, Mapping):
        raise UnsupportedError(
            f"the state is a {type(state).__name__}; give a dict from section names to modules, optimizers and values, "
            'such as {"model": model}'
        )
    wrong = [section for section in state if not isinstance(section, str)]
    if wrong:
        raise UnsupportedError(f"the section {wrong[0]!r} of the state is no text; name sections by text")


def kind_of(section: str, value: object) -> str:
    """Give the kind of a section: "module", "optimizer", "state" (has a state dict) or "value"."""
    if isinstance(value, torch.nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    return "state" if isinstance(value, Stateful) and not isinstance(value, Mapping) else "value"


def module_shards(section: str, module: torch.nn.Module) -> list[Shard]:
    """Give what this rank holds of a module: every parameter and persistent buffer, tied ones once, with aliases."""
    by_identity: dict[int, list[str]] = {}
    found = sharding.local_state_dict(module)
    for fqn, local in found.items():
        by_identity.setdefault(id(local.tensor), []).append(fqn)
    shards = []
    for first, *aliases in by_identity.values():
        local = found[first]
        if local.is_replicated:
            shards.append(shard_of_tensor(first, local.tensor, tuple(aliases)))
        else:
            region = normalise(Span(local.start, local.stop), local.shape, fqn=first)
            shards.append(Shard(first, tuple(aliases), local.tensor, region, local.shape, False))
    return shards


def named_optimizers(state: Mapping[str, object]) -> dict[str, NamedOptimizer]:
    """Give the optimizers of a state, their parameters named after its modules.

    With several modules, a parameter's name begins with the section of its module.
    """
    modules = {section: value for section, value in state.items() if isinstance(value, torch.nn.Module)}
    shards: dict[int, Shard] = {}
    for section, module in modules.items():
        for shard in module_shards(section, module):
            fqn = shard.fqn if len(modules) == 1 else f"{section}.{shard.fqn}"
            shards[id(shard.tensor)] = replace(shard, fqn=fqn)
    return {
        section: NamedOptimizer(value, shards, section=section)
        for section, value in state.items()
        if isinstance(value, torch.optim.Optimizer)
    }


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of the state and all paths to it, the first one its own."""

    paths: tuple[Path, ...]
    shard: Shard


def _module_leaves(section: str, module: torch.nn.Module) -> Iterator[_Leaf]:
    for shard in module_shards(section, module):
        yield _Leaf(tuple((section, fqn) for fqn in (shard.fqn, *shard.aliases)), shard)


def _optimizer_leaves(section: str, optimizer: NamedOptimizer) -> Iterator[_Leaf]:
    for entry in optimizer.entries():
        yield _Leaf(((section, "state", entry.parameter.fqn, entry.key),), optimizer.shard_of(entry))


def _value_leaves(section: str, value: object, place: RankOf) -> Iterator[_Leaf]:
    """Yield the tensors of a nested value, equal views of one memory once."""
    found: dict[object, list[Path]] = {}
    tensors: dict[object, torch.Tensor] = {}

    def collect_tensor(path: Path, leaf: object) -> str | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        key = _memory_of(leaf)
        tensors.setdefault(key, leaf)
        found.setdefault(key, []).append(path)
        return ""

    encode(value, (section,), collect_tensor, place)
    for key, paths in found.items():
        yield _Leaf(tuple(paths), shard_of_tensor(path_text(paths[0]), tensors[key]))


def _memory_of(tensor: torch.Tensor) -> object:
    """Give a key that two tensors share only if they are the same elements in the same order."""
    if isinstance(tensor, DTensor) or tensor.layout is not torch.strided or not tensor.numel() or not tensor.data_ptr():
        return id(tensor)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _plain_value(section: str, value: object, optimizers: Mapping[str, NamedOptimizer]) -> object:
    """Give what of a section goes into the objects."""
    match kind_of(section, value):
        case "module":
            return {}
        case "optimizer":
            return {"param_groups": optimizers[section].groups(), "state": optimizers[section].values()}
        case "state":
            return value.state_dict()  # type: ignore[attr-defined]  # a Stateful
    return dict(value) if isinstance(value, Mapping) and type(value) is not dict else value


def _local_tensor(leaf: _Leaf, assigned: Mapping[Path, str], of_rank: set[str]) -> LocalTensor:
    name, *aliases = (assigned[path] for path in leaf.paths)
    tensor = Tensor(name, dtype_name(leaf.shard.tensor, fqn=name), leaf.shard.shape, tuple(aliases))
    return LocalTensor(tensor, leaf.shard, leaf.paths[0], name in of_rank)


def _buckets(
    modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, NamedOptimizer], assigned: Mapping[Path, str]
) -> Iterator[NamedBucket]:
    """Yield the buckets of all modules, with the parameters and each kind of optimizer state that is cut like them."""
    for section, module in modules.items():
        first = {fqn: shard.fqn for shard in module_shards(section, module) for fqn in (shard.fqn, *shard.aliases)}
        prefix = "" if len(modules) == 1 else f"{section}."
        for bucket in sharding.bucket_layouts(module):
            fqns = [first[slot.fqn] for slot in bucket.slots]
            columns = [tuple(assigned.get((section, fqn)) for fqn in fqns)]
            for optimizer_section, optimizer in optimizers.items():
                found = {(e.parameter.fqn, e.key): e.is_like_parameter for e in optimizer.entries()}
                for key in dict.fromkeys(key for _, key in found):
                    rows = [prefix + fqn for fqn in fqns]
                    column = tuple(
                        assigned[optimizer_section, "state", fqn, key] if found.get((fqn, key)) else None
                        for fqn in rows
                    )
                    columns.append(column)
            yield NamedBucket(
                bucket.align,
                bucket.world_size,
                tuple(slot.numel for slot in bucket.slots),
                tuple(slot.granularity for slot in bucket.slots),
                tuple(column for column in columns if any(name is not None for name in column)),
            )
