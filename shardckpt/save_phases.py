"""The phases of a save: agree on the state, write, commit. The same whether the bytes are live or staged copies."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import SupportsFloat

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Catalogue, CatalogueBuilder, File
from shardckpt.checksum import crc32c
from shardckpt.committed import Destination, Draft, commit, draft_of_state, prepare, with_chunk_crcs
from shardckpt.container import FileSet
from shardckpt.coordinate import Coordinator
from shardckpt.endpoints import Source
from shardckpt.errors import MismatchError, UnsupportedError
from shardckpt.layout import RankChunks, regions
from shardckpt.manifest import Json
from shardckpt.merge import HeldState, held, merge, merge_values
from shardckpt.per_rank import without_values
from shardckpt.plan import prove_coverage
from shardckpt.rules import layout_of, shared_tensors
from shardckpt.shard_file import chunk_rows, chunks_of, lay_out_shard, place_shards
from shardckpt.state import LocalState, LocalTensor
from shardckpt.store import Store
from shardckpt.transfer import DEFAULT_BUDGET_BYTES, TransferOptions
from shardckpt.write_files import write_files

_CRC_STEP_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did.

    Attributes:
        path: Where the checkpoint is.
        nbytes: Bytes of all shard files.
        seconds: From the call to the commit.
        leftovers: Files of an unfinished save that were found there and removed.
        not_removed: Why old files that are no longer needed are still there. This checkpoint is committed all the same.
    """

    path: str
    nbytes: int
    seconds: float
    leftovers: tuple[str, ...]
    not_removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a caller asks of a save.

    Attributes:
        step: The training step, kept in the manifest.
        overwrite: Replace a checkpoint that is there, atomically.
        budget_bytes: Ceiling of the buffers that this rank uses beside the state itself.
        metrics: How good the state is, by name; those of rank 0 are kept in the manifest.
        clean_up: Called on rank 0 once the checkpoint is committed; gives why what it should remove is still there.
    """

    step: int | None = None
    overwrite: bool = False
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    metrics: Mapping[str, SupportsFloat] | None = None
    clean_up: Callable[[], tuple[str, ...]] | None = None

    def __post_init__(self) -> None:
        """Check the step."""
        if self.step is not None and (type(self.step) is not int or not 0 <= self.step < 1 << 63):
            raise UnsupportedError(f"step is {self.step!r}; give an integer that is not negative, or None")


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank holds of a state, and the sources over it, one a tensor."""

    local: LocalState
    sources: list[Source]


class _Collected(msgspec.Struct):
    """What a rank says of its state: a digest of it, and the checksum of each tensor that other ranks hold too."""

    digest: bytes  # of what must be alike; empty if there is no rule for the state as a whole
    shared: bytes  # uint32 a shared tensor, in the order of the state
    per_rank: bytes = b""  # the state with what this rank has for itself, if it has any: `ShardNaming.state`


class _Agreement(msgspec.Struct):
    """Rank 0's answer: the token of the destination, and, where ranks differ, the whole and who writes what."""

    token: str
    state: bytes = b""  # of the merged draft: `ShardNaming.state`
    chunks: tuple[bytes, ...] = ()  # int64 columns of `RankChunks`
    width: int = 0


class _ShardReport(msgspec.Struct):
    """What a rank says of the file it wrote."""

    header_nbytes: int
    header_crc: int
    chunk_crcs: bytes  # uint32 a chunk, in the order of the file
    nbytes: int


class _Done(msgspec.Struct):
    """What rank 0 says of the commit."""

    nbytes: int
    leftovers: tuple[str, ...]
    not_removed: tuple[str, ...]


class SavePhases:
    """One save, as one rank sees it; the methods are its phases. `agree`, `merge` and `commit` run on rank 0 alone."""

    def __init__(self, together: Coordinator, store: Store, request: SaveRequest) -> None:
        self._together = together
        self._store = store
        self._request = request
        self._local: LocalState
        self._sources: list[Source]  # one a tensor of the local state
        self._metrics: dict[str, float | None]
        self._draft: Draft
        self._chunks: RankChunks
        self._destination: Destination

    def run(self, held: Callable[[], Held]) -> SaveReport:
        """Go through all phases.

        Args:
            held: Gives what this rank holds; called in the first phase, so that its failure is every rank's.

        Collective:
            All ranks of the coordinator; blocks until the checkpoint is committed.
        """
        started = time.monotonic()
        with self._together as together:
            answer = together.exchange("collect the state", lambda: self.collect(held()), self.agree)
            if not answer:
                answer = together.exchange("merge the states", self.describe, self.merge)
            token = self.take_agreement(answer)
            report = together.exchange("write the shard files", lambda: self.write(token), self.commit)
        done = msgspec.msgpack.decode(report, type=_Done)
        return SaveReport(self._store.url, done.nbytes, time.monotonic() - started, done.leftovers, done.not_removed)

    def collect(self, held: Held) -> bytes:
        """Take what this rank holds; give its digest and the checksums of what other ranks hold too."""
        self._local, self._sources = held.local, held.sources
        self._metrics = _numbers(self._request.metrics or {})
        rank, world_size = self._together.rank, self._together.world_size
        tensors = tuple(one.tensor for one in self._local.tensors)
        layout = layout_of(self._local, rank, world_size)
        self._draft = Draft(self._request.step, world_size, self._local.sections, tensors, layout, self._local.objects)
        if layout is None:
            return msgspec.msgpack.encode(_Collected(b"", b""))
        alike = _alike(self._draft)
        digest = hashlib.sha256(alike.naming("").state).digest()
        shared = shared_tensors(self._local, world_size) if world_size > 1 else []
        crcs = [self._crc_of(position) for position, _ in shared]
        own = self._draft.naming("").state if alike != self._draft else b""
        return msgspec.msgpack.encode(_Collected(digest, np.array(crcs, np.uint32).tobytes(), own))

    def agree(self, payloads: Sequence[bytes]) -> bytes:
        """Check that all ranks hold the same, and make the destination ready; nothing, if they do not."""
        collected = [msgspec.msgpack.decode(payload, type=_Collected) for payload in payloads]
        if not collected[0].digest or any(one.digest != collected[0].digest for one in collected):
            return b""
        if len(collected) > 1:
            self._check_shared(np.stack([np.frombuffer(one.shared, np.uint32) for one in collected]))
            self._take_per_rank([one.per_rank for one in collected])
        self._destination = prepare(self._store, overwrite=self._request.overwrite)
        return msgspec.msgpack.encode(_Agreement(self._destination.token))

    def _take_per_rank(self, states: Sequence[bytes]) -> None:
        """Add what the other ranks have for themselves to the draft."""
        for rank, state in enumerate(states):
            layout = self._draft.layout
            if rank == 0 or not state or layout is None:
                continue
            other = draft_of_state(state, self._draft.step, self._draft.world_size)
            own = other.tensors[len(_alike(other).tensors) :]
            first = len(self._draft.tensors)
            places = [*layout.per_rank, *((first + i, rank) for i in range(len(own)))]
            self._draft = replace(
                self._draft,
                tensors=(*self._draft.tensors, *own),
                layout=msgspec.structs.replace(layout, per_rank=places),
                objects=merge_values(self._draft.objects, other.objects, "state", (0, rank)),
            )

    def describe(self) -> bytes:
        """Give all that this rank holds, but the tensors' bytes."""
        tensors = [
            held(one.tensor, one.shard.region, self._crc_of(position))
            for position, one in enumerate(self._local.tensors)
        ]
        objects = self._local.objects
        assert isinstance(objects, dict)
        raw = {section: msgspec.json.encode(value) for section, value in objects.items()}
        return msgspec.msgpack.encode(HeldState(tensors, self._local.sections, raw))

    def merge(self, payloads: Sequence[bytes]) -> bytes:
        """Put together what all ranks hold, and make the destination ready."""
        merged = merge([msgspec.msgpack.decode(payload, type=HeldState) for payload in payloads])
        objects: dict[str, Json] = dict(merged.objects)
        draft = Draft(self._request.step, self._together.world_size, merged.sections, merged.tensors, None, objects)
        naming = draft.naming("")
        prove_coverage(place_shards(merged.tensors, merged.chunks, naming, [0] * draft.world_size))
        self._destination = prepare(self._store, overwrite=self._request.overwrite)
        c = merged.chunks
        columns = (c.rank, c.tensor, c.start, c.stop, c.box, c.offset, c.shape)
        chunks = tuple(column.tobytes() for column in columns)
        return msgspec.msgpack.encode(_Agreement(self._destination.token, naming.state, chunks, c.offset.shape[1]))

    def take_agreement(self, answer: bytes) -> str:
        """Take rank 0's answer, and give the token of the destination."""
        agreement = msgspec.msgpack.decode(answer, type=_Agreement)
        if agreement.state:
            self._draft = draft_of_state(agreement.state, self._request.step, self._together.world_size)
            columns = [np.frombuffer(column, np.int64) for column in agreement.chunks]
            offset, shape = (
                column.reshape(-1, agreement.width) if len(column) else _no_boxes() for column in columns[5:]
            )
            self._chunks = RankChunks(columns[0], columns[1], columns[2], columns[3], columns[4], offset, shape)
        else:
            assert self._draft.layout is not None
            self._chunks = regions(self._draft.layout, self._draft.tensors, self._draft.world_size)
        return agreement.token

    def write(self, token: str) -> bytes:
        """Write this rank's file."""
        rank, draft = self._together.rank, self._draft
        naming = draft.naming(token)
        own = self._chunks.of_rank(rank)
        chunks = chunks_of(draft.tensors, own)
        header, begins, nbytes = lay_out_shard(draft.tensors, chunks, rank, naming)
        target = CatalogueBuilder()
        target.add_file(File(naming.path(rank), nbytes, len(header)))
        index = {tensor: target.add_tensor(draft.tensors[tensor]) for tensor in dict.fromkeys(t for t, _ in chunks)}
        for (tensor, region), begin in zip(chunks, begins, strict=True):
            target.add_chunk(index[tensor], region, file=0, byte_offset=begin)
        options = TransferOptions(budget_bytes=self._request.budget_bytes)
        files = FileSet(target.build(), (header,))
        written = write_files(_in_memory(self._local.tensors), self._sources, files, self._store, options=options)
        crcs = np.empty(len(chunks), np.uint32)
        crcs[chunk_rows(own)] = written.catalogue.chunk_crc
        return msgspec.msgpack.encode(_ShardReport(len(header), crc32c(header), crcs.tobytes(), nbytes))

    def commit(self, payloads: Sequence[bytes]) -> bytes:
        """Commit what all ranks wrote."""
        reports = [msgspec.msgpack.decode(payload, type=_ShardReport) for payload in payloads]
        naming = self._draft.naming(self._destination.token)
        headers = [report.header_nbytes for report in reports]
        placed = place_shards(self._draft.tensors, self._chunks, naming, headers)
        crcs = np.concatenate([np.frombuffer(report.chunk_crcs, np.uint32) for report in reports]).astype(np.int64)
        written = with_chunk_crcs(placed, crcs[chunk_rows(self._chunks)])
        prove_coverage(written)
        draft = replace(self._draft, metrics=self._metrics)
        not_removed = commit(self._destination, draft, written, [report.header_crc for report in reports])
        if self._request.clean_up is not None:
            not_removed += self._request.clean_up()
        return msgspec.msgpack.encode(
            _Done(sum(report.nbytes for report in reports), self._destination.leftovers, not_removed)
        )

    def _crc_of(self, position: int) -> int:
        """Give the checksum of what this rank holds of a tensor."""
        nbytes = self._local.tensors[position].nbytes
        buffer = np.empty(min(nbytes, _CRC_STEP_BYTES), np.uint8)
        crc = 0
        for at in range(0, nbytes, _CRC_STEP_BYTES):
            crc = crc32c(self._sources[position].fetch(at, buffer[: min(_CRC_STEP_BYTES, nbytes - at)]), crc)
        return crc

    def _check_shared(self, crcs: NDArray[np.uint32]) -> None:
        """Refuse if what should be the same on several ranks is not. `crcs` is [ranks, shared tensors]."""
        for column, (position, holders) in enumerate(shared_tensors(self._local, self._together.world_size)):
            first = np.unique(holders, return_index=True)[1]  # the first rank of each group that holds the same
            wrong = np.flatnonzero(crcs[:, column] != crcs[first[holders], column])
            if len(wrong):
                rank, like = int(wrong[0]), int(first[holders[wrong[0]]])
                raise MismatchError(
                    f"{self._local.tensors[position].tensor.name!r} should be the same on ranks {like} and {rank}, "
                    "but its bytes "
                    f"differ (checksums {int(crcs[like, column]):08x} and {int(crcs[rank, column]):08x}). "
                    "Bring the ranks together before saving, give it another name on each, or leave it out."
                )


def _alike(draft: Draft) -> Draft:
    """Give a draft without what differs per rank."""
    layout = draft.layout
    assert layout is not None
    tensors = draft.tensors[: len(draft.tensors) - len(layout.per_rank)]
    alike = msgspec.structs.replace(layout, per_rank=[])
    return replace(draft, tensors=tensors, layout=alike, objects=without_values(draft.objects))


def _numbers(metrics: Mapping[str, SupportsFloat]) -> dict[str, float | None]:
    """Give metrics as they are stored: what is no finite number has no place in JSON, and is best of nothing."""
    numbers: dict[str, float | None] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise UnsupportedError(f"the metric {name!r} has no text for a name; name metrics by text")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedError(f"the metric {name!r} is {value!r}, which is no number: {error}") from None
        numbers[name] = number if math.isfinite(number) else None
    return numbers


def _in_memory(tensors: Sequence[LocalTensor]) -> Catalogue:
    """Give the catalogue of what this rank holds in memory, a file a tensor."""
    builder = CatalogueBuilder()
    for local in tensors:
        index = builder.add_tensor(local.tensor)
        file = builder.add_file(File(f"memory of {local.tensor.name}", local.nbytes, 0))
        builder.add_chunk(index, local.shard.region, file=file, byte_offset=0)
    return builder.build()


def _no_boxes() -> NDArray[np.int64]:
    return np.empty((0, 0), np.int64)
