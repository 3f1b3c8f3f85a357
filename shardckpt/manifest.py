"""The manifest and the chunk table: `docs/format.md` in code.

Reads them from untrusted bytes, checks them against each other, and writes them. Refuses to know where they lie, how
the state was collected and how chunks are planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from shardckpt.catalogue import Boxes, Catalogue, File, Spans, Tensor
from shardckpt.checksum import crc32c
from shardckpt.container import MAX_DIMS, parse_json
from shardckpt.dtypes import ITEM_BYTES
from shardckpt.errors import CorruptError, FormatError
from shardckpt.layout import Layout

MANIFEST_PATH = "manifest.json"
VERSION = 1
MAX_MANIFEST_NBYTES = 1 << 30

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class TensorRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor, as stored."""

    name: str
    dtype: str
    shape: list[int]
    aliases: list[str] = []


class FileRecord(msgspec.Struct, forbid_unknown_fields=True):
    """One data file, as stored; `crc32c` is eight hexadecimal digits."""

    path: str
    nbytes: int
    header_nbytes: int
    crc32c: str


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """`manifest.json` without its first line. See `docs/format.md` for the meaning of each field."""

    format: str
    version: int
    writer: str
    created: str
    step: int | None
    world_size: int
    sections: dict[str, str]
    tensors: list[TensorRecord]
    files: list[FileRecord]
    chunk_table: FileRecord
    num_chunks: int
    layout: Layout | None
    objects: msgspec.Raw
    metrics: dict[str, float | None] = {}


@dataclass(frozen=True)
class Stored:
    """A checkpoint as its manifest and chunk table describe it.

    Attributes:
        manifest: Everything but the chunks.
        catalogue: Tensors, files and chunks.
        objects: The non-tensor state, encoded as `docs/format.md` says.
    """

    manifest: Manifest
    catalogue: Catalogue
    objects: Json


def encode_manifest(manifest: Manifest) -> bytes:
    """Give the bytes of `manifest.json`: a first line with the checksum of the rest, then the fields."""
    fields = []
    for field in msgspec.structs.fields(Manifest):
        value = getattr(manifest, field.name)
        if field.name == "metrics" and not value:
            continue
        if isinstance(value, list):
            text = b"[\n  " + b",\n  ".join(msgspec.json.encode(item) for item in value) + b"\n ]"
        else:
            text = msgspec.json.encode(value)
        fields.append(b' "%s": %s' % (field.name.encode(), text))
    body = b",\n".join(fields) + b"\n}\n"
    return b'{"crc32c":"%08x",\n' % crc32c(body) + body


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Read `manifest.json`.

    Raises:
        CorruptError: If it was changed since it was written.
        FormatError: If it is not a manifest, or one of a later version.
    """
    line, _, body = data.partition(b"\n")
    if not (line.startswith(b'{"crc32c":"') and line.endswith(b'",') and len(line) == 21):
        raise FormatError(
            f"{path!r} is no manifest of shardckpt: its first line is not the checksum; name a checkpoint's folder"
        )
    if line[11:19] != b"%08x" % crc32c(body):
        raise CorruptError(
            f"{path!r} is damaged: its checksum is {crc32c(body):08x}, recorded is "
            f"{line[11:19].decode(errors='replace')}. "
            "Restore it from a copy, or use an earlier checkpoint."
        )
    parse_json(b"{" + body, path)  # duplicate keys and deep nesting, which the typed decoder lets pass
    try:
        head = msgspec.json.decode(b"{" + body, type=_Head)
        if head.format != "shardckpt" or head.version != VERSION:
            raise FormatError(
                f"{path!r} has format {head.format!r} version {head.version}; this program reads 'shardckpt' version "
                f"{VERSION}. "
                "Install a newer shardckpt."
            )
        manifest = msgspec.json.decode(b"{" + body, type=Manifest)
    except msgspec.MsgspecError as error:
        raise FormatError(f"{path!r} does not follow the format: {error}. It was not written by shardckpt.") from None
    _check_manifest(manifest, path)
    return manifest


class _Head(msgspec.Struct):
    format: str
    version: int


def stored(manifest: Manifest, table: bytes) -> Stored:
    """Give the checkpoint that a manifest and its chunk table describe, every number checked.

    Raises:
        CorruptError: If the table is not the one that the manifest was written with.
        FormatError: If a number in it is out of range.
    """
    record = manifest.chunk_table
    if len(table) != record.nbytes or f"{crc32c(table):08x}" != record.crc32c:
        raise CorruptError(
            f"{record.path!r} is damaged: expected {record.nbytes} bytes with checksum {record.crc32c}, found "
            f"{len(table)} with "
            f"{crc32c(table):08x}. Restore it from a copy, or use an earlier checkpoint."
        )
    tensors = tuple(Tensor(t.name, t.dtype, tuple(t.shape), tuple(t.aliases)) for t in manifest.tensors)
    files = tuple(File(f.path, f.nbytes, f.header_nbytes, int(f.crc32c, 16)) for f in manifest.files)
    spans, boxes = decode_chunk_table(table, record.path)
    catalogue = Catalogue(tensors, files, spans, boxes)
    _check_chunks(catalogue, record.path)
    if len(spans) + len(boxes) != manifest.num_chunks:
        raise FormatError(
            f"{record.path!r} has {len(spans) + len(boxes)} chunks, the manifest says {manifest.num_chunks}; it was "
            "not written by a sound shardckpt"
        )
    objects: Json = msgspec.json.decode(manifest.objects)
    return Stored(manifest, catalogue, objects)


def _check_manifest(manifest: Manifest, path: str) -> None:
    def refuse(what: str) -> None:
        raise FormatError(f"{path!r} {what}; it was not written by a sound shardckpt")

    names: set[str] = set()
    for tensor in manifest.tensors:
        if tensor.dtype not in ITEM_BYTES:
            refuse(f"gives {tensor.name!r} the unknown dtype {tensor.dtype!r}")
        if len(tensor.shape) > MAX_DIMS or any(not 0 <= n < 1 << 62 for n in tensor.shape):
            refuse(f"gives {tensor.name!r} the shape {tensor.shape}")
        for name in (tensor.name, *tensor.aliases):
            if name in names:
                refuse(f"has two tensors named {name!r}")
            names.add(name)
    if sum(Tensor(t.name, t.dtype, tuple(t.shape)).nbytes for t in manifest.tensors) >= 1 << 62:
        refuse("has tensors of an impossible size")
    paths = [record.path for record in (*manifest.files, manifest.chunk_table)]
    for record in (*manifest.files, manifest.chunk_table):
        if not is_safe_path(record.path):
            refuse(f"names the file {record.path!r}, which may lie outside its folder")
        if not 0 <= record.header_nbytes <= record.nbytes < 1 << 62:
            refuse(f"gives {record.path!r} a size of {record.nbytes} with a header of {record.header_nbytes}")
        if len(record.crc32c) != 8 or not set(record.crc32c) <= set("0123456789abcdef"):
            refuse(f"gives {record.path!r} the checksum {record.crc32c!r}")
    if len(set(paths)) < len(paths):
        refuse("names a file twice")
    if manifest.world_size < 1 or manifest.num_chunks < 0:
        refuse(f"has world size {manifest.world_size} and {manifest.num_chunks} chunks")
    if manifest.world_size != len(manifest.files):
        refuse(f"has {len(manifest.files)} files for a world size of {manifest.world_size}")
    if manifest.layout is not None:
        manifest.layout.check(len(manifest.tensors), path)


def is_safe_path(path: str) -> bool:
    """Tell whether a path stays in its folder on every file system."""
    parts = path.split("/")
    return (
        bool(path)
        and "\\" not in path
        and "\0" not in path
        and ":" not in path
        and not any(p in ("", ".", "..") for p in parts)
    )


# The chunk table ----------------------------------------------------------------------------------------------------

_SPAN_COLUMNS = ("tensor", "start", "stop", "file", "byte_offset", "crc32c")
_BOX_COLUMNS = ("tensor", "offset", "shape", "file", "byte_offset", "crc32c")


def encode_chunk_table(catalogue: Catalogue) -> bytes:
    """Give the bytes of the chunk table; every column takes the narrowest unsigned type that holds it."""
    spans, boxes = catalogue.spans, catalogue.boxes
    columns: dict[str, NDArray[np.int64]] = {
        "span.tensor": spans.tensor,
        "span.start": spans.start,
        "span.stop": spans.stop,
        "span.file": spans.file,
        "span.byte_offset": spans.byte_offset,
        "span.crc32c": spans.crc,
        "box.tensor": boxes.tensor,
        "box.offset": boxes.offset,
        "box.shape": boxes.shape,
        "box.file": boxes.file,
        "box.byte_offset": boxes.byte_offset,
        "box.crc32c": boxes.crc,
    }
    return safetensors_numpy.save({name: _narrow(column) for name, column in columns.items()})


def _narrow(column: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
    largest = int(column.max(initial=0))
    return column.astype(next(t for t in (np.uint8, np.uint16, np.uint32, np.uint64) if largest <= np.iinfo(t).max))


def decode_chunk_table(data: bytes, path: str) -> tuple[Spans, Boxes]:
    """Read a chunk table; its numbers are not yet checked against tensors and files.

    Raises:
        FormatError: If columns are missing, of another kind, or not equally long.
    """
    try:
        columns = safetensors_numpy.load(data)
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise FormatError(f"{path!r} is no chunk table: {error}. Restore it from a copy.") from None
    wanted = [f"span.{c}" for c in _SPAN_COLUMNS] + [f"box.{c}" for c in _BOX_COLUMNS]
    if set(columns) != set(wanted):
        raise FormatError(
            f"{path!r} has columns {sorted(columns)}, expected {sorted(wanted)}; it was not written by shardckpt"
        )
    wide: dict[str, NDArray[np.int64]] = {}
    for name in wanted:
        column = columns[name]
        dims = 2 if name in ("box.offset", "box.shape") else 1
        rows = len(columns[name.split(".")[0] + ".tensor"]) if columns[name].ndim else -1
        if column.dtype.kind != "u" or column.ndim != dims or len(column) != rows or column.max(initial=0) >= 1 << 62:
            raise FormatError(f"{path!r} has a malformed column {name!r}; it was not written by shardckpt")
        wide[name] = column.astype(np.int64)
    if wide["box.offset"].shape != wide["box.shape"].shape or wide["box.shape"].shape[1] > MAX_DIMS:
        raise FormatError(f"{path!r} has box offsets and shapes of no sound width; it was not written by shardckpt")
    return (
        Spans(*(wide[f"span.{column}"] for column in _SPAN_COLUMNS)),
        Boxes(*(wide[f"box.{column}"] for column in _BOX_COLUMNS)),
    )


def _check_chunks(catalogue: Catalogue, path: str) -> None:
    """Check that every chunk names a tensor and a file, lies in both, and carries a checksum."""

    def refuse(what: str) -> None:
        raise FormatError(f"{path!r} {what}; it was not written by a sound shardckpt")

    spans, boxes = catalogue.spans, catalogue.boxes
    num_tensors, num_files = len(catalogue.tensors), len(catalogue.files)
    for column, limit in (
        (spans.tensor, num_tensors),
        (boxes.tensor, num_tensors),
        (spans.file, num_files),
        (boxes.file, num_files),
    ):
        if (column >= limit).any():
            refuse(f"names tensor or file number {int(column.max())} of {limit}")
    numel = np.array([tensor.numel for tensor in catalogue.tensors], np.int64)
    bad_spans = (spans.start >= spans.stop) | (spans.stop > numel[spans.tensor])
    dims = _padded_shapes(catalogue, boxes.offset.shape[1])[boxes.tensor]
    ndim = np.array([len(tensor.shape) for tensor in catalogue.tensors], np.int64)
    bad_boxes = ((boxes.shape < 1) | (boxes.offset + boxes.shape > dims)).any(axis=1)
    bad_boxes |= ndim[boxes.tensor] > boxes.shape.shape[1]
    if (outside := np.flatnonzero(np.concatenate([bad_spans, bad_boxes]))).size:
        refuse(f"has a chunk outside its tensor: {catalogue.describe(int(outside[0]))}")
    begin = np.array([file.header_nbytes for file in catalogue.files], np.int64)
    size = np.array([file.nbytes for file in catalogue.files], np.int64)
    at, file = catalogue.chunk_byte_offset, catalogue.chunk_file
    if (outside := np.flatnonzero((at < begin[file]) | (at + catalogue.chunk_nbytes > size[file]))).size:
        refuse(f"has a chunk outside its file: {catalogue.describe(int(outside[0]))}")
    if (catalogue.chunk_crc >= 1 << 32).any():
        refuse("has a checksum of more than 32 bits")


def _padded_shapes(catalogue: Catalogue, width: int) -> NDArray[np.int64]:
    """Shapes of all tensors, trailing dims 1 up to `width`; a tensor of more dims than that can have no box."""
    rows = [tensor.shape if len(tensor.shape) <= width else (0,) * width for tensor in catalogue.tensors]
    return np.array([(*row, *(1,) * (width - len(row))) for row in rows], np.int64).reshape(len(rows), width)


def sections_of(names: Mapping[str, str], kind: str) -> list[str]:
    """Give the top-level keys whose state is of this kind ("module", "optimizer", "state", "value")."""
    return [section for section, found in names.items() if found == kind]
