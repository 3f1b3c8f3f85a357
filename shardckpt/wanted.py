"""What a state wants of a checkpoint: which stored tensors go where, and what is done when they are there.

Matches names, shapes and dtypes, before a byte is read and without changing the state. Refuses to know how bytes are
moved.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch

from shardckpt import names
from shardckpt.catalogue import Catalogue, CatalogueBuilder, File, Tensor
from shardckpt.errors import FormatError, MismatchError, listing
from shardckpt.manifest import Json, Stored
from shardckpt.names import Path
from shardckpt.objects import decode, tensor_paths
from shardckpt.optimizer_state import NamedOptimizer, is_like_parameter
from shardckpt.region import Region, whole
from shardckpt.state import Stateful, kind_of, module_shards, named_optimizers
from shardckpt.tensors import Fill, dtype_name, fill_of, torch_dtype


class Wanted:
    """The match of a checkpoint with a state, on one rank.

    Attributes:
        fills: One a file of `catalogue()`: the memory that it stands for.
        missing: Names that the state has and the checkpoint lacks.
    """

    def __init__(self, found: Stored, state: MutableMapping[str, object]) -> None:
        """Match every section of `state`.

        Raises:
            MismatchError: If a kind, shape or dtype differs.
        """
        self.fills: list[Fill] = []
        self.missing: list[str] = []
        self._found = found
        self._state = state
        self._builder = CatalogueBuilder()
        self._taken: set[str] = set()  # stored tensors that have a place
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

    def check_names(self, *, strict: bool) -> None:
        """Refuse a match that is not complete, or (not `strict`) that is empty.

        Raises:
            MismatchError: Names what is missing and what is left over.
        """
        unexpected = self.unexpected()
        if strict and (self.missing or unexpected):
            lacking = f"it lacks {listing(self.missing)}" if self.missing else ""
            extra = f"it has {listing(unexpected)}, which the state lacks" if unexpected else ""
            raise MismatchError(
                f"the checkpoint does not fit the state: {'; '.join(filter(None, (lacking, extra)))}. "
                "Build the state as it was saved, or pass strict=False to load what fits."
            )
        if not self._builder.tensors and not self._objects and self._found.catalogue.tensors:
            raise MismatchError(
                f"nothing of the checkpoint fits the state: it has {listing(self._found.catalogue.by_name)}, the state "
                f"wants {listing(self.missing)}. Compare the names with `shardckpt inspect --tensors`."
            )

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
                self._want(stored, shard.tensor, shard.region, shard.shape)

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
                    shape = tuple(shard.tensor.shape) if is_like else stored.shape
                    device = parameter.device if is_like or step_follows else torch.device("cpu")
                    tensor = _fitting(current.get(key), stored, shape, device)
                    self._want(stored, tensor, shard.region if is_like else whole(shape), stored.shape)
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
            tensor = _fitting(_at(current, path), stored, stored.shape, torch.device("cpu"))
            self._want(stored, tensor, whole(stored.shape), stored.shape)
            tensors[name] = tensors[stored.name] = tensor

    def _want(self, stored: Tensor, tensor: torch.Tensor, region: Region, shape: Sequence[int]) -> None:
        """Ask for a region of a stored tensor, to be put into `tensor`, a shard of a tensor of global shape `shape`."""
        dtype = dtype_name(tensor, fqn=stored.name)
        if (stored.dtype, stored.shape) != (dtype, tuple(shape)):
            raise MismatchError(
                f"cannot load {stored.name!r}: the checkpoint has dtype {stored.dtype} and global shape "
                f"{stored.shape}, the "
                f"state {dtype} and {tuple(shape)}. Build it from the config that was saved, or leave this section out."
            )
        index = self._builder.add_tensor(stored)
        file = self._builder.add_file(File(f"memory of {stored.name}", region.numel * stored.item_bytes, 0))
        self._builder.add_chunk(index, region, file=file, byte_offset=0)
        self.fills.append(fill_of(tensor, fqn=stored.name))
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
        objects = self._found.objects
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


def _fitting(current: object, stored: Tensor, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Give `current` if it can take a stored tensor in place, else a new tensor of the local shape `shape`."""
    dtype = torch_dtype(stored.dtype, fqn=stored.name)
    if isinstance(current, torch.Tensor) and current.dtype == dtype and tuple(current.shape) == tuple(shape):
        return current
    return torch.empty(tuple(shape), dtype=dtype, device=device)


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
