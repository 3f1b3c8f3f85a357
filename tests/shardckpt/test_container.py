"""Tests of data files: headers written here are read by safetensors, and malformed ones are refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from shardckpt.container import MAX_HEADER_NBYTES, Header, build_header, parse_json, read_header
from shardckpt.dtypes import ITEM_BYTES
from shardckpt.errors import FormatError
from shardckpt.storage import LocalStore

WEIGHT = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def read(folder: Path, content: bytes) -> Header:
    """Read the header of a file of this content."""
    (folder / "x.safetensors").write_bytes(content)
    reader = LocalStore(folder).open_reader("x.safetensors")
    try:
        return read_header(reader)
    finally:
        reader.close()


def file_of(fields: object, payload: int = 24) -> bytes:
    """Give a file with this header and `payload` zeros."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + bytes(payload)


def test_a_file_of_safetensors_is_read(tmp_path: Path) -> None:
    """Keys, dtypes, shapes, places and metadata are those that the library wrote."""
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array(5, np.int64),
        "e": np.zeros((0, 4), bool),
    }
    content = save(arrays, metadata={"format": "pt"})
    header = read(tmp_path, content)
    found = {entry.key: (entry.dtype, entry.shape) for entry in header.entries}
    assert found == {"b": ("F32", (2, 3)), "a": ("I64", ()), "e": ("BOOL", (0, 4))}
    assert header.metadata == {"format": "pt"}
    for entry in header.entries:
        assert content[entry.begin : entry.begin + entry.nbytes] == arrays[entry.key].tobytes()


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=5).filter(lambda key: key != "__metadata__"),
            st.sampled_from(["F32", "I64", "U8", "BOOL"]),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
        ),
        max_size=5,
        unique_by=lambda row: row[0],
    ),
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.text("aü\n", max_size=5)),
)
def test_a_laid_out_header_is_read_by_safetensors(
    rows: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    """Any reader opens a file laid out here; widest first, all tensors are aligned in it."""
    rows = sorted(rows, key=lambda row: -ITEM_BYTES[row[1]])
    start, begins = build_header(rows, metadata)
    payload = sum(int(np.prod(shape)) * ITEM_BYTES[dtype] for _, dtype, shape in rows)
    found = load(start + bytes(payload))
    assert {key: array.shape for key, array in found.items()} == {key: shape for key, _, shape in rows}
    assert len(start) % 8 == 0
    assert all(begin % ITEM_BYTES[dtype] == 0 for begin, (_, dtype, _) in zip(begins, rows, strict=True))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=3, unique_by=lambda row: row[0]))
def test_a_laid_out_header_is_read_back(rows: list[tuple[str, int]]) -> None:
    """Reading gives the places that laying out gave."""

    class Bytes:
        path = "x"

        def __init__(self, content: bytes) -> None:
            self.content, self.nbytes = content, len(content)

        def read(self, at: int, nbytes: int) -> bytes:
            return self.content[at : at + nbytes]

    start, begins = build_header([(key, "F32", (n,)) for key, n in rows], {"k": "v"})
    header = read_header(Bytes(start + bytes(4 * sum(n for _, n in rows))))  # type: ignore[arg-type]
    assert [entry.begin for entry in header.entries] == begins
    assert header.nbytes == len(start)


def test_a_header_over_the_limit_is_not_written() -> None:
    """The message says to write more, smaller files."""
    with pytest.raises(FormatError, match="over the 100000000 that safetensors allows; write more, smaller files"):
        build_header([], {"k": "x" * MAX_HEADER_NBYTES})


@pytest.mark.parametrize(
    ("content", "meaning"),
    [
        (b"", "has 0 bytes, too few for a safetensors file"),
        (b"1234567", "has 7 bytes, too few"),
        (bytes(100), "begins with zeros: it was not written to the end"),
        (b"PK\x03\x04" + bytes(100), "zip archive .perhaps a torch.save file"),
        (b"\x80\x02}q\x00" + bytes(100), "looks like a pickle"),
        (b"\x80\x04}q\x00" + bytes(100), "looks like a pickle"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer: fetch the real file"),
        (b"<!DOCTYPE html><html></html>", "HTML page: a download went wrong"),
        (b"<html><body></body></html>", "HTML page: a download went wrong"),
        (b"GGUF" + bytes(100), "its first bytes are no safetensors header; it is damaged or of another format"),
        ((MAX_HEADER_NBYTES + 1).to_bytes(8, "little") + b"{}" + bytes(100), "first bytes are no safetensors header"),
        ((16).to_bytes(8, "little") + b"[" + bytes(100), "first bytes are no safetensors header"),
    ],
)
def test_a_foreign_file_is_told_what_it_looks_like(tmp_path: Path, content: bytes, meaning: str) -> None:
    """A file of another kind is named together with what it seems to be."""
    with pytest.raises(FormatError, match=rf"x\.safetensors' .*{meaning}"):
        read(tmp_path, content)


@pytest.mark.parametrize("cut", [9, 20, 50, 70, -24, -23, -1])
def test_a_truncated_file_is_refused_at_every_cut(tmp_path: Path, cut: int) -> None:
    """In the header or behind it, a missing byte is found, and the cure named."""
    with pytest.raises(FormatError, match=r"x\.safetensors' is truncated.* Restore"):
        read(tmp_path, file_of({"w": WEIGHT})[:cut])


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    """A file that is too long is as wrong as one that is too short."""
    with pytest.raises(FormatError, match=r"longer than its header says: expected \d+ bytes, found \d+\. Restore"):
        read(tmp_path, file_of({"w": WEIGHT}, payload=25))


def changed(**change: object) -> dict[str, object]:
    """Give a header whose only entry has these fields changed."""
    return {"w": {**WEIGHT, **change}}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (b"{", "its JSON cannot be read .*Restore it from a copy"),
        (b'{"w": \xff\xff}', "its JSON cannot be read .*Restore"),
        (b'{"\\ud800": 1}', "its JSON cannot be read .*Restore"),
        (b'{"w":' * 100_000, "its JSON cannot be read .*Restore"),
        (b'{"w": ' + b"9" * 5000 + b"}", "its JSON cannot be read .*Restore"),
        (b'{"w": 1, "w": 2}', "has a duplicate key in its JSON; it was not written by a sound tool"),
        ({"__metadata__": {"k": 1}}, "metadata of .* is not text by text; it is no safetensors file"),
        ({"__metadata__": ["k"]}, "metadata of .* is not text by text"),
        ({"w": 5}, "header entry 'w' of .* is malformed; the file is damaged or no safetensors file"),
        ({"w": {}}, "header entry 'w' of .* is malformed"),
        (changed(dtype=5), "'w' of .* is malformed"),
        (changed(shape=6), "'w' of .* is malformed"),
        (changed(shape=[2, -3]), "'w' of .* is malformed"),
        (changed(shape=[2.0, 3]), "'w' of .* is malformed"),
        (changed(shape=[2, True, 3]), "'w' of .* is malformed"),
        (changed(shape=["6"]), "'w' of .* is malformed"),
        (changed(shape=[1] * 65), "'w' of .* is malformed"),
        (changed(shape=[1 << 62] * 40), "'w' of .* is malformed"),
        (changed(data_offsets=[0]), "'w' of .* is malformed"),
        (changed(data_offsets=[-24, 0]), "'w' of .* is malformed"),
        (changed(data_offsets=[False, 24]), "'w' of .* is malformed"),
        (changed(data_offsets=[0, 1 << 62]), "'w' of .* is malformed"),
        (changed(dtype="F33"), "'w' in .* has the unknown dtype 'F33'; known are BOOL"),
        (changed(shape=[2, 4]), r"has 24 bytes where dtype F32 and shape \(2, 4\) need 32; the file is damaged"),
        (changed(shape=[1 << 61, 1 << 61]), "has 24 bytes where dtype F32"),
        (changed(data_offsets=[24, 0]), "has -24 bytes where dtype F32"),
        (changed(data_offsets=[8, 32]), "'w' in .* begins at byte .*overlap or leave a gap; the file is damaged"),
        ({"w": WEIGHT, "v": WEIGHT}, "overlap or leave a gap; the file is damaged"),
        ({"w": WEIGHT, "v": {**WEIGHT, "data_offsets": [20, 44]}}, "overlap or leave a gap"),
        ({}, "longer than its header says"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, fields: object, text: str) -> None:
    """Each way in which a header can lie is a FormatError that names file and entry."""
    with pytest.raises(FormatError, match=text):
        read(tmp_path, file_of(fields))


@given(st.binary(max_size=200))
def test_no_bytes_make_the_parser_fail_otherwise(text: bytes) -> None:
    """Whatever the bytes, JSON is parsed or refused with a FormatError."""
    with contextlib.suppress(FormatError):
        parse_json(text, "x")


@given(st.data())
def test_no_change_of_a_header_makes_the_reader_fail_otherwise(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A header with random bytes overwritten is read or refused with a FormatError."""
    content = bytearray(file_of({"w": WEIGHT, "__metadata__": {"a": "b"}}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 25))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        read(tmp_path_factory.getbasetemp(), bytes(content))
