"""Rewrite a checkpoint for another number of ranks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

from shardckpt.committed import Destination, Draft, commit, draft_of, prepare, read_committed
from shardckpt.container import FileSet
from shardckpt.endpoints import ReaderPool
from shardckpt.errors import MismatchError, UnsupportedError
from shardckpt.layout import regions
from shardckpt.manifest import Stored
from shardckpt.shard_file import lay_out_shards
from shardckpt.storage import Store
from shardckpt.transfer import TransferOptions
from shardckpt.write_files import write_files


@dataclass(frozen=True, slots=True)
class ReshardJob:
    """A reshard that is worked out but not begun.

    Attributes:
        found: The source checkpoint.
        draft: What will be written.
        files: Its files.
    """

    found: Stored
    draft: Draft
    files: FileSet


def plan_reshard(source: Store, *, to_ranks: int, from_ranks: int | None = None, token: str = "") -> ReshardJob:
    """Work out the files that the checkpoint's writer would have written at `to_ranks`.

    Args:
        source: Root of the checkpoint.
        to_ranks: The new world size.
        from_ranks: The world size that the caller believes it was written at; None to believe the manifest.
        token: Of the destination.

    Raises:
        MismatchError: If `from_ranks` is not the manifest's world size.
        UnsupportedError: If the checkpoint has no layout rule.
    """
    found = read_committed(source)
    manifest = found.manifest
    if from_ranks is not None and from_ranks != manifest.world_size:
        raise MismatchError(
            f"{source.url!r} was written by {manifest.world_size} ranks, not {from_ranks}; "
            f"use --from {manifest.world_size}, or leave --from out"
        )
    if manifest.layout is None:
        raise UnsupportedError(
            f"{source.url!r} does not record the rule of its layout; consolidate it and import the result"
        )
    draft = replace(draft_of(found), world_size=to_ranks)
    spans = regions(manifest.layout, draft.tensors, to_ranks)
    return ReshardJob(found, draft, lay_out_shards(draft.tensors, spans, draft.naming(token)))


def reshard(
    source: Store,
    target: Store,
    *,
    to_ranks: int,
    from_ranks: int | None = None,
    overwrite: bool = False,
    options: TransferOptions,
) -> tuple[ReshardJob, Destination]:
    """Write the checkpoint at `source` to `target` as `to_ranks` ranks would have saved it.

    Raises:
        CheckpointExistsError: If `target` is taken and not to be overwritten.
        CheckpointError: As `plan_reshard` and `write_files`; `target` then holds no new checkpoint.
    """
    plan_reshard(source, to_ranks=to_ranks, from_ranks=from_ranks)  # refuse before the destination is touched
    destination = prepare(target, overwrite=overwrite)
    job = plan_reshard(source, to_ranks=to_ranks, from_ranks=from_ranks, token=destination.token)
    with closing(ReaderPool(source)) as pool:
        sources = pool.sources([file.path for file in job.found.catalogue.files])
        written = write_files(job.found.catalogue, sources, job.files, target, options=options)
    commit(destination, job.draft, written.catalogue, written.headers_crc)
    return job, destination
