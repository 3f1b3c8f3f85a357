"""Random small tensors cut at random into chunks, and the oracle: what bytes each chunk must hold."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardckpt.catalogue import Boxes, Catalogue, CatalogueBuilder, File, Spans, Tensor
from shardckpt.checksum import crc32c
from shardckpt.region import Box, Region, Span, normalise

Bytes = NDArray[np.uint8]
Arrays = Mapping[str, NDArray[np.generic]]

DTYPES = {"float32": "F32", "int16": "I16", "uint8": "U8"}

shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 6]), max_size=4).map(tuple)


@dataclass(frozen=True)
class Tiled:
    """A catalogue, and the bytes of each of its files."""

    catalogue: Catalogue
    files: list[Bytes]


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, NDArray[np.generic]]:
    """Draw a few small arrays, no two elements of one alike as far as their dtype goes."""
    found: dict[str, NDArray[np.generic]] = {}
    for number in range(draw(st.integers(1, 3))):
        shape, dtype = draw(shapes), draw(st.sampled_from(list(DTYPES)))
        values = np.arange(number, number + int(np.prod(shape, dtype=np.int64))) * 257 + number
        found[f"t{number}"] = values.astype(dtype).reshape(shape)
    return found


@st.composite
def cuts(draw: st.DrawFn, size: int, most: int = 3) -> list[int]:
    """Draw ascending borders from 0 to `size`."""
    inner = draw(st.lists(st.integers(0, size), max_size=most))
    return sorted({0, size, *inner})


@st.composite
def spans_of(draw: st.DrawFn, numel: int) -> list[Region]:
    """Draw spans that tile `numel` elements."""
    return [Span(low, high) for low, high in itertools.pairwise(draw(cuts(numel)))]


@st.composite
def grid_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Draw a grid of boxes that tile a tensor."""
    borders = [list(itertools.pairwise(draw(cuts(size, 2)))) for size in shape]
    return [
        Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in itertools.product(*borders)
    ]


@st.composite
def tilings(draw: st.DrawFn, whole: Arrays) -> Tiled:
    """Draw a cut of all arrays into chunks, spread over a few files in any order."""
    builder = CatalogueBuilder()
    contents = [bytearray() for _ in range(draw(st.integers(1, 3)))]
    for number in range(len(contents)):
        builder.add_file(File(f"file-{number}", 0, 0))
    for name, array in whole.items():
        tensor = builder.add_tensor(Tensor(name, DTYPES[str(array.dtype)], array.shape))
        regions = draw(st.one_of(spans_of(array.size), grid_of(array.shape)).flatmap(st.permutations))
        for region in (normalise(region, array.shape, fqn=name) for region in regions):
            if region.numel:
                file = draw(st.integers(0, len(contents) - 1))
                builder.add_chunk(tensor, region, file=file, byte_offset=len(contents[file]))
                contents[file] += elements(array, region).tobytes()
    files = [np.frombuffer(bytes(content), np.uint8).copy() for content in contents]
    return Tiled(with_recorded_crc(builder.build(), files), files)


def elements(array: NDArray[np.generic], region: Region) -> NDArray[np.generic]:
    """Give the elements of a region the slow and obvious way."""
    match region:
        case Span(start, stop):
            return array.reshape(-1)[start:stop]
        case Box(offset, shape):
            return array[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def with_recorded_crc(catalogue: Catalogue, files: Sequence[Bytes]) -> Catalogue:
    """Give the catalogue with the checksum of every chunk's bytes."""
    found = [
        crc32c(files[file][at : at + nbytes])
        for file, at, nbytes in zip(
            catalogue.chunk_file, catalogue.chunk_byte_offset, catalogue.chunk_nbytes, strict=True
        )
    ]
    crc = np.array(found, np.int64)
    number = len(catalogue.spans)
    spans: Spans = dataclasses.replace(catalogue.spans, crc=crc[:number])
    boxes: Boxes = dataclasses.replace(catalogue.boxes, crc=crc[number:])
    return dataclasses.replace(catalogue, spans=spans, boxes=boxes)


def shifted(catalogue: Catalogue, nbytes: int) -> Catalogue:
    """Give the catalogue with all chunks moved back by `nbytes`, as behind a header."""
    spans = dataclasses.replace(catalogue.spans, byte_offset=catalogue.spans.byte_offset + nbytes)
    boxes = dataclasses.replace(catalogue.boxes, byte_offset=catalogue.boxes.byte_offset + nbytes)
    return dataclasses.replace(catalogue, spans=spans, boxes=boxes)


def wrong_chunks(catalogue: Catalogue, whole: Arrays, files: Sequence[Bytes]) -> list[str]:
    """Name the chunks whose bytes in `files` are not those of the arrays."""
    wrong = []
    for chunk in range(len(catalogue.chunk_nbytes)):
        array = whole[catalogue.tensors[int(catalogue.chunk_tensor[chunk])].name]
        at, nbytes = int(catalogue.chunk_byte_offset[chunk]), int(catalogue.chunk_nbytes[chunk])
        found = files[int(catalogue.chunk_file[chunk])][at : at + nbytes].tobytes()
        if found != np.ascontiguousarray(elements(array, catalogue.region(chunk))).tobytes():
            wrong.append(catalogue.describe(chunk))
    return wrong
