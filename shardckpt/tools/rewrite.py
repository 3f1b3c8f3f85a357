"""Writing a checkpoint from files that are there: what `reshard` and `import` share.

Knows how laid-out ranks become a committed checkpoint; refuses to know where the rule of the layout comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Catalogue
from shardckpt.checksum import crc32c
from shardckpt.committed import Destination, Draft, check_space, commit, prepare, refuse_remains
from shardckpt.container import FileSet
from shardckpt.derivation import Derivation
from shardckpt.endpoints import ReaderPool
from shardckpt.layout import RankChunks
from shardckpt.shard_file import lay_out_shards
from shardckpt.storage import Store
from shardckpt.team import Team, is_team_file
from shardckpt.tools.shares import Share, cut_out, divide, meeting, put_together
from shardckpt.transfer import TransferOptions
from shardckpt.write_files import write_files


@dataclass(frozen=True)
class Rewrite:
    """A checkpoint that is worked out but not begun.

    Attributes:
        source: What its bytes are taken from.
        store: Where the files of `source` are.
        draft: What will be written.
        chunks: Which rank writes what.
        files: Its files, as they are called at an empty destination.
        renamed: Name in the checkpoint -> name in `source`, where they differ.
    """

    source: Catalogue
    store: Store
    draft: Draft
    chunks: RankChunks
    files: FileSet
    renamed: Mapping[str, str] = field(default_factory=dict)


def plan_rewrite(
    source: Catalogue, store: Store, draft: Draft, chunks: RankChunks, renamed: Mapping[str, str] | None = None
) -> Rewrite:
    """Work out the files; the arguments are the attributes of `Rewrite`."""
    files = lay_out_shards(draft.tensors, chunks, draft.naming(""))
    return Rewrite(source, store, draft, chunks, files, renamed or {})


def rewrite(
    job: Rewrite, target: Store, *, overwrite: bool, options: TransferOptions, team: Team | None = None
) -> Destination:
    """Write and commit what was planned.

    Args:
        job: From `plan_rewrite`.
        target: Where to.
        overwrite: Replace a checkpoint that is there.
        options: How.
        team: The processes that do it together, each with the same job; None for this one alone.

    Raises:
        CheckpointExistsError: If `target` is taken and not to be overwritten.
        CheckpointError: As `write_files`; `target` then holds no new checkpoint, and keeps the one it had.
    """
    team = team or Team()
    with meeting(target, team, options) as (together, options):

        def begin() -> bytes:
            found = prepare(target, overwrite=overwrite)
            check_space(target, job.files.nbytes)
            return msgspec.json.encode([found.token, [path for path in found.leftovers if not is_team_file(path)]])

        token, leftovers = msgspec.json.decode(together.share(begin), type=tuple[str, tuple[str, ...]])
        destination = Destination(target, token, leftovers)
        files = job.files if not token else lay_out_shards(job.draft.tensors, job.chunks, job.draft.naming(token))
        numbers = divide(files, team.size)
        share = cut_out(files, numbers[team.rank])

        def all_have_written() -> None:
            together.gather(b"")
            together.share(lambda: b"")

        crcs = _write_share(job, share, target, options, before_commit=all_have_written)
        parts = together.gather(crcs.tobytes())
        if team.rank == 0:
            done = [
                (cut_out(files, mine).chunks, np.frombuffer(part, np.int64))
                for mine, part in zip(numbers, parts, strict=True)
            ]
            headers_crc = [crc32c(header) for header in files.headers]
            refuse_remains(target, commit(destination, job.draft, put_together(files, done), headers_crc))
    return destination


def _write_share(
    job: Rewrite, share: Share, target: Store, options: TransferOptions, before_commit: Callable[[], None]
) -> NDArray[np.int64]:
    """Write some of the files, and give the checksums of their chunks."""
    derivation = Derivation.renaming(share.files.catalogue, job.renamed)
    with closing(ReaderPool(job.store)) as pool:
        sources = pool.sources([file.path for file in job.source.files])
        written = write_files(
            job.source,
            sources,
            share.files,
            target,
            options=options,
            derivation=derivation,
            before_commit=before_commit,
        )
    return written.catalogue.chunk_crc
