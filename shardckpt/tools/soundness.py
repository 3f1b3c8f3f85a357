"""What is wrong with a checkpoint or with weights: problems by file and tensor.

Knows how all bytes are read and compared with what was recorded, whatever the format; refuses to know how any is
surveyed. The reading is a transfer of whole files to nowhere that leaves checksums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardckpt.catalogue import NO_CRC, Catalogue, File
from shardckpt.storage import Store
from shardckpt.tools.segments import Segments, file_crcs, read_checksums, wrong_chunks
from shardckpt.transfer import TransferOptions


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: The file, relative to the checkpoint.
        kind: "missing", "size", "damaged", "malformed", "incomplete", "inconsistent" or "untied".
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
        ties: Chunks that ought to be alike, as the tensors that they are count as one: (file, chunk, chunk) each.
    """

    store: Store
    catalogue: Catalogue
    problems: tuple[Problem, ...]
    extra: tuple[str, ...]
    segments: Segments
    ties: tuple[tuple[str, int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return int(self.segments.nbytes.sum())

    @property
    def unverified_bytes(self) -> int:
        """Bytes of which no checksum is recorded, neither of the chunk nor of the file."""
        has_own = np.append(self.catalogue.chunk_crc != NO_CRC, False)[self.segments.chunk]
        has_file = np.array([file.crc is not None for file in self.catalogue.files], bool)[self.segments.file]
        return int(self.segments.nbytes[~(has_own | has_file)].sum())


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
    crc_of = dict(zip(segments.chunk.tolist(), found.tolist(), strict=True))
    for path, one, other in surveyed.ties:
        names = names_of(catalogue, (one, other))
        if crc_of.get(one) != crc_of.get(other) and {one, other} <= crc_of.keys():
            text = f"it says that {names[0]!r} and {names[1]!r} are one tensor, but their bytes differ"
            problems.append(Problem(path, "untied", text, names))
    return tuple(problems)


def _damage(catalogue: Catalogue, file: File, chunks: list[int]) -> Problem:
    names = names_of(catalogue, chunks)
    text = f"the bytes of {len(chunks)} chunks are not those that were saved: {catalogue.describe(chunks[0])}"
    return Problem(file.path, "damaged", text if len(chunks) == 1 else f"{text}, ...", names)


def names_of(catalogue: Catalogue, chunks: Iterable[int]) -> tuple[str, ...]:
    """Give the tensors of some chunks, each once."""
    tensors = dict.fromkeys(int(catalogue.chunk_tensor[chunk]) for chunk in chunks)
    return tuple(catalogue.tensors[tensor].name for tensor in tensors)
