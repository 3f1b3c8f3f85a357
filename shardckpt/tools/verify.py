"""Check that a checkpoint is whole and undamaged, and name everything that is not.

Two steps: a survey of what can be told without reading data (manifest, chunk table, sizes, coverage), and a reading of
every byte, which is a transfer of whole files to nowhere that leaves checksums. Neither stops at the first problem.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from shardckpt.catalogue import Catalogue, File, Tensor
from shardckpt.committed import read_committed
from shardckpt.errors import CheckpointNotFoundError, CoverageError, FormatError
from shardckpt.manifest import MANIFEST_PATH, MAX_MANIFEST_NBYTES, Manifest, decode_manifest
from shardckpt.plan import prove_coverage
from shardckpt.storage import Store
from shardckpt.tools.segments import (
    Segments,
    file_crcs,
    read_checksums,
    segments_of,
    untiled_files,
    wrong_chunks,
)
from shardckpt.transfer import TransferOptions


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
            return Survey(store, Catalogue((), ()), (problem,), (), segments_of(Catalogue((), ())))
        kind = "missing" if isinstance(error, CheckpointNotFoundError) else "damaged"
        table_problems = [Problem(manifest.chunk_table.path, kind, str(error))]
        catalogue = _without_chunks(manifest)
    return _survey(store, manifest, catalogue, table_problems)


def _survey(store: Store, manifest: Manifest, catalogue: Catalogue, problems: list[Problem]) -> Survey:
    listed = store.list()
    found = {file.path: _size(store, file.path, listed) for file in catalogue.files}
    has_table = not problems
    segments = segments_of(catalogue)
    untiled = untiled_files(catalogue, segments) if has_table else []
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
    found = read_checksums(surveyed.store, catalogue, segments, options=options)
    wrong = wrong_chunks(catalogue, segments, found)
    crcs = file_crcs(catalogue, segments, found)
    problems = []
    for number, file in enumerate(catalogue.files):
        own = wrong[catalogue.chunk_file[wrong] == number].tolist()
        if own:
            problems.append(_damage(catalogue, file, own))
        elif file.crc is not None and crcs.get(number, file.crc) != file.crc:
            text = f"its header was changed: the file's checksum is {crcs[number]:08x}, recorded is {file.crc:08x}"
            problems.append(Problem(file.path, "damaged", text))
    return tuple(problems)


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
