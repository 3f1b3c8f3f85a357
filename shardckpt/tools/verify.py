"""Check that a checkpoint is whole and undamaged, and name everything that is not.

Two steps: a survey of what can be told without reading data (manifest, chunk table, sizes, coverage), and a reading of
every byte, which is a transfer of whole files to nowhere that leaves checksums. Neither stops at the first problem.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import NO_CRC, Catalogue, File, Spans, Tensor
from shardckpt.checksum import combine_groups
from shardckpt.committed import read_committed
from shardckpt.endpoints import NowhereSink, ReaderPool
from shardckpt.errors import CheckpointNotFoundError, CoverageError, FormatError
from shardckpt.manifest import MANIFEST_PATH, MAX_MANIFEST_NBYTES, Manifest, decode_manifest
from shardckpt.plan import plan, prove_coverage
from shardckpt.storage import Store
from shardckpt.transfer import TransferOptions, transfer

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: The file, relative to the checkpoint.
        kind: "missing", "size", "damaged", "malformed" or "incomplete".
        text: What was expected and found.
        tensors: Names of the tensors that are hurt, as far as can be told.
    """

    path: str
    kind: str
    text: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survey:
    """What can be told without reading data.

    Attributes:
        store: Root of the checkpoint.
        catalogue: What should be there; without chunks if the table is damaged, empty if the manifest is.
        problems: What is wrong so far.
        extra: Files at the root that do not belong to the checkpoint.
        segments: What to read.
    """

    store: Store
    catalogue: Catalogue
    problems: tuple[Problem, ...]
    extra: tuple[str, ...]
    segments: Segments

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return int(self.segments.nbytes.sum())


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


def survey(store: Store) -> Survey:
    """Check manifest, chunk table, sizes of files, and that the chunks of every tensor tile it.

    Raises:
        CheckpointNotFoundError: If nothing is committed there.
        StorageError: If something cannot be read.
    """
    try:
        catalogue = read_committed(store).catalogue
        table_problems: list[Problem] = []
        manifest = _read_manifest(store)
    except (FormatError, CheckpointNotFoundError) as error:
        if not store.exists(MANIFEST_PATH):
            raise
        try:
            manifest = _read_manifest(store)
        except FormatError as manifest_error:
            problem = Problem(MANIFEST_PATH, "damaged", str(manifest_error))
            return Survey(store, Catalogue((), ()), (problem,), (), _segments(Catalogue((), ())))
        kind = "missing" if isinstance(error, CheckpointNotFoundError) else "damaged"
        table_problems = [Problem(manifest.chunk_table.path, kind, str(error))]
        catalogue = _without_chunks(manifest)
    return _survey(store, manifest, catalogue, table_problems)


def _survey(store: Store, manifest: Manifest, catalogue: Catalogue, problems: list[Problem]) -> Survey:
    listed = store.list()
    found = {file.path: _size(store, file.path, listed) for file in catalogue.files}
    has_table = not problems
    segments = _segments(catalogue)
    untiled = _untiled(catalogue, segments) if has_table else []
    for number, file in enumerate(catalogue.files):
        problems += _size_problems(catalogue, number, found[file.path])
        if number in untiled:
            problems.append(Problem(file.path, "malformed", f"the chunk table does not tile the {file.nbytes} bytes"))
    if has_table:
        problems += _coverage_problems(catalogue)
    sizes = np.array([size or 0 for size in found.values()], np.int64)
    is_there = segments.byte_offset + segments.nbytes <= sizes[segments.file] if len(sizes) else segments.file < 0
    named = {MANIFEST_PATH, manifest.chunk_table.path, *found}
    extra = tuple(path for path in listed if path not in named)
    return Survey(store, catalogue, tuple(problems), extra, segments.take(is_there & ~np.isin(segments.file, untiled)))


def read_through(surveyed: Survey, *, options: TransferOptions) -> tuple[Problem, ...]:
    """Read every byte that is there and compare all checksums; give what is wrong in addition.

    Raises:
        StorageError: If something cannot be read.
    """
    catalogue, segments = surveyed.catalogue, surveyed.segments
    found = _checksums(surveyed, options)
    recorded = np.where(segments.chunk < 0, NO_CRC, _take(catalogue.chunk_crc, segments.chunk))
    is_wrong = (recorded != NO_CRC) & (recorded != found)
    file_crcs = _file_crcs(catalogue, segments, found)
    problems = []
    for number, file in enumerate(catalogue.files):
        wrong = segments.chunk[is_wrong & (segments.file == number)].tolist()
        if wrong:
            problems.append(_damage(catalogue, file, wrong))
        elif file.crc is not None and file_crcs.get(number, file.crc) != file.crc:
            text = f"its header was changed: the file's checksum is {file_crcs[number]:08x}, recorded is {file.crc:08x}"
            problems.append(Problem(file.path, "damaged", text))
    return tuple(problems)


def _checksums(surveyed: Survey, options: TransferOptions) -> I64:
    """Read all segments and give their checksums. # [segments]"""
    segments = surveyed.segments
    # files are seen as tensors of bytes here, and segments as the chunks that are wanted of them
    files = surveyed.catalogue.files
    tensors = tuple(Tensor(file.path, "U8", (file.nbytes,)) for file in files)
    number, zero = np.arange(len(files)), np.zeros(len(files), np.int64)
    sizes = np.array([file.nbytes for file in files], np.int64)
    filled = number[sizes > 0]
    source = Spans(filled, zero[filled], sizes[filled], filled, zero[filled], np.full(len(filled), NO_CRC, np.int64))
    begin, end = segments.byte_offset, segments.byte_offset + segments.nbytes
    wanted = Spans(segments.file, begin, end, segments.file, begin, np.full(len(begin), NO_CRC, np.int64))
    copies = plan(Catalogue(tensors, files, source), Catalogue(tensors, files, wanted))
    with closing(ReaderPool(surveyed.store)) as pool:
        sources = pool.sources([file.path for file in files])
        return transfer(copies, sources, [NowhereSink() for _ in files], options=options).target_crc


def _segments(catalogue: Catalogue) -> Segments:
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


def _untiled(catalogue: Catalogue, segments: Segments) -> list[int]:
    """Give the files whose segments overlap, or leave bytes out."""
    expected = np.array([file.nbytes for file in catalogue.files], np.int64)
    total = np.bincount(segments.file, weights=segments.nbytes, minlength=len(expected)).astype(np.int64)
    follows = np.diff(segments.file) == 0
    ends = segments.byte_offset + segments.nbytes
    broken = segments.file[1:][follows & (segments.byte_offset[1:] != ends[:-1])]
    return sorted({*broken.tolist(), *np.flatnonzero(total != expected).tolist()})


def _file_crcs(catalogue: Catalogue, segments: Segments, found: I64) -> dict[int, int]:
    """Give the checksum of every file that was read whole."""
    expected = np.array([file.nbytes for file in catalogue.files], np.int64)
    total = np.bincount(segments.file, weights=segments.nbytes, minlength=len(expected)).astype(np.int64)
    starts = np.flatnonzero(np.diff(segments.file, prepend=-1))
    crcs = combine_groups(found.astype(np.uint32), segments.nbytes, starts).tolist()
    numbers = segments.file[starts].tolist()
    return {number: crc for number, crc in zip(numbers, crcs, strict=True) if total[number] == expected[number]}


def _size_problems(catalogue: Catalogue, number: int, found: int | None) -> list[Problem]:
    file = catalogue.files[number]
    if found == file.nbytes:
        return []
    is_in_file = catalogue.chunk_file == number
    if found is None:
        text = f"it is missing; {file.nbytes} bytes were written"
        return [Problem(file.path, "missing", text, _names(catalogue, np.flatnonzero(is_in_file)))]
    is_hurt = is_in_file & (catalogue.chunk_byte_offset + catalogue.chunk_nbytes > found)
    state = "truncated" if found < file.nbytes else "longer than it was"
    text = f"it is {state}: expected {file.nbytes} bytes, found {found}"
    return [Problem(file.path, "size", text, _names(catalogue, np.flatnonzero(is_hurt)))]


def _coverage_problems(catalogue: Catalogue) -> list[Problem]:
    """Give the tensors that the chunks do not tile; each alone only if there are any."""

    def attempt(part: Catalogue) -> str | None:
        try:
            prove_coverage(part)
        except CoverageError as error:
            return str(error)
        return None

    if attempt(catalogue) is None:
        return []
    alone = ((t.name, attempt(catalogue.select([t.name]))) for t in catalogue.tensors)
    return [Problem("", "incomplete", text, (name,)) for name, text in alone if text is not None]


def _damage(catalogue: Catalogue, file: File, chunks: list[int]) -> Problem:
    names = _names(catalogue, chunks)
    text = f"the bytes of {len(chunks)} chunks are not those that were saved: {catalogue.describe(chunks[0])}"
    return Problem(file.path, "damaged", text if len(chunks) == 1 else f"{text}, ...", names)


def _names(catalogue: Catalogue, chunks: Iterable[int]) -> tuple[str, ...]:
    tensors = dict.fromkeys(int(catalogue.chunk_tensor[chunk]) for chunk in chunks)
    return tuple(catalogue.tensors[tensor].name for tensor in tensors)


def _read_manifest(store: Store) -> Manifest:
    return decode_manifest(store.get(MANIFEST_PATH, max_nbytes=MAX_MANIFEST_NBYTES), f"{store.url}/{MANIFEST_PATH}")


def _without_chunks(manifest: Manifest) -> Catalogue:
    files = tuple(File(f.path, f.nbytes, f.header_nbytes, int(f.crc32c, 16)) for f in manifest.files)
    tensors = tuple(Tensor(t.name, t.dtype, tuple(t.shape), tuple(t.aliases)) for t in manifest.tensors)
    return Catalogue(tensors, files)


def _size(store: Store, path: str, listed: dict[str, int]) -> int | None:
    if path in listed:
        return listed[path]
    try:
        with closing(store.open_reader(path)) as reader:  # a list may lag behind
            return reader.nbytes
    except (CheckpointNotFoundError, FormatError):  # or something that is no file
        return None


def _take(values: I64, index: I64) -> I64:
    """Give `values[index]`, anything where the index is negative."""
    return values[index] if len(values) else np.full(len(index), NO_CRC, np.int64)
