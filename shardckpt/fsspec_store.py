"""Any file system of fsspec as a store, written front to back.

Knows fsspec's interface; refuses to know what lies behind it, but for which protocols hold a file back by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import numpy as np

from shardckpt.errors import CheckpointError, StorageError
from shardckpt.retry import GaveUp, RetryPolicy
from shardckpt.store import (
    Bytes,
    Reader,
    Store,
    Writer,
    gave_up,
    is_temporary_of,
    missing,
    not_whole,
    taken,
    temporary_name,
    truncated,
    view_of,
)

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

_DEFERRING_PROTOCOLS = frozenset({"gs", "gcs", "abfs", "az"})
"""File systems on which a file opened with `autocommit=False` is not there until it is committed."""

_TRANSIENT_STATUS = frozenset({429, 500, 502, 503, 504})


class FsspecStore(Store):
    """A root on any file system of fsspec."""

    is_sequential = True
    is_remote = True

    def __init__(self, url: str, storage_options: Mapping[str, object]) -> None:
        from fsspec.core import url_to_fs  # on demand: local work starts without fsspec

        self.url = url.rstrip("/")
        with _remote_errors("open", url):
            found: tuple[AbstractFileSystem, str] = url_to_fs(self.url, **storage_options)
        self._fs, self._root = found
        self._retry = RetryPolicy()

    def open_reader(self, path: str) -> Reader:
        return FsspecReader(self._fs, self._full(path), f"{self.url}/{path}", self._retry)

    def create(self, path: str, *, nbytes: int) -> Writer:
        return FsspecWriter(self._fs, self._full(path), f"{self.url}/{path}", nbytes)

    def put(self, path: str, data: bytes, *, is_new: bool = False) -> None:
        if is_new and self.exists(path):  # fsspec has no way to make this one step
            raise taken(f"{self.url}/{path}")
        self._run("write", path, lambda: self._fs.pipe_file(self._full(path), data))

    def list(self) -> dict[str, int]:
        prefix = self._root.rstrip("/") + "/"
        found = self._run("list", "", self._find)
        return {path.removeprefix(prefix): nbytes for path, nbytes in sorted(found.items())}

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._run("delete", path, lambda: self._fs.rm_file(self._full(path)))

    def exists(self, path: str) -> bool:
        self._fs.invalidate_cache()
        return self._run("find", path, lambda: bool(self._fs.isfile(self._full(path))))

    def discard_temporaries(self, path: str) -> tuple[str, ...]:
        folder, _, name = self._full(path).rpartition("/")
        found = self._run("list", path, lambda: self._names_in(folder))
        left = tuple(other for other in found if is_temporary_of(name, other))
        for other in left:
            self.delete(f"{path.rpartition('/')[0]}/{other}".lstrip("/"))
        return left

    def _run(self, action: str, path: str, attempt: Callable[[], T]) -> T:
        return _run(self._retry, action, f"{self.url}/{path}".rstrip("/"), attempt)

    def _find(self) -> dict[str, int]:
        self._fs.invalidate_cache()
        try:
            return {path: int(info["size"]) for path, info in self._fs.find(self._root, detail=True).items()}
        except FileNotFoundError:
            return {}

    def _names_in(self, folder: str) -> tuple[str, ...]:
        self._fs.invalidate_cache()
        try:
            return tuple(str(found).rstrip("/").rpartition("/")[2] for found in self._fs.ls(folder, detail=False))
        except FileNotFoundError:
            return ()

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"


class FsspecReader(Reader):
    """An object read by ranges."""

    def __init__(self, fs: AbstractFileSystem, full: str, path: str, retry: RetryPolicy) -> None:
        self.path = path
        self._fs, self._full, self._retry = fs, full, retry
        self.nbytes = _run(retry, "open", path, lambda: int(fs.info(full)["size"]))

    def read_into(self, byte_offset: int, out: Bytes) -> None:
        end = byte_offset + len(out)
        data = _run(self._retry, "read", self.path, lambda: self._fs.cat_file(self._full, start=byte_offset, end=end))
        if len(data) != len(out):
            raise truncated(self.path, end, byte_offset + len(data))
        out[:] = np.frombuffer(data, np.uint8)


class FsspecWriter(Writer):
    """An object written front to back: under its own name where the file system holds it back until it is committed,
    else under a temporary name, and moved.
    """

    def __init__(self, fs: AbstractFileSystem, full: str, path: str, nbytes: int) -> None:
        self.path = path
        self._fs, self._full, self._nbytes = fs, full, nbytes
        folder, _, name = full.rpartition("/")
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._temporary = None if protocols & _DEFERRING_PROTOCOLS else f"{folder}/{temporary_name(name)}"
        with _remote_errors("create", path):
            if self._temporary is None:
                self._file: BinaryIO = fs.open(full, "wb", autocommit=False)
            else:
                fs.makedirs(folder, exist_ok=True)
                self._file = fs.open(self._temporary, "wb")
        self._position = 0

    def write(self, byte_offset: int, data: Bytes | bytes) -> None:
        if byte_offset != self._position:
            raise StorageError(
                f"{self.path!r} is written front to back: expected offset {self._position}, found {byte_offset}; "
                "use one worker a file"
            )
        with _remote_errors("write", self.path):
            self._file.write(view_of(data))
        self._position += len(data)

    def finish(self) -> None:
        if self._position != self._nbytes:
            raise not_whole(self.path, self._nbytes, self._position)
        with _remote_errors("write", self.path):
            self._file.close()

    def commit(self) -> None:
        with _remote_errors("write", self.path):
            if self._temporary is None:
                self._file.commit()  # type: ignore[attr-defined]  # fsspec files opened with autocommit=False
            else:
                self._fs.cp_file(self._temporary, self._full)  # not mv, which would expand `*` and `[` in names
                self._fs.rm_file(self._temporary)
            self._fs.invalidate_cache()
            found = int(self._fs.info(self._full)["size"])
        if found != self._nbytes:
            raise not_whole(self.path, self._nbytes, found)

    def abort(self) -> None:
        # Whatever the store raises here, the failure that led to the abort is what the caller must see.
        with contextlib.suppress(Exception):
            if self._temporary is None:
                self._file.discard()  # type: ignore[attr-defined]
            else:
                self._file.close()
                self._fs.rm_file(self._temporary)


def _run(retry: RetryPolicy, action: str, path: str, attempt: Callable[[], T]) -> T:
    """Give what `attempt` gives, tried again while that may help; failures as ours."""
    with _remote_errors(action, path):
        return retry.run(f"{action} {path!r}", attempt, _is_transient)


def _is_transient(error: Exception) -> bool:
    """Tell by kind or by HTTP status; the file systems behind fsspec have exceptions of their own kinds."""
    if isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError):
        return True
    return any(getattr(error, name, None) in _TRANSIENT_STATUS for name in ("status", "code", "status_code"))


@contextlib.contextmanager
def _remote_errors(action: str, path: str) -> Iterator[None]:
    """Raise failures of any kind as ours, with the path."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise missing(path) from error
    except GaveUp as error:
        raise gave_up(action, path, error) from error.first
    except Exception as error:
        raise StorageError.wrap(action, path, error) from error
