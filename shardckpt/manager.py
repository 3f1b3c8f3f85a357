"""Many checkpoints of one run under one root: the newest, which to keep, which to remove.

Each checkpoint is a folder `step-00001000` below the root. Only committed ones count; nothing is removed on the word of
a save that failed, and never the newest committed one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shardckpt.coordinate import Deadlines, coordinator, rank_in
from shardckpt.errors import CheckpointError, CheckpointNotFoundError, FormatError, MismatchError
from shardckpt.loading import LoadReport, load
from shardckpt.manifest import MANIFEST_PATH
from shardckpt.save_async import AsyncSaver, PendingSave
from shardckpt.save_phases import SaveReport
from shardckpt.saving import save
from shardckpt.storage import open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_STEP_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Restored:
    """What `Manager.restore` loaded.

    Attributes:
        step: The step of the checkpoint.
        report: Of the load.
        skipped: (step, why) of each newer checkpoint that could not be read.
    """

    step: int
    report: LoadReport
    skipped: tuple[tuple[int, str], ...]


class Manager:
    """The checkpoints of one run.

    Example:
        >>> import tempfile, torch, shardckpt
        >>> state = {"model": torch.nn.Linear(2, 2), "epoch": 0}
        >>> manager = shardckpt.Manager(tempfile.mkdtemp(), keep=2)
        >>> for step in (10, 20, 30):
        ...     _ = manager.save(step, state)
        >>> manager.steps(), manager.restore(state).step
        ([20, 30], 30)
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        process_group: ProcessGroup | None = None,
        deadlines: Deadlines | None = None,
        storage_options: Mapping[str, object] | None = None,
        staging_budget_bytes: int | None = None,
    ) -> None:
        """Look at nothing yet.

        Args:
            root: A folder or any fsspec URL.
            keep: How many of the newest checkpoints to keep; None for all.
            keep_every: Also keep those whose step is a multiple of this.
            process_group: The ranks that save and load together; None for all.
            deadlines: How long to wait for other ranks.
            storage_options: For the fsspec file system of `root`.
            staging_budget_bytes: See `AsyncSaver`.

        Raises:
            MismatchError: If `keep` or `keep_every` is less than 1.
        """
        if (keep is not None and keep < 1) or (keep_every is not None and keep_every < 1):
            raise MismatchError(f"keep={keep} and keep_every={keep_every}: both must be at least 1, or None")
        self.root = os.fspath(root).rstrip("/")
        self._keep = keep
        self._keep_every = keep_every
        self._group = process_group
        self._deadlines = deadlines
        self._storage_options = storage_options
        self._saver = AsyncSaver(staging_budget_bytes=staging_budget_bytes)

    def path(self, step: int) -> str:
        """Give where the checkpoint of a step is, or would be."""
        return f"{self.root}/{_folder(step)}"

    def steps(self) -> list[int]:
        """Give the steps of all committed checkpoints, oldest first."""
        return _committed_steps(open_store(self.root, self._storage_options).list())

    def latest(self) -> int | None:
        """Give the step of the newest committed checkpoint, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Mapping[str, object]) -> SaveReport:
        """Save a state, then remove what is not to be kept.

        Args:
            step: The training step; a checkpoint of it that is there is replaced.
            state: As for `shardckpt.save`.

        Raises:
            CheckpointError: The same on all ranks; nothing was removed.

        Collective:
            All ranks call. Blocks until the checkpoint is committed.
        """
        self._saver.wait()
        report = save(
            self.path(step),
            state,
            step=step,
            overwrite=True,
            process_group=self._group,
            deadlines=self._deadlines,
            storage_options=self._storage_options,
        )
        self._prune_after(step)
        return report

    def save_async(self, step: int, state: Mapping[str, object]) -> PendingSave:
        """Save a state in the background, as `AsyncSaver.save`; then remove what is not to be kept.

        Collective:
            All ranks call. Returns when the snapshot is taken.
        """
        return self._saver.save(
            self.path(step),
            state,
            step=step,
            overwrite=True,
            process_group=self._group,
            deadlines=self._deadlines,
            storage_options=self._storage_options,
            on_commit=lambda report: self._prune_after(step),
        )

    def wait(self) -> None:
        """Wait for the save under way, and raise its failure if nobody has seen it yet."""
        self._saver.wait()

    def restore(self, state: MutableMapping[str, object], *, strict: bool = True) -> Restored | None:
        """Load the newest checkpoint that can be read; older ones are tried where files are damaged or gone.

        Args:
            state: As for `shardckpt.load`.
            strict: As for `shardckpt.load`.

        Returns:
            What was loaded, and what was skipped and why; None if there is no checkpoint.

        Raises:
            CheckpointError: If there are checkpoints but none can be read, or the state does not fit.

        Collective:
            All ranks call. Blocks until all have loaded.
        """
        self._saver.wait()
        with coordinator(self._group, self._deadlines) as together:
            answer = together.exchange("find the newest checkpoint", bytes, lambda _: msgspec.json.encode(self.steps()))
        skipped: list[tuple[int, str]] = []
        for step in reversed(msgspec.json.decode(answer, type=list[int])):
            try:
                report = load(
                    self.path(step),
                    state,
                    strict=strict,
                    process_group=self._group,
                    deadlines=self._deadlines,
                    storage_options=self._storage_options,
                )
            except (FormatError, CheckpointNotFoundError) as error:
                skipped.append((step, str(error)))
                continue
            return Restored(step, report, tuple(skipped))
        if skipped:
            raise CheckpointError(
                f"none of the {len(skipped)} checkpoints under {self.root!r} can be read; the newest, of step "
                f"{skipped[0][0]}: "
                f"{skipped[0][1]}"
            )
        return None

    def prune(self) -> list[int]:
        """Remove the checkpoints that are not to be kept; give their steps.

        Collective:
            None; one process calls.
        """
        store = open_store(self.root, self._storage_options)
        files = store.list()
        steps = _committed_steps(files)
        newest = steps if self._keep is None else steps[-self._keep :]
        every = self._keep_every
        doomed = [step for step in steps if step not in newest and not (every is not None and step % every == 0)]
        for step in doomed:
            folder = f"{_folder(step)}/"
            store.delete(folder + MANIFEST_PATH)  # first, so that it stops being a checkpoint at once
            for path in files:
                if path.startswith(folder):
                    store.delete(path)
        return doomed

    def _prune_after(self, step: int) -> None:
        """Prune on rank 0, once it has seen that the new checkpoint is there."""
        if rank_in(self._group) == 0 and step in self.steps():
            self.prune()


def _folder(step: int) -> str:
    return f"step-{step:08}"


def _committed_steps(files: Iterable[str]) -> list[int]:
    folders = (path.removesuffix(f"/{MANIFEST_PATH}") for path in files if path.endswith(f"/{MANIFEST_PATH}"))
    return sorted(int(match[1]) for folder in folders if (match := _STEP_FOLDER.fullmatch(folder)))
