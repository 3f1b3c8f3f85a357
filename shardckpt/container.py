"""One data file: a safetensors header and the bytes behind it.

Knows how a header is read from untrusted bytes and how one is laid out; refuses to know what the tensors are for.
A safetensors file is: 8 bytes little-endian length N, N bytes of JSON, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from shardckpt.catalogue import Catalogue
from shardckpt.dtypes import ITEM_BYTES
from shardckpt.errors import FormatError
from shardckpt.storage import Reader

MAX_HEADER_NBYTES = 100_000_000
"""The limit of the safetensors format itself."""

MAX_DIMS = 64
"""As many as torch and NumPy allow; more would make products of sizes costly to refuse."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a data file; `begin` is in bytes from the start of the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a data file says of itself."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str]
    nbytes: int  # bytes before the first tensor


@dataclass(frozen=True, slots=True)
class FileSet:
    """Data files that are laid out but not yet written: `catalogue.files[i]` begins with `headers[i]`."""

    catalogue: Catalogue
    headers: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files, headers included."""
        return sum(file.nbytes for file in self.catalogue.files)


def read_header(reader: Reader) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        FormatError: If it is no safetensors file, or truncated, or its header and size do not agree.
    """
    if reader.nbytes < 8:
        raise FormatError(f"{reader.path!r} has {reader.nbytes} bytes, too few for a safetensors file. {_AGAIN}")
    start = reader.read(0, min(64, reader.nbytes))
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_NBYTES or start[8:9] not in (b"{", b""):
        raise FormatError(f"{reader.path!r} is no safetensors file; {_sniff(start)}. {_AGAIN}")
    if 8 + length > reader.nbytes:
        raise FormatError(
            f"{reader.path!r} is truncated: its header has {length} bytes, the file {reader.nbytes}. {_AGAIN}"
        )
    entries, metadata = _parse(reader.read(8, length), reader.path, 8 + length)
    _check_extents(entries, reader, 8 + length)
    return Header(entries, metadata, 8 + length)


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, list[int]]:
    """Lay out a file.

    Args:
        tensors: (key, dtype, shape) of each, in the order of their bytes.
        metadata: Free text of the file.

    Returns:
        The bytes before the first tensor (a multiple of 8), and where each tensor begins in the file.
    """
    fields: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    position, begins = 0, []
    for key, dtype, shape in tensors:
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        fields[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        begins.append(position)
        position += nbytes
    text = msgspec.json.encode(fields)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_NBYTES:
        raise FormatError(
            f"a header of {len(text)} bytes is over the {MAX_HEADER_NBYTES} that safetensors allows; write more, "
            "smaller files"
        )
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + begin for begin in begins]


def parse_json(text: bytes, path: str) -> object:
    """Parse JSON from an untrusted file: duplicate keys, deep nesting and bad text are a `FormatError`."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise FormatError(f"{path!r} has a duplicate key in its JSON; it was not written by a sound tool")
        "".join(result).encode()  # a lone surrogate is a ValueError
        return result

    try:
        parsed: object = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path!r} is damaged: its JSON cannot be read ({error}). {_AGAIN}") from None
    return parsed


def _parse(text: bytes, path: str, data_begin: int) -> tuple[tuple[Entry, ...], dict[str, str]]:
    fields = parse_json(text, path)
    if not isinstance(fields, dict):
        raise FormatError(f"the header of {path!r} is no JSON object; it is no safetensors file. {_AGAIN}")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"the metadata of {path!r} is not text by text; it is no safetensors file. {_AGAIN}")
    return tuple(_entry(key, value, path, data_begin) for key, value in fields.items()), metadata


def _entry(key: str, value: object, path: str, data_begin: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if len(
            shape
        ) <= MAX_DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in [*shape, begin, end]):
            if dtype not in ITEM_BYTES:
                raise FormatError(
                    f"{key!r} in {path!r} has the unknown dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}"
                )
            nbytes = math.prod(shape) * ITEM_BYTES[dtype]
            if end - begin != nbytes:
                raise FormatError(
                    f"{key!r} in {path!r} has {end - begin} bytes where dtype {dtype} and shape {tuple(shape)} need "
                    f"{nbytes}; the file is damaged. {_AGAIN}"
                )
            return Entry(key, dtype, tuple(shape), data_begin + begin, nbytes)
    raise FormatError(
        f"the header entry {key!r} of {path!r} is malformed; the file is damaged or no safetensors file. {_AGAIN}"
    )


def _check_extents(entries: tuple[Entry, ...], reader: Reader, data_begin: int) -> None:
    """Check that the tensors fill the file without gap or overlap."""
    position = data_begin
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.nbytes)):
        if entry.begin != position:
            raise FormatError(
                f"{entry.key!r} in {reader.path!r} begins at byte {entry.begin}, expected {position}: tensors overlap "
                f"or leave a gap; the file is damaged. {_AGAIN}"
            )
        position += entry.nbytes
    if position != reader.nbytes:
        state = "truncated" if reader.nbytes < position else "longer than its header says"
        raise FormatError(f"{reader.path!r} is {state}: expected {position} bytes, found {reader.nbytes}. {_AGAIN}")


_AGAIN = "Restore it from a copy, or fetch it again."

_SIGNATURES = (
    (b"PK\x03\x04", "it looks like a zip archive (perhaps a torch.save file)"),
    (b"\x80\x02", "it looks like a pickle"),
    (b"\x80\x04", "it looks like a pickle"),
    (b"version https://git-lfs", "it is a Git LFS pointer: fetch the real file with `git lfs pull`"),
    (b"<!DOCTYPE", "it is an HTML page: a download went wrong"),
    (b"<html", "it is an HTML page: a download went wrong"),
    (b"\0" * 8, "it begins with zeros: it was not written to the end"),
)


def _sniff(start: bytes) -> str:
    """Say what a file that is no safetensors file may be."""
    for signature, meaning in _SIGNATURES:
        if start.startswith(signature):
            return meaning
    return "its first bytes are no safetensors header; it is damaged or of another format"
