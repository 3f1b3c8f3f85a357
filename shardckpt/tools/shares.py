"""Dividing the files of a job among processes: who writes which, and what that gives when put together."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import NO_CRC, Catalogue
from shardckpt.committed import with_chunk_crcs
from shardckpt.container import FileSet
from shardckpt.storage import Store
from shardckpt.team import Meeting, Team
from shardckpt.transfer import TransferOptions

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """Some files of a job.

    Attributes:
        files: These files alone.
        chunks: Number, in the whole job, of each of their chunks. # [chunks of the share]
    """

    files: FileSet
    chunks: I64


def divide(files: FileSet, num_shares: int) -> list[list[int]]:
    """Give the numbers of the files of each share: about as many bytes for each, the largest files dealt first."""
    loads = [(0, number) for number in range(num_shares)]
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    sizes = [file.nbytes for file in files.catalogue.files]
    for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
        load, number = heapq.heappop(loads)
        shares[number].append(file)
        heapq.heappush(loads, (load + sizes[file], number))
    return [sorted(share) for share in shares]


def cut_out(files: FileSet, numbers: Sequence[int]) -> Share:
    """Give the share of these files."""
    catalogue = files.catalogue
    new_number = np.full(len(catalogue.files), -1, np.int64)
    new_number[list(numbers)] = np.arange(len(numbers))
    spans = catalogue.spans.take(np.flatnonzero(new_number[catalogue.spans.file] >= 0))
    boxes = catalogue.boxes.take(np.flatnonzero(new_number[catalogue.boxes.file] >= 0))
    part = Catalogue(
        catalogue.tensors,
        tuple(catalogue.files[number] for number in numbers),
        replace(spans, file=new_number[spans.file]),
        replace(boxes, file=new_number[boxes.file]),
    )
    chunks = np.flatnonzero(new_number[catalogue.chunk_file] >= 0)
    return Share(FileSet(part, tuple(files.headers[number] for number in numbers)), chunks)


def put_together(files: FileSet, shares: Iterable[tuple[I64, I64]]) -> Catalogue:
    """Give the catalogue of all files, with the checksums of the shares: (chunk numbers, checksums) each."""
    crcs = np.full(len(files.catalogue.chunk_nbytes), NO_CRC, np.int64)
    for chunks, found in shares:
        crcs[chunks] = found
    return with_chunk_crcs(files.catalogue, crcs)


@contextlib.contextmanager
def meeting(target: Store, team: Team, options: TransferOptions) -> Iterator[tuple[Meeting, TransferOptions]]:
    """Meet at `target`.

    Yields:
        The meeting, and the options of transfers that show the others that this process goes on.
    """
    report = options.on_progress or (lambda nbytes: None)
    with Meeting(target, team, on_wait=lambda: report(0)) as found:

        def on_progress(nbytes: int) -> None:
            found.beat()
            report(nbytes)

        yield found, replace(options, on_progress=on_progress)
