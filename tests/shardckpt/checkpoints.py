"""Small checkpoints for tests, made from NumPy arrays through the package's own data path."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Catalogue, CatalogueBuilder, File, Tensor
from shardckpt.committed import Draft, commit, prepare, read_committed
from shardckpt.endpoints import MemorySink, MemorySource, ReaderPool
from shardckpt.layout import Bucket, Layout, regions
from shardckpt.manifest import Json
from shardckpt.plan import plan
from shardckpt.region import whole
from shardckpt.shard_file import lay_out_shards
from shardckpt.storage import Store, open_store
from shardckpt.transfer import TransferOptions, transfer
from shardckpt.write_files import write_files

DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "int64": "I64", "uint8": "U8", "bool": "BOOL"}

Arrays = Mapping[str, NDArray[np.generic]]


def in_memory(
    arrays: Arrays, aliases: Mapping[str, tuple[str, ...]] | None = None
) -> tuple[Catalogue, list[MemorySource]]:
    """Give the catalogue of whole arrays in memory, and its sources."""
    builder = CatalogueBuilder()
    for name, array in arrays.items():
        tensor = builder.add_tensor(Tensor(name, DTYPES[str(array.dtype)], array.shape, (aliases or {}).get(name, ())))
        file = builder.add_file(File(f"memory of {name}", array.nbytes, 0))
        builder.add_chunk(tensor, whole(array.shape), file=file, byte_offset=0)
    sources = [MemorySource(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) for array in arrays.values()]
    return builder.build(), sources


def write_checkpoint(
    root: str | Store,
    arrays: Arrays,
    *,
    world_size: int = 2,
    replicated: tuple[str, ...] = (),
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    sections: dict[str, str] | None = None,
    objects: Json = None,
    step: int | None = 7,
    align: int = 4,
    overwrite: bool = False,
) -> None:
    """Write `arrays` as a checkpoint of `world_size` ranks: one flat bucket a dtype, and the `replicated` ones.

    Args:
        root: A path, a URL or a store.
        arrays: Tensors by name. Names should begin with a section, such as "model.".
        world_size: How many ranks to write.
        replicated: The tensors that every rank holds whole.
        aliases: Further names of tied tensors.
        sections: Section -> kind; None for modules.
        objects: The encoded non-tensor state.
        step: The training step.
        align: Of the buckets.
        overwrite: Replace a checkpoint that is there.
    """
    source, sources = in_memory(arrays, aliases)
    tensors = source.tensors
    flat = [i for i, tensor in enumerate(tensors) if tensor.name not in replicated]
    groups = [[i for i in flat if tensors[i].dtype == dtype] for dtype in dict.fromkeys(t.dtype for t in tensors)]
    layout = Layout(
        [Bucket(align, [tensors[i].numel for i in group], [1] * len(group), [group]) for group in groups if group],
        [i for i, tensor in enumerate(tensors) if tensor.name in replicated],
    )
    found = sections or dict.fromkeys((name.split(".")[0] for name in arrays), "module")
    draft = Draft(step, world_size, found, tensors, layout, objects if objects is not None else {})
    destination = prepare(root if isinstance(root, Store) else open_store(root), overwrite=overwrite)
    files = lay_out_shards(tensors, regions(layout, tensors, world_size), draft.naming(destination.token))
    written = write_files(source, sources, files, destination.store, options=TransferOptions())
    commit(destination, draft, written.catalogue, written.headers_crc)


def read_checkpoint(root: str | Store) -> dict[str, NDArray[np.generic]]:
    """Read all tensors of a committed checkpoint, every checksum compared."""
    store = root if isinstance(root, Store) else open_store(root)
    stored = read_committed(store).catalogue
    numpy_names = {name: dtype for dtype, name in DTYPES.items()}
    found = {t.name: np.empty(t.shape, numpy_names[t.dtype]) for t in stored.tensors}
    target, _ = in_memory(found)
    sinks = [MemorySink(array.reshape(-1).view(np.uint8)) for array in found.values()]
    with closing(ReaderPool(store)) as pool:
        transfer(plan(stored, target), pool.sources([file.path for file in stored.files]), sinks)
    return found
