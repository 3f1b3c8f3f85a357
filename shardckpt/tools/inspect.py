"""Show what a checkpoint, or weights, hold: from manifest and chunk table, or from headers, alone.

Each function gives rows for people and programs; refuses to know how they are printed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardckpt.catalogue import Catalogue
from shardckpt.errors import MismatchError, listing
from shardckpt.formats.origin import Origin
from shardckpt.layout import Layout
from shardckpt.manifest import Json, Stored
from shardckpt.region import Span
from shardckpt.tools.selection import tensors_by_section

Row = dict[str, Json]


def summary(found: Origin) -> Row:
    """Give what is said of the checkpoint, or of weights, as a whole."""
    catalogue = found.catalogue
    facts: Row = {"format": found.format}
    if found.stored is not None:
        manifest = found.stored.manifest
        facts |= {
            "step": manifest.step,
            "world_size": manifest.world_size,
            "created": manifest.created,
            "writer": manifest.writer,
            "version": manifest.version,
            "layout": _layout_text(manifest.layout),
            "metrics": dict(manifest.metrics) or None,
        }
    return facts | {
        "num_tensors": len(catalogue.tensors),
        "num_elements": sum(tensor.numel for tensor in catalogue.tensors),
        "num_chunks": len(catalogue.chunk_file),
        "num_files": len(catalogue.files),
        "tensor_bytes": catalogue.nbytes,
        "file_bytes": sum(file.nbytes for file in catalogue.files),
    }


def section_rows(found: Stored) -> list[Row]:
    """Give one row a section: its kind and its tensors."""
    by_section = tensors_by_section(found)
    return [
        {
            "section": section,
            "kind": kind,
            "num_tensors": len(tensors := by_section.get(section, [])),
            "nbytes": sum(tensor.nbytes for tensor in tensors),
        }
        for section, kind in found.manifest.sections.items()
    ]


def tensor_rows(catalogue: Catalogue) -> list[Row]:
    """Give one row a tensor."""
    num_chunks = np.bincount(catalogue.chunk_tensor, minlength=len(catalogue.tensors)).tolist()
    return [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "nbytes": tensor.nbytes,
            "num_chunks": count,
            "aliases": list(tensor.aliases),
        }
        for tensor, count in zip(catalogue.tensors, num_chunks, strict=True)
    ]


def chunk_rows(catalogue: Catalogue, name: str) -> list[Row]:
    """Give one row a chunk of one tensor: its region and where it lies.

    Raises:
        MismatchError: If there is no tensor of that name.
    """
    if name not in catalogue.by_name:
        raise MismatchError(
            f"there is no tensor {name!r}; there are {listing(catalogue.by_name)}. List them with --tensors."
        )
    rows = []
    for chunk in np.flatnonzero(catalogue.chunk_tensor == catalogue.by_name[name]).tolist():
        region: Row
        match catalogue.region(chunk):
            case Span(start, stop):
                region = {"start": start, "stop": stop, "offset": None, "shape": None}
            case box:
                region = {"start": None, "stop": None, "offset": list(box.offset), "shape": list(box.shape)}
        crc = int(catalogue.chunk_crc[chunk])
        rows.append(
            {
                "file": catalogue.files[int(catalogue.chunk_file[chunk])].path,
                **region,
                "byte_offset": int(catalogue.chunk_byte_offset[chunk]),
                "nbytes": int(catalogue.chunk_nbytes[chunk]),
                "crc32c": f"{crc:08x}" if crc >= 0 else None,
            }
        )
    return rows


def rank_rows(found: Origin) -> list[Row]:
    """Give one row a rank: what its file holds; where files are not those of ranks, one a file."""
    catalogue = found.catalogue
    num_files = len(catalogue.files)
    chunks = np.bincount(catalogue.chunk_file, minlength=num_files).tolist()
    nbytes = np.zeros(num_files, np.int64)
    np.add.at(nbytes, catalogue.chunk_file, catalogue.chunk_nbytes)
    columns = zip(catalogue.files, chunks, nbytes.tolist(), strict=True)
    return [
        {"rank": rank if found.stored else None, "file": file.path, "num_chunks": count, "nbytes": size}
        for rank, (file, count, size) in enumerate(columns)
    ]


def object_rows(objects: Json) -> list[Row]:
    """Give one row a value of the state that is no tensor: its place and the value as stored."""
    rows: list[Row] = []

    def walk(value: Json, path: str) -> None:
        is_marked = isinstance(value, Mapping) and len(value) == 1 and next(iter(value)).startswith("$")
        if isinstance(value, Mapping) and value and not is_marked:
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else key)
        elif isinstance(value, list) and any(isinstance(item, (list, dict)) for item in value):
            for number, item in enumerate(value):
                walk(item, f"{path}[{number}]")
        elif value != {}:
            rows.append({"path": path, "value": value})

    walk(objects, "")
    return rows


def _layout_text(layout: Layout | None) -> str:
    """Say in a line how tensors are cut."""
    if layout is None:
        return "not recorded"
    parts = [f"flat buckets: {len(layout.buckets)}"] if layout.buckets else []
    parts += [f"tensors on a mesh of {'x'.join(map(str, mesh.axes))}: {len(mesh.tensors)}" for mesh in layout.meshes]
    parts += [f"replicated tensors: {len(layout.replicated)}"] if layout.replicated else []
    return ", ".join(parts) or "no tensors"
