"""Rebuild a lost manifest, and a lost chunk table, from the shard files themselves.

Each shard file says which rank of how many wrote it and which regions it holds; rank 0's says what the state is. Knows
how to put these together; refuses to guess: every file must be there, and every tensor whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from shardckpt.catalogue import Catalogue, CatalogueBuilder, File
from shardckpt.committed import Destination, Draft, commit, draft_of_state, read_committed, with_chunk_crcs
from shardckpt.container import Entry, Header, read_header
from shardckpt.errors import CheckpointNotFoundError, CorruptError, FormatError, MismatchError, listing
from shardckpt.manifest import MANIFEST_PATH, decode_chunk_table
from shardckpt.names import name_of_key
from shardckpt.plan import prove_coverage
from shardckpt.region import Box, Region, Span, normalise, whole
from shardckpt.storage import Store
from shardckpt.tools.segments import read_checksums, segments_of
from shardckpt.transfer import TransferOptions

_SHARD = re.compile(r"shard-\d{5,}-of-\d{5,}(-[0-9a-f]{8})?\.safetensors")


@dataclass(frozen=True)
class RepairJob:
    """A repair that is worked out but not begun.

    Attributes:
        store: Root of the checkpoint.
        draft: What the checkpoint holds.
        catalogue: Its files and chunks, without checksums.
        table: What is left of the chunk table, with checksums of the save; None if it is lost too.
        fault: What is wrong with the checkpoint as it is.
    """

    store: Store
    draft: Draft
    catalogue: Catalogue
    table: Catalogue | None
    fault: str

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(file.nbytes for file in self.catalogue.files)


@dataclass(frozen=True, slots=True)
class _Shard:
    """One shard file by what its header says."""

    path: str
    nbytes: int
    header: Header
    rank: int
    world_size: int
    step: int | None
    regions: Mapping[str, Sequence[object]]


def plan_repair(store: Store) -> RepairJob | None:
    """Read the headers of the shard files and put them together; None if manifest and table are sound.

    Raises:
        CheckpointNotFoundError: If there are no shard files.
        FormatError: If a header is damaged.
        MismatchError: If files are missing, or those of several saves are there.
        CoverageError: If the files do not hold every tensor whole.
    """
    try:
        read_committed(store)
        return None
    except (FormatError, CheckpointNotFoundError) as error:
        fault = str(error)
    paths = [path for path in store.list() if _SHARD.fullmatch(path)]
    if not paths:
        raise CheckpointNotFoundError(f"there are no shard files at {store.url!r} to rebuild a manifest from: {fault}")
    shards = _complete_set([_read_shard(store, path) for path in paths], store.url)
    draft = _draft(shards[0])
    catalogue = _catalogue(shards, draft)
    prove_coverage(catalogue)
    return RepairJob(store, draft, catalogue, _left_table(store, shards[0].path, catalogue), fault)


def repair(job: RepairJob, *, options: TransferOptions) -> None:
    """Read all files, compare them with the chunk table if that is left, and commit them.

    Raises:
        CorruptError: If a chunk is not what the table says was saved.
    """
    segments = segments_of(job.catalogue)
    found = read_checksums(job.store, job.catalogue, segments, options=options)
    crcs = np.zeros(len(job.catalogue.chunk_file), np.int64)
    is_chunk = segments.chunk >= 0
    crcs[segments.chunk[is_chunk]] = found[is_chunk]
    if job.table is not None:
        _compare(job.table, with_chunk_crcs(job.catalogue, crcs))
    headers = np.zeros(len(job.catalogue.files), np.int64)
    headers[segments.file[~is_chunk]] = found[~is_chunk]
    job.store.delete(MANIFEST_PATH)  # a damaged one
    destination = Destination(job.store, "", ())
    commit(destination, job.draft, with_chunk_crcs(job.catalogue, crcs), [int(crc) for crc in headers])


def _read_shard(store: Store, path: str) -> _Shard:
    with closing(store.open_reader(path)) as reader:
        header, nbytes = read_header(reader), reader.nbytes
    try:
        rank, world_size = int(header.metadata["rank"]), int(header.metadata["world_size"])
        step = msgspec.json.decode(header.metadata["step"], type=int | None)
        regions = msgspec.json.decode(header.metadata["regions"], type=dict[str, list[object]])
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise FormatError(
            f"{path!r} does not say where it belongs ({type(error).__name__}: {error}); it is no shard file of "
            "shardckpt. Move it away."
        ) from None
    return _Shard(path, nbytes, header, rank, world_size, step, regions)


def _complete_set(shards: Sequence[_Shard], url: str) -> list[_Shard]:
    """Give the shards of the one save of which all are there, by rank."""
    saves: dict[tuple[str, int, int | None], list[_Shard]] = {}
    for shard in shards:
        match = _SHARD.fullmatch(shard.path)
        token = match[1] or "" if match else ""
        saves.setdefault((token, shard.world_size, shard.step), []).append(shard)
    complete = [
        found
        for (_, world_size, _), found in saves.items()
        if sorted(shard.rank for shard in found) == list(range(world_size))
    ]
    if len(complete) == 1:
        return sorted(complete[0], key=lambda shard: shard.rank)
    if complete:
        raise MismatchError(
            f"{url!r} has the files of {len(complete)} whole saves, such as "
            f"{listing(found[0].path for found in complete)}; move those of all but one away"
        )
    (_, world_size, _), found = max(saves.items(), key=lambda item: len(item[1]))
    missing = sorted(set(range(world_size)) - {shard.rank for shard in found})
    raise MismatchError(
        f"{url!r} cannot be repaired: of a save by {world_size} ranks, {len(found)} files are there; those of ranks "
        f"{listing(str(rank) for rank in missing)} are missing. Restore them from a copy, or use an earlier checkpoint."
    )


def _draft(first: _Shard) -> Draft:
    state = first.header.metadata.get("state")
    if state is None:
        raise FormatError(f"{first.path!r} is of rank 0 and does not describe the state; restore it from a copy")
    draft = draft_of_state(state.encode(), first.step, first.world_size)
    if draft.layout is not None:
        draft.layout.check(len(draft.tensors), first.path)
    return draft


def _catalogue(shards: Sequence[_Shard], draft: Draft) -> Catalogue:
    builder = CatalogueBuilder()
    numbers = {tensor.name: builder.add_tensor(tensor) for tensor in draft.tensors}
    for shard in shards:
        file = builder.add_file(File(shard.path, shard.nbytes, shard.header.nbytes))
        for entry, name, cut in _chunks(shard):
            if name not in numbers:
                raise FormatError(f"{shard.path!r} holds {name!r}, which rank 0 does not know; it is of another save")
            tensor = draft.tensors[numbers[name]]
            region = whole(tensor.shape) if cut is None else normalise(cut, tensor.shape, fqn=name)
            if entry.dtype != tensor.dtype or entry.nbytes != region.numel * tensor.item_bytes:
                raise FormatError(
                    f"{entry.key!r} in {shard.path!r} has dtype {entry.dtype} and {entry.nbytes} bytes, which does not "
                    f"fit {name!r} of dtype {tensor.dtype} and global shape {tensor.shape}; the file is of another save"
                )
            builder.add_chunk(numbers[name], region, file=file, byte_offset=entry.begin)
    return builder.build()


def _chunks(shard: _Shard) -> Iterator[tuple[Entry, str, Region | None]]:
    """Yield each entry of a shard with its tensor's name and its region, None for the whole tensor."""
    for entry in shard.header.entries:
        match shard.regions.get(entry.key):
            case None:
                region: Region | None = None
            case [list(), int(start), int(stop)]:
                region = Span(start, stop)
            case [list(), list(offset), list(shape)]:
                region = Box(_integers(offset, shard.path), _integers(shape, shard.path))
            case other:
                raise FormatError(f"{shard.path!r} gives {entry.key!r} the region {other!r}; restore it from a copy")
        yield entry, name_of_key(entry.key), region


def _integers(values: list[object], path: str) -> tuple[int, ...]:
    integers = tuple(value for value in values if isinstance(value, int))
    if len(integers) < len(values):
        raise FormatError(f"{path!r} has a region of other than integers: {values!r}; restore it from a copy")
    return integers


def _left_table(store: Store, shard_path: str, catalogue: Catalogue) -> Catalogue | None:
    """Give the chunk table of the save, if it is there and is about the same chunks."""
    match = _SHARD.fullmatch(shard_path)
    path = f"chunks{(match[1] or '') if match else ''}.safetensors"
    if not store.exists(path):
        return None
    try:
        with closing(store.open_reader(path)) as reader:
            spans, boxes = decode_chunk_table(reader.read(0, reader.nbytes), path)
    except FormatError:
        return None
    found = replace(catalogue, spans=spans, boxes=boxes)
    return found if _rows(found).keys() == _rows(catalogue).keys() else None


def _compare(table: Catalogue, found: Catalogue) -> None:
    recorded, now = _rows(table), _rows(found)
    wrong = [row for row, (crc, _) in recorded.items() if now[row][0] != crc]
    if wrong:
        more = f" ({len(wrong) - 1} more chunks are damaged too)" if len(wrong) > 1 else ""
        raise CorruptError(
            f"damaged: {found.describe(now[wrong[0]][1])} is not what was saved, by the chunk table{more}. Restore the "
            "file from a copy, or use an earlier checkpoint."
        )


def _rows(catalogue: Catalogue) -> dict[tuple[int, ...], tuple[int, int]]:
    """Give the place of each chunk in files and tensors -> its checksum and number."""
    places = np.stack([catalogue.chunk_file, catalogue.chunk_byte_offset, catalogue.chunk_tensor]).T.tolist()
    regions = np.concatenate([catalogue.spans.start, catalogue.boxes.offset.sum(axis=1)]).tolist()
    crcs = catalogue.chunk_crc.tolist()
    return {(*place, start): (crc, i) for i, (place, start, crc) in enumerate(zip(places, regions, crcs, strict=True))}
