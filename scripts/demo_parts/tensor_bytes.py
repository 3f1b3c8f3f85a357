"""The bytes of the tensors in safetensors files, read and compared without any of the code under demonstration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STEP_BYTES = 8 << 20


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: the file, its first byte, its length, and how to read it."""

    path: Path
    begin: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def places(source: Path) -> dict[str, Place]:
    """Give the place of each tensor in a safetensors file, or in all such files of a folder."""
    paths = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    return {name: place for path in paths for name, place in _places_of(path)}


def first_difference(old: Path, new: Path) -> str | None:
    """Compare two sources tensor by tensor: name, dtype, shape and every byte. Give the first that differs, or None."""
    one, other = places(old), places(new)
    if not one or one.keys() != other.keys():
        return f"the names differ: {sorted(one.keys() ^ other.keys())[:5]} of {len(one)} and {len(other)}"
    for name, place in one.items():
        twin = other[name]
        if (place.dtype, place.shape, place.nbytes) != (twin.dtype, twin.shape, twin.nbytes):
            return f"{name}: {place.dtype} {place.shape} became {twin.dtype} {twin.shape}"
        if any(a != b for a, b in zip(_blocks(place), _blocks(twin), strict=True)):
            return f"{name}: its bytes differ"
    return None


def _places_of(path: Path) -> Iterator[tuple[str, Place]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, Place(path, 8 + length + begin, end - begin, entry["dtype"], tuple(entry["shape"]))


def _blocks(place: Place) -> Iterator[bytes]:
    with place.path.open("rb") as file:
        file.seek(place.begin)
        for at in range(0, place.nbytes, _STEP_BYTES):
            yield file.read(min(_STEP_BYTES, place.nbytes - at))
