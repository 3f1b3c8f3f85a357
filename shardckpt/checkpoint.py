"""A checkpoint opened for reading: names, shapes and objects at once, tensors when they are asked for.

Slices read only the bytes that they need (and, to keep reads few, short gaps between them).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING

from shardckpt.catalogue import Catalogue, CatalogueBuilder, File, Tensor
from shardckpt.committed import read_committed
from shardckpt.endpoints import ReaderPool
from shardckpt.errors import listing
from shardckpt.manifest import Json, Manifest, Stored
from shardckpt.objects import decode
from shardckpt.plan import plan
from shardckpt.region import Box, normalise
from shardckpt.storage import Store, open_store
from shardckpt.transfer import TransferOptions, transfer

if TYPE_CHECKING:
    import torch

Index = int | slice | EllipsisType


class Checkpoint(Mapping[str, "StoredTensor"]):
    """A committed checkpoint: a mapping of tensor names (aliases too) to tensors that are not yet read.

    Attributes:
        path: Where it is.
        step: The training step, or None.
        world_size: Number of ranks that wrote it.
        sections: Top-level key of the state -> "module", "optimizer", "state" or "value".
    """

    def __init__(self, store: Store, found: Stored) -> None:
        self._found = found
        self._pool = ReaderPool(store)
        self.path = store.url

    @property
    def step(self) -> int | None:
        """The training step, or None."""
        return self._found.manifest.step

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return self._found.manifest.world_size

    @property
    def sections(self) -> dict[str, str]:
        """Top-level key of the state -> "module", "optimizer", "state" or "value"."""
        return dict(self._found.manifest.sections)

    @property
    def manifest(self) -> Manifest:
        """The manifest, as stored."""
        return self._found.manifest

    @property
    def catalogue(self) -> Catalogue:
        """Tensors, files and chunks."""
        return self._found.catalogue

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, aliases left out, in the order of the manifest."""
        return tuple(tensor.name for tensor in self._found.catalogue.tensors)

    @property
    def objects(self) -> dict[str, object]:
        """The state that is no tensor, by section; where it holds tensors, these are `StoredTensor`s."""
        stored: Json = self._found.objects
        assert isinstance(stored, dict)
        return {section: decode(value, self.__getitem__) for section, value in stored.items()}

    def __getitem__(self, name: str) -> StoredTensor:
        """Give a tensor, unread.

        Raises:
            KeyError: If there is none of that name.
        """
        catalogue = self._found.catalogue
        if name not in catalogue.by_name:
            raise KeyError(f"no tensor named {name!r} in {self.path!r}; it has {listing(catalogue.by_name)}")
        return StoredTensor(catalogue.select([name]), self._pool)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found.catalogue.by_name)

    def __len__(self) -> int:
        return len(self._found.catalogue.by_name)

    def close(self) -> None:
        """Close the files."""
        self._pool.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class StoredTensor:
    """One tensor of a checkpoint; indexing reads it: `stored[...]` whole, `stored[2:4, 0]` in part."""

    def __init__(self, catalogue: Catalogue, pool: ReaderPool) -> None:
        self._catalogue = catalogue
        self._pool = pool

    @property
    def _tensor(self) -> Tensor:
        return self._catalogue.tensors[0]

    @property
    def name(self) -> str:
        """Its name."""
        return self._tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        return self._tensor.shape

    @property
    def dtype(self) -> str:
        """Its dtype, as in a safetensors header ("F32", "BF16" ...)."""
        return self._tensor.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self._tensor.nbytes

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, {self.dtype}, shape={self.shape})"

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Read a part of the tensor.

        Args:
            index: Integers, slices and `...`, as for a torch tensor; steps must be positive.

        Returns:
            A new CPU tensor.

        Raises:
            CheckpointError: If reading fails, or (where a chunk is read whole) its checksum is wrong.
            IndexError: If the index does not fit the shape.
        """
        import torch  # so that looking at names and shapes needs none

        from shardckpt.tensors import fill_of, torch_dtype

        box, picks = _box_of(index, self.shape)
        out = torch.empty(box.shape, dtype=torch_dtype(self.dtype, fqn=self.name))
        target = CatalogueBuilder()
        number = target.add_tensor(self._tensor)
        target.add_file(File("memory", box.numel * self._tensor.item_bytes, 0))
        target.add_chunk(number, normalise(box, self.shape, fqn=self.name), file=0, byte_offset=0)
        sources = self._pool.sources([file.path for file in self._catalogue.files])
        copies = plan(self._catalogue, target.build())
        transfer(copies, sources, [fill_of(out, fqn=self.name).sink], options=TransferOptions())
        return out[picks]


def open_checkpoint(path: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None) -> Checkpoint:
    """Open a committed checkpoint for reading. Reads the manifest and the chunk table, nothing else.

    Args:
        path: A folder or any fsspec URL.
        storage_options: For the fsspec file system.

    Raises:
        CheckpointNotFoundError: If nothing is committed there.
        FormatError: If the manifest or the chunk table is damaged.

    Example:
        >>> import tempfile, torch, shardckpt
        >>> folder = tempfile.mkdtemp()
        >>> _ = shardckpt.save(f"{folder}/a", {"x": torch.arange(6).reshape(2, 3)})
        >>> shardckpt.open(f"{folder}/a")["x"][1, 1:]
        tensor([4, 5])
    """
    store = open_store(path, storage_options)
    return Checkpoint(store, read_committed(store))


def _box_of(index: Index | tuple[Index, ...], shape: tuple[int, ...]) -> tuple[Box, tuple[int | slice, ...]]:
    """Give the smallest box that an index needs, and the index into it that is left."""
    items = index if isinstance(index, tuple) else (index,)
    if items.count(...) > 1:
        raise IndexError("an index can have one '...' only")
    if ... not in items:
        items = (*items, ...)
    at = items.index(...)
    filled = len(shape) - (len(items) - 1)
    if filled < 0:
        raise IndexError(f"{len(items) - 1} indices for a tensor of {len(shape)} dims")
    full = (*items[:at], *(slice(None),) * filled, *items[at + 1 :])
    offset, extent, picks = [], [], []
    for item, size in zip(full, shape, strict=True):
        begin, length, pick = _range_of(item, size)
        offset.append(begin)
        extent.append(length)
        picks.append(pick)
    return Box(tuple(offset), tuple(extent)), tuple(picks)


def _range_of(item: Index, size: int) -> tuple[int, int, int | slice]:
    if isinstance(item, slice):
        start, stop, step = item.indices(size)
        if step < 1:
            raise IndexError("slices with a negative step are not supported; flip the result")
        return start, max(stop - start, 0), slice(None, None, step)
    if isinstance(item, bool) or not isinstance(item, int):
        raise IndexError(f"{item!r} is neither an integer nor a slice")
    if not -size <= item < size:
        raise IndexError(f"index {item} is out of range for a dim of {size}")
    return item % size, 1, 0
