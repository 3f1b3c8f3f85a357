"""What a state wants of a checkpoint: which stored tensors go where, and what is done when they are there.

Matches names, shapes and dtypes, before a byte is read and without changing the state. Refuses to know how bytes are
moved.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from shardckpt import names
from shardckpt.catalogue import Catalogue, CatalogueBuilder, File, Tensor
from shardckpt.errors import FormatError, MismatchError
from shardckpt.manifest import Json, Stored
from shardckpt.names import Path
from shardckpt.objects import decode, per_rank_names, tensor_paths
from shardckpt.optimizer_state import NamedOptimizer, is_like_parameter
from shardckpt.per_rank import RankOf, for_rank
from shardckpt.shard import Shard, shard_of_tensor
from shardckpt.state import Stateful, check_sections, kind_of, module_shards, named_optimizers
from shardckpt.tensors import Fill, dtype_name, fill_of, torch_dtype


class Wanted:
    """The match of a checkpoint with a state, on one rank.

    Attributes:
        fills: One a file of `catalogue()`: the memory that it stands for.
        missing: Names that the state has and the checkpoint lacks.
    """

    def __init__(self, found: Stored, state: MutableMapping[str, object], place: RankOf) -> None:
        """Match every section of `state`, for one rank of those that load.

        Raises:
            MismatchError: If a kind, shape or dtype differs.
        """
        check_sections(state)
        self.fills: list[Fill] = []
        self.missing: list[str] = []
        self._found = found
        self._state = state
        self._builder = CatalogueBuilder()
        self._stored_objects = for_rank(found.objects, place)
        self._taken = per_rank_names(found.objects)  # stored tensors that have a place, here or on their own rank
        self._objects: dict[str, dict[str, torch.Tensor]] = {}  # section -> name -> tensor that its objects refer to
        self._optimizers = named_optimizers(state)
        self._optimizer_state: dict[int, dict[str, object]] = {}  # id of the parameter -> its new state
        for section, value in state.items():
            if section in found.manifest.sections:
                self._match(section, value)
            else:
                self.missing.append(section)

    def catalogue(self) -> Catalogue:
        """Give what is wanted, one file a tensor."""
        return self._builder.build()

    def loaded(self) -> list[str]:
        """Give the names of the tensors that are filled."""
        return list(dict.fromkeys(tensor.name for tensor in self._builder.tensors))

    def unexpected(self) -> list[str]:
        """Give the tensors of the loaded sections that have no place in the state."""
        prefixes = tuple(f"{section}." for section in self._state if section in self._found.manifest.sections)
        return [
            tensor.name
            for tensor in self._found.catalogue.tensors
            if tensor.name not in self._taken and tensor.name.startswith(prefixes)
        ]

    @property
    def is_empty(self) -> bool:
        """True if nothing of the checkpoint has a place in the state."""
        return not self._builder.tensors and not self._objects

    def finish(self) -> None:
        """Put into place what was read: everything but the tensors that were filled where they lie."""
        for fill in self.fills:
            fill.finish()
        for section, tensors in self._objects.items():
            value = decode(self._objects_of(section), tensors.__getitem__)
            current = self._state[section]
            if section in self._optimizers:
                self._finish_optimizer(self._optimizers[section], value)
            elif kind_of(section, current) == "state" and isinstance(current, Stateful) and isinstance(value, dict):
                current.load_state_dict(value)
            elif isinstance(current, dict) and isinstance(value, dict):
                current.clear()
                current.update(value)
            else:
                self._state[section] = value

    # What each kind of section wants

    def _match(self, section: str, value: object) -> None:
        stored, found = self._found.manifest.sections[section], kind_of(section, value)
        if stored != found and {stored, found} & {"module", "optimizer"}:
            raise MismatchError(
                f"state[{section!r}] is of kind {found!r}, in the checkpoint it is of kind {stored!r}; load it into "
                "such a one"
            )
        if isinstance(value, torch.nn.Module):
            self._match_module(section, value)
            return
        if isinstance(value, torch.optim.Optimizer):
            self._match_optimizer(section, self._optimizers[section])
        self._match_objects(section, value if found == "value" else None)

    def _match_module(self, section: str, module: torch.nn.Module) -> None:
        for shard in module_shards(section, module):
            stored = self._lookup([(section, fqn) for fqn in (shard.fqn, *shard.aliases)])
            if stored is not None:
                self._want(stored, shard)

    def _match_optimizer(self, section: str, optimizer: NamedOptimizer) -> None:
        stored_keys = self._stored_optimizer_keys(section)
        for group in optimizer.optimizer.param_groups:
            step_follows = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                shard = optimizer.shards[id(parameter)]
                state: dict[str, object] = {}
                current = optimizer.optimizer.state.get(parameter, {})
                for key, stored in stored_keys.get(names.plain((shard.fqn,)), {}).items():
                    is_like = is_like_parameter(key, stored.shape, shard.shape)
                    tensor = current.get(key)
                    if not _fits(tensor, stored, shard.tensor.shape if is_like else stored.shape):
                        dtype = torch_dtype(stored.dtype, fqn=stored.name)
                        if is_like:
                            tensor = torch.empty_like(parameter.detach(), dtype=dtype)
                        else:
                            device = parameter.device if step_follows else "cpu"
                            tensor = torch.empty(stored.shape, dtype=dtype, device=device)
                    is_span = is_like and not isinstance(tensor, DTensor)
                    self._want(
                        stored, replace(shard, tensor=tensor) if is_span else shard_of_tensor(stored.name, tensor)
                    )
                    state[key] = tensor
                self._optimizer_state[id(parameter)] = state

    def _match_objects(self, section: str, current: object) -> None:
        """Ask for the tensors that objects refer to: into those at the same place of `current`, where they fit."""
        tensors = self._objects.setdefault(section, {})
        catalogue = self._found.catalogue
        for path, name in tensor_paths(self._objects_of(section)):
            if name not in catalogue.by_name:
                raise FormatError(
                    f"the objects of the checkpoint refer to {name!r}, which is no tensor of it; it is damaged"
                )
            stored = catalogue.tensors[catalogue.by_name[name]]
            if stored.name in tensors:
                tensors[name] = tensors[stored.name]
                continue
            tensor = _at(current, path)
            if not isinstance(tensor, torch.Tensor) or not _fits(tensor, stored, stored.shape):
                tensor = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype, fqn=name))
            self._want(stored, shard_of_tensor(name, tensor))
            tensors[name] = tensors[stored.name] = tensor

    def _want(self, stored: Tensor, shard: Shard) -> None:
        """Ask for what a shard holds of a stored tensor."""
        dtype = dtype_name(shard.tensor, fqn=stored.name)
        if (stored.dtype, stored.shape) != (dtype, shard.shape):
            raise MismatchError(
                f"cannot load {stored.name!r}: the checkpoint has dtype {stored.dtype} and global shape "
                f"{stored.shape}, the "
                f"state {dtype} and {shard.shape}. Build it from the config that was saved, or leave this section out."
            )
        index = self._builder.add_tensor(stored)
        file = self._builder.add_file(File(f"memory of {stored.name}", shard.region.numel * stored.item_bytes, 0))
        self._builder.add_chunk(index, shard.region, file=file, byte_offset=0)
        self.fills.append(fill_of(shard.local, fqn=stored.name))
        self._taken.add(stored.name)

    # Names

    def _lookup(self, paths: Sequence[Path]) -> Tensor | None:
        """Give the stored tensor of a place in the state, or note that it is missing."""
        catalogue = self._found.catalogue
        for path in paths:
            for name in (names.escaped(path), names.plain(path)):
                if name in catalogue.by_name:
                    return catalogue.tensors[catalogue.by_name[name]]
        self.missing.append(names.plain(paths[0]))
        return None

    def _stored_optimizer_keys(self, section: str) -> dict[str, dict[str, Tensor]]:
        """Give the stored state tensors of an optimizer: FQN, as names write it -> key -> tensor."""
        prefix = f"{names.plain((section,))}.state."
        found: dict[str, dict[str, Tensor]] = {}
        for tensor in self._found.catalogue.tensors:
            if tensor.name.startswith(prefix):
                fqn, _, key = tensor.name.removeprefix(prefix).rpartition(".")
                found.setdefault(fqn, {})[key] = tensor
        return found

    def _objects_of(self, section: str) -> Json:
        objects = self._stored_objects
        if not isinstance(objects, dict) or section not in objects:
            raise FormatError(f"the manifest has no objects for the section {section!r}; the checkpoint is damaged")
        return objects[section]

    def _finish_optimizer(self, optimizer: NamedOptimizer, value: object) -> None:
        match value:
            case {"param_groups": list(groups), "state": dict(values)}:
                optimizer.set_groups(groups)
            case _:
                raise FormatError(
                    f"the objects of state[{optimizer.section!r}] are none of an optimizer; it is damaged"
                )
        for parameter, shard in optimizer.parameters():
            state = self._optimizer_state[id(parameter)] | values.get(shard.fqn, {})
            if state:
                optimizer.optimizer.state[parameter] = state
            else:
                optimizer.optimizer.state.pop(parameter, None)


def _fits(current: object, stored: Tensor, shape: Sequence[int]) -> bool:
    """Tell whether `current` is a tensor of this shape that can take a stored tensor in place."""
    dtype = torch_dtype(stored.dtype, fqn=stored.name)
    return isinstance(current, torch.Tensor) and current.dtype == dtype and tuple(current.shape) == tuple(shape)


def _at(value: object, path: Path) -> object:
    """Give what stands at a path of nested values, or None."""
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value
