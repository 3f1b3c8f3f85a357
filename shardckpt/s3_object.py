"""One object of S3 and the requests about it.

Knows what each request carries and how its outcome is proved; refuses to know how a file is cut into parts.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from botocore.exceptions import ClientError, IncompleteReadError

from shardckpt.checksum import crc32c
from shardckpt.errors import CheckpointNotFoundError, StorageError
from shardckpt.s3_client import Client, S3Connection, error_code, sends_checksums
from shardckpt.store import Bytes, not_whole, taken

T = TypeVar("T")

_MARK = "shardckpt-write"
"""Metadata key of a random value, by which a writer knows its own object from an older one or another's."""

_READ_BYTES = 64 << 10
"""Taken from the socket at a time; the clock is looked at in between."""

_NUM_SLOW_READS = 3
"""A read may take this part of the deadline: a new connection may be quicker than one that drips."""

_ABORT_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Head:
    """What the server says of an object.

    Attributes:
        nbytes: Its size.
        etag: Changes when it is replaced.
        mark: Of the write that made it; "" if it is not ours.
    """

    nbytes: int
    etag: str
    mark: str


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """A part that the server has.

    Attributes:
        number: From 1.
        etag: What the server calls it.
        checksum: CRC-32C as S3 writes it; None if none was sent, or the server tells none of what it copied.
    """

    number: int
    etag: str
    checksum: str | None

    @property
    def crc(self) -> int | None:
        """The checksum as a number."""
        return None if self.checksum is None else int.from_bytes(base64.b64decode(self.checksum), "big")


class Stream(Protocol):
    """The body of an answer."""

    def readinto(self, b: memoryview) -> int:
        """Fill `b` from the front; gives how much, 0 at the end."""

    def close(self) -> None:
        """Let go of the connection."""


class S3Object:
    """One key in one bucket, whether there is an object or not."""

    def __init__(self, connection: S3Connection, bucket: str, key: str, path: str) -> None:
        self.path = path
        self._connection = connection
        self._at = {"Bucket": bucket, "Key": key}

    @property
    def location(self) -> dict[str, str]:
        """Bucket and key."""
        return self._at

    def replaced(self) -> StorageError:
        """Give the error for an object that is no longer the one that was opened."""
        return self._failed("was replaced while it was read; open the checkpoint again")

    def head(self) -> Head:
        """Give size and identity; raises `CheckpointNotFoundError` if there is no object."""
        found = self._run("find", lambda client: client.head_object(**self._at))
        return Head(int(found["ContentLength"]), str(found["ETag"]), str(found.get("Metadata", {}).get(_MARK, "")))

    def read_into(self, byte_offset: int, out: Bytes, etag: str) -> None:
        """Fill all of `out` from the object that was `etag` when it was opened."""
        wanted = f"bytes {byte_offset}-{byte_offset + len(out) - 1}/"
        limit_s = self._connection.deadline_s / _NUM_SLOW_READS

        def request(client: Client) -> None:
            answer = client.get_object(**self._at, Range=wanted.rstrip("/").replace(" ", "="))
            with contextlib.closing(answer["Body"]) as body:
                if answer["ETag"] != etag:
                    raise self.replaced()
                if not (found := str(answer.get("ContentRange", ""))).startswith(wanted):
                    raise self._failed(
                        f"was asked for {wanted[:-1]!r} and answered {found!r}; this server serves no ranges"
                    )
                _fill(out.data, body, limit_s)

        self._run("read", request)

    def put(self, data: bytes, *, is_new: bool = False) -> None:
        """Write the object in one request; with `is_new` only if there is none."""
        mark = secrets.token_hex(16)

        def request(client: Client) -> None:
            checksum = {"ChecksumCRC32C": _checksum(data)} if sends_checksums(client) else {}
            put = functools.partial(client.put_object, **self._at, Body=data, Metadata={_MARK: mark}, **checksum)
            if not is_new:
                put()
                return
            try:
                put(IfNoneMatch="*")
            except ClientError as error:
                match error_code(error):
                    case "PreconditionFailed":
                        # An earlier attempt may have come through: what is there then bears our mark.
                        if self.head().mark != mark:
                            raise taken(self.path) from error
                    case "NotImplemented":  # this server knows no conditions
                        put()
                    case _:
                        raise

        self._run("write", request)
        self._confirm(len(data), mark)

    def delete(self) -> None:
        """Remove the object; none is no error."""
        self._run("delete", lambda client: client.delete_object(**self._at))

    # Uploads in parts

    def start_upload(self, mark: str) -> str:
        """Begin an upload and give its id."""
        num_attempts = 0

        def request(client: Client) -> str:
            nonlocal num_attempts
            num_attempts += 1
            checksum = {"ChecksumAlgorithm": "CRC32C"} if sends_checksums(client) else {}
            return str(client.create_multipart_upload(**self._at, Metadata={_MARK: mark}, **checksum)["UploadId"])

        upload = self._run("create", request)
        if num_attempts > 1:  # the server may have begun others, whose answers were lost
            self._abort_others(upload)
        return upload

    def upload_part(self, upload: str, number: int, body: bytearray) -> UploadedPart:
        """Send one part."""

        def request(client: Client) -> UploadedPart:
            checksum = _checksum(body) if sends_checksums(client) else None
            sent = {"ChecksumCRC32C": checksum} if checksum else {}
            answer = client.upload_part(**self._at, UploadId=upload, PartNumber=number, Body=body, **sent)
            return UploadedPart(number, str(answer["ETag"]), checksum)

        return self._run(f"write part {number} of", request)

    def copy_part(
        self, upload: str, number: int, source: S3Object, etag: str, *, byte_offset: int, nbytes: int
    ) -> UploadedPart:
        """Let the server take one part from the object that was `etag` when it was opened."""
        wanted = f"bytes={byte_offset}-{byte_offset + nbytes - 1}"
        copied = {"CopySource": source.location, "CopySourceRange": wanted, "CopySourceIfMatch": etag}

        def request(client: Client) -> UploadedPart:
            try:
                answer = client.upload_part_copy(**self._at, UploadId=upload, PartNumber=number, **copied)
            except ClientError as error:
                match error_code(error):
                    case "PreconditionFailed" | "NoSuchKey":
                        raise source.replaced() from error
                    case "NotImplemented":
                        raise self._failed(
                            "cannot be made of parts that the server copies: this server does not know "
                            "UploadPartCopy; set the storage option part_copies=false"
                        ) from error
                raise
            found = answer["CopyPartResult"]
            return UploadedPart(number, str(found["ETag"]), found.get("ChecksumCRC32C"))

        return self._run(f"copy part {number} of", request)

    def complete_upload(self, upload: str, parts: Sequence[UploadedPart], *, nbytes: int, mark: str) -> None:
        """Make the object of its parts, in order, and prove that it is there."""
        listed = [
            {
                "PartNumber": part.number,
                "ETag": part.etag,
                **({"ChecksumCRC32C": part.checksum} if part.checksum else {}),
            }
            for part in parts
        ]

        def request(client: Client) -> None:
            # An earlier attempt may have come through, and the upload be gone: what is there decides.
            with _suppressed("NoSuchUpload"):
                client.complete_multipart_upload(**self._at, UploadId=upload, MultipartUpload={"Parts": listed})

        self._run("complete", request)
        self._confirm(nbytes, mark)

    def abort_upload(self, upload: str) -> None:
        """Drop an upload and its parts; one that is gone is no error.

        Does nothing once this could not be done for another: a server out of reach would cost as much time for each.
        """
        if self._connection.is_out_of_reach:
            return

        def request(client: Client) -> None:
            with _suppressed("NoSuchUpload"):
                client.abort_multipart_upload(**self._at, UploadId=upload)

        try:
            self._connection.run(
                "abort the upload of",
                self.path,
                request,
                deadline_s=min(_ABORT_DEADLINE_S, self._connection.deadline_s),
            )
        except StorageError:
            self._connection.is_out_of_reach = True
            raise

    def _abort_others(self, upload: str) -> None:
        """Drop all uploads of this very object but one: a file has one writer."""
        asked = {"Bucket": self._at["Bucket"], "Prefix": self._at["Key"]}
        with contextlib.suppress(StorageError):  # who may not list uploads can still write
            found = self._run("list the uploads of", lambda client: client.list_multipart_uploads(**asked))
            for item in found.get("Uploads", []):
                if item["Key"] == self._at["Key"] and item["UploadId"] != upload:
                    self.abort_upload(item["UploadId"])

    # How

    def _run(self, action: str, request: Callable[[Client], T]) -> T:
        return self._connection.run(action, self.path, request)

    def _confirm(self, nbytes: int, mark: str) -> None:
        """Refuse unless the server has what was written: success is decided by what is there."""
        try:
            found = self.head()
        except CheckpointNotFoundError:
            found = Head(0, "", mark)
        if found.mark != mark:
            raise self._failed("was replaced by another writer while it was written; let only one save write there")
        if found.nbytes != nbytes:
            raise not_whole(self.path, nbytes, found.nbytes)

    def _failed(self, what: str) -> StorageError:
        error = StorageError(f"{self.path!r} {what}")
        error.path = self.path
        return error


def _fill(out: memoryview, body: Stream, limit_s: float) -> None:
    """Fill `out` from a body that has as much."""
    done, started = 0, time.monotonic()
    while done < len(out):
        if time.monotonic() - started > limit_s:
            raise TimeoutError(f"only {done} of {len(out)} bytes came within {limit_s:.0f} s")
        count = body.readinto(out[done : done + _READ_BYTES])
        if not count:
            raise IncompleteReadError(actual_bytes=done, expected_bytes=len(out))
        done += count


def _checksum(data: bytes | bytearray) -> str:
    """Give the CRC-32C as S3 writes it."""
    return base64.b64encode(crc32c(np.frombuffer(data, np.uint8)).to_bytes(4, "big")).decode()


@contextlib.contextmanager
def _suppressed(code: str) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        if error_code(error) != code:
            raise
