"""Tests of the manifest and the chunk table: they come back as written, and nothing hostile or damaged passes."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save

from shardckpt.catalogue import Boxes, Catalogue, CatalogueBuilder, File, Spans, Tensor
from shardckpt.checksum import crc32c
from shardckpt.errors import CorruptError, FormatError
from shardckpt.layout import Bucket, Layout
from shardckpt.manifest import (
    FileRecord,
    Manifest,
    Stored,
    TensorRecord,
    decode_chunk_table,
    decode_manifest,
    encode_chunk_table,
    encode_manifest,
    is_safe_path,
    sections_of,
    stored,
)
from shardckpt.region import Box, Span

OBJECTS = {"optimizer": {"param_groups": [{"lr": 1.0, "params": []}], "n": {"$int": "99999999999999999999"}}, "k": None}


def catalogue() -> Catalogue:
    """Give three tensors in two files, as spans and boxes."""
    builder = CatalogueBuilder()
    builder.add_tensor(Tensor("model.a", "F32", (6,), ("model.tied",)))
    builder.add_tensor(Tensor("model.b", "BF16", (2, 3, 4)))
    builder.add_tensor(Tensor("model.c", "I64", ()))
    builder.add_file(File("shard-0.safetensors", 100, 8, 0x0000ABCD))
    builder.add_file(File("shard-1.safetensors", 100, 16, 0xFFFFFFFF))
    builder.add_chunk(0, Span(0, 6), file=0, byte_offset=8, crc=7)
    builder.add_chunk(2, Span(0, 1), file=1, byte_offset=16, crc=0xFFFFFFFF)
    builder.add_chunk(1, Box((0, 0, 0), (2, 1, 4)), file=0, byte_offset=32, crc=8)
    builder.add_chunk(1, Box((0, 1, 0), (2, 2, 4)), file=1, byte_offset=24, crc=9)
    return builder.build()


def manifest(found: Catalogue, table: bytes) -> Manifest:
    """Give the manifest of a catalogue and its table."""
    return Manifest(
        format="shardckpt",
        version=1,
        writer="shardckpt test",
        created="2026-01-01T00:00:00Z",
        step=5,
        world_size=len(found.files),
        sections={"model": "module", "optimizer": "optimizer", "k": "value"},
        tensors=[TensorRecord(t.name, t.dtype, list(t.shape), list(t.aliases)) for t in found.tensors],
        files=[FileRecord(f.path, f.nbytes, f.header_nbytes, f"{f.crc:08x}") for f in found.files],
        chunk_table=FileRecord("chunks.safetensors", len(table), 0, f"{crc32c(table):08x}"),
        num_chunks=len(found.chunk_nbytes),
        layout=Layout([Bucket(4, [6], [1], [[0]])], [1, 2]),
        objects=msgspec.Raw(msgspec.json.encode(OBJECTS)),
    )


def encoded() -> tuple[bytes, bytes]:
    """Give sound bytes of a manifest and a table."""
    table = encode_chunk_table(catalogue())
    return encode_manifest(manifest(catalogue(), table)), table


def forged(change: Callable[[dict], object]) -> bytes:
    """Give a manifest whose fields were changed by someone who knows how to put the checksum right."""
    fields = json.loads(encoded()[0])
    del fields["crc32c"]
    change(fields)
    body = json.dumps(fields).encode()[1:]
    return b'{"crc32c":"%08x",\n' % crc32c(body) + body


def test_a_checkpoint_comes_back_as_it_was_written() -> None:
    """Every field, every chunk and the objects, with types."""
    data, table = encoded()
    found = decode_manifest(data, "m")
    assert found == manifest(catalogue(), table)
    whole = stored(found, table)
    assert whole.objects == OBJECTS
    assert type(whole.objects["optimizer"]["param_groups"][0]["lr"]) is float  # type: ignore[index,call-overload]
    assert (whole.catalogue.tensors, whole.catalogue.files) == (catalogue().tensors, catalogue().files)
    for mine, theirs in ((whole.catalogue.spans, catalogue().spans), (whole.catalogue.boxes, catalogue().boxes)):
        for column in dataclasses.fields(mine):
            assert getattr(mine, column.name).tolist() == getattr(theirs, column.name).tolist()


def test_the_manifest_is_one_json_object_that_people_can_read() -> None:
    """Any JSON tool reads it; a tensor or file has a line of its own."""
    data, table = encoded()
    fields = json.loads(data)
    assert fields["tensors"][0] == {"name": "model.a", "dtype": "F32", "shape": [6], "aliases": ["model.tied"]}
    assert fields["tensors"][2] == {"name": "model.c", "dtype": "I64", "shape": []}
    assert fields["objects"] == OBJECTS
    assert b'\n  {"name":"model.b"' in data
    assert load(table)["span.tensor"].dtype == np.uint8


def test_sections_are_found_by_kind() -> None:
    """Sections of a kind are listed in order."""
    assert sections_of({"a": "module", "o": "optimizer", "b": "module"}, "module") == ["a", "b"]


def test_a_flipped_bit_anywhere_is_found() -> None:
    """Each byte of manifest and table is under a checksum."""
    data, table = encoded()
    good = decode_manifest(data, "m")
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(
            FormatError, match=r"'m' is damaged: .*Restore it|'m' is no manifest .* name a checkpoint's"
        ):
            decode_manifest(bytes(damaged), "m")
    for position in range(len(table)):
        damaged = bytearray(table)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CorruptError, match=r"'chunks.safetensors' is damaged: expected .*Restore it from a copy"):
            stored(good, bytes(damaged))


@pytest.mark.parametrize("cut", [0, 1, 20, 21, 22, 100, -1])
def test_a_truncated_manifest_is_refused(cut: int) -> None:
    """At the first line or later, a manifest that ends early is damaged."""
    with pytest.raises(FormatError, match="'m' is"):
        decode_manifest(encoded()[0][:cut], "m")


@pytest.mark.parametrize("table", [b"", encoded()[1][:-1], encoded()[1] + b"\0"])
def test_a_table_of_another_size_is_refused(table: bytes) -> None:
    """The message shows both sizes."""
    with pytest.raises(CorruptError, match=rf"expected {len(encoded()[1])} bytes .*, found {len(table)} with"):
        stored(decode_manifest(encoded()[0], "m"), table)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": 1}\n', b"\0" * 100, b"PK\x03\x04" * 30])
def test_a_foreign_file_is_no_manifest(content: bytes) -> None:
    """The message says to name a checkpoint's folder."""
    with pytest.raises(FormatError, match=r"'m' is no manifest of shardckpt: .*name a checkpoint's folder"):
        decode_manifest(content, "m")


@pytest.mark.parametrize(("name", "value"), [("version", 2), ("version", 0), ("format", "other")])
def test_another_version_says_to_install_a_newer_program(name: str, value: object) -> None:
    """A later version is told apart from damage, even if it has fields that are not known here."""
    data = forged(lambda fields: fields.update({name: value, "future": 1}))
    with pytest.raises(FormatError, match=rf"has format .*{value}.*reads 'shardckpt' version 1. Install a newer"):
        decode_manifest(data, "m")


FIELDS = [field.name for field in msgspec.structs.fields(Manifest)]


def test_metrics_may_be_missing_or_null() -> None:
    """A checkpoint without metrics has none; a number that was not finite is null."""
    assert decode_manifest(forged(lambda fields: fields.pop("metrics", None)), "m").metrics == {}
    metrics = {"loss": 0.5, "accuracy": None}
    assert decode_manifest(forged(lambda fields: fields.update(metrics=metrics)), "m").metrics == metrics


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "metrics"])
def test_a_missing_field_is_named(name: str) -> None:
    """Every field but the metrics is required."""
    with pytest.raises(FormatError, match=f"'m' does not follow the format: .*`{name}`.*not written by shardckpt"):
        decode_manifest(forged(lambda fields: fields.pop(name)), "m")


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "objects"])
def test_a_field_of_another_type_is_named(name: str) -> None:
    """A value of the wrong JSON type is refused, with its place."""
    with pytest.raises(FormatError, match=rf"does not follow the format: Expected .*at `\$.{name}"):
        decode_manifest(forged(lambda fields: fields.update({name: 1.5})), "m")


@pytest.mark.parametrize("inner", ["tensors", "files", "chunk_table"])
def test_missing_and_unknown_inner_fields_are_named(inner: str) -> None:
    """Also in the records of tensors and files, no field may lack or be added."""

    def record(fields: dict) -> dict:
        return fields[inner] if inner == "chunk_table" else fields[inner][1]

    for name in record(json.loads(encoded()[0])):
        with pytest.raises(FormatError, match=f"missing required field `{name}`.*{inner}"):
            decode_manifest(forged(lambda fields, name=name: record(fields).pop(name)), "m")
    with pytest.raises(FormatError, match=f"unknown field `more`.*{inner}"):
        decode_manifest(forged(lambda fields: record(fields).update(more=1)), "m")


def tensor(**change: object) -> Callable[[dict], object]:
    """Change the record of the first tensor."""
    return lambda fields: fields["tensors"][0].update(change)


def file(**change: object) -> Callable[[dict], object]:
    """Change the record of the first file."""
    return lambda fields: fields["files"][0].update(change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (tensor(dtype="F33"), "gives 'model.a' the unknown dtype 'F33'"),
        (tensor(shape=[-1]), r"gives 'model.a' the shape \[-1\]"),
        (tensor(shape=[1 << 62]), "gives 'model.a' the shape"),
        (tensor(shape=[1] * 65), "gives 'model.a' the shape"),
        (tensor(shape=[1 << 31, 1 << 31]), "has tensors of an impossible size"),
        (tensor(name="model.b"), "has two tensors named 'model.b'"),
        (tensor(aliases=["model.b"]), "has two tensors named 'model.b'"),
        (tensor(aliases=["x", "x"]), "has two tensors named 'x'"),
        (file(nbytes=-1), r"gives 'shard-0.safetensors' a size of -1 with a header of 8"),
        (file(nbytes=7), r"gives 'shard-0.safetensors' a size of 7 with a header of 8"),
        (file(nbytes=1 << 62), "gives 'shard-0.safetensors' a size of"),
        (file(header_nbytes=-8), "with a header of -8"),
        (file(crc32c="123"), "gives 'shard-0.safetensors' the checksum '123'"),
        (file(crc32c="0000000G"), "the checksum '0000000G'"),
        (file(crc32c="0000ABCD"), "the checksum '0000ABCD'"),
        (file(path="shard-1.safetensors"), "names a file twice"),
        (file(path="chunks.safetensors"), "names a file twice"),
        (lambda fields: fields.update(world_size=0), "has world size 0 and 4 chunks"),
        (lambda fields: fields.update(num_chunks=-1), "has world size 2 and -1 chunks"),
        (lambda fields: fields["layout"].update(replicated=[1]), "the layout in 'm' does not place each of 3 tensors"),
        (lambda fields: fields["layout"].update(replicated=[1, 2, 2]), "does not place each of 3 tensors"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(change: Callable[[dict], object], text: str) -> None:
    """What JSON types cannot say is checked by hand, and told with the name of what is wrong."""
    with pytest.raises(FormatError, match=rf"'m' {text}.*sound shardckpt|{text}.*sound shardckpt"):
        decode_manifest(forged(change), "m")


ESCAPES = ["", "/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", ".", "..", "a\\b", "C:x", "a\0b", "a/", "s3://b/x"]


@pytest.mark.parametrize("path", ESCAPES)
def test_a_path_out_of_the_folder_is_refused(path: str) -> None:
    """No file outside of a checkpoint's folder is ever named by its manifest."""
    for change in (file(path=path), lambda fields: fields["chunk_table"].update(path=path)):
        with pytest.raises(FormatError, match="which may lie outside its folder; it was not written by a sound"):
            decode_manifest(forged(change), "m")


@pytest.mark.parametrize("path", ["a", "a.b", "...", "a/b/c", " ", "ü", "-", "a..b"])
def test_paths_in_the_folder_are_allowed(path: str) -> None:
    """Odd names that stay inside are no reason to refuse."""
    assert is_safe_path(path)


def test_duplicate_keys_and_deep_nesting_are_refused() -> None:
    """What JSON parsers disagree on is not let in."""
    good = encoded()[0].partition(b"\n")[2]
    deep = good.replace(b'"k":null', b'"k":' + b"[" * 50_000 + b"]" * 50_000)
    for body, text in (
        (good.replace(b'"n":', b'"param_groups":'), "duplicate key in its JSON; it was not written by a sound tool"),
        (b'"crc32c": 1, "crc32c": 2, ' + good, "duplicate key"),
        (deep, "its JSON cannot be read .*Restore it from a copy"),
    ):
        assert body != good
        with pytest.raises(FormatError, match=text):
            decode_manifest(b'{"crc32c":"%08x",\n' % crc32c(body) + body, "m")


def test_huge_counts_take_no_memory() -> None:
    """Numbers from a file are compared with what is there before anything of that size is made."""
    data = forged(lambda fields: fields.update(num_chunks=1 << 62))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="has 2 files for a world size of 4611686018427387904"):
            decode_manifest(forged(lambda fields: fields.update(world_size=1 << 62)), "m")
        found = decode_manifest(data, "m")
        with pytest.raises(FormatError, match="has 4 chunks, the manifest says 4611686018427387904"):
            stored(found, encoded()[1])
        wide = changed_table(
            {"box.offset": np.zeros((0, 1 << 40), np.uint8), "box.shape": np.zeros((0, 1 << 40), np.uint8)}
        )
        none = {f"box.{column}": np.zeros(0, np.uint8) for column in ("tensor", "file", "byte_offset", "crc32c")}
        with pytest.raises(FormatError, match="no sound width"):
            decode_chunk_table(save({**load(wide), **none}), "t")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# The chunk table ----------------------------------------------------------------------------------------------------


def changed_table(change: dict[str, NDArray[np.generic]]) -> bytes:
    """Give a table with some columns replaced."""
    return save({**load(encode_chunk_table(catalogue())), **change})


def opened(table: bytes) -> Stored:
    """Open a table with a manifest that vouches for it."""
    return stored(manifest(catalogue(), table), table)


COLUMNS = sorted(load(encode_chunk_table(catalogue())))


@pytest.mark.parametrize("name", COLUMNS)
def test_a_malformed_column_is_named(name: str) -> None:
    """A column that lacks, has another type, another length or absurd numbers is refused."""
    columns = load(encode_chunk_table(catalogue()))
    good = columns[name]
    for bad in (good.astype(np.int64), good.astype(np.float32), good[:1], good[None], np.array(0, np.uint8)):
        with pytest.raises(FormatError, match=r"'t' has a malformed column '.*'; it was not written by shardckpt"):
            decode_chunk_table(save({**columns, name: np.ascontiguousarray(bad)}), "t")
    with pytest.raises(FormatError, match=f"'t' has a malformed column '{name}'; it was not written by shardckpt"):
        decode_chunk_table(save({**columns, name: np.full(good.shape, 1 << 62, np.uint64)}), "t")
    del columns[name]
    with pytest.raises(FormatError, match=r"'t' has columns \[.*\], expected \[.*; it was not written by shardckpt"):
        decode_chunk_table(save(columns), "t")


@pytest.mark.parametrize(
    "content", [b"", b"12345678", b"PK\x03\x04" * 8, bytes(64), encode_chunk_table(catalogue())[:-1]]
)
def test_what_is_no_table_is_refused(content: bytes) -> None:
    """Foreign and cut bytes are a FormatError."""
    with pytest.raises(FormatError, match=r"'t' is no chunk table: .*Restore it from a copy"):
        decode_chunk_table(content, "t")


def column(*values: int) -> NDArray[np.uint64]:
    """Give a column of the widest type."""
    return np.array(values, np.uint64)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"span.tensor": column(0, 3)}, "names tensor or file number 3 of 3"),
        ({"box.tensor": column(1, 3)}, "names tensor or file number 3 of 3"),
        ({"span.file": column(0, 2)}, "names tensor or file number 2 of 2"),
        ({"box.file": column(0, 2)}, "names tensor or file number 2 of 2"),
        ({"span.stop": column(7, 1)}, r"outside its tensor: elements \[0, 7\) of 'model.a'"),
        ({"span.start": column(6, 0)}, r"outside its tensor: elements \[6, 6\)"),
        ({"span.start": column(0, 1)}, r"outside its tensor: elements \[1, 1\) of 'model.c'"),
        ({"box.shape": np.array([[2, 1, 4], [2, 3, 4]], np.uint8)}, r"outside its tensor: box at \(0, 1, 0\)"),
        ({"box.shape": np.array([[2, 1, 4], [2, 0, 4]], np.uint8)}, "outside its tensor: box at"),
        ({"box.offset": np.array([[0, 0, 1], [0, 1, 0]], np.uint8)}, "outside its tensor: box at"),
        (
            {"box.offset": np.zeros((2, 2), np.uint8), "box.shape": np.ones((2, 2), np.uint8)},
            "outside its tensor: box at",
        ),
        (
            {"box.offset": np.zeros((2, 0), np.uint8), "box.shape": np.ones((2, 0), np.uint8)},
            "outside its tensor: box at",
        ),
        (
            {"box.offset": np.zeros((2, 4), np.uint8), "box.shape": np.full((2, 4), 2, np.uint8)},
            "outside its tensor: box at",
        ),
        ({"span.byte_offset": column(7, 16)}, r"outside its file: elements .* in 'shard-0.safetensors'"),
        ({"span.byte_offset": column(77, 16)}, "outside its file: elements"),
        ({"span.byte_offset": column((1 << 62) - 1, 16)}, "outside its file: elements"),
        ({"box.byte_offset": column(32, 15)}, r"outside its file: box at .* in 'shard-1.safetensors'"),
        ({"span.crc32c": column(1 << 32, 0)}, "has a checksum of more than 32 bits"),
    ],
)
def test_a_chunk_out_of_range_is_refused(change: dict[str, NDArray[np.generic]], text: str) -> None:
    """Every chunk must name a tensor and a file and lie inside both; the message names it."""
    opened(encode_chunk_table(catalogue()))
    with pytest.raises(FormatError, match=rf"'chunks.safetensors' .*{text}.*not written by a sound shardckpt"):
        opened(changed_table(change))


def test_a_table_of_other_length_than_the_manifest_says_is_refused() -> None:
    """The number of chunks stands in both."""
    table = encode_chunk_table(catalogue())
    short = msgspec.structs.replace(manifest(catalogue(), table), num_chunks=3)
    with pytest.raises(FormatError, match="has 4 chunks, the manifest says 3; it was not written by a sound shardckpt"):
        stored(short, table)


def test_an_empty_checkpoint_is_a_checkpoint() -> None:
    """No tensors, no chunks, one file."""
    nothing = Catalogue((), (File("shard-0.safetensors", 8, 8, 0),), Spans.empty(), Boxes.empty())
    table = encode_chunk_table(nothing)
    found = msgspec.structs.replace(manifest(nothing, table), layout=None, objects=msgspec.Raw(b"{}"))
    assert len(stored(decode_manifest(encode_manifest(found), "m"), table).catalogue.chunk_nbytes) == 0


def test_a_million_chunks_fit_in_25_megabytes() -> None:
    """1,024 ranks x 1,000 tensors: the table is small, and comes back whole."""
    ranks, tensors, shard = 1024, 1000, 3000
    tensor, rank = (grid.reshape(-1) for grid in np.meshgrid(range(tensors), range(ranks), indexing="ij"))
    spans = Spans(
        tensor, rank * shard, (rank + 1) * shard, rank, 8 + tensor * shard * 4, (rank * 2654435761) % (1 << 32)
    )
    wide = Catalogue(
        tuple(Tensor(f"model.layers.{i}.weight", "F32", (ranks * shard,)) for i in range(tensors)),
        tuple(File(f"shard-{i:05}-of-{ranks:05}.safetensors", 8 + tensors * shard * 4, 8, 0) for i in range(ranks)),
        spans,
        Boxes.empty(),
    )
    table = encode_chunk_table(wide)
    assert len(table) <= 25_000_000
    found = msgspec.structs.replace(manifest(wide, table), layout=None)
    again = stored(decode_manifest(encode_manifest(found), "m"), table).catalogue
    assert all(np.array_equal(getattr(again.spans, c.name), getattr(spans, c.name)) for c in dataclasses.fields(spans))
