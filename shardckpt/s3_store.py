"""A bucket prefix as a store: multipart uploads, ranged reads, conditional puts.

Knows how objects of S3 come to be and are read; refuses to know options, credentials and retries. It has no threads of
its own: each thread that writes uploads the parts that it fills.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from shardckpt.checksum import crc32c
from shardckpt.errors import CheckpointNotFoundError, StorageError, UnsupportedError
from shardckpt.s3_client import Client, S3Connection, S3Options
from shardckpt.s3_object import S3Object, UploadedPart
from shardckpt.store import Bytes, PartRule, Reader, Store, Writer, not_whole, taken, truncated

MAX_PARTS = 10_000
"""Of an upload; set by S3."""

LEAST_PART_BYTES = 5 << 20
"""Of every part but the last; set by S3."""

PART_BYTES = 8 << 20
MOST_COPIED_BYTES = 64 << 20
"""Of a part that the server copies: several at a time are quicker, and none takes long enough to time out."""

_ROUND_BYTES = 1 << 20


class S3Store(Store):
    """A prefix in a bucket."""

    is_remote = True

    def __init__(self, url: str, storage_options: Mapping[str, object]) -> None:
        self.url = url.rstrip("/")
        bucket, _, prefix = self.url.partition("://")[2].partition("/")
        if not bucket:
            raise UnsupportedError(f"{url!r} names no bucket; expected s3://bucket/path")
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self._connection = S3Connection(S3Options.parse(storage_options))

    def open_reader(self, path: str) -> Reader:
        return S3Reader(self._object(path))

    def create(self, path: str, *, nbytes: int) -> Writer:
        return S3Writer(self._object(path), nbytes, self.part_bytes(nbytes))

    def put(self, path: str, data: bytes, *, is_new: bool = False) -> None:
        if is_new and self.exists(path):  # also where the server ignores conditions
            raise taken(f"{self.url}/{path}")
        self._object(path).put(data, is_new=is_new)

    def list(self) -> dict[str, int]:
        pages = self._pages("list_objects_v2")
        found = {str(item["Key"]): int(item["Size"]) for page in pages for item in page.get("Contents", [])}
        prefix = len(self._prefix)
        return {
            key[prefix:]: found[key] for key in sorted(found) if not key.endswith("/")
        }  # consoles make such folders

    def delete(self, path: str) -> None:
        self._object(path).delete()

    def exists(self, path: str) -> bool:
        try:
            self._object(path).head()
        except CheckpointNotFoundError:
            return False
        return True

    def discard_unfinished(self, is_own: Callable[[str], bool]) -> tuple[str, ...]:
        found = []
        # Who may not list or abort uploads can still save; the bucket's own rule ends them one day.
        with contextlib.suppress(StorageError):
            for page in self._pages("list_multipart_uploads"):
                for item in page.get("Uploads", []):
                    path = str(item["Key"])[len(self._prefix) :]
                    if is_own(path):
                        self._object(path).abort_upload(item["UploadId"])
                        found.append(path)
        return tuple(found)

    def part_bytes(self, nbytes: int) -> int:
        """Give the size of a part: the usual one, or as large as it must be to do with `MAX_PARTS`."""
        least = -(-nbytes // MAX_PARTS)
        return max(PART_BYTES, -(-least // _ROUND_BYTES) * _ROUND_BYTES)

    def can_copy_from(self, source: Store) -> bool:
        """Tell whether `source` is on the same server, asked by the same account; the bucket may be another."""
        return self.options.part_copies and isinstance(source, S3Store) and source.options == self.options

    def part_rule(self, nbytes: int) -> PartRule:
        """Give the rule by which there are never more than `MAX_PARTS`."""
        part = self.part_bytes(nbytes)
        # Stretches that need not be full parts may take turns with copied ones: as many as there are of these.
        least = LEAST_PART_BYTES if nbytes < LEAST_PART_BYTES * (MAX_PARTS - 1) else 2 * part
        return PartRule(LEAST_PART_BYTES, part, least, max(MOST_COPIED_BYTES, 2 * least))

    @property
    def options(self) -> S3Options:
        """Whom it asks, and how."""
        return self._connection.options

    def _object(self, path: str) -> S3Object:
        return S3Object(self._connection, self._bucket, self._prefix + path, f"{self.url}/{path}")

    def _pages(self, operation: str) -> Iterator[Mapping[str, Any]]:
        """Yield the pages of a listing below the root; each is asked for again by itself."""
        marker: dict[str, object] = {}
        is_last = False
        while not is_last:
            asked = {"Bucket": self._bucket, "Prefix": self._prefix, **marker}
            page = self._connection.run("list", self.url, functools.partial(_call, operation=operation, asked=asked))
            yield page
            is_last = not page.get("IsTruncated")
            marker = {name.removeprefix("Next"): value for name, value in page.items() if name.startswith("Next")}


class S3Reader(Reader):
    """An object read by ranges: the one that was there when it was opened, or none."""

    def __init__(self, found: S3Object) -> None:
        self.path = found.path
        self._object = found
        head = found.head()
        self.nbytes, self._etag = head.nbytes, head.etag

    def read_into(self, byte_offset: int, out: Bytes) -> None:
        if byte_offset + len(out) > self.nbytes:
            raise truncated(self.path, byte_offset + len(out), self.nbytes)
        if len(out):
            self._object.read_into(byte_offset, out, self._etag)

    def copy_part(self, target: S3Object, upload: str, number: int, byte_offset: int, nbytes: int) -> UploadedPart:
        """Let the server make a part of another object from bytes of this one."""
        return target.copy_part(upload, number, self._object, self._etag, byte_offset=byte_offset, nbytes=nbytes)

    def crc(self, byte_offset: int, nbytes: int) -> int:
        """Read bytes and give their CRC-32C."""
        crc, buffer = 0, np.empty(min(nbytes, PART_BYTES), np.uint8)
        for begin in range(byte_offset, byte_offset + nbytes, PART_BYTES):
            out = buffer[: byte_offset + nbytes - begin]
            self.read_into(begin, out)
            crc = crc32c(out, crc)
        return crc


class _Part:
    """A part that is not yet full."""

    def __init__(self, nbytes: int) -> None:
        self.body = bytearray(nbytes)
        self.bytes = np.frombuffer(self.body, np.uint8)
        self.missing_nbytes = nbytes


class S3Writer(Writer):
    """A multipart upload. The thread that fills a part sends it, so as many are in flight as threads write, and no
    more are in memory than that and those begun: few, as long as ranges come about in order.
    """

    def __init__(self, target: S3Object, nbytes: int, part_bytes: int) -> None:
        self.path = target.path
        self._object, self._nbytes, self._part_bytes = target, nbytes, part_bytes
        self._begins = _part_begins(nbytes, part_bytes, ())
        self._mark = secrets.token_hex(16)
        self._lock = Lock()
        self._begun: dict[int, _Part] = {}
        self._uploaded: dict[int, UploadedPart] = {}
        self._upload = target.start_upload(self._mark) if nbytes else ""  # S3 makes no object of no parts

    def write(self, byte_offset: int, data: Bytes | bytes) -> None:
        rest = np.frombuffer(data, np.uint8)
        if byte_offset + len(rest) > self._nbytes:
            raise not_whole(self.path, self._nbytes, byte_offset + len(rest))
        while len(rest):
            index = bisect_right(self._begins, byte_offset) - 1
            begin, part = byte_offset - self._begins[index], self._part(index)
            piece = rest[: len(part.bytes) - begin]
            part.bytes[begin : begin + len(piece)] = piece
            with self._lock:
                part.missing_nbytes -= len(piece)
                is_full = not part.missing_nbytes
            if is_full:
                self._send(index, part)
            rest = rest[len(piece) :]
            byte_offset += len(piece)

    def expect_copies(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._begins = _part_begins(self._nbytes, self._part_bytes, ranges)

    def copy_from(self, source: Reader, source_offset: int, byte_offset: int, nbytes: int) -> int:
        assert isinstance(source, S3Reader), "as can_copy_from says"
        index = bisect_left(self._begins, byte_offset)
        uploaded = source.copy_part(self._object, self._upload, index + 1, source_offset, nbytes)
        with self._lock:
            self._uploaded[index] = uploaded
        return source.crc(source_offset, nbytes) if uploaded.crc is None else uploaded.crc

    def finish(self) -> None:
        sizes = [self._size_of(index) for index in self._uploaded]
        if sum(sizes) != self._nbytes:
            begun = sum(len(part.bytes) - part.missing_nbytes for part in self._begun.values())
            raise not_whole(self.path, self._nbytes, sum(sizes) + begun)

    def commit(self) -> None:
        if not self._nbytes:
            self._object.put(b"")
            return
        parts = [self._uploaded[index] for index in sorted(self._uploaded)]
        self._object.complete_upload(self._upload, parts, nbytes=self._nbytes, mark=self._mark)
        self._upload = ""

    def abort(self) -> None:
        self._begun.clear()
        upload, self._upload = self._upload, ""
        if upload:
            # Whatever is raised here, the failure that led to the abort is what the caller must see.
            with contextlib.suppress(StorageError):
                self._object.abort_upload(upload)

    def _size_of(self, index: int) -> int:
        end = self._begins[index + 1] if index + 1 < len(self._begins) else self._nbytes
        return end - self._begins[index]

    def _part(self, index: int) -> _Part:
        with self._lock:
            if index not in self._begun:
                self._begun[index] = _Part(self._size_of(index))
            return self._begun[index]

    def _send(self, index: int, part: _Part) -> None:
        uploaded = self._object.upload_part(self._upload, index + 1, part.body)
        with self._lock:
            self._uploaded[index] = uploaded
            del self._begun[index]


def _part_begins(nbytes: int, part_bytes: int, copied: Sequence[tuple[int, int]]) -> list[int]:
    """Give where each part begins: the copied ranges, and what is between them cut into usual parts."""
    begins, at = [], 0
    for begin, end in (*copied, (nbytes, nbytes)):
        begins += [*range(at, begin, part_bytes), *([begin] if begin < end else [])]
        at = end
    return begins


def _call(client: Client, *, operation: str, asked: Mapping[str, object]) -> Mapping[str, Any]:
    page: Mapping[str, Any] = getattr(client, operation)(**asked)
    return page
