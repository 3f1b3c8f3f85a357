"""What files are made of, where that is more than the same tensors under the same names.

A target tensor is a list of pieces, regions of source tensors, that lie end to end in it: one whole tensor if it is
only renamed, several if it is fused, a part if it is split. Where a piece has another dtype, its elements are converted
as they are written. The plan sees source tensors only: `wanted` lists the pieces as chunks of the target files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Catalogue, CatalogueBuilder
from shardckpt.elements import decode, encode
from shardckpt.endpoints import Bytes, Sink
from shardckpt.errors import MismatchError
from shardckpt.region import Region, whole

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a source tensor."""

    source: str
    region: Region


@dataclass(frozen=True, slots=True)
class Conversion:
    """How many numbers of one target tensor were changed by being written in another dtype.

    Attributes:
        name: The tensor.
        dtype: What it was.
        to_dtype: What it is.
        numel: Its elements.
        num_rounded: Elements that are no longer equal to what they were.
        num_overflowed: Of these, finite ones that became infinite.
    """

    name: str
    dtype: str
    to_dtype: str
    numel: int
    num_rounded: int
    num_overflowed: int

    def plus(self, more: Conversion) -> Conversion:
        """Give the sum of two parts of one tensor."""
        return replace(
            self,
            numel=self.numel + more.numel,
            num_rounded=self.num_rounded + more.num_rounded,
            num_overflowed=self.num_overflowed + more.num_overflowed,
        )


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Bytes of one piece, as read and as written."""

    name: str
    begin: int  # where it is read to, in bytes of the file that `wanted` describes
    real_begin: int  # where it belongs in the real file
    numel: int
    dtype: str
    to_dtype: str
    item_bytes: int
    to_item_bytes: int


class Derivation:
    """How the tensors of target files come from those of a source.

    Attributes:
        wanted: The target files in terms of source tensors: the chunks to fill. Where dtypes change, byte offsets are
            those that the file would have without the change.
        is_chunkwise: Each chunk of `wanted` is that chunk of the target.
    """

    def __init__(
        self, wanted: Catalogue, converted: Mapping[int, Sequence[_Stretch]] | None = None, *, is_chunkwise: bool = True
    ) -> None:
        self.wanted = wanted
        self.is_chunkwise = is_chunkwise
        self._converted = converted or {}
        self._tally = Tally()

    @classmethod
    def renaming(cls, target: Catalogue, renamed: Mapping[str, str]) -> Derivation:
        """Give the derivation of tensors that are the source's under other names (target name -> source name)."""
        tensors = tuple(replace(t, name=renamed.get(t.name, t.name), aliases=()) for t in target.tensors)
        return cls(replace(target, tensors=tensors))

    @classmethod
    def assembling(cls, source: Catalogue, target: Catalogue, pieces: Mapping[str, Sequence[Piece]]) -> Derivation:
        """Give the derivation of tensors that are made of pieces.

        Args:
            source: Where the pieces are from.
            target: Files of whole tensors.
            pieces: Target name -> pieces; a tensor that is not here is the source's of that name.

        Raises:
            MismatchError: If the source lacks a tensor, or pieces have other than the elements of their tensor.
        """
        builder = CatalogueBuilder()
        builder.tensors, builder.files = list(source.tensors), list(target.files)
        converted: dict[int, list[_Stretch]] = {}
        ends = [file.header_nbytes for file in target.files]
        for chunk in np.lexsort((target.chunk_byte_offset, target.chunk_file)).tolist():
            tensor, file = target.tensors[int(target.chunk_tensor[chunk])], int(target.chunk_file[chunk])
            real = int(target.chunk_byte_offset[chunk])
            parts = pieces.get(tensor.name) or (Piece(tensor.name, whole(tensor.shape)),)
            _check_pieces(tensor.name, tensor.numel, parts, source)
            for part in parts:
                index = source.by_name[part.source]
                origin = source.tensors[index]
                builder.add_chunk(index, part.region, file=file, byte_offset=ends[file])
                stretch = _Stretch(
                    tensor.name,
                    ends[file],
                    real,
                    part.region.numel,
                    origin.dtype,
                    tensor.dtype,
                    origin.item_bytes,
                    tensor.item_bytes,
                )
                converted.setdefault(file, []).append(stretch)
                ends[file] += part.region.numel * origin.item_bytes
                real += part.region.numel * tensor.item_bytes
        changed = {file: s for file, s in converted.items() if any(one.dtype != one.to_dtype for one in s)}
        return cls(builder.build(), changed, is_chunkwise=False)

    def sink(self, file: int, inner: Sink) -> Sink:
        """Give the sink for a target file: `inner`, or one that converts on the way to it."""
        if file not in self._converted:
            return inner
        return ConvertingSink(inner, self._converted[file], self._tally)

    @property
    def conversions(self) -> list[Conversion]:
        """What was converted so far, by tensor."""
        return self._tally.conversions


class Tally:
    """Counts what is converted, by tensor; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: dict[str, Conversion] = {}

    def add(self, more: Conversion) -> None:
        """Count a part of a tensor."""
        with self._lock:
            before = self._found.get(more.name)
            self._found[more.name] = more if before is None else before.plus(more)

    @property
    def conversions(self) -> list[Conversion]:
        """What was counted, one a tensor."""
        return list(self._found.values())


class ConvertingSink(Sink):
    """Writes elements in other dtypes than they come in; takes whole elements only."""

    def __init__(self, inner: Sink, stretches: Sequence[_Stretch], tally: Tally) -> None:
        self._tally = tally
        self.is_sequential, self.is_remote, self.part_bytes = inner.is_sequential, inner.is_remote, inner.part_bytes
        self._inner = inner
        self._stretches = [one for one in stretches if one.numel]
        self._begins = np.array([one.begin for one in self._stretches], np.int64)

    def write(self, byte_offset: int, data: Bytes) -> None:
        done = 0
        while done < len(data):
            number = int(np.searchsorted(self._begins, byte_offset + done, side="right")) - 1
            stretch = self._stretches[number]
            within = byte_offset + done - stretch.begin
            nbytes = min(len(data) - done, stretch.numel * stretch.item_bytes - within)
            first, rest = divmod(within, stretch.item_bytes)
            assert rest == nbytes % stretch.item_bytes == 0, "transfers cut between elements"
            at = stretch.real_begin + first * stretch.to_item_bytes
            self._inner.write(at, self._converted(stretch, data[done : done + nbytes]))
            done += nbytes

    def finish(self) -> None:
        self._inner.finish()

    def commit(self) -> None:
        self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()

    def _converted(self, stretch: _Stretch, data: Bytes) -> Bytes:
        if stretch.dtype == stretch.to_dtype:
            return data
        before = decode(data, stretch.dtype)
        out = encode(before, stretch.to_dtype)
        after = decode(out, stretch.to_dtype)
        is_changed = (before != after) & ~np.isnan(before)
        is_overflowed = is_changed & np.isfinite(before) & ~np.isfinite(after)
        counts = len(before), int(is_changed.sum()), int(is_overflowed.sum())
        self._tally.add(Conversion(stretch.name, stretch.dtype, stretch.to_dtype, *counts))
        return out


def _check_pieces(name: str, numel: int, pieces: Sequence[Piece], source: Catalogue) -> None:
    missing = [piece.source for piece in pieces if piece.source not in source.by_name]
    if missing:
        raise MismatchError(
            f"{name!r} is to be made of {missing[0]!r}, which the source does not have. "
            "Compare the names with `shardckpt inspect --tensors`."
        )
    found = sum(piece.region.numel for piece in pieces)
    if found != numel:
        raise MismatchError(f"{name!r} has {numel} elements, but what it is to be made of has {found}")
