"""Tests of catalogues."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.catalogue import NO_CRC, Catalogue, CatalogueBuilder, File, Tensor, byte_strides
from shardckpt.errors import MismatchError
from shardckpt.region import Box, Span
from tests.shardckpt.tilings import Tiled, arrays, tilings, wrong_chunks


def small() -> Catalogue:
    """Give a tensor of spans and one of boxes, of different numbers of dims, in two files."""
    builder = CatalogueBuilder()
    for path in ("one", "two"):
        builder.add_file(File(path, 100, 8))
    flat = builder.add_tensor(Tensor("model.flat", "F32", (6,), aliases=("model.tied",)))
    cube = builder.add_tensor(Tensor("model.cube", "I16", (2, 3, 4)))
    plane = builder.add_tensor(Tensor("model.plane", "U8", (4, 4)))
    builder.add_chunk(flat, Span(0, 2), file=0, byte_offset=8, crc=5)
    builder.add_chunk(flat, Span(2, 6), file=1, byte_offset=8)
    builder.add_chunk(flat, Span(0, 0), file=1, byte_offset=8)
    builder.add_chunk(cube, Box((0, 1, 0), (2, 1, 4)), file=1, byte_offset=24)
    builder.add_chunk(plane, Box((0, 0), (4, 2)), file=0, byte_offset=16)
    return builder.build()


def test_columns_number_spans_first_then_boxes() -> None:
    """All columns agree on what chunk number i is, and empty regions are no chunks."""
    catalogue = small()
    assert catalogue.chunk_tensor.tolist() == [0, 0, 1, 2]
    assert catalogue.chunk_file.tolist() == [0, 1, 1, 0]
    assert catalogue.chunk_byte_offset.tolist() == [8, 8, 24, 16]
    assert catalogue.chunk_nbytes.tolist() == [8, 16, 16, 8]
    assert catalogue.chunk_crc.tolist() == [5, NO_CRC, NO_CRC, NO_CRC]
    assert [catalogue.region(i) for i in range(4)] == [
        Span(0, 2),
        Span(2, 6),
        Box((0, 1, 0), (2, 1, 4)),
        Box((0, 0), (4, 2)),
    ]


def test_bytes_of_tied_tensors_count_once() -> None:
    """A tensor with two names is one tensor."""
    catalogue = small()
    assert catalogue.nbytes == 6 * 4 + 24 * 2 + 16
    assert catalogue.by_name["model.tied"] == catalogue.by_name["model.flat"] == 0


def test_a_chunk_is_described_by_region_tensor_and_file() -> None:
    """Spans and boxes both say where they are and of what."""
    catalogue = small()
    assert catalogue.describe(1) == "elements [2, 6) of 'model.flat' (global shape (6,)) in 'two'"
    assert catalogue.describe(2) == (
        "box at (0, 1, 0) of shape (2, 1, 4) of 'model.cube' (global shape (2, 3, 4)) in 'two'"
    )


@given(arrays().flatmap(lambda whole: st.tuples(st.just(whole), tilings(whole))), st.data())
def test_select_keeps_the_bytes_of_what_was_asked_for(case: tuple[dict, Tiled], data: st.DataObject) -> None:
    """A selection has the tensors in the order asked for, and all of their chunks, unchanged."""
    whole, tiled = case
    wanted = data.draw(st.lists(st.sampled_from(list(whole)), unique=True))
    picked = tiled.catalogue.select(wanted)
    assert [tensor.name for tensor in picked.tensors] == wanted
    assert wrong_chunks(picked, whole, tiled.files) == []
    assert picked.chunk_nbytes.sum() == sum(whole[name].nbytes for name in wanted)


def test_select_takes_aliases_and_gives_the_tensor_once() -> None:
    """Asking for both names of a tied tensor gives it once."""
    assert len(small().select(["model.tied", "model.flat"]).tensors) == 1


def test_select_names_what_is_missing() -> None:
    """The message lists what there is and how to see all of it."""
    with pytest.raises(MismatchError, match=r"no tensor named 'model.x'; the checkpoint has 'model.flat'.*inspect"):
        small().select(["model.flat", "model.x"])


def test_byte_strides_are_those_of_the_array() -> None:
    """Strides count bytes, whatever the dtype."""
    assert byte_strides(Tensor("w", "I16", (2, 3, 4))) == np.zeros((2, 3, 4), np.int16).strides
    assert byte_strides(Tensor("w", "F32", ())) == ()
