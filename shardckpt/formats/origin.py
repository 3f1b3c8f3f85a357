"""Any place with tensors, whatever its format: which format it is, and its catalogue.

Knows the formats by what lies at a path; refuses to know how they work.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from shardckpt.catalogue import Catalogue
from shardckpt.committed import read_committed
from shardckpt.formats.huggingface import looks_like_weights, read_files, read_folder
from shardckpt.manifest import MANIFEST_PATH, Stored
from shardckpt.storage import Store, split_url

_SHARD = re.compile(r"shard-\d{5,}-of-\d{5,}.*")


@dataclass(frozen=True, slots=True)
class Place:
    """Where something lies, unread.

    Attributes:
        format: "shardckpt" or "safetensors"; the former also where nothing is recognised.
        store: The folder.
        file: The file in it that was named; None for the folder itself.
    """

    format: str
    store: Store
    file: str | None = None


@dataclass(frozen=True)
class Origin:
    """What was found at a place.

    Attributes:
        format: As of the place.
        store: Where its files are.
        catalogue: What it holds.
        stored: The whole checkpoint, if it is one of shardckpt.
        unused: Files that look as if they belonged to it, and do not.
    """

    format: str
    store: Store
    catalogue: Catalogue
    stored: Stored | None = None
    unused: tuple[str, ...] = ()


def find_place(url: str, open_at: Callable[[str], Store]) -> Place:
    """Tell what lies at a place by the names of its files; `open_at` gives the store of a folder."""
    store = open_at(url)
    if store.exists(MANIFEST_PATH):
        return Place("shardckpt", store)
    folder, name = split_url(url)
    if open_at(folder).exists(name):
        return Place("safetensors", open_at(folder), name)
    found = [path for path in store.list() if "/" not in path]
    is_ours = any(_SHARD.fullmatch(path) for path in found)
    return Place("safetensors" if not is_ours and looks_like_weights(found) else "shardckpt", store)


def find_origin(url: str, open_at: Callable[[str], Store]) -> Origin:
    """Open a checkpoint, a Hugging Face folder or a safetensors file for reading.

    Args:
        url: The place.
        open_at: Gives the store of a folder.

    Raises:
        CheckpointNotFoundError: If there is nothing of these at that place; says what there is instead.
        FormatError: If it is damaged.
    """
    place = find_place(url, open_at)
    if place.format == "shardckpt":
        found = read_committed(place.store)
        return Origin(place.format, place.store, found.catalogue, found)
    weights = read_folder(place.store) if place.file is None else read_files(place.store, [place.file])
    return Origin(place.format, place.store, weights.catalogue, unused=weights.unused)
