"""What files are made of, where that is more than the same tensors under the same names.

A target tensor is a list of pieces, regions of source tensors, that lie end to end in it: one whole tensor if it is
only renamed, several if it is fused, a part if it is split. Where a piece has another dtype, its elements are converted
as they are written. The plan sees source tensors only: `wanted` lists the pieces as chunks of the target files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardckpt.catalogue import Catalogue, CatalogueBuilder
from shardckpt.conversion import Conversion, ConvertingSink, Stretch, Tally
from shardckpt.endpoints import Sink
from shardckpt.errors import MismatchError
from shardckpt.region import Region, whole


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a source tensor."""

    source: str
    region: Region


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
        converted: dict[int, list[Stretch]] = {}
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
                stretch = Stretch(
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
