"""Random damage with a purpose: files that are wrong in one or a few places, with checksums made right again.

A case is a seed: it picks a source, what is done to it, and follows from the seed alone.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from shardckpt.catalogue import Boxes, Catalogue, Spans
from shardckpt.checksum import crc32c
from shardckpt.committed import read_committed
from shardckpt.manifest import encode_chunk_table
from shardckpt.storage import open_store
from tests.shardckpt.cli.sources import FOREIGN, OF_HF, OF_OURS, Verb, attempt, outcome, write_hf, write_ours

EVIL: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**53 + 1,
    2**62,
    2**63,
    2**64,
    -(2**63),
    10**30,
    0.5,
    1e308,
    "",
    "..",
    "../x",
    "/etc/passwd",
    "a\0b",
    "\ud800",
    "F32",
    "model",
    "x" * 5000,
    [],
    {},
    [[]],
    [0] * 100,
    {"$tensor": "x"},
    {"$dict": [[1]]},
)


class Pristine:
    """Sound sources, made once and copied for every case."""

    def __init__(self, folder: Path) -> None:
        self.ours = write_ours(folder / "ours")
        self.hf = write_hf(folder / "hf")


def run_case(seed: int, pristine: Pristine, folder: Path) -> None:
    """Make one case and run a command on it; raises `AssertionError` if that does anything but succeed or refuse."""
    dice = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    is_ours = dice.random() < 0.7
    source = Path(shutil.copytree(pristine.ours if is_ours else pristine.hf, folder / "source"))
    done = dice.choice(OURS_DAMAGE if is_ours else HF_DAMAGE)(dice, source)
    verb = dice.choice(OF_OURS if is_ours else OF_HF)
    check_outcome(verb, source, folder / "out", f"seed {seed}: {verb} after {done}")


def check_outcome(verb: Verb, source: Path, out: Path, label: str) -> None:
    """Hold what a command does with a bad source against what it may do."""
    try:
        exit_code, text, left = outcome(verb, source, out)
    except AssertionError as error:
        raise AssertionError(f"{label}: {error}") from error
    if exit_code == 0:
        new = out / "new"
        if new.exists():
            again, found = attempt("verify", new)
            assert again == 0, f"{label}: what was written is not sound: {found}"
        return
    assert exit_code in (1, 3), label
    assert left == {}, f"{label}: left {sorted(left)}"
    if exit_code == 1:
        assert text.startswith("Error: "), f"{label}: {text}"
    assert len(text) < 20_000, f"{label}: a message of {len(text)} characters"
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"], f"{label}: wrote elsewhere"


# What is done to sources ----------------------------------------------------------------------------------------------


def _edit_manifest(dice: random.Random, source: Path) -> str:
    path = source / "manifest.json"
    fields_ = json.loads(path.read_text())
    del fields_["crc32c"]
    done = [_edit_json(dice, fields_) for _ in range(dice.choice((1, 1, 1, 2, 4)))]
    _seal(path, json.dumps(fields_)[1:])
    return f"manifest: {done}"


def _garble_manifest(dice: random.Random, source: Path) -> str:
    path = source / "manifest.json"
    body = path.read_bytes().partition(b"\n")[2]
    changed = _garble(dice, body)
    path.write_bytes(b'{"crc32c":"%08x",\n' % crc32c(changed) + changed)
    return "bytes of the manifest"


def _edit_objects(dice: random.Random, source: Path) -> str:
    path = source / "manifest.json"
    fields_ = json.loads(path.read_text())
    del fields_["crc32c"]
    key = dice.choice(("objects", "layout", "sections", "tensors", "files", "chunk_table"))
    done = _edit_json(dice, fields_[key])
    _seal(path, json.dumps(fields_)[1:])
    return f"{key}: {done}"


def _edit_table(dice: random.Random, source: Path) -> str:
    found = read_committed(open_store(source)).catalogue
    table = found.spans
    column = dice.choice([field.name for field in fields(Spans)])
    columns = {field.name: getattr(table, field.name).copy() for field in fields(Spans)}
    row = dice.randrange(len(table))
    values = (0, 1, 2, 255, 2**31, 2**40, 2**61, int(columns[column][row]) + 1, max(int(columns[column][row]) - 1, 0))
    columns[column][row] = dice.choice(values)
    spans = Spans(**columns)
    if dice.random() < 0.3:
        spans = spans.take(np.array(dice.choices(range(len(table)), k=dice.randrange(1, 2 * len(table)))))
    _write_table(source, Catalogue(found.tensors, found.files, spans, _some_boxes(dice, found)))
    return f"table: {column}[{row}]"


def _some_boxes(dice: random.Random, found: Catalogue) -> Boxes:
    """Give no boxes, mostly, or one that may or may not fit."""
    if dice.random() < 0.7:
        return found.boxes
    width = dice.choice((1, 2, 3, 64))
    one = np.array([dice.randrange(len(found.tensors))])
    offset, shape = (np.array([[dice.choice((0, 1, 3, 2**40)) for _ in range(width)]]) for _ in range(2))
    return Boxes(one, offset, np.maximum(shape, dice.choice((0, 1))), one * 0, one * 0 + 2000, one * 0)


def _garble_table(dice: random.Random, source: Path) -> str:
    path = source / "chunks.safetensors"
    path.write_bytes(_garble(dice, path.read_bytes()))
    _note_table(source, path.read_bytes(), None)
    return "bytes of the table"


def _garble_any(dice: random.Random, source: Path) -> str:
    path = dice.choice(sorted(path for path in source.iterdir() if path.is_file()))
    path.write_bytes(_garble(dice, path.read_bytes()))
    return f"bytes of {path.name}"


def _edit_header(dice: random.Random, source: Path) -> str:
    path = dice.choice(sorted(source.glob("*.safetensors")))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    done = [_edit_json(dice, header) for _ in range(dice.choice((1, 1, 2)))]
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", dice.choice((len(text),) * 9 + (2**60,))) + text + data[8 + length :])
    return f"header of {path.name}: {done}"


def _edit_index(dice: random.Random, source: Path) -> str:
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    done = _edit_json(dice, index)
    path.write_text(json.dumps(index), encoding="utf-8", errors="surrogatepass")
    return f"index: {done}"


def _exchange(dice: random.Random, source: Path) -> str:
    one, other = dice.sample(sorted(path for path in source.iterdir() if path.is_file()), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return f"{one.name} and {other.name} exchanged"


def _replace(dice: random.Random, source: Path) -> str:
    path = dice.choice(sorted(path for path in source.iterdir() if path.is_file()))
    kind = dice.choice(sorted(FOREIGN))
    path.write_bytes(FOREIGN[kind])
    return f"{path.name} is {kind}"


Damage = Callable[[random.Random, Path], str]
OURS_DAMAGE: tuple[Damage, ...] = (
    _edit_manifest,
    _edit_manifest,
    _edit_objects,
    _garble_manifest,
    _edit_table,
    _edit_table,
    _garble_table,
    _garble_any,
    _edit_header,
    _exchange,
    _replace,
)
HF_DAMAGE: tuple[Damage, ...] = (_edit_header, _edit_header, _edit_index, _garble_any, _exchange, _replace)


def _edit_json(dice: random.Random, value: Any) -> str:
    """Change one place somewhere inside a JSON value, in place."""
    place: list[str] = []
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            if isinstance(value, dict):
                value["new"] = dice.choice(EVIL)
            else:
                value.append(dice.choice(EVIL))
            return "/".join([*place, "new"])
        key = dice.choice(keys)
        place.append(str(key)[:40])
        inner = value[key]
        if isinstance(inner, (dict, list)) and dice.random() < 0.8:
            value = inner
            continue
        match dice.randrange(5):
            case 0:
                del value[key]
            case 1 if isinstance(value, dict):
                value[str(dice.choice(EVIL))] = value.pop(key)
            case 2 if isinstance(value, list):
                value.insert(dice.randrange(len(value) + 1), inner)
            case 3 if isinstance(inner, int):
                value[key] = inner + dice.choice((-1, 1, 7, 2**32))
            case _:
                value[key] = dice.choice(EVIL)
        return "/".join(place)


def _garble(dice: random.Random, data: bytes) -> bytes:
    """Flip, cut out, repeat or insert a few bytes."""
    result = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8))):
        at = dice.randrange(len(result) + 1)
        size = dice.choice((1, 2, 8, 100))
        match dice.randrange(4):
            case 0 if at < len(result):
                result[at] ^= 1 << dice.randrange(8)
            case 1:
                del result[at : at + size]
            case 2:
                result[at:at] = result[at : at + size]
            case _:
                result[at:at] = dice.randbytes(size)
    return bytes(result)


def _seal(path: Path, body: str) -> None:
    text = body.encode("utf-8", "surrogatepass")
    path.write_bytes(b'{"crc32c":"%08x",\n' % crc32c(text) + text)


def _write_table(source: Path, changed: Catalogue) -> None:
    table = encode_chunk_table(changed)
    (source / "chunks.safetensors").write_bytes(table)
    _note_table(source, table, len(changed.spans) + len(changed.boxes))


def _note_table(source: Path, table: bytes, num_chunks: int | None) -> None:
    path = source / "manifest.json"
    fields_ = json.loads(path.read_text())
    del fields_["crc32c"]
    fields_["chunk_table"] |= {"nbytes": len(table), "crc32c": f"{crc32c(table):08x}"}
    if num_chunks is not None:
        fields_["num_chunks"] = num_chunks
    _seal(path, json.dumps(fields_)[1:])
