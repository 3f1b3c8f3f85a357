"""What files are made of, where that is more than the same tensors under the same names.

A target tensor is a list of pieces, regions of source tensors, that lie end to end in it: one whole tensor if it is
only renamed, several if it is fused, a part if it is split. Where a piece has another dtype, its elements are converted
as they are written. The plan sees source tensors only: `wanted` lists the pieces as chunks of the target files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardckpt.catalogue import Catalogue, CatalogueBuilder, Tensor
from shardckpt.conversion import Conversion, ConvertingSink, Form, Stretch, Tally
from shardckpt.endpoints import Sink
from shardckpt.errors import MismatchError
from shardckpt.region import Box, Region, normalise, whole

BLOCK_BYTES = 4 << 20
"""So many columns are transposed together."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a source tensor.

    Attributes:
        source: The tensor.
        region: Of it; normalised.
        is_transposed: The tensor has two dims, the region is all of it, and it is stored with these swapped.
    """

    source: str
    region: Region
    is_transposed: bool = False


class Derivation:
    """How the tensors of target files come from those of a source.

    Attributes:
        wanted: The target files in terms of source tensors: the chunks to fill. Where dtypes change, byte offsets are
            those that the file would have without the change.
        is_chunkwise: Each chunk of `wanted` is that chunk of the target.
    """

    def __init__(
        self, wanted: Catalogue, converted: Mapping[int, Sequence[Stretch]] | None = None, *, is_chunkwise: bool = True
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
        stretches: dict[int, list[Stretch]] = {}
        ends = [file.header_nbytes for file in target.files]
        for chunk in np.lexsort((target.chunk_byte_offset, target.chunk_file)).tolist():
            tensor, file = target.tensors[int(target.chunk_tensor[chunk])], int(target.chunk_file[chunk])
            real = int(target.chunk_byte_offset[chunk])
            parts = pieces.get(tensor.name) or (Piece(tensor.name, whole(tensor.shape)),)
            _check_pieces(tensor.name, tensor.numel, parts, source)
            for part in parts:
                index = source.by_name[part.source]
                origin = source.tensors[index]
                for region, num_rows in _runs(part, origin):
                    builder.add_chunk(index, region, file=file, byte_offset=ends[file])
                    come, go = Form(origin.dtype, origin.item_bytes), Form(tensor.dtype, tensor.item_bytes)
                    stretch = Stretch(tensor.name, ends[file], real, region.numel, come, go, num_rows)
                    stretches.setdefault(file, []).append(stretch)
                    ends[file] += region.numel * come.item_bytes
                    real += region.numel * go.item_bytes
        changed = {file: s for file, s in stretches.items() if any(one.is_changed for one in s)}
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


def _runs(piece: Piece, origin: Tensor) -> Iterator[tuple[Region, int]]:
    """Cut a piece into the regions that are converted together, each with its number of rows if it is transposed."""
    if not piece.is_transposed:
        yield piece.region, 0
        return
    rows, columns = origin.shape
    step = max(1, BLOCK_BYTES // max(rows * origin.item_bytes, 1))
    for first in range(0, columns if rows else 0, step):
        box = Box((0, first), (rows, min(step, columns - first)))
        yield normalise(box, origin.shape, fqn=origin.name), rows


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
