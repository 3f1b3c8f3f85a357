"""Folders of this machine as a store. Files are written under a temporary name, synced and renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from shardckpt.errors import CheckpointError, FormatError, StorageError
from shardckpt.store import (
    Bytes,
    Reader,
    Store,
    Writer,
    is_temporary_of,
    missing,
    not_whole,
    taken,
    temporary_name,
    truncated,
    view_of,
)

_WRITE_BYTES = 256 << 10
"""Longer writes make the page cache look for huge pages, which can cost ten times the write itself."""

_RESERVED_BYTES = 1 << 20
"""Smaller files need no room asked for beforehand."""

_STARTS_WRITEBACK = hasattr(os, "posix_fadvise")
"""Linux answers "not needed" for dirty pages by starting to write them: the disk works while more is copied, and the
sync at the end finds little left."""


class LocalStore(Store):
    """A folder of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def open_reader(self, path: str) -> Reader:
        return LocalReader(self.root / path)

    def create(self, path: str, *, nbytes: int) -> Writer:
        return LocalWriter(self.root / path, nbytes)

    def put(self, path: str, data: bytes, *, is_new: bool = False) -> None:
        writer = LocalWriter(self.root / path, len(data))
        try:
            writer.write(0, data)
            writer.finish()
            if is_new:
                writer.commit_new()
            else:
                writer.commit()
        except BaseException:
            writer.abort()
            raise

    def list(self) -> dict[str, int]:
        return dict(_files_below(self.root, ""))

    def delete(self, path: str) -> None:
        with _storage_errors("delete", self.root / path), contextlib.suppress(FileNotFoundError):
            (self.root / path).unlink()
        with contextlib.suppress(OSError):  # a folder that is not empty stays, and so do those above it
            for folder in (self.root / path).parents:
                if folder == self.root:
                    break
                folder.rmdir()

    def exists(self, path: str) -> bool:
        with _storage_errors("find", self.root / path):
            return (self.root / path).is_file()

    def discard_temporaries(self, path: str) -> tuple[str, ...]:
        folder, name = (self.root / path).parent, (self.root / path).name
        with _storage_errors("list", folder):
            found = [entry.name for entry in os.scandir(folder)] if folder.is_dir() else []
        left = tuple(other for other in found if is_temporary_of(name, other))
        for other in left:
            self.delete(str(folder.relative_to(self.root) / other))
        return left

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
                raise truncated(self.path, byte_offset + len(out), byte_offset + done)
            done += count

    def close(self) -> None:
        os.close(self._descriptor)


class LocalWriter(Writer):
    """A local file under a temporary name beside its own."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = str(path)
        self._final = path
        self._nbytes = nbytes
        self._temporary = path.with_name(temporary_name(path.name))
        with _storage_errors("create", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with _storage_errors("write", path):
                _reserve(self._descriptor, nbytes)
        except StorageError:
            self.abort()
            raise

    def write(self, byte_offset: int, data: Bytes | bytes) -> None:
        view, begin = view_of(data), byte_offset
        with _storage_errors("write", self.path):
            while view:
                count = os.pwrite(self._descriptor, view[:_WRITE_BYTES], byte_offset)
                view = view[count:]
                byte_offset += count
            if _STARTS_WRITEBACK:
                os.posix_fadvise(self._descriptor, begin, byte_offset - begin, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        with _storage_errors("write", self.path):
            os.fsync(self._descriptor)
            found = os.fstat(self._descriptor).st_size
        self._close()
        if found != self._nbytes:
            raise not_whole(self.path, self._nbytes, found)

    def commit(self) -> None:
        with _storage_errors("write", self.path):
            os.replace(self._temporary, self._final)
            _sync_folder(self._final.parent)

    def commit_new(self) -> None:
        """As `commit`, but never over a file of that name."""
        with _storage_errors("write", self.path):
            try:
                os.link(self._temporary, self._final)
            except FileExistsError as error:
                raise taken(self.path) from error
            except OSError:  # a file system without hard links
                if self._final.exists():
                    raise taken(self.path) from None
                os.replace(self._temporary, self._final)
            else:
                self._temporary.unlink()
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


@contextlib.contextmanager
def _storage_errors(action: str, path: Path | str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise missing(str(path)) from error
    except CheckpointError:
        raise
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
            with contextlib.suppress(FileNotFoundError):  # gone since the folder was read
                yield prefix + entry.name, entry.stat().st_size


def _reserve(descriptor: int, nbytes: int) -> None:
    """Ask for the room of a file beforehand, if it is worth it: a full disk is known at once, and writing is cheaper.

    Not `os.posix_fallocate`, which writes to every block where the file system has no such call.

    Raises:
        OSError: If there is no room.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None or nbytes < _RESERVED_BYTES:
        return
    keeps_size = 1
    if fallocate(descriptor, keeps_size, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(number, os.strerror(number))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
