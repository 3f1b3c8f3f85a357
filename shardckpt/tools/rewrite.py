"""Writing a checkpoint from files that are there: what `reshard` and `import` share.

Knows how laid-out ranks become a committed checkpoint; refuses to know where the rule of the layout comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

from shardckpt.catalogue import Catalogue
from shardckpt.committed import Destination, Draft, commit, prepare
from shardckpt.container import FileSet
from shardckpt.derivation import Derivation
from shardckpt.endpoints import ReaderPool
from shardckpt.layout import RankChunks
from shardckpt.shard_file import lay_out_shards
from shardckpt.storage import Store
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


def rewrite(job: Rewrite, target: Store, *, overwrite: bool, options: TransferOptions) -> Destination:
    """Write and commit what was planned.

    Raises:
        CheckpointExistsError: If `target` is taken and not to be overwritten.
        CheckpointError: As `write_files`; `target` then holds no new checkpoint, and keeps the one it had.
    """
    destination = prepare(target, overwrite=overwrite)
    files = job.files
    if destination.token:
        files = lay_out_shards(job.draft.tensors, job.chunks, job.draft.naming(destination.token))
    derivation = Derivation.renaming(files.catalogue, job.renamed)
    with closing(ReaderPool(job.store)) as pool:
        sources = pool.sources([file.path for file in job.source.files])
        written = write_files(job.source, sources, files, target, options=options, derivation=derivation)
    commit(destination, job.draft, written.catalogue, written.headers_crc)
    return destination
