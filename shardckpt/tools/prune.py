"""Remove checkpoints of a run that are not to be kept, and what unfinished saves left behind.

Knows which files are a save's; refuses to remove any other, the newest checkpoint, and what it cannot read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardckpt.committed import is_own_file
from shardckpt.errors import CheckpointNotFoundError, FormatError, MismatchError
from shardckpt.manifest import MANIFEST_PATH, MAX_MANIFEST_NBYTES, Manifest, decode_manifest
from shardckpt.storage import Store


@dataclass(frozen=True, slots=True)
class Keeping:
    """What stays.

    Attributes:
        newest: How many of the newest checkpoints; None for all.
        every: Also those whose step is a multiple of this.
        is_unfinished_kept: False to remove what unfinished saves left.
    """

    newest: int | None = None
    every: int | None = None
    is_unfinished_kept: bool = True


@dataclass(frozen=True, slots=True)
class Folder:
    """One folder below the root, and what becomes of it.

    Attributes:
        name: Its name.
        step: Of its checkpoint, if there is one with a step.
        verdict: "keep" or "remove".
        reason: Why.
        doomed: Files to remove, in that order.
        nbytes: Bytes of these.
    """

    name: str
    step: int | None
    verdict: str
    reason: str
    doomed: tuple[str, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True)
class PruneJob:
    """A pruning that is worked out but not begun."""

    store: Store
    folders: tuple[Folder, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to be freed."""
        return sum(folder.nbytes for folder in self.folders)


def plan_prune(store: Store, keeping: Keeping) -> PruneJob:
    """Look at the folders directly below a root, and decide.

    Raises:
        CheckpointNotFoundError: If there is no checkpoint and nothing unfinished below the root.
        MismatchError: If the root is a checkpoint itself, or nothing would be kept.
    """
    if keeping.newest is not None and keeping.newest < 1:
        raise MismatchError("at least the newest checkpoint is kept; use --keep 1")
    files = store.list()
    if MANIFEST_PATH in files:
        raise MismatchError(f"{store.url!r} is a checkpoint itself; name the folder that holds the run's checkpoints")
    inside: dict[str, dict[str, int]] = {}
    for path, nbytes in files.items():
        folder, slash, name = path.partition("/")
        if slash and "/" not in name:
            inside.setdefault(folder, {})[name] = nbytes
    ours = {folder: names for folder, names in inside.items() if MANIFEST_PATH in names or any(map(is_own_file, names))}
    if not ours:
        raise CheckpointNotFoundError(f"there are no checkpoints below {store.url!r}; check the path")
    manifests = {folder: _manifest(store, folder) for folder, names in ours.items() if MANIFEST_PATH in names}
    kept = _kept_steps((m.step for m in manifests.values() if isinstance(m, Manifest) and m.step is not None), keeping)
    return PruneJob(store, tuple(_judge(f, names, manifests.get(f), kept, keeping) for f, names in ours.items()))


def prune(job: PruneJob) -> None:
    """Remove what was decided: of each checkpoint the manifest first, so that it stops being one at once."""
    for folder in job.folders:
        for name in folder.doomed:
            job.store.delete(f"{folder.name}/{name}")


def _kept_steps(steps: Iterable[int], keeping: Keeping) -> set[int]:
    ordered = sorted(set(steps))
    newest = ordered if keeping.newest is None else ordered[-keeping.newest :]
    return {step for step in ordered if step in newest or (keeping.every is not None and step % keeping.every == 0)}


def _judge(
    name: str, files: dict[str, int], manifest: Manifest | str | None, kept: set[int], keeping: Keeping
) -> Folder:
    if isinstance(manifest, str):
        return Folder(name, None, "keep", f"its manifest cannot be read: {manifest}")
    if manifest is None:
        doomed = [] if keeping.is_unfinished_kept else [file for file in files if is_own_file(file)]
        return _folder(name, None, files, doomed, "unfinished save")
    named = {MANIFEST_PATH, manifest.chunk_table.path, *(record.path for record in manifest.files)}
    if manifest.step is not None and manifest.step not in kept:
        doomed = [MANIFEST_PATH, *(file for file in files if file in named or is_own_file(file))]
        return _folder(name, manifest.step, files, list(dict.fromkeys(doomed)), "older than those that are kept")
    left = [] if keeping.is_unfinished_kept else [file for file in files if is_own_file(file) and file not in named]
    reason = "remains of an unfinished save" if left else "no step" if manifest.step is None else "kept"
    return _folder(name, manifest.step, files, left, reason)


def _folder(name: str, step: int | None, files: dict[str, int], doomed: list[str], reason: str) -> Folder:
    verdict = "remove" if doomed else "keep"
    return Folder(name, step, verdict, reason, tuple(doomed), sum(files.get(file, 0) for file in doomed))


def _manifest(store: Store, folder: str) -> Manifest | str:
    """Give the manifest of a folder, or what is wrong with it."""
    path = f"{folder}/{MANIFEST_PATH}"
    try:
        return decode_manifest(store.get(path, max_nbytes=MAX_MANIFEST_NBYTES), path)
    except FormatError as error:
        return str(error)
