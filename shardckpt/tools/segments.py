"""Data files as byte ranges: header, and chunks, each with a checksum; what `verify` and `cp` share.

Here a file is a tensor of bytes, and a transfer reads or copies its ranges like any other chunks. Knows nothing of what
is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import NO_CRC, Catalogue, Spans, Tensor
from shardckpt.checksum import combine_groups
from shardckpt.endpoints import NowhereSink, ReaderPool
from shardckpt.plan import Plan, plan
from shardckpt.storage import Store
from shardckpt.transfer import TransferOptions, transfer

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Byte ranges of files, one row each, by file and offset: headers, and chunks."""

    file: I64  # [n]
    byte_offset: I64  # [n]
    nbytes: I64  # [n]
    chunk: I64  # [n] number of the chunk, or -1 for what is none

    def take(self, rows: NDArray[np.bool_] | I64) -> Segments:
        """Give the rows picked by an index or mask."""
        return Segments(self.file[rows], self.byte_offset[rows], self.nbytes[rows], self.chunk[rows])


def segments_of(catalogue: Catalogue) -> Segments:
    """Cut every file in header and chunks; in one piece where no chunks are known."""
    number = np.arange(len(catalogue.files))
    sizes = np.array([file.nbytes for file in catalogue.files], np.int64)
    header = np.array([file.header_nbytes for file in catalogue.files], np.int64)
    if not len(catalogue.chunk_file):
        header = sizes
    file = np.concatenate([number, catalogue.chunk_file])
    offset = np.concatenate([np.zeros(len(number), np.int64), catalogue.chunk_byte_offset])
    nbytes = np.concatenate([header, catalogue.chunk_nbytes])
    chunk = np.concatenate([np.full(len(number), -1, np.int64), np.arange(len(catalogue.chunk_file))])
    order = np.lexsort((chunk, offset, file))
    segments = Segments(file, offset, nbytes, chunk).take(order)
    return segments.take(segments.nbytes > 0)


def untiled_files(catalogue: Catalogue, segments: Segments) -> list[int]:
    """Give the files whose segments overlap, or leave bytes out."""
    expected = np.array([file.nbytes for file in catalogue.files], np.int64)
    total = np.bincount(segments.file, weights=segments.nbytes, minlength=len(expected)).astype(np.int64)
    follows = np.diff(segments.file) == 0
    ends = segments.byte_offset + segments.nbytes
    broken = segments.file[1:][follows & (segments.byte_offset[1:] != ends[:-1])]
    return sorted({*broken.tolist(), *np.flatnonzero(total != expected).tolist()})


def file_crcs(catalogue: Catalogue, segments: Segments, found: I64) -> dict[int, int]:
    """Give the checksum of every file that was read whole."""
    expected = np.array([file.nbytes for file in catalogue.files], np.int64)
    total = np.bincount(segments.file, weights=segments.nbytes, minlength=len(expected)).astype(np.int64)
    starts = np.flatnonzero(np.diff(segments.file, prepend=-1))
    crcs = combine_groups(found.astype(np.uint32), segments.nbytes, starts).tolist()
    numbers = segments.file[starts].tolist()
    return {number: crc for number, crc in zip(numbers, crcs, strict=True) if total[number] == expected[number]}


def plan_bytes(catalogue: Catalogue, segments: Segments, paths: Sequence[str] | None = None) -> Plan:
    """Plan to read segments as they are, and to put each at the same place of a file of the same size.

    Args:
        catalogue: Of the files, and of the chunks that segments are.
        segments: Which ranges; source and target chunk `i` of the plan are row `i`.
        paths: Names of the target files; None for the same.
    """
    files = catalogue.files
    tensors = tuple(Tensor(file.path, "U8", (file.nbytes,)) for file in files)
    begin, end = segments.byte_offset, segments.byte_offset + segments.nbytes
    crc = np.full(len(begin), NO_CRC, np.int64)
    is_chunk = segments.chunk >= 0
    crc[is_chunk] = catalogue.chunk_crc[segments.chunk[is_chunk]]
    spans = Spans(segments.file, begin, end, segments.file, begin, crc)
    names = paths or [file.path for file in files]
    targets = tuple(replace(file, path=path) for file, path in zip(files, names, strict=True))
    return plan(Catalogue(tensors, files, spans), Catalogue(tensors, targets, spans))


def read_checksums(store: Store, catalogue: Catalogue, segments: Segments, *, options: TransferOptions) -> I64:
    """Read segments and give the checksum of each. # [segments]"""
    with closing(ReaderPool(store)) as pool:
        sources = pool.sources([file.path for file in catalogue.files])
        copies, sinks = plan_bytes(catalogue, segments), [NowhereSink() for _ in sources]
        return transfer(copies, sources, sinks, options=replace(options, is_verified=False)).target_crc


def wrong_chunks(catalogue: Catalogue, segments: Segments, found: I64) -> I64:
    """Give the chunks whose checksum, as found, is not the recorded one."""
    is_chunk = segments.chunk >= 0
    chunk = segments.chunk[is_chunk]
    recorded = catalogue.chunk_crc[chunk]
    wrong: I64 = chunk[(recorded != NO_CRC) & (recorded != found[is_chunk])]
    return wrong
