"""What is stored, whatever the format says it: tensors, files, and the chunks that tie them.

A catalogue is the one noun between formats, planning and execution. Chunk tables are columns of integers, never one
object a chunk, so that a million chunks are nothing special. This file refuses to know how a catalogue is stored or
read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardckpt.dtypes import item_bytes
from shardckpt.errors import MismatchError, listing
from shardckpt.region import Box, Region, Span, strides

I64 = NDArray[np.int64]

NO_CRC = -1
"""In a checksum column: none was recorded."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as a whole.

    Attributes:
        name: Its name in the checkpoint (see `names`).
        dtype: As in a safetensors header.
        shape: Global shape.
        aliases: Further names of the same tensor (tied parameters).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return item_bytes(self.dtype, fqn=self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.item_bytes


@dataclass(frozen=True, slots=True)
class File:
    """One data file.

    Attributes:
        path: Relative to the catalogue's root.
        nbytes: Its size.
        header_nbytes: Bytes before the first chunk.
        crc: CRC-32C of the whole file, if recorded.
    """

    path: str
    nbytes: int
    header_nbytes: int
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class Spans:
    """Chunks whose region is a span: one row each, all columns equally long, in elements unless named bytes."""

    tensor: I64  # [n] index into the catalogue's tensors
    start: I64  # [n]
    stop: I64  # [n]
    file: I64  # [n] index into the catalogue's files
    byte_offset: I64  # [n] in the file
    crc: I64  # [n] CRC-32C or NO_CRC

    @classmethod
    def empty(cls) -> Spans:
        """Give a table without rows."""
        return cls(*(np.empty(0, np.int64) for _ in range(6)))

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Spans:
        """Give the rows picked by an index or mask."""
        return Spans(
            self.tensor[rows],
            self.start[rows],
            self.stop[rows],
            self.file[rows],
            self.byte_offset[rows],
            self.crc[rows],
        )


@dataclass(frozen=True, slots=True)
class Boxes:
    """Chunks whose region is a box that is no span; stored row-major and dense. Trailing unused dims have shape 1."""

    tensor: I64  # [n]
    offset: I64  # [n, max ndim]
    shape: I64  # [n, max ndim]
    file: I64  # [n]
    byte_offset: I64  # [n]
    crc: I64  # [n]

    @classmethod
    def empty(cls) -> Boxes:
        """Give a table without rows."""
        one, two = np.empty(0, np.int64), np.empty((0, 0), np.int64)
        return cls(one, two, two, one, one, one)

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Boxes:
        """Give the rows picked by an index or mask."""
        return Boxes(
            self.tensor[rows],
            self.offset[rows],
            self.shape[rows],
            self.file[rows],
            self.byte_offset[rows],
            self.crc[rows],
        )


@dataclass(frozen=True)
class Catalogue:
    """Tensors, files and chunks. Chunks are numbered: spans first, then boxes."""

    tensors: tuple[Tensor, ...]
    files: tuple[File, ...]
    spans: Spans = field(default_factory=Spans.empty)
    boxes: Boxes = field(default_factory=Boxes.empty)

    @functools.cached_property
    def by_name(self) -> dict[str, int]:
        """Every name, aliases included -> index of the tensor."""
        return {name: i for i, tensor in enumerate(self.tensors) for name in (tensor.name, *tensor.aliases)}

    @functools.cached_property
    def tensor_item_bytes(self) -> I64:
        """Bytes of one element, by tensor. # [tensors]"""
        return np.array([tensor.item_bytes for tensor in self.tensors], np.int64)

    @functools.cached_property
    def chunk_nbytes(self) -> I64:
        """Bytes of every chunk. # [chunks]"""
        spans = (self.spans.stop - self.spans.start) * self.tensor_item_bytes[self.spans.tensor]
        boxes = self.boxes.shape.prod(axis=1) * self.tensor_item_bytes[self.boxes.tensor]
        return np.concatenate([spans, boxes])

    @functools.cached_property
    def chunk_tensor(self) -> I64:
        """Index of every chunk's tensor. # [chunks]"""
        return np.concatenate([self.spans.tensor, self.boxes.tensor])

    @functools.cached_property
    def chunk_file(self) -> I64:
        """Index of every chunk's file. # [chunks]"""
        return np.concatenate([self.spans.file, self.boxes.file])

    @functools.cached_property
    def chunk_byte_offset(self) -> I64:
        """Where every chunk begins in its file. # [chunks]"""
        return np.concatenate([self.spans.byte_offset, self.boxes.byte_offset])

    @functools.cached_property
    def chunk_crc(self) -> I64:
        """Checksum of every chunk, or NO_CRC. # [chunks]"""
        return np.concatenate([self.spans.crc, self.boxes.crc])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def region(self, chunk: int) -> Region:
        """Give the region of one chunk."""
        if chunk < len(self.spans):
            return Span(int(self.spans.start[chunk]), int(self.spans.stop[chunk]))
        row = chunk - len(self.spans)
        ndim = len(self.tensors[int(self.boxes.tensor[row])].shape)
        return Box(tuple(self.boxes.offset[row, :ndim].tolist()), tuple(self.boxes.shape[row, :ndim].tolist()))

    def describe(self, chunk: int) -> str:
        """Name one chunk for a message: region, tensor and file."""
        tensor = self.tensors[int(self.chunk_tensor[chunk])]
        path = self.files[int(self.chunk_file[chunk])].path
        match self.region(chunk):
            case Span(start, stop):
                return f"elements [{start}, {stop}) of {tensor.name!r} (global shape {tensor.shape}) in {path!r}"
            case Box(offset, shape):
                return f"box at {offset} of shape {shape} of {tensor.name!r} (global shape {tensor.shape}) in {path!r}"

    def select(self, names: Iterable[str]) -> Catalogue:
        """Give the catalogue of these tensors alone, in the order asked for; files stay as they are.

        Raises:
            MismatchError: If there is no tensor of that name.
        """
        wanted = list(names)
        missing = [name for name in wanted if name not in self.by_name]
        if missing:
            raise MismatchError(
                f"no tensor named {listing(missing)}; the checkpoint has {listing(self.by_name)}. "
                "List the names with `shardckpt inspect --tensors`."
            )
        new_index = np.full(len(self.tensors), -1, np.int64)
        picked = list(dict.fromkeys(self.by_name[name] for name in wanted))
        new_index[picked] = np.arange(len(picked))
        spans = self.spans.take(new_index[self.spans.tensor] >= 0)
        boxes = self.boxes.take(new_index[self.boxes.tensor] >= 0)
        return Catalogue(
            tuple(self.tensors[i] for i in picked),
            self.files,
            Spans(new_index[spans.tensor], spans.start, spans.stop, spans.file, spans.byte_offset, spans.crc),
            Boxes(new_index[boxes.tensor], boxes.offset, boxes.shape, boxes.file, boxes.byte_offset, boxes.crc),
        )


class CatalogueBuilder:
    """Collects chunks one by one, for formats and states whose number of chunks is modest."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.files: list[File] = []
        self._spans: list[tuple[int, int, int, int, int, int]] = []
        self._boxes: list[tuple[int, Box, int, int, int]] = []

    def add_tensor(self, tensor: Tensor) -> int:
        """Add a tensor and give its index."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def add_file(self, file: File) -> int:
        """Add a file and give its index."""
        self.files.append(file)
        return len(self.files) - 1

    def add_chunk(self, tensor: int, region: Region, *, file: int, byte_offset: int, crc: int = NO_CRC) -> None:
        """Add a chunk; `region` must be normalised. Empty regions are no chunks."""
        match region:
            case Span(start, stop):
                if start < stop:
                    self._spans.append((tensor, start, stop, file, byte_offset, crc))
            case Box():
                self._boxes.append((tensor, region, file, byte_offset, crc))

    def build(self) -> Catalogue:
        """Give the catalogue of what was added, chunks in the order of adding."""
        columns = np.array(self._spans, np.int64).reshape(-1, 6).T
        return Catalogue(
            tuple(self.tensors),
            tuple(self.files),
            Spans(*(np.ascontiguousarray(c) for c in columns)),
            self._box_table(),
        )

    def _box_table(self) -> Boxes:
        width = max((len(box.shape) for _, box, *_ in self._boxes), default=0)
        return Boxes(
            np.array([row[0] for row in self._boxes], np.int64),
            _padded([row[1].offset for row in self._boxes], width, 0),
            _padded([row[1].shape for row in self._boxes], width, 1),
            np.array([row[2] for row in self._boxes], np.int64),
            np.array([row[3] for row in self._boxes], np.int64),
            np.array([row[4] for row in self._boxes], np.int64),
        )


def _padded(rows: Sequence[tuple[int, ...]], width: int, fill: int) -> I64:
    return np.array([(*row, *(fill,) * (width - len(row))) for row in rows], np.int64).reshape(len(rows), width)


def byte_strides(tensor: Tensor) -> tuple[int, ...]:
    """Give the strides, in bytes, of the whole tensor lying row-major."""
    return tuple(stride * tensor.item_bytes for stride in strides(tensor.shape))
