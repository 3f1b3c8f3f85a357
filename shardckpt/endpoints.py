"""Where copies come from and go to: files and memory.

A source gives byte ranges, a sink takes them; each stands for one file of a catalogue. Memory gives and takes itself
without a copy. Knows one end at a time; refuses to know plans.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from shardckpt.storage import Reader, Store, Writer
from shardckpt.store import PartRule

Bytes = NDArray[np.uint8]

MAX_OPEN_READERS = 64


class Source(ABC):
    """One file or buffer to copy from; safe to use from several threads."""

    is_remote = False
    """True if each fetch takes a round trip."""

    @abstractmethod
    def fetch(self, byte_offset: int, out: Bytes) -> Bytes:
        """Give `len(out)` bytes from `byte_offset`: `out`, filled, or a view of the source's own memory."""


class Sink(ABC):
    """One file or buffer to copy to."""

    is_sequential: bool
    """True if writes must come front to back."""
    is_memory = False
    """True if `memory` gives what to fill in place of writing."""
    is_remote = False
    """True if what is written goes over a network."""
    part_bytes = 0
    """What it keeps in memory for each thread that writes."""

    def memory(self, byte_offset: int, nbytes: int) -> Bytes:
        """Give the memory of this range; only where `is_memory`."""
        raise NotImplementedError

    @abstractmethod
    def write(self, byte_offset: int, data: Bytes) -> None:
        """Take `data` at `byte_offset`."""

    def rule_of_copies(self, source: Source) -> PartRule | None:
        """Give the rule by which a server can copy ranges of `source` to here; None if it cannot."""
        return None

    def expect_copies(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Hear, before the first write, which byte ranges `[begin, end)` will come by `copy_from`, each in one go."""
        raise NotImplementedError

    def copy_from(self, source: Source, source_offset: int, byte_offset: int, nbytes: int) -> int:
        """Let the server copy a range; give its CRC-32C. Only where there is a `rule_of_copies`."""
        raise NotImplementedError

    def finish(self) -> None:  # noqa: B027  # memory is finished as it is
        """All is written: make it durable, still unseen."""

    def commit(self) -> None:  # noqa: B027
        """Make it visible."""

    def abort(self) -> None:  # noqa: B027
        """Undo; never raises."""


class NowhereSink(Sink):
    """Takes bytes and keeps none: for reading alone."""

    is_sequential = False

    def write(self, byte_offset: int, data: Bytes) -> None:
        pass


class MemorySource(Source):
    """Bytes that lie in memory."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def fetch(self, byte_offset: int, out: Bytes) -> Bytes:
        return self._data[byte_offset : byte_offset + len(out)]


class MemorySink(Sink):
    """Bytes in memory that are filled in place."""

    is_sequential = False
    is_memory = True

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def memory(self, byte_offset: int, nbytes: int) -> Bytes:
        return self._data[byte_offset : byte_offset + nbytes]

    def write(self, byte_offset: int, data: Bytes) -> None:
        self._data[byte_offset : byte_offset + len(data)] = data


class FileSource(Source):
    """A file of a store; its reader is opened on demand by the pool that made this source."""

    def __init__(self, pool: ReaderPool, path: str) -> None:
        self._pool = pool
        self._path = path
        self.is_remote = pool.is_remote

    @property
    def store(self) -> Store:
        """Where the file is."""
        return self._pool.store

    @contextlib.contextmanager
    def opened(self) -> Iterator[Reader]:
        """Lend the open file."""
        reader = self._pool.acquire(self._path)
        try:
            yield reader
        finally:
            self._pool.release(self._path)

    def fetch(self, byte_offset: int, out: Bytes) -> Bytes:
        with self.opened() as reader:
            reader.read_into(byte_offset, out)
        return out


class ReaderPool:
    """The open files of one store: a bounded number, the longest unused closed first."""

    def __init__(self, store: Store, max_open: int = MAX_OPEN_READERS) -> None:
        self.store = store
        self._max_open = max_open
        self.is_remote = store.is_remote
        self._lock = Lock()
        self._idle: OrderedDict[str, Reader] = OrderedDict()
        self._in_use: dict[str, tuple[Reader, int]] = {}  # with the number of users

    def sources(self, paths: Sequence[str]) -> list[Source]:
        """Give a source for every path; nothing is opened yet."""
        return [FileSource(self, path) for path in paths]

    def acquire(self, path: str) -> Reader:
        """Give an open reader; must be released."""
        with self._lock:
            reader = self._take(path)
        if reader is not None:
            return reader
        opened = self.store.open_reader(path)  # not under the lock: other files need not wait for a slow answer
        with self._lock:
            reader = self._take(path)
            if reader is None:
                self._in_use[path] = (opened, 1)
                return opened
        opened.close()  # another thread was quicker
        return reader

    def _take(self, path: str) -> Reader | None:
        """Give a reader that is open, for one more user; None if there is none."""
        reader, users = self._in_use[path] if path in self._in_use else (self._idle.pop(path, None), 0)
        if reader is not None:
            self._in_use[path] = (reader, users + 1)
        return reader

    def release(self, path: str) -> None:
        """Give back a reader."""
        with self._lock:
            reader, users = self._in_use.pop(path)
            if users > 1:
                self._in_use[path] = (reader, users - 1)
                return
            self._idle[path] = reader
            while len(self._idle) > self._max_open:
                self._idle.popitem(last=False)[1].close()

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            while self._idle:
                self._idle.popitem()[1].close()


class FileSink(Sink):
    """A file of a store, begun with its header on the first write."""

    def __init__(self, store: Store, path: str, header: bytes, nbytes: int) -> None:
        self._store = store
        self._path = path
        self._header = header
        self._nbytes = nbytes
        self._lock = Lock()
        self._writer: Writer | None = None
        self._copied: Sequence[tuple[int, int]] = ()
        self.is_sequential = store.is_sequential
        self.is_remote = store.is_remote
        self.part_bytes = store.part_bytes(nbytes)

    def write(self, byte_offset: int, data: Bytes) -> None:
        self._begun().write(byte_offset, data)

    def rule_of_copies(self, source: Source) -> PartRule | None:
        can_copy = isinstance(source, FileSource) and self._store.can_copy_from(source.store)
        return self._store.part_rule(self._nbytes) if can_copy else None

    def expect_copies(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._copied = ranges

    def copy_from(self, source: Source, source_offset: int, byte_offset: int, nbytes: int) -> int:
        assert isinstance(source, FileSource), "as rule_of_copies says"
        with source.opened() as reader:
            return self._begun().copy_from(reader, source_offset, byte_offset, nbytes)

    def finish(self) -> None:
        self._begun().finish()

    def commit(self) -> None:
        self._begun().commit()

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def _begun(self) -> Writer:
        with self._lock:
            if self._writer is None:
                self._writer = self._store.create(self._path, nbytes=self._nbytes)
                if self._copied:
                    self._writer.expect_copies(self._copied)
                self._writer.write(0, self._header)
            return self._writer
