"""Checksums of ranges of chunks: put together to those of whole chunks, and compared with what was recorded.

Knows chunks by their numbers; refuses to know who read or wrote the ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import NO_CRC, Catalogue
from shardckpt.checksum import combine_groups
from shardckpt.errors import CorruptError

I64 = NDArray[np.int64]

Row = tuple[int, int, int, int]
"""Chunk, first byte in it, number of bytes, checksum."""


@dataclass(frozen=True)
class Parts:
    """Checksums of ranges of chunks, as columns."""

    chunk: I64  # [n]
    begin: I64  # [n] bytes from the chunk's start
    nbytes: I64  # [n]
    crc: I64  # [n]

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> Parts:
        """Give parts from the rows of the table."""
        return cls(*np.array(rows, np.int64).reshape(-1, 4).T)

    @classmethod
    def concatenate(cls, parts: Sequence[Parts]) -> Parts:
        """Give all rows of all parts; there must be one."""
        return cls(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(cls)))


def compose(parts: Parts, num_chunks: int) -> I64:
    """Give every chunk's checksum from those of the parts that tile it; NO_CRC for chunks without any.

    # [num_chunks]
    """
    order = np.lexsort((parts.begin, parts.chunk))
    chunk = parts.chunk[order]
    starts = np.flatnonzero(np.concatenate([[True], np.diff(chunk) != 0])) if len(chunk) else np.empty(0, np.int64)
    result = np.full(num_chunks, NO_CRC, np.int64)
    result[chunk[starts]] = combine_groups(parts.crc[order].astype(np.uint32), parts.nbytes[order], starts)
    return result


def compare(source: Catalogue, parts: Parts) -> Parts:
    """Compare the checksums of what was read with those recorded, and give the parts of chunks that were read only in
    part.

    Raises:
        CorruptError: On the first chunk that differs.
    """
    if len(parts.chunk) == 0:
        return parts
    keys = np.unique(np.stack([parts.chunk, parts.begin, parts.nbytes], axis=1), axis=0, return_index=True)[1]
    chunk, begin, nbytes, crc = parts.chunk[keys], parts.begin[keys], parts.nbytes[keys], parts.crc[keys]
    is_first = np.concatenate([[True], np.diff(chunk) != 0])
    ends = np.where(np.append(is_first[1:], True), source.chunk_nbytes[chunk], np.append(begin[1:], 0))
    is_adjacent = (begin + nbytes == ends) & (~is_first | (begin == 0))
    is_whole = np.ones(len(source.chunk_nbytes), bool)
    is_whole[chunk[~is_adjacent]] = False
    rows = np.flatnonzero(is_whole[chunk])
    found = compose(Parts(chunk[rows], begin[rows], nbytes[rows], crc[rows]), len(is_whole))
    wrong = np.flatnonzero((found != NO_CRC) & (source.chunk_crc != NO_CRC) & (found != source.chunk_crc))
    if len(wrong):
        first = int(wrong[0])
        more = f" ({len(wrong) - 1} more chunks are damaged too)" if len(wrong) > 1 else ""
        raise CorruptError(
            f"damaged: {source.describe(first)} has checksum {found[first]:08x}, recorded is "
            f"{source.chunk_crc[first]:08x}{more}. Restore the file from a copy, or use an earlier checkpoint."
        )
    rest = np.flatnonzero(~is_whole[chunk])
    return Parts(chunk[rest], begin[rest], nbytes[rest], crc[rest])
