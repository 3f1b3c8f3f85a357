"""Put tensors of a checkpoint into one safetensors file."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from enum import Enum

from shardckpt.catalogue import Catalogue
from shardckpt.committed import read_committed
from shardckpt.container import FileSet
from shardckpt.derivation import Derivation
from shardckpt.endpoints import ReaderPool
from shardckpt.errors import CheckpointExistsError, listing
from shardckpt.formats.huggingface import lay_out_files
from shardckpt.manifest import MANIFEST_PATH
from shardckpt.storage import Store
from shardckpt.tools.recast import NewDtype, recast
from shardckpt.tools.selection import Choice, fanned_out, select
from shardckpt.transfer import TransferOptions
from shardckpt.write_files import write_files


class Tied(Enum):
    """What becomes of a tensor with several names."""

    ONCE = "once"
    """It is stored under its first name; the file's metadata records the others."""
    BOTH = "both"
    """It is stored once for each name."""


@dataclass(frozen=True)
class ConsolidateJob:
    """A consolidation that is worked out but not begun.

    Attributes:
        source: What the checkpoint holds.
        store: Its root.
        files: The one file that will be written.
        derivation: How its tensors come from the checkpoint's.
    """

    source: Catalogue
    store: Store
    files: FileSet
    derivation: Derivation


def plan_consolidate(
    source: Store, name: str, *, choice: Choice, tied: Tied = Tied.ONCE, dtype: NewDtype | None = None
) -> ConsolidateJob:
    """Work out the file.

    Args:
        source: Root of the checkpoint.
        name: The file's name.
        choice: Which tensors.
        tied: What becomes of tensors with several names.
        dtype: Another dtype for some of them; None to keep all.

    Raises:
        MismatchError: As `select` and `recast`.
    """
    found = read_committed(source)
    selection = select(found, choice)
    if tied is Tied.BOTH:
        selection = fanned_out(selection, lambda tensor: (tensor.name, *tensor.aliases))
    if dtype is not None:
        selection = recast(selection, dtype)
    files = lay_out_files([(name, selection.tensors)])
    derivation = Derivation.assembling(found.catalogue, files.catalogue, selection.pieces)
    return ConsolidateJob(found.catalogue, source, files, derivation)


def consolidate(job: ConsolidateJob, target: Store, *, overwrite: bool, options: TransferOptions) -> tuple[str, ...]:
    """Write the file; it appears whole or not at all.

    Args:
        job: From `plan_consolidate`.
        target: The folder.
        overwrite: Replace a file of that name.
        options: How.

    Returns:
        What an unfinished run had left, and was removed.

    Raises:
        CheckpointExistsError: If there is one, and it is not to be replaced.
        CheckpointError: As `write_files`.
    """
    path = job.files.catalogue.files[0].path
    refuse_taken(target, [path], overwrite=overwrite)
    leftovers = target.discard_temporaries(path)
    with closing(ReaderPool(job.store)) as pool:
        sources = pool.sources([file.path for file in job.source.files])
        write_files(job.source, sources, job.files, target, options=options, derivation=job.derivation)
    return leftovers


def refuse_taken(target: Store, paths: list[str], *, overwrite: bool) -> None:
    """Raise `CheckpointExistsError` if there is a file at one of `paths` and it is not to be replaced.

    A file beside a manifest is never replaced: it may be one of that checkpoint's.
    """
    taken = [path for path in paths if target.exists(path)]
    if taken and target.exists(MANIFEST_PATH):
        raise CheckpointExistsError(
            f"{target.url!r} is a checkpoint, which has {listing(taken)}; choose a destination outside it"
        )
    if taken and not overwrite:
        raise CheckpointExistsError(
            f"{target.url!r} has {listing(taken)} already; choose another destination, or ask to overwrite it"
        )
