"""Writes laid-out files from a source: the one data path of saving and of every tool that writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardckpt.catalogue import NO_CRC, Catalogue, File, Spans, Tensor
from shardckpt.checksum import crc32c
from shardckpt.committed import check_space, with_chunk_crcs
from shardckpt.container import FileSet
from shardckpt.derivation import Derivation
from shardckpt.endpoints import FileSink, NowhereSink, Source
from shardckpt.plan import Copies, Plan, plan
from shardckpt.storage import Store
from shardckpt.transfer import TransferOptions, TransferReport, transfer


@dataclass(frozen=True, slots=True)
class Written:
    """Files that are in place.

    Attributes:
        catalogue: What was written, chunks with checksums.
        headers_crc: Checksum of each file's header.
        nbytes: Bytes of all files.
    """

    catalogue: Catalogue
    headers_crc: tuple[int, ...]
    nbytes: int


def write_files(
    source: Catalogue,
    sources: Sequence[Source],
    target: FileSet,
    store: Store,
    *,
    options: TransferOptions,
    derivation: Derivation | None = None,
    before_commit: Callable[[], None] | None = None,
) -> Written:
    """Write every file of `target`, its bytes taken from `source`; all appear at the end, or none.

    Args:
        source: What is there.
        sources: One a file of `source`.
        target: What to write.
        store: Where to.
        options: How.
        derivation: How the tensors come from those of `source`; None if they are the same. With it, chunks get no
            checksums, unless they are only renamed.
        before_commit: Called once when all bytes are written and durable, just before the first file appears.

    Raises:
        NoSpaceError: Before anything is written, if the destination is too small.
        MismatchError, CoverageError: If `source` does not hold what `target` wants.
        CorruptError: If bytes of the source are not those recorded.
        StorageError: If reading or writing fails.
    """
    derivation = derivation or Derivation(target.catalogue)
    copies = plan(source, derivation.wanted)
    check_space(store, target.nbytes)
    sinks = [
        derivation.sink(number, FileSink(store, file.path, header, file.nbytes))
        for number, (file, header) in enumerate(zip(target.catalogue.files, target.headers, strict=True))
    ]
    report = transfer(copies, sources, sinks, options=options)
    pending = list(sinks)
    try:
        if options.is_verified:
            _compare_rest(source, sources, report, options)
        if before_commit is not None:
            before_commit()
        while pending:
            pending[0].commit()
            del pending[0]
    except BaseException:
        for sink in pending:
            sink.abort()
        raise
    catalogue = target.catalogue
    if derivation.is_chunkwise:
        catalogue = with_chunk_crcs(catalogue, report.target_crc)
    return Written(catalogue, tuple(crc32c(header) for header in target.headers), target.nbytes)


def _compare_rest(
    source: Catalogue, sources: Sequence[Source], report: TransferReport, options: TransferOptions
) -> None:
    """Read once more, and whole, the chunks that were read in part or with gaps, and compare them too.

    Raises:
        CorruptError: If one of them is not what was recorded.
    """
    rest = np.union1d(report.partial.chunk, report.unchecked)
    rest = rest[source.chunk_crc[rest] != NO_CRC]
    nbytes = source.chunk_nbytes[rest]
    begin, end = np.cumsum(nbytes) - nbytes, np.cumsum(nbytes)
    zero = np.zeros(len(rest), np.int64)
    total = int(nbytes.sum())
    seen = Catalogue((Tensor("", "U8", (total,)),), (File("", total, 0),), Spans(zero, begin, end, zero, begin, zero))
    copies = Copies(rest, np.arange(len(rest)), source.chunk_byte_offset[rest], begin, nbytes, zero + 1, zero, zero)
    transfer(Plan(source, seen, copies), sources, [NowhereSink()], options=replace(options, on_progress=None))
