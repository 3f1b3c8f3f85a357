"""Where bytes lie: local folders, and any place that fsspec reaches, behind one small interface.

A `Store` is one root. It knows ranged reads, writes that appear whole or not at all, lists and deletes; it refuses to
know what the files mean. Every failure leaves here as a `StorageError` that names the file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shardckpt.errors import CheckpointNotFoundError, FormatError, StorageError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Bytes = NDArray[np.uint8]

TEMPORARY_SUFFIX = ".tmp"


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
            raise _truncated(self.path, byte_offset + nbytes, self.nbytes)
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

    @abstractmethod
    def finish(self) -> None:
        """End the writing and make it durable, still unseen; lets go of descriptors and buffers."""

    @abstractmethod
    def commit(self) -> None:
        """Make a finished file visible under its name."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written; never raises."""


class Store(ABC):
    """A folder, bucket prefix or the like. Paths are relative to it, with `/` between parts."""

    url: str
    is_sequential: bool
    """True if files must be written front to back."""

    @abstractmethod
    def open_reader(self, path: str) -> Reader:
        """Open a file; raises `CheckpointNotFoundError` if there is none."""

    @abstractmethod
    def create(self, path: str) -> Writer:
        """Begin to write a file, replacing one of that name at commit."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write a small file in one go, atomically and durably."""

    @abstractmethod
    def list(self) -> dict[str, int]:
        """Give the path and size in bytes of every file below the root, unfinished ones included.

        {} if the root is not there.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; one that is gone already is no error."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Tell whether the file is there."""

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
                    "may have; "
                    "it is not what its name says"
                )
            return reader.read(0, reader.nbytes)


def open_store(url: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None) -> Store:
    """Give the store for a path or an fsspec URL.

    Args:
        url: A local path, `file://...`, or any URL that fsspec knows (`memory://`, `s3://`, ...).
        storage_options: Passed to the fsspec file system; None for local paths.
    """
    text = os.fspath(url)
    if "://" not in text or text.startswith("file://"):
        return LocalStore(Path(text.removeprefix("file://")))
    return FsspecStore(text, storage_options or {})


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Split a path or URL into its folder and its last part."""
    text = os.fspath(url).rstrip("/")
    folder, slash, name = text.rpartition("/")
    return (folder or "/", name) if slash else (".", name)


def _view(data: Bytes | bytes) -> memoryview:
    return data.data if isinstance(data, np.ndarray) else memoryview(data)


def _truncated(path: str, expected: int, found: int) -> FormatError:
    return FormatError(
        f"{path!r} is truncated: it has {found} bytes where at least {expected} are needed. Restore the file from a "
        "copy, or "
        "use an earlier checkpoint."
    )


# Local folders ------------------------------------------------------------------------------------------------------


class LocalStore(Store):
    """A folder of this machine. Files are written under a temporary name, synced and renamed."""

    is_sequential = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def open_reader(self, path: str) -> Reader:
        return LocalReader(self.root / path)

    def create(self, path: str) -> Writer:
        return LocalWriter(self.root / path)

    def put(self, path: str, data: bytes) -> None:
        writer = self.create(path)
        try:
            writer.write(0, data)
            writer.finish()
            writer.commit()
        except BaseException:
            writer.abort()
            raise

    def list(self) -> dict[str, int]:
        return dict(_files_below(self.root, ""))

    def delete(self, path: str) -> None:
        with _storage_errors("delete", self.root / path), contextlib.suppress(FileNotFoundError):
            (self.root / path).unlink()

    def exists(self, path: str) -> bool:
        with _storage_errors("find", self.root / path):
            return (self.root / path).is_file()

    def free_bytes(self) -> int | None:
        existing = next(folder for folder in (self.root.absolute(), *self.root.absolute().parents) if folder.is_dir())
        status = os.statvfs(existing)
        return status.f_bavail * status.f_frsize


class LocalReader(Reader):
    """A local file read with `preadv`: a file that shrinks meanwhile is an error here, not a signal as with mmap."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        with _storage_errors("open", path):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
            status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise FormatError(f"{self.path!r} is not a regular file; name a checkpoint's file")
        self.nbytes = status.st_size

    def read_into(self, byte_offset: int, out: Bytes) -> None:
        done = 0
        while done < len(out):
            with _storage_errors("read", self.path):
                count = os.preadv(self._descriptor, [out[done:].data], byte_offset + done)
            if count == 0:
                raise _truncated(self.path, byte_offset + len(out), byte_offset + done)
            done += count

    def close(self) -> None:
        os.close(self._descriptor)


class LocalWriter(Writer):
    """A local file under a temporary name beside its own."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._final = path
        self._temporary = path.with_name(_temporary_name(path.name))
        with _storage_errors("create", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, byte_offset: int, data: Bytes | bytes) -> None:
        view = _view(data)
        while view:
            with _storage_errors("write", self.path):
                count = os.pwrite(self._descriptor, view, byte_offset)
            view = view[count:]
            byte_offset += count

    def finish(self) -> None:
        with _storage_errors("write", self.path):
            os.fsync(self._descriptor)
        self._close()

    def commit(self) -> None:
        with _storage_errors("write", self.path):
            os.replace(self._temporary, self._final)
            _sync_folder(self._final.parent)

    def abort(self) -> None:
        with contextlib.suppress(StorageError):
            self._close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()

    def _close(self) -> None:
        """Close the descriptor once: its number may soon be that of another file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with _storage_errors("write", self.path):
                os.close(descriptor)


def _temporary_name(name: str) -> str:
    """Give a new name beside `name`; no longer than file systems allow."""
    return f".{name.encode()[:100].decode(errors='ignore')}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"


@contextlib.contextmanager
def _storage_errors(action: str, path: Path | str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"there is no file {str(path)!r}; check the path, and that the save was finished"
        ) from error
    except OSError as error:
        raise StorageError.wrap(action, str(path), error) from error


def _files_below(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError.wrap("list", str(folder), error) from error
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(Path(entry.path), f"{prefix}{entry.name}/")
        elif entry.is_file():
            yield prefix + entry.name, entry.stat().st_size


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# fsspec -------------------------------------------------------------------------------------------------------------


_DEFERRING_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az"})
"""File systems on which a file opened with `autocommit=False` is not there until it is committed."""


class FsspecStore(Store):
    """A root on any file system of fsspec."""

    is_sequential = True

    def __init__(self, url: str, storage_options: Mapping[str, object]) -> None:
        from fsspec.core import url_to_fs  # on demand: local work starts without fsspec

        self.url = url.rstrip("/")
        with _remote_errors("open", url):
            found: tuple[AbstractFileSystem, str] = url_to_fs(self.url, **storage_options)
        self._fs, self._root = found

    def open_reader(self, path: str) -> Reader:
        return FsspecReader(self._fs, self._full(path), f"{self.url}/{path}")

    def create(self, path: str) -> Writer:
        return FsspecWriter(self._fs, self._full(path), f"{self.url}/{path}")

    def put(self, path: str, data: bytes) -> None:
        with _remote_errors("write", f"{self.url}/{path}"):
            self._fs.pipe_file(self._full(path), data)

    def list(self) -> dict[str, int]:
        prefix = self._root.rstrip("/") + "/"
        with _remote_errors("list", self.url):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        return {path.removeprefix(prefix): int(info["size"]) for path, info in sorted(found.items())}

    def delete(self, path: str) -> None:
        with _remote_errors("delete", f"{self.url}/{path}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(path))

    def exists(self, path: str) -> bool:
        with _remote_errors("find", f"{self.url}/{path}"):
            self._fs.invalidate_cache()
            return bool(self._fs.isfile(self._full(path)))

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"


class FsspecReader(Reader):
    """An object read by ranges."""

    def __init__(self, fs: AbstractFileSystem, full: str, path: str) -> None:
        self.path = path
        self._fs, self._full = fs, full
        with _remote_errors("open", path):
            self.nbytes = int(fs.info(full)["size"])

    def read_into(self, byte_offset: int, out: Bytes) -> None:
        with _remote_errors("read", self.path):
            data = self._fs.cat_file(self._full, start=byte_offset, end=byte_offset + len(out))
        if len(data) != len(out):
            raise _truncated(self.path, byte_offset + len(out), byte_offset + len(data))
        out[:] = np.frombuffer(data, np.uint8)


class FsspecWriter(Writer):
    """An object written front to back: under its own name where the file system holds it back until it is committed,
    else under a temporary name, and moved.
    """

    def __init__(self, fs: AbstractFileSystem, full: str, path: str) -> None:
        self.path = path
        self._fs, self._full = fs, full
        folder, _, name = full.rpartition("/")
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._temporary = None if protocols & _DEFERRING_PROTOCOLS else f"{folder}/{_temporary_name(name)}"
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
            self._file.write(_view(data))
        self._position += len(data)

    def finish(self) -> None:
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
        if found != self._position:
            raise StorageError(
                f"{self.path!r} has {found} bytes after the write, expected {self._position}; save again"
            )

    def abort(self) -> None:
        # Whatever the store raises here, the failure that led to the abort is what the caller must see.
        with contextlib.suppress(Exception):
            if self._temporary is None:
                self._file.discard()  # type: ignore[attr-defined]
            else:
                self._file.close()
                self._fs.rm_file(self._temporary)


@contextlib.contextmanager
def _remote_errors(action: str, path: str) -> Iterator[None]:
    """As `_storage_errors`; file systems behind fsspec raise exceptions of their own kinds, so all are wrapped."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"there is no file {path!r}; check the path, and that the save was finished"
        ) from error
    except Exception as error:
        raise StorageError.wrap(action, path, error) from error
