"""The commit: what makes files under one root a checkpoint, and reading it back.

A checkpoint is there if and only if its manifest is, and the manifest is written last. Over an older checkpoint the new
files get names of their own, so that each moment shows the old one or the new one, whole; what the new
manifest does not name is removed after it is in place.
"""

from __future__ import annotations

import datetime
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Boxes, Catalogue, File, Spans, Tensor
from shardckpt.checksum import combine_groups, crc32c
from shardckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    NoSpaceError,
    StorageError,
    listing,
)
from shardckpt.layout import Layout
from shardckpt.manifest import (
    MANIFEST_PATH,
    MAX_MANIFEST_NBYTES,
    VERSION,
    FileRecord,
    Json,
    Manifest,
    Stored,
    TensorRecord,
    decode_manifest,
    encode_chunk_table,
    encode_manifest,
    stored,
)
from shardckpt.shard_file import ShardNaming
from shardckpt.storage import TEMPORARY_SUFFIX, Store

I64 = NDArray[np.int64]

WRITER = "shardckpt 0.1.0"
_OWN_FILE = re.compile(
    r"(shard-\d{5,}-of-\d{5,}|chunks)(-[0-9a-f]{8})?\.safetensors"
    r"|\.[^/]*\.[0-9a-f]{16}" + re.escape(TEMPORARY_SUFFIX)
)


def is_own_file(path: str) -> bool:
    """Tell whether a file's name is one that only a save gives: shards, chunk tables, temporary files."""
    return _OWN_FILE.fullmatch(path) is not None


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is not yet written: all but files and chunks.

    Attributes:
        step: The training step, or None.
        world_size: Number of ranks, and of shard files.
        sections: Top-level key of the state -> "module", "optimizer", "state" (an object with a state dict) or "value".
        tensors: All tensors, in the order of the manifest.
        layout: The rule of their distribution, if there is one.
        objects: The non-tensor state, encoded as `docs/format.md` says.
        metrics: How good the state is; None where a value was no finite number.
    """

    step: int | None
    world_size: int
    sections: dict[str, str]
    tensors: tuple[Tensor, ...]
    layout: Layout | None
    objects: Json
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    def naming(self, token: str) -> ShardNaming:
        """Give the naming of its shard files."""
        state = {
            "sections": self.sections,
            "tensors": _tensor_records(self.tensors),
            "layout": self.layout,
            "objects": self.objects,
        }
        return ShardNaming(self.world_size, self.step, token, msgspec.json.encode(state))


@dataclass(frozen=True, slots=True)
class Destination:
    """A root made ready for a new checkpoint.

    Attributes:
        store: The root.
        token: For the names of the files; "" unless there is a checkpoint to replace.
        leftovers: Files of an unfinished save that were found and removed.
    """

    store: Store
    token: str
    leftovers: tuple[str, ...]


def read_committed(store: Store) -> Stored:
    """Read manifest and chunk table of the checkpoint at a root.

    Raises:
        CheckpointNotFoundError: If nothing is committed there; says what there is instead.
        FormatError: If manifest or table is damaged.
    """
    try:
        data = store.get(MANIFEST_PATH, max_nbytes=MAX_MANIFEST_NBYTES)
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(_what_is_there(store)) from None
    manifest = decode_manifest(data, f"{store.url}/{MANIFEST_PATH}")
    table = store.get(manifest.chunk_table.path, max_nbytes=manifest.chunk_table.nbytes)
    return stored(manifest, table)


def draft_of(found: Stored) -> Draft:
    """Give the draft that writes the same state again."""
    manifest = found.manifest
    return Draft(
        manifest.step,
        manifest.world_size,
        manifest.sections,
        found.catalogue.tensors,
        manifest.layout,
        found.objects,
        manifest.metrics,
    )


class _State(msgspec.Struct):
    """What `Draft.naming` puts into rank 0's header."""

    sections: dict[str, str]
    tensors: list[TensorRecord]
    layout: Layout | None
    objects: msgspec.Raw


def draft_of_state(state: bytes, step: int | None, world_size: int) -> Draft:
    """Give the draft whose `naming` has this `state`: from rank 0's header, or from rank 0 itself.

    Raises:
        FormatError: If it is not what `Draft.naming` makes.
    """
    try:
        found = msgspec.json.decode(state, type=_State)
        objects: Json = msgspec.json.decode(found.objects)
    except msgspec.MsgspecError as error:
        raise FormatError(f"the state in a shard file's header does not follow the format: {error}") from None
    tensors = tuple(Tensor(t.name, t.dtype, tuple(t.shape), tuple(t.aliases)) for t in found.tensors)
    return Draft(step, world_size, found.sections, tensors, found.layout, objects)


def survey_destination(store: Store, *, overwrite: bool) -> Destination:
    """Find out whether a root can be written to, and change nothing; `leftovers` are those that `prepare` would remove.

    Raises:
        CheckpointExistsError: If there is a checkpoint and `overwrite` is False, or if there are files of another kind.
    """
    found = store.list()
    if store.exists(MANIFEST_PATH):  # asked for by name, as a list may lag behind
        if not overwrite:
            raise CheckpointExistsError(
                f"{store.url!r} holds a checkpoint already; choose another destination, or ask to overwrite it"
            )
        return Destination(store, secrets.token_hex(4), ())
    foreign = [path for path in found if not is_own_file(path)]
    if foreign and not overwrite:
        raise CheckpointExistsError(
            f"{store.url!r} is not empty: it has {listing(foreign)}; choose another destination, or ask to overwrite"
        )
    return Destination(store, "", tuple(path for path in found if is_own_file(path)))


def prepare(store: Store, *, overwrite: bool) -> Destination:
    """Make a root ready to be written to; must be called once a save, by one rank.

    Raises:
        CheckpointExistsError: As `survey_destination`.
    """
    destination = survey_destination(store, overwrite=overwrite)
    for path in destination.leftovers:
        store.delete(path)
    leftovers = tuple(dict.fromkeys((*destination.leftovers, *_discard_unfinished(store))))
    return replace(destination, leftovers=leftovers)


def _discard_unfinished(store: Store) -> tuple[str, ...]:
    return store.discard_unfinished(is_own_file)


def check_space(store: Store, nbytes: int) -> None:
    """Refuse before anything is written if the destination cannot hold `nbytes`.

    Raises:
        NoSpaceError: With both numbers.
    """
    free = store.free_bytes()
    if free is not None and free < nbytes:
        raise NoSpaceError(
            f"{store.url!r} has {free} bytes free, {nbytes} are needed; free some room or choose another destination"
        )


def commit(destination: Destination, draft: Draft, written: Catalogue, headers_crc: Sequence[int]) -> tuple[str, ...]:
    """Write chunk table and manifest, then remove what they do not name.

    Args:
        destination: From `prepare`.
        draft: What was written.
        written: Its files and chunks, the chunks with checksums.
        headers_crc: Checksum of each file's header.

    Returns:
        Why files of the replaced checkpoint are still there: the new one is committed all the same, and the next save
        at this place tries again.
    """
    store = destination.store
    written = replace(written, files=_with_checksums(written, headers_crc))
    table = encode_chunk_table(written)
    token = f"-{destination.token}" if destination.token else ""
    table_path = f"chunks{token}.safetensors"
    store.put(table_path, table)
    manifest = Manifest(
        format="shardckpt",
        version=VERSION,
        writer=WRITER,
        created=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        step=draft.step,
        world_size=draft.world_size,
        sections=draft.sections,
        tensors=_tensor_records(draft.tensors),
        files=[FileRecord(f.path, f.nbytes, f.header_nbytes, f"{f.crc:08x}") for f in written.files],
        chunk_table=FileRecord(table_path, len(table), 0, f"{crc32c(table):08x}"),
        num_chunks=len(written.chunk_nbytes),
        layout=draft.layout,
        objects=msgspec.Raw(msgspec.json.encode(draft.objects)),
        metrics=dict(draft.metrics),
    )
    store.put(MANIFEST_PATH, encode_manifest(manifest), is_new=not destination.token)
    if not destination.token:
        return ()
    return _remove_others(store, {MANIFEST_PATH, table_path, *(file.path for file in written.files)})


def _remove_others(store: Store, named: Collection[str]) -> tuple[str, ...]:
    """Remove the files of other saves; give why those that stay could not be removed."""
    try:
        found = store.list()
    except StorageError as error:
        return (str(error),)
    return remove_files(store, [path for path in found if path not in named and is_own_file(path)])


def remove_files(store: Store, paths: Iterable[str]) -> tuple[str, ...]:
    """Remove files, all that can be; give why the others could not."""
    failures = []
    for path in paths:
        try:
            store.delete(path)
        except StorageError as error:
            failures.append(str(error))
    return tuple(failures)


def refuse_remains(store: Store, not_removed: Sequence[str]) -> None:
    """Raise if `commit` could not remove all that it should.

    Raises:
        StorageError: Says that the new checkpoint is there, and what else is.
    """
    if not_removed:
        raise StorageError(
            f"the checkpoint at {store.url!r} is replaced, but files of the old one are still there: {not_removed[0]} "
            f"({len(not_removed)} in all). They do no harm; the next write there, or `shardckpt prune --unfinished` on "
            "the folder above, removes them."
        )


def with_chunk_crcs(catalogue: Catalogue, crcs: I64) -> Catalogue:
    """Give the catalogue with these checksums of its chunks, by chunk number."""
    spans, boxes = catalogue.spans, catalogue.boxes
    return replace(
        catalogue,
        spans=Spans(spans.tensor, spans.start, spans.stop, spans.file, spans.byte_offset, crcs[: len(spans)]),
        boxes=Boxes(boxes.tensor, boxes.offset, boxes.shape, boxes.file, boxes.byte_offset, crcs[len(spans) :]),
    )


def _with_checksums(written: Catalogue, headers_crc: Sequence[int]) -> tuple[File, ...]:
    """Give the files with their checksums, put together from those of header and chunks."""
    num_files = len(written.files)
    file = np.concatenate([np.arange(num_files), written.chunk_file])
    at = np.concatenate([np.zeros(num_files, np.int64), written.chunk_byte_offset])
    nbytes = np.concatenate([np.array([f.header_nbytes for f in written.files], np.int64), written.chunk_nbytes])
    crc = np.concatenate([np.array(headers_crc, np.int64), written.chunk_crc])
    order = np.lexsort((at, file))
    starts = np.searchsorted(file[order], np.arange(num_files))
    found = combine_groups(crc[order].astype(np.uint32), nbytes[order], starts).tolist()
    return tuple(replace(f, crc=value) for f, value in zip(written.files, found, strict=True))


def _tensor_records(tensors: Sequence[Tensor]) -> list[TensorRecord]:
    return [TensorRecord(t.name, t.dtype, list(t.shape), list(t.aliases)) for t in tensors]


def _what_is_there(store: Store) -> str:
    found = store.list()
    if not found:
        return f"there is no checkpoint at {store.url!r}: nothing is there; check the path"
    inner = sorted(path.removesuffix(f"/{MANIFEST_PATH}") for path in found if path.endswith(f"/{MANIFEST_PATH}"))
    if inner:
        return f"{store.url!r} holds no checkpoint itself, but {listing(inner)}; name one of these"
    if any(is_own_file(path) for path in found):
        return f"{store.url!r} holds an unfinished save (shard files, but no manifest); use another checkpoint"
    return f"there is no checkpoint at {store.url!r}: it has {listing(found)} but no {MANIFEST_PATH}; check the path"
