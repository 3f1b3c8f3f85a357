"""Any place with tensors, whatever its format: which format it is, and its catalogue.

Knows the formats by what lies at a path; refuses to know how they work.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from shardckpt.catalogue import Catalogue
from shardckpt.committed import read_committed
from shardckpt.errors import CheckpointNotFoundError
from shardckpt.formats.huggingface import read_files, read_folder
from shardckpt.manifest import MANIFEST_PATH, Stored
from shardckpt.storage import Store, split_url

_SHARD = re.compile(r"shard-\d{5,}-of-\d{5,}.*")


@dataclass(frozen=True)
class Origin:
    """What was found at a place.

    Attributes:
        format: "shardckpt" or "safetensors".
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


def find_origin(url: str, open_at: Callable[[str], Store]) -> Origin:
    """Open a checkpoint, a Hugging Face folder or a safetensors file for reading.

    Args:
        url: The place.
        open_at: Gives the store of a folder.

    Raises:
        CheckpointNotFoundError: If there is nothing of these at that place; says what there is instead.
        FormatError: If it is damaged.
    """
    store = open_at(url)
    if store.exists(MANIFEST_PATH):
        found = read_committed(store)
        return Origin("shardckpt", store, found.catalogue, found)
    folder, name = split_url(url)
    if open_at(folder).exists(name):
        return Origin("safetensors", open_at(folder), read_files(open_at(folder), [name])[0])
    found_paths = [path for path in store.list() if "/" not in path]
    if found_paths and not any(_SHARD.fullmatch(path) for path in found_paths):
        try:
            weights = read_folder(store)
            return Origin("safetensors", store, weights.catalogue, unused=weights.unused)
        except CheckpointNotFoundError:
            if any(".safetensors" in path for path in found_paths):
                raise
    read_committed(store)  # raises, and says what is there
    raise CheckpointNotFoundError(f"the checkpoint at {url!r} appeared just now; try again")
