"""Tests of checksums of ranges of chunks."""

from __future__ import annotations

import pytest

from shardckpt.catalogue import NO_CRC, Catalogue, CatalogueBuilder, File, Tensor
from shardckpt.checksum import crc32c
from shardckpt.errors import CorruptError
from shardckpt.parts import Parts, compare, compose
from shardckpt.region import Span


def parts(*table: tuple[int, int, bytes]) -> Parts:
    """Give parts of (chunk, begin, bytes)."""
    return Parts.of_rows([(chunk, begin, len(data), crc32c(data)) for chunk, begin, data in table])


def test_compose_puts_parts_together_in_any_order() -> None:
    """Chunks get the checksum of their parts in order of place; chunks without any get none."""
    found = compose(parts((2, 3, b"def"), (0, 0, b"x"), (2, 0, b"abc")), 4)
    assert found.tolist() == [crc32c(b"x"), NO_CRC, crc32c(b"abcdef"), NO_CRC]
    assert compose(Parts.of_rows([]), 2).tolist() == [NO_CRC, NO_CRC]


def test_compare_takes_a_range_that_was_read_twice_once() -> None:
    """The same range read for two targets counts once; a chunk with a gap is partial."""
    source = six_bytes()
    assert len(compare(source, parts((0, 0, b"abc"), (0, 3, b"def"), (0, 0, b"abc"))).chunk) == 0
    assert compare(source, parts((0, 0, b"ab"), (0, 3, b"def"))).begin.tolist() == [0, 3]
    assert compare(source, parts((0, 1, b"bcdef"))).begin.tolist() == [1]
    with pytest.raises(CorruptError, match=r"elements \[0, 6\) of 'w'"):
        compare(source, parts((0, 0, b"abc"), (0, 3, b"dez")))


def six_bytes() -> Catalogue:
    """Give a catalogue of one chunk, 'abcdef'."""
    builder = CatalogueBuilder()
    builder.add_tensor(Tensor("w", "U8", (6,)))
    builder.add_file(File("f", 6, 0))
    builder.add_chunk(0, Span(0, 6), file=0, byte_offset=0, crc=crc32c(b"abcdef"))
    return builder.build()
