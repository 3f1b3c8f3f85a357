"""Copy a checkpoint from one place to another, every byte compared with its recorded checksum on the way.

The data files stay as they are, to the byte. Refuses to know what is in them.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from shardckpt.catalogue import File
from shardckpt.committed import (
    check_space,
    commit,
    draft_of,
    prepare,
    read_committed,
    refuse_remains,
    survey_destination,
)
from shardckpt.endpoints import FileSink, ReaderPool
from shardckpt.errors import CorruptError, FormatError
from shardckpt.manifest import MANIFEST_PATH, MAX_MANIFEST_NBYTES, Stored
from shardckpt.shard_file import ShardNaming
from shardckpt.storage import Store
from shardckpt.tools.segments import file_crcs, plan_bytes, segments_of, untiled_files, wrong_chunks
from shardckpt.transfer import TransferOptions, transfer


@dataclass(frozen=True)
class CopyJob:
    """A copy that is worked out but not begun.

    Attributes:
        found: The checkpoint.
        source: Its root.
        target: Where it goes.
        leftovers: Remains of an unfinished run at the target.
    """

    found: Stored
    source: Store
    target: Store
    leftovers: tuple[str, ...]

    @property
    def files(self) -> tuple[File, ...]:
        """The data files."""
        return self.found.catalogue.files

    @property
    def nbytes(self) -> int:
        """Bytes of the data files."""
        return sum(file.nbytes for file in self.files)


def plan_cp(source: Store, target: Store, *, overwrite: bool) -> CopyJob:
    """Find out whether a checkpoint can be copied, and change nothing.

    Raises:
        CheckpointExistsError: If the target is taken and not to be replaced.
        NoSpaceError: If it has too little room.
        FormatError: If the source's table and files contradict each other.
    """
    found = read_committed(source)
    if untiled := untiled_files(found.catalogue, segments_of(found.catalogue)):
        path = found.catalogue.files[untiled[0]].path
        raise FormatError(f"the chunks of {path!r} do not fill the file; run `shardckpt verify` on {source.url!r}")
    destination = survey_destination(target, overwrite=overwrite)
    job = CopyJob(found, source, target, destination.leftovers)
    check_space(target, job.nbytes)
    return job


def cp(job: CopyJob, *, overwrite: bool, options: TransferOptions) -> tuple[str, ...]:
    """Copy and commit; give the remains of an unfinished run that were removed.

    Over an older checkpoint the files take new names, as in every save; else manifest and table are copied too.

    Raises:
        CorruptError: If a byte is not what was saved; names file and tensor. The target then has no new checkpoint.
        StorageError: If reading or writing fails.
    """
    manifest = job.source.get(MANIFEST_PATH, max_nbytes=MAX_MANIFEST_NBYTES)
    record = job.found.manifest.chunk_table
    table = job.source.get(record.path, max_nbytes=record.nbytes)
    destination = prepare(job.target, overwrite=overwrite)
    naming = ShardNaming(job.found.manifest.world_size, None, destination.token)
    is_renaming = bool(destination.token)
    paths = [naming.path(rank) if is_renaming else file.path for rank, file in enumerate(job.files)]
    headers_crc = _copy_files(job, paths, options)
    if is_renaming:
        files = tuple(replace(file, path=path) for file, path in zip(job.files, paths, strict=True))
        catalogue = replace(job.found.catalogue, files=files)
        refuse_remains(job.target, commit(destination, draft_of(job.found), catalogue, headers_crc))
    else:
        job.target.put(record.path, table)
        job.target.put(MANIFEST_PATH, manifest, is_new=True)
    return destination.leftovers


def _copy_files(job: CopyJob, paths: list[str], options: TransferOptions) -> list[int]:
    """Copy the data files, compare all checksums, and only then let the files appear; give those of the headers."""
    catalogue = job.found.catalogue
    segments = segments_of(catalogue)
    sinks = [FileSink(job.target, path, b"", file.nbytes) for path, file in zip(paths, job.files, strict=True)]
    with closing(ReaderPool(job.source)) as pool:
        sources = pool.sources([file.path for file in job.files])
        copies = plan_bytes(catalogue, segments, paths)
        found = transfer(copies, sources, sinks, options=replace(options, is_verified=False)).target_crc
    try:
        wrong = wrong_chunks(catalogue, segments, found).tolist()
        if wrong:
            more = f" ({len(wrong) - 1} more chunks are damaged too)" if len(wrong) > 1 else ""
            raise CorruptError(
                f"damaged: {catalogue.describe(wrong[0])} has not the checksum that was recorded{more}. Restore the "
                "file from a copy, or use an earlier checkpoint."
            )
        for number, crc in file_crcs(catalogue, segments, found).items():
            file = job.files[number]
            if file.crc is not None and file.crc != crc:
                raise CorruptError(
                    f"damaged: the header of {file.path!r} was changed: the file has checksum {crc:08x}, recorded is "
                    f"{file.crc:08x}. Restore the file from a copy, or use an earlier checkpoint."
                )
        for sink in sinks:
            sink.commit()
    except BaseException:
        for sink in sinks:
            sink.abort()
        raise
    headers = np.zeros(len(job.files), np.int64)
    is_header = segments.chunk < 0
    headers[segments.file[is_header]] = found[is_header]
    return [int(crc) for crc in headers]
