"""Save a state from all ranks: collect, agree, write, commit."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Catalogue, CatalogueBuilder, File, Tensor
from shardckpt.checksum import crc32c
from shardckpt.committed import Destination, Draft, commit, prepare, with_chunk_crcs
from shardckpt.container import FileSet
from shardckpt.coordinate import DEFAULT_TIMEOUT_S, Coordinator, coordinator
from shardckpt.endpoints import Source
from shardckpt.errors import MismatchError, listing
from shardckpt.layout import Bucket, Layout, RankChunks, regions
from shardckpt.plan import prove_coverage
from shardckpt.shard_file import chunk_rows, chunks_of, lay_out_shard, place_shards
from shardckpt.state import LocalState, LocalTensor, collect
from shardckpt.storage import Store, open_store
from shardckpt.tensors import source_of
from shardckpt.transfer import DEFAULT_BUDGET_BYTES, TransferOptions
from shardckpt.write_files import write_files

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CRC_STEP_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did.

    Attributes:
        path: Where the checkpoint is.
        nbytes: Bytes of all shard files.
        seconds: From the call to the commit.
        leftovers: Files of an unfinished save that were found there and removed.
    """

    path: str
    nbytes: int
    seconds: float
    leftovers: tuple[str, ...]


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    step: int | None = None,
    overwrite: bool = False,
    process_group: ProcessGroup | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    storage_options: Mapping[str, object] | None = None,
) -> SaveReport:
    """Save a state as a checkpoint; when this returns it is committed, when it raises it is not.

    Args:
        path: A folder, or any fsspec URL, that holds no checkpoint yet.
        state: Section -> module, optimizer, object with `state_dict()`, tensor, or nested values of JSON types.
        step: The training step, kept in the manifest.
        overwrite: Replace a checkpoint at `path`, atomically.
        process_group: The ranks that save together; None for all.
        timeout_s: How long to wait for the slowest rank in each phase.
        budget_bytes: Ceiling of the buffers that this rank uses beside the state itself.
        storage_options: For the fsspec file system of `path`.

    Raises:
        CheckpointError: The same on all ranks; names the rank, tensor or file at fault.

    Collective:
        All ranks of the group call, with the same `path`. Blocks until the checkpoint is committed.

    Example:
        >>> import tempfile, torch, shardckpt
        >>> model = torch.nn.Linear(2, 3)
        >>> folder = tempfile.mkdtemp()
        >>> shardckpt.save(f"{folder}/step-1", {"model": model, "epoch": 4}, step=1).nbytes > 0
        True
    """
    started = time.monotonic()
    together = coordinator(process_group, timeout_s)
    store = open_store(path, storage_options)
    saving = _Saving(together, store, step, overwrite)
    answer = together.exchange("collect the state", lambda: saving.collect(state), saving.agree)
    if (differing := msgspec.msgpack.decode(answer, type=_Agreement)).differing:
        together.exchange("compare the states", lambda: saving.description(differing.differing), saving.refuse)
    report = together.exchange(
        "write the shard files", lambda: saving.write(differing.token, budget_bytes), saving.commit
    )
    nbytes, leftovers = msgspec.msgpack.decode(report, type=tuple[int, tuple[str, ...]])
    return SaveReport(store.url, nbytes, time.monotonic() - started, leftovers)


class _Agreement(msgspec.Struct):
    """Rank 0's answer to what all ranks collected: the token of the destination, or who differs from rank 0."""

    token: str
    differing: tuple[int, ...]


class _Description(msgspec.Struct):
    """What must be equal on all ranks, to be named where it is not."""

    tensors: dict[str, str]
    objects: bytes


class _Collected(msgspec.Struct):
    """What a rank says of its state: a digest of all that must be equal, and the checksum of each replica."""

    digest: bytes
    replicas: bytes  # uint32 a replicated tensor, in the order of the state


class _ShardReport(msgspec.Struct):
    """What a rank says of the file it wrote."""

    header_nbytes: int
    header_crc: int
    chunk_crcs: bytes  # uint32 a chunk, in the order of the file
    nbytes: int


class _Saving:
    """One save, as one rank sees it; the methods are its phases. `agree`, `refuse` and `commit` run on rank 0 alone."""

    def __init__(self, together: Coordinator, store: Store, step: int | None, overwrite: bool) -> None:
        self._together = together
        self._store = store
        self._step = step
        self._overwrite = overwrite
        self._local: LocalState
        self._draft: Draft
        self._destination: Destination

    def collect(self, state: Mapping[str, object]) -> bytes:
        """Collect the state and give its digest and the checksums of replicas."""
        self._local = collect(state)
        self._draft = _draft(self._local, self._step, self._together.world_size)
        digest = hashlib.sha256(self._draft.naming("").state).digest()
        replicas = [local for local in self._local.tensors if local.shard.is_replicated]
        crcs = [_crc_of(local) for local in replicas] if self._together.world_size > 1 else []
        return msgspec.msgpack.encode(_Collected(digest, np.array(crcs, np.uint32).tobytes()))

    def agree(self, payloads: Sequence[bytes]) -> bytes:
        """Check that all ranks hold the same, and make the destination ready."""
        collected = [msgspec.msgpack.decode(payload, type=_Collected) for payload in payloads]
        differing = tuple(rank for rank, one in enumerate(collected) if one.digest != collected[0].digest)
        token = ""
        if not differing:
            self._check_replicas([np.frombuffer(one.replicas, np.uint32) for one in collected])
            self._destination = prepare(self._store, overwrite=self._overwrite)
            token = self._destination.token
        return msgspec.msgpack.encode(_Agreement(token, differing))

    def description(self, differing: Sequence[int]) -> bytes:
        """Give what this rank holds in words, if it is asked: rank 0 and those that differ from it."""
        if self._together.rank != 0 and self._together.rank not in differing:
            return b""
        tensors = {
            tensor.name: f"{tensor.dtype} {tensor.shape} {'also ' + listing(tensor.aliases) if tensor.aliases else ''}"
            for tensor in self._draft.tensors
        }
        return msgspec.msgpack.encode(_Description(tensors, msgspec.json.encode(self._draft.objects)))

    def refuse(self, payloads: Sequence[bytes]) -> bytes:
        """Raise an error that says how the first differing rank differs from rank 0."""
        told = {rank: msgspec.msgpack.decode(p, type=_Description) for rank, p in enumerate(payloads) if p}
        other = min(rank for rank in told if rank != 0)
        mine, theirs = told[0].tensors, told[other].tensors
        lines = (
            [f"only on rank 0: {listing(sorted(mine.keys() - theirs.keys()))}"] if mine.keys() - theirs.keys() else []
        )
        if theirs.keys() - mine.keys():
            lines.append(f"only on rank {other}: {listing(sorted(theirs.keys() - mine.keys()))}")
        changed = [name for name in mine if name in theirs and mine[name] != theirs[name]]
        lines += [f"{name!r} is {mine[name]} on rank 0, {theirs[name]} on rank {other}" for name in changed[:5]]
        if not lines:
            lines = ["values that are no tensors, or the order or wrapping of the tensors"]
        raise MismatchError(
            f"ranks hold different states: rank {other} differs from rank 0: {'; '.join(lines)}. "
            "Give the same state on all ranks."
        )

    def write(self, token: str, budget_bytes: int) -> bytes:
        """Write this rank's file."""
        rank, draft = self._together.rank, self._draft
        naming = draft.naming(token)
        own = _chunks(draft).of_rank(rank)
        chunks = chunks_of(draft.tensors, own)
        header, begins, nbytes = lay_out_shard(draft.tensors, chunks, rank, naming)
        target = CatalogueBuilder()
        target.tensors.extend(draft.tensors)
        target.add_file(File(naming.path(rank), nbytes, len(header)))
        for (tensor, region), begin in zip(chunks, begins, strict=True):
            target.add_chunk(tensor, region, file=0, byte_offset=begin)
        source, sources = in_memory(self._local.tensors)
        files = FileSet(target.build(), (header,))
        options = TransferOptions(budget_bytes=budget_bytes)
        written = write_files(source, sources, files, self._store, options=options)
        crcs = np.empty(len(chunks), np.uint32)
        crcs[chunk_rows(own)] = written.catalogue.chunk_crc
        return msgspec.msgpack.encode(_ShardReport(len(header), crc32c(header), crcs.tobytes(), nbytes))

    def commit(self, payloads: Sequence[bytes]) -> bytes:
        """Commit what all ranks wrote."""
        reports = [msgspec.msgpack.decode(payload, type=_ShardReport) for payload in payloads]
        draft = self._draft
        naming = draft.naming(self._destination.token)
        chunks = _chunks(draft)
        placed = place_shards(draft.tensors, chunks, naming, [report.header_nbytes for report in reports])
        crcs = np.concatenate([np.frombuffer(report.chunk_crcs, np.uint32) for report in reports]).astype(np.int64)
        written = with_chunk_crcs(placed, crcs[chunk_rows(chunks)])
        prove_coverage(written)
        commit(self._destination, draft, written, [report.header_crc for report in reports])
        return msgspec.msgpack.encode((sum(report.nbytes for report in reports), self._destination.leftovers))

    def _check_replicas(self, crcs: Sequence[NDArray[np.uint32]]) -> None:
        """Refuse if what should be the same on all ranks is not."""
        replicas = [local for local in self._local.tensors if local.shard.is_replicated]
        for rank, found in enumerate(crcs):
            wrong = np.flatnonzero(found != crcs[0])
            if len(wrong):
                name = replicas[int(wrong[0])].tensor.name
                raise MismatchError(
                    f"{name!r} should be the same on all ranks, but its bytes on rank {rank} are not those on rank 0 "
                    "(checksum "
                    f"{int(found[wrong[0]]):08x}, on rank 0 {int(crcs[0][wrong[0]]):08x}; {len(wrong)} tensors "
                    "differ). "
                    "Bring the ranks together before saving, or leave it out."
                )


def in_memory(tensors: Sequence[LocalTensor]) -> tuple[Catalogue, list[Source]]:
    """Give the catalogue of what this rank holds in memory, a file a tensor, and the sources over it."""
    builder = CatalogueBuilder()
    sources: list[Source] = []
    for local in tensors:
        index = builder.add_tensor(local.tensor)
        nbytes = local.shard.region.numel * local.tensor.item_bytes
        file = builder.add_file(File(f"memory of {local.tensor.name}", nbytes, 0))
        builder.add_chunk(index, local.shard.region, file=file, byte_offset=0)
        sources.append(source_of(local.shard.tensor, fqn=local.tensor.name))
    return builder.build(), sources


def _draft(local: LocalState, step: int | None, world_size: int) -> Draft:
    tensors = tuple(one.tensor for one in local.tensors)
    return Draft(step, world_size, local.sections, tensors, _layout(local, tensors), local.objects)


def _layout(local: LocalState, tensors: Sequence[Tensor]) -> Layout:
    """Give the rule by which a state is cut: the runtime's buckets, and what is replicated."""
    index = {tensor.name: i for i, tensor in enumerate(tensors)}
    buckets = [
        Bucket(
            bucket.align,
            list(bucket.numel),
            list(bucket.granularity),
            [[-1 if name is None else index[name] for name in column] for column in bucket.columns],
        )
        for bucket in local.buckets
    ]
    return Layout(buckets, [i for i, one in enumerate(local.tensors) if one.shard.is_replicated])


def _chunks(draft: Draft) -> RankChunks:
    assert draft.layout is not None
    return regions(draft.layout, draft.tensors, draft.world_size)


def _crc_of(local: LocalTensor) -> int:
    """Give the checksum of all bytes of a replicated tensor."""
    source, nbytes = source_of(local.shard.tensor, fqn=local.tensor.name), local.tensor.nbytes
    buffer = np.empty(min(nbytes, _CRC_STEP_BYTES), np.uint8)
    crc = 0
    for at in range(0, nbytes, _CRC_STEP_BYTES):
        crc = crc32c(source.fetch(at, buffer[: min(_CRC_STEP_BYTES, nbytes - at)]), crc)
    return crc
