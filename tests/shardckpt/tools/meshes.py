"""Checkpoints cut over a mesh, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardckpt.committed import Draft, commit, prepare
from shardckpt.layout import Layout, Mesh, regions
from shardckpt.shard_file import lay_out_shards
from shardckpt.storage import open_store
from shardckpt.transfer import TransferOptions
from shardckpt.write_files import write_files
from tests.shardckpt.checkpoints import Arrays, in_memory


def write_on_mesh(root: Path, arrays: Arrays, axes: list[int], cuts: list[tuple[int, int]]) -> None:
    """Write arrays cut over a mesh."""
    source, sources = in_memory(arrays)
    tensors = source.tensors
    layout = Layout([], [], [Mesh(axes, cuts, list(range(len(tensors))))])
    world_size = int(np.prod(axes))
    draft = Draft(1, world_size, {"model": "module"}, tensors, layout, {"model": {}})
    destination = prepare(open_store(root), overwrite=False)
    files = lay_out_shards(tensors, regions(layout, tensors, world_size), draft.naming(""))
    written = write_files(source, sources, files, destination.store, options=TransferOptions())
    commit(destination, draft, written.catalogue, written.headers_crc)
