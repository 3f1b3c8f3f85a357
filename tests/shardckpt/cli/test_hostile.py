"""Every command on files that were made to do harm, with right checksums: refused, quickly, and nothing written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardckpt.catalogue import Catalogue, Spans
from shardckpt.checksum import crc32c
from shardckpt.committed import read_committed
from shardckpt.manifest import encode_chunk_table
from shardckpt.storage import open_store
from tests.shardckpt.cli.invocation import run, tree
from tests.shardckpt.cli.sources import OF_HF, OF_OURS, SHARDS, outcome, write_hf, write_ours

HUGE = 1 << 61
Fields = dict[str, Any]


def _seal(body: str) -> bytes:
    """Put the right checksum in front of the rest of a manifest."""
    text = body.encode("utf-8", "surrogatepass")
    return b'{"crc32c":"%08x",\n' % crc32c(text) + text


def _edit(root: Path, change: Callable[[Fields], object]) -> None:
    """Change the fields of a manifest, and make its checksum right."""
    fields = json.loads((root / "manifest.json").read_text())
    del fields["crc32c"]
    change(fields)
    (root / "manifest.json").write_bytes(_seal(json.dumps(fields)[1:]))


def _edit_table(root: Path, change: Callable[[Spans], Spans]) -> None:
    """Change the span columns of the chunk table, and make size, number and checksum right."""
    found = read_committed(open_store(root)).catalogue
    changed = Catalogue(found.tensors, found.files, change(found.spans), found.boxes)
    table = encode_chunk_table(changed)
    (root / "chunks.safetensors").write_bytes(table)

    def note(fields: Fields) -> None:
        fields["chunk_table"] |= {"nbytes": len(table), "crc32c": f"{crc32c(table):08x}"}
        fields["num_chunks"] = len(changed.chunk_file)

    _edit(root, note)


def _path(value: str) -> Callable[[Fields], object]:
    return lambda fields: fields["files"][1].update(path=value)


MANIFESTS: dict[str, Callable[[Fields], object]] = {
    "escaping path": _path("../../etc/passwd"),
    "absolute path": _path("/etc/passwd"),
    "path with a drive": _path("c:evil"),
    "path with a backslash": _path("..\\evil"),
    "path of a parent": _path("x/../../evil"),
    "empty path": _path(""),
    "path with NUL": _path("a\0b"),
    "one file twice": _path(SHARDS[0]),
    "escaping table": lambda f: f["chunk_table"].update(path="../chunks.safetensors"),
    "huge table": lambda f: f["chunk_table"].update(nbytes=HUGE),
    "huge file": lambda f: f["files"][0].update(nbytes=1 << 63),
    "negative size": lambda f: f["files"][0].update(nbytes=-1),
    "header larger than file": lambda f: f["files"][0].update(header_nbytes=1 << 40),
    "huge shape": lambda f: f["tensors"][0].update(shape=[HUGE, HUGE]),
    "many dims": lambda f: f["tensors"][0].update(shape=[1] * 100_000),
    "negative shape": lambda f: f["tensors"][0].update(shape=[-1]),
    "fractional shape": lambda f: f["tensors"][0].update(shape=[1.5]),
    "unknown dtype": lambda f: f["tensors"][0].update(dtype="F128"),
    "one name twice": lambda f: f["tensors"][0].update(name=f["tensors"][1]["name"]),
    "alias of another's name": lambda f: f["tensors"][0].update(aliases=[f["tensors"][1]["name"]]),
    "no ranks": lambda f: f.update(world_size=0),
    "huge world size": lambda f: f.update(world_size=1 << 70),
    "huge number of chunks": lambda f: f.update(num_chunks=HUGE),
    "later version": lambda f: f.update(version=99),
    "other format": lambda f: f.update(format="other"),
    "unknown field": lambda f: f.update(extra=1),
    "missing field": lambda f: f.pop("files"),
    "field of another type": lambda f: f.update(tensors="all"),
    "layout of other tensors": lambda f: f["layout"]["buckets"][0]["columns"][0].__setitem__(0, 77),
    "layout with a huge align": lambda f: f["layout"]["buckets"][0].update(align=HUGE),
    "not a checksum": lambda f: f["files"][0].update(crc32c="xyz"),
}

TEXTS = {
    "duplicate key": '"format": "shardckpt", "format": "shardckpt"}\n',
    "deep nesting": '"objects": ' + "[" * 200_000 + "]" * 200_000 + "}\n",
    "deep objects": '"objects": ' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}\n",
    "lone surrogate": '"format": "\\ud800"}\n',
    "unpaired bytes": '"format": "\ud800"}\n',
    "huge number": '"version": ' + "9" * 10_000 + "}\n",
    "not an object": "1]\n",
    "nothing": "",
}


@pytest.mark.parametrize("kind", [*MANIFESTS, *TEXTS])
def test_no_manifest_is_believed(tmp_path: Path, kind: str) -> None:
    """Paths, sizes, shapes, counts, names and text of every wrong sort are refused by every command."""
    source = write_ours(tmp_path / "ours")
    if kind in MANIFESTS:
        _edit(source, MANIFESTS[kind])
    else:
        (source / "manifest.json").write_bytes(_seal(TEXTS[kind]))
    for verb in OF_OURS:
        exit_code, text, left = outcome(verb, source, tmp_path / "out")
        assert (exit_code, left) == (verb.bad_exit_code, {}), f"{verb}: {text}"
        assert "manifest.json" in text or "chunks.safetensors" in text, f"{verb}: {text}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "out"]


def _column(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[Spans], Spans]:  # type: ignore[type-arg]  # of any
    def change(spans: Spans) -> Spans:
        columns = {c: getattr(spans, c).copy() for c in ("tensor", "start", "stop", "file", "byte_offset", "crc")}
        columns[name] = value(columns[name])
        return Spans(**columns)

    return change


def _first(value: int) -> Callable[[np.ndarray], np.ndarray]:  # type: ignore[type-arg]  # of any
    def change(column: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]  # of any
        column[0] = value
        return column

    return change


TABLES: dict[str, Callable[[Spans], Spans]] = {
    "tensor out of range": _column("tensor", _first(99)),
    "file out of range": _column("file", _first(99)),
    "start behind stop": _column("start", _first(1 << 40)),
    "stop behind the tensor": _column("stop", _first(1 << 40)),
    "bytes behind the file": _column("byte_offset", _first(1 << 40)),
    "bytes of the header": _column("byte_offset", _first(0)),
    "a chunk left out": lambda spans: spans.take(np.arange(1, len(spans))),
    "a chunk twice, elsewhere": lambda spans: spans.take(np.array([0, *range(len(spans))])),
    "chunks that overlap": _column("start", lambda column: np.maximum(column - 1, 0)),
}


@pytest.mark.parametrize("kind", list(TABLES))
def test_no_chunk_table_is_believed(tmp_path: Path, kind: str) -> None:
    """Indices, regions and offsets out of range, holes and overlaps: no command that moves data gives a result."""
    source, out = write_ours(tmp_path / "ours"), tmp_path / "out"
    good = {verb.name: outcome(verb, source, out)[2] for verb in OF_OURS}
    _edit_table(source, TABLES[kind])
    for verb in OF_OURS:
        exit_code, text, left = outcome(verb, source, out)
        if kind == "a chunk twice, elsewhere" and exit_code == 0:
            assert left.keys() == good[verb.name].keys()  # a replica of itself is none
        elif verb.reads_data:
            assert (exit_code, left) == (verb.bad_exit_code, {}), f"{verb}: {text}"


def _safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})


HEADERS = {
    "huge header": struct.pack("<Q", 1 << 62) + b"{}",
    "header beyond the file": struct.pack("<Q", 1000) + b"{}",
    "no object": _safetensors(b"[1]"),
    "deep nesting": _safetensors(b'{"a":' * 60_000 + b"1" + b"}" * 60_000),
    "duplicate names": _safetensors(f'{{"a":{_entry(0, 4, [1])},"a":{_entry(0, 4, [1])}}}'.encode(), bytes(4)),
    "overlapping tensors": _safetensors(f'{{"a":{_entry(0, 8, [2])},"b":{_entry(4, 12, [2])}}}'.encode(), bytes(12)),
    "a gap": _safetensors(f'{{"a":{_entry(0, 4, [1])},"b":{_entry(8, 12, [1])}}}'.encode(), bytes(12)),
    "huge shape": _safetensors(f'{{"a":{_entry(0, 4, [HUGE, HUGE, 0])}}}'.encode(), bytes(4)),
    "many dims": _safetensors(f'{{"a":{_entry(0, 4, [1] * 10_000)}}}'.encode(), bytes(4)),
    "negative offset": _safetensors(f'{{"a":{_entry(-4, 0, [1])}}}'.encode(), bytes(4)),
    "fractional shape": _safetensors(b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', bytes(4)),
    "unknown dtype": _safetensors(f'{{"a":{_entry(0, 4, [1], "F31")}}}'.encode(), bytes(4)),
    "wrong size": _safetensors(f'{{"a":{_entry(0, 4, [2])}}}'.encode(), bytes(4)),
    "metadata of numbers": _safetensors(b'{"__metadata__":{"a":1}}'),
    "lone surrogate": _safetensors(f'{{"\\ud800":{_entry(0, 4, [1])}}}'.encode(), bytes(4)),
    "not UTF-8": _safetensors(b'{"\xff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "bytes behind the end": _safetensors(f'{{"a":{_entry(0, 4, [1])}}}'.encode(), bytes(5)),
    "no tensors": _safetensors(b"{}"),
}


@pytest.mark.parametrize("kind", list(HEADERS))
def test_no_header_is_believed(tmp_path: Path, kind: str) -> None:
    """Files of others with lengths, offsets, shapes, names and text of every wrong sort are refused."""
    source = tmp_path / "hf"
    source.mkdir()
    (source / "model.safetensors").write_bytes(HEADERS[kind])
    for verb in OF_HF:
        exit_code, text, left = outcome(verb, source, tmp_path / "out")
        is_looking = verb.name == "inspect" and kind == "no tensors"
        assert exit_code in ((0,) if is_looking else (1, verb.bad_exit_code)), f"{verb}: {text}"
        assert left == {}
        assert "model.safetensors" in text or kind == "no tensors", f"{verb}: {text}"


INDICES: dict[str, object] = {
    "escaping path": {"weight_map": {"embed.weight": "../model.safetensors"}},
    "absolute path": {"weight_map": {"embed.weight": "/etc/passwd"}},
    "path in a folder": {"weight_map": {"embed.weight": "a/b.safetensors"}},
    "numbers for paths": {"weight_map": {"embed.weight": 7}},
    "no map": {"metadata": {}},
    "a list": [1, 2],
    "an empty map": {"weight_map": {}},
}


@pytest.mark.parametrize("kind", list(INDICES))
def test_no_index_is_believed(tmp_path: Path, kind: str) -> None:
    """An index that leads outside its folder, or is none, is refused by name."""
    source = write_hf(tmp_path / "hf")
    (source / "model.safetensors.index.json").write_text(json.dumps(INDICES[kind]))
    for verb in OF_HF:
        exit_code, text, left = outcome(verb, source, tmp_path / "out")
        assert exit_code in (1, verb.bad_exit_code), f"{verb}: {text}"
        assert left == {}
        assert "model.safetensors.index.json" in text


ODD_NAMES = [
    "a.b",
    "x/y",
    "..",
    "%2F",
    "é中\U0001f600",
    "Case",
    "case",
    "n" * 300,
    "line\nbreak",
    "\x1b[31mred",
    " ",
    "%",
    "\u202e",
]


def test_odd_names_come_through_and_cannot_move_the_cursor(tmp_path: Path) -> None:
    """Names are data: they survive import, reshard and export as they are, and control characters are shown escaped."""
    source = tmp_path / "odd.safetensors"
    fields = {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(ODD_NAMES)}
    source.write_bytes(_safetensors(json.dumps(fields).encode(), bytes(range(len(ODD_NAMES)))))
    run("import", source, tmp_path / "a", "--ranks", 3)
    run("reshard", tmp_path / "a", tmp_path / "b", "--to", 2)
    run("verify", tmp_path / "b")
    run("export", tmp_path / "b", tmp_path / "hf")
    run("consolidate", tmp_path / "b", tmp_path / "one.safetensors")
    assert 'is_same": true' in run("diff", source, tmp_path / "hf", "--json").stdout
    assert 'is_same": true' in run("diff", source, tmp_path / "one.safetensors", "--json").stdout
    for shown in (
        run("inspect", tmp_path / "b", "--tensors"),
        run("inspect", tmp_path / "b", "--tensor", "model.Case"),
    ):
        assert "\x1b" not in shown.stdout
        assert "\u202e" not in shown.stdout
    assert set(tree(tmp_path / "b")) == {
        "manifest.json",
        "chunks.safetensors",
        "shard-00000-of-00002.safetensors",
        "shard-00001-of-00002.safetensors",
    }
