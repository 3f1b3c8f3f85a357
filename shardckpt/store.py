"""A place for files: ranged reads, writes that appear whole or not at all, lists and deletes.

A `Store` is one root. This file knows what every kind of store promises; it refuses to know how any of them does it,
and what the files mean. Every failure leaves a store as a `StorageError` that names the file.
"""

from __future__ import annotations

import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardckpt.errors import CheckpointExistsError, CheckpointNotFoundError, FormatError, StorageError
from shardckpt.retry import GaveUp

Bytes = NDArray[np.uint8]

TEMPORARY_SUFFIX = ".tmp"


@dataclass(frozen=True, slots=True)
class PartRule:
    """Of which parts a store can make a file that is copied in part by the server; all in bytes.

    Attributes:
        least_bytes: Every part but the last has as many.
        part_bytes: Of a part that a writer fills.
        least_copied_bytes: Of a part that the server copies; not less than `least_bytes`.
        most_copied_bytes: Of such a part; at least twice `least_copied_bytes`.
    """

    least_bytes: int
    part_bytes: int
    least_copied_bytes: int
    most_copied_bytes: int

    def missing_bytes(self, nbytes: int) -> int:
        """Give how many more a stretch of `nbytes` needs, for each of the parts that it is cut into to be allowed."""
        rest = nbytes % self.part_bytes
        return self.least_bytes - rest if 0 < rest < self.least_bytes else 0


class Reader(ABC):
    """One file, open for ranged reads from any thread."""

    path: str
    nbytes: int

    @abstractmethod
    def read_into(self, byte_offset: int, out: Bytes) -> None:
        """Fill all of `out` from `byte_offset`.

        Raises `FormatError` if the file ends before, `StorageError` if reading fails.
        """

    def close(self) -> None:  # noqa: B027  # most kinds hold nothing
        """Let go of what the reader holds."""

    def read(self, byte_offset: int, nbytes: int) -> bytes:
        """Give `nbytes` bytes from `byte_offset`."""
        if byte_offset + nbytes > self.nbytes:
            raise truncated(self.path, byte_offset + nbytes, self.nbytes)
        out = np.empty(nbytes, np.uint8)
        self.read_into(byte_offset, out)
        return out.tobytes()


class Writer(ABC):
    """One file being written.

    It appears under its name at `commit`, whole; before, and after `abort`, it is not there.
    """

    path: str

    @abstractmethod
    def write(self, byte_offset: int, data: Bytes | bytes) -> None:
        """Put `data` at `byte_offset`. Threads may write disjoint ranges, unless the store `is_sequential`."""

    def expect_copies(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Hear, before the first write, which byte ranges `[begin, end)` will come by `copy_from`, each in one go."""
        raise NotImplementedError

    def copy_from(self, source: Reader, source_offset: int, byte_offset: int, nbytes: int) -> int:
        """Let the server put bytes of another file at `byte_offset`; give the CRC-32C of what it put there.

        Only for readers of a store that this one `can_copy_from`.
        """
        raise NotImplementedError

    @abstractmethod
    def finish(self) -> None:
        """End the writing and make it durable, still unseen; lets go of descriptors and buffers.

        Raises `StorageError` if other than the announced number of bytes was written.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make a finished file visible under its name."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written; never raises."""


class Store(ABC):
    """A folder, bucket prefix or the like. Paths are relative to it, with `/` between parts."""

    url: str
    is_sequential = False
    """True if files must be written front to back."""
    is_remote = False
    """True if each request takes a round trip: fewer and larger ones, more of them at a time."""

    @abstractmethod
    def open_reader(self, path: str) -> Reader:
        """Open a file; raises `CheckpointNotFoundError` if there is none."""

    @abstractmethod
    def create(self, path: str, *, nbytes: int) -> Writer:
        """Begin to write a file of `nbytes` bytes, replacing one of that name at commit."""

    @abstractmethod
    def put(self, path: str, data: bytes, *, is_new: bool = False) -> None:
        """Write a small file in one go, atomically and durably.

        With `is_new`, raises `CheckpointExistsError` if there is one of that name, also one that appeared just now.
        """

    @abstractmethod
    def list(self) -> dict[str, int]:
        """Give the path and size in bytes of every file below the root, unfinished ones included where they are files.

        {} if the root is not there. A list may lag behind what was just written or deleted; `exists` does not.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; one that is gone already is no error."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Tell whether the file is there."""

    def discard_unfinished(self, is_own: Callable[[str], bool]) -> tuple[str, ...]:
        """End interrupted writes of the paths for which `is_own` holds, where `list` does not show them.

        Gives their paths.
        """
        return ()

    def discard_temporaries(self, path: str) -> tuple[str, ...]:
        """Remove what interrupted writes of one file have left, without a list of all others; give what it was."""
        return self.discard_unfinished(lambda found: found == path)

    def part_bytes(self, nbytes: int) -> int:
        """Give the bytes of a file of `nbytes` that its writer keeps in memory for each thread that writes."""
        return 0

    def can_copy_from(self, source: Store) -> bool:
        """Tell whether the server can copy ranges of files of `source` to here by itself."""
        return False

    def part_rule(self, nbytes: int) -> PartRule:
        """Give the rule for a file of `nbytes` bytes; only where there is a source that this store `can_copy_from`."""
        raise NotImplementedError

    def free_bytes(self) -> int | None:
        """Give the room left, or None where that means nothing."""
        return None

    def get(self, path: str, *, max_nbytes: int) -> bytes:
        """Read a whole file; refuses one of more than `max_nbytes` before anything is allocated."""
        reader = self.open_reader(path)
        with contextlib.closing(reader):
            if reader.nbytes > max_nbytes:
                raise FormatError(
                    f"{path!r} in {self.url!r} has {reader.nbytes} bytes, more than the {max_nbytes} that such a file "
                    "may have; it is not what its name says"
                )
            return reader.read(0, reader.nbytes)


def temporary_name(name: str) -> str:
    """Give a new name beside `name`; no longer than file systems allow."""
    return f".{_clipped(name)}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"


def is_temporary_of(name: str, candidate: str) -> bool:
    """Tell whether `candidate` may be a name that `temporary_name(name)` gave."""
    front, back = f".{_clipped(name)}.", TEMPORARY_SUFFIX
    token = candidate[len(front) : -len(back)]
    is_token = len(token) == 16 and set(token) <= set("0123456789abcdef")
    return candidate.startswith(front) and candidate.endswith(back) and is_token


def _clipped(name: str) -> str:
    return name.encode()[:100].decode(errors="ignore")


def view_of(data: Bytes | bytes) -> memoryview:
    """Give the bytes of `data`, not copied."""
    return data.data if isinstance(data, np.ndarray) else memoryview(data)


def truncated(path: str, expected: int, found: int) -> FormatError:
    """Give the error for a file that ends before its `expected` bytes."""
    return FormatError(
        f"{path!r} is truncated: it has {found} bytes where at least {expected} are needed. Restore the file from a "
        "copy, or use an earlier checkpoint."
    )


def missing(path: str) -> CheckpointNotFoundError:
    """Give the error for a file that is not there."""
    return CheckpointNotFoundError(f"there is no file {path!r}; check the path, and that the save was finished")


def not_whole(path: str, expected: int, found: int) -> StorageError:
    """Give the error for a file that was not written to its end, or has another size after it was."""
    error = StorageError(f"{path!r} has {found} bytes after the write, expected {expected}; save again")
    error.path = path
    return error


def taken(path: str) -> CheckpointExistsError:
    """Give the error for a file that was to be new and is there."""
    return CheckpointExistsError(
        f"{path!r} appeared meanwhile: another save writes to the same place; choose another destination, or ask to "
        "overwrite it once that save is done"
    )


def gave_up(action: str, path: str, found: GaveUp) -> StorageError:
    """Give the error for an operation that was tried until its deadline."""
    first, last = (f"{type(error).__name__}: {error}" for error in (found.first, found.last))
    last = "" if last == first else f", the last with {last}"
    error = StorageError(
        f"cannot {action} {path!r}: gave up after {found.num_attempts} attempts in {found.seconds:.0f} s; the first "
        f"failed with {first}{last}. Check that the server is up and within reach, and whether it throttles."
    )
    error.path = path
    return error
