"""Many checkpoints of one run under one root: the newest, which to keep, which to remove.

Each checkpoint is a folder `step-00001000` below the root. Only committed ones count. One rank removes, as the last
act of a commit, so that nothing goes on the word of a save that failed; never what was just saved, nor the newest that
can be read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, SupportsFloat

import msgspec

from shardckpt.committed import is_own_file, remove_files
from shardckpt.coordinate import Deadlines, FlagPoll, coordinator
from shardckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    MismatchError,
    PreemptedError,
    StorageError,
)
from shardckpt.loading import LoadReport, load
from shardckpt.manifest import MANIFEST_PATH, MAX_MANIFEST_NBYTES, decode_manifest
from shardckpt.preemption import Preemption, SignalWatch
from shardckpt.retention import Best, Metrics, Retention
from shardckpt.save_async import AsyncSaver, PendingSave
from shardckpt.save_phases import SaveReport, SaveRequest
from shardckpt.saving import run_save
from shardckpt.storage import Store, open_store

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

    A loop that saves every tenth step in the background:
        >>> with shardckpt.Manager(tempfile.mkdtemp(), every=10) as manager:
        ...     restored = manager.restore(state)
        ...     for step in range(restored.step if restored else 0, 30):
        ...         _ = manager.save_if_due(step + 1, state)
        >>> manager.latest()
        30
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: Best | None = None,
        preemption: Preemption | None = None,
        process_group: ProcessGroup | None = None,
        deadlines: Deadlines | None = None,
        storage_options: Mapping[str, object] | None = None,
        staging_budget_bytes: int | None = None,
    ) -> None:
        """Look at nothing yet.

        Args:
            root: A folder or any fsspec URL.
            every: At which steps `save_if_due` saves: the multiples of this. None for none.
            keep: How many of the newest checkpoints to keep; None for all.
            keep_every: Also keep those whose step is a multiple of this.
            best: Also keep the best by a metric that `save` was given.
            preemption: What `save_if_due` does once a signal tells this rank, or another, to stop; None to leave
                signals alone.
            process_group: The ranks that save and load together; None for all.
            deadlines: How long to wait for other ranks.
            storage_options: For the fsspec file system of `root`.
            staging_budget_bytes: See `AsyncSaver`.

        Raises:
            MismatchError: If `every`, `keep` or `keep_every` is less than 1.
            UnsupportedError: If there are signals to watch for, and this is not the main thread.
        """
        if every is not None and every < 1:
            raise MismatchError(f"every={every}; must be at least 1, or None")
        self._every = every
        self.root = os.fspath(root).rstrip("/")
        self._retention = Retention(keep, keep_every, best)
        self._metrics: dict[int, Metrics] = {}  # step -> those of its manifest, where that was read
        self._damaged: set[int] = set()  # steps that `restore` had to skip
        self._group = process_group
        self._deadlines = deadlines
        self._storage_options = storage_options
        self._saver = AsyncSaver(staging_budget_bytes=staging_budget_bytes)
        self._preemption = preemption
        self._poll = FlagPoll(process_group, deadlines)
        self._watch = SignalWatch(preemption.signals if preemption else ())

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._watch.close()  # its own failure is not to be hidden behind that of a save

    def close(self) -> None:
        """Wait for the save under way, and let signals do what they did before."""
        self._watch.close()
        self._saver.wait()

    def path(self, step: int) -> str:
        """Give where the checkpoint of a step is, or would be."""
        return f"{self.root}/{_folder(step)}"

    def steps(self) -> list[int]:
        """Give the steps of all committed checkpoints, oldest first."""
        return _committed_steps(open_store(self.root, self._storage_options).list())

    def latest(self) -> int | None:
        """Give the step of the newest committed checkpoint, or None."""
        return max(self.steps(), default=None)

    def metrics(self, step: int) -> Metrics:
        """Give the metrics that a checkpoint was saved with; None for what was no finite number.

        Raises:
            CheckpointNotFoundError: If there is no checkpoint of this step.
            FormatError: If its manifest is damaged.
        """
        return self._metrics_of(open_store(self.root, self._storage_options), step)

    def best(self) -> int | None:
        """Give the step of the best checkpoint, or None if none has the metric.

        Raises:
            MismatchError: If the manager was not told what is best.
        """
        best = self._retention.best
        if best is None:
            raise MismatchError("no metric says which checkpoint is best; make the manager with best=Best(metric)")
        store = open_store(self.root, self._storage_options)
        return next(iter(best.ranked(self._all_metrics(store, self.steps()))), None)

    def save(
        self, step: int, state: Mapping[str, object], *, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> SaveReport:
        """Save a state, then remove what is not to be kept.

        Args:
            step: The training step; a checkpoint of it that is there is replaced.
            state: As for `shardckpt.save`.
            metrics: How good the state is, by name; where ranks differ, those of rank 0 count.

        Returns:
            What was done; its `not_removed` says what should be gone and is still there: the next save tries again.

        Raises:
            CheckpointError: The same on all ranks; nothing was removed.

        Collective:
            All ranks call. Blocks until the checkpoint is committed.
        """
        self._saver.wait()
        store = open_store(self.path(step), self._storage_options)
        return run_save(store, state, self._request(step, metrics), coordinator(self._group, self._deadlines))

    def save_async(
        self, step: int, state: Mapping[str, object], *, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> PendingSave:
        """Save a state in the background, as `AsyncSaver.save`; then remove what is not to be kept.

        Collective:
            All ranks call. Returns when the snapshot is taken.
        """
        self._saver.wait()
        store = open_store(self.path(step), self._storage_options)
        return self._saver.start(store, state, self._request(step, metrics), coordinator(self._group, self._deadlines))

    def save_if_due(
        self, step: int, state: Mapping[str, object], *, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> bool:
        """Save in the background if the step is a multiple of `every`; if a rank was told to stop, save and end.

        Call it after each step. The signal of one rank is enough: at the next call all of them save, once, and then
        raise `SystemExit` with the code of `Preemption`, or `PreemptedError`.

        Args:
            step, state, metrics: As for `save`.

        Returns:
            True if a save has begun.

        Raises:
            PreemptedError: If the state is saved and the process should end.
            CheckpointError: As `save_async` and, when told to stop, `save`.

        Collective:
            All ranks call, after each step.
        """
        if self._preemption is not None and self._poll.ask(self._watch.received is not None):
            self._save_and_end(step, state, metrics, self._preemption)
        if self._every is None or step % self._every:
            return False
        self.save_async(step, state, metrics=metrics)
        return True

    def _save_and_end(
        self,
        step: int,
        state: Mapping[str, object],
        metrics: Mapping[str, SupportsFloat] | None,
        preemption: Preemption,
    ) -> None:
        failure: CheckpointError | None = None
        try:
            self._saver.wait()
        except CheckpointError as error:  # of the save before; this one may do better
            failure = error
        self.save(step, state, metrics=metrics)
        self._watch.close()
        if preemption.exit_code is not None:
            raise SystemExit(preemption.exit_code) from failure
        raise PreemptedError(
            f"a signal told this rank or another to stop; step {step} is saved under {self.root!r}. "
            "Start again to go on.",
            step,
        ) from failure

    def wait(self) -> None:
        """Wait for the save under way, and raise its failure if nobody has seen it yet."""
        self._saver.wait()

    def restore(
        self, state: MutableMapping[str, object], *, step: int | None = None, strict: bool = True
    ) -> Restored | None:
        """Load the newest checkpoint that can be read; older ones are tried where files are damaged or gone.

        Args:
            state: As for `shardckpt.load`.
            step: Load that of this step (such as `best()`), and no other.
            strict: As for `shardckpt.load`.

        Returns:
            What was loaded, and what was skipped and why; None if there is no checkpoint.

        Raises:
            CheckpointError: If there are checkpoints but none can be read, or the state does not fit.

        Collective:
            All ranks call. Blocks until all have loaded.
        """
        self._saver.wait()
        if step is not None:
            return Restored(step, self._load(step, state, strict), ())
        with coordinator(self._group, self._deadlines) as together:
            answer = together.exchange("find the newest checkpoint", bytes, lambda _: msgspec.json.encode(self.steps()))
        skipped: list[tuple[int, str]] = []
        for found in reversed(msgspec.json.decode(answer, type=list[int])):
            try:
                report = self._load(found, state, strict)
            except (FormatError, CheckpointNotFoundError) as error:
                skipped.append((found, str(error)))
                continue
            self._damaged = {skip for skip, _ in skipped}
            return Restored(found, report, tuple(skipped))
        if skipped:
            raise CheckpointError(
                f"none of the {len(skipped)} checkpoints under {self.root!r} can be read; the newest, of step "
                f"{skipped[0][0]}: "
                f"{skipped[0][1]}"
            )
        return None

    def prune(self) -> list[int]:
        """Remove the checkpoints that are not to be kept; give their steps.

        Those that `restore` had to skip are neither counted nor removed.

        Raises:
            StorageError: If files could not be removed; all others are.

        Collective:
            None; one process calls, while no other saves.
        """
        store = open_store(self.root, self._storage_options)
        files = store.list()
        steps = _committed_steps(files)
        doomed = self._doomed(store, steps)
        failures = _remove_checkpoints(store, files, doomed)
        if failures:
            raise StorageError(f"not all files of the steps {doomed} could be removed: {failures[0]}")
        return doomed

    def _load(self, step: int, state: MutableMapping[str, object], strict: bool) -> LoadReport:
        return load(
            self.path(step),
            state,
            strict=strict,
            process_group=self._group,
            deadlines=self._deadlines,
            storage_options=self._storage_options,
        )

    def _request(self, step: int, metrics: Mapping[str, SupportsFloat] | None) -> SaveRequest:
        return SaveRequest(step, overwrite=True, metrics=metrics, clean_up=lambda: self._clean_up(step))

    def _clean_up(self, step: int) -> tuple[str, ...]:
        """Remove what is not to be kept now that `step` is committed; give why some of it is still there."""
        self._metrics.pop(step, None)
        self._damaged.discard(step)
        store = open_store(self.root, self._storage_options)
        try:
            files = store.list()
            steps = _committed_steps(files)
            if step not in steps:
                return (f"the list of {self.root!r} does not show step {step} yet",)
            doomed = self._doomed(store, steps, just_saved=step)
        except StorageError as error:
            return (str(error),)
        return _remove_checkpoints(store, files, doomed) + remove_files(store, _remains(store, files, steps))

    def _doomed(self, store: Store, steps: list[int], just_saved: int | None = None) -> list[int]:
        sound = [step for step in steps if step not in self._damaged]
        metrics = self._all_metrics(store, sound) if self._retention.best else {}
        return self._retention.doomed(sound, metrics, protected=() if just_saved is None else (just_saved,))

    def _all_metrics(self, store: Store, steps: Iterable[int]) -> dict[int, Metrics]:
        found: dict[int, Metrics] = {}
        for step in steps:
            with contextlib.suppress(FormatError, CheckpointNotFoundError):  # damaged, or gone since it was listed
                found[step] = self._metrics_of(store, step)
        return found

    def _metrics_of(self, store: Store, step: int) -> Metrics:
        if step not in self._metrics:
            path = f"{_folder(step)}/{MANIFEST_PATH}"
            data = store.get(path, max_nbytes=MAX_MANIFEST_NBYTES)
            self._metrics[step] = decode_manifest(data, f"{store.url}/{path}").metrics
        return self._metrics[step]


def _folder(step: int) -> str:
    return f"step-{step:08}"


def _committed_steps(files: Iterable[str]) -> list[int]:
    folders = (path.removesuffix(f"/{MANIFEST_PATH}") for path in files if path.endswith(f"/{MANIFEST_PATH}"))
    return sorted(int(match[1]) for folder in folders if (match := _STEP_FOLDER.fullmatch(folder)))


def _remove_checkpoints(store: Store, files: Iterable[str], steps: Iterable[int]) -> tuple[str, ...]:
    """Remove checkpoints, of each the manifest first, so that it stops being one at once; give what failed."""
    failures: tuple[str, ...] = ()
    for step in steps:
        folder = f"{_folder(step)}/"
        kept = remove_files(store, [folder + MANIFEST_PATH])
        rest = [path for path in files if path.startswith(folder) and path != folder + MANIFEST_PATH]
        failures += kept or remove_files(store, rest)
    return failures


def _remains(store: Store, files: Iterable[str], steps: Collection[int]) -> list[str]:
    """Give the files of saves, or removals, that did not come to their end, before the newest checkpoint.

    They are nobody's: a manager has one save under way at a time, and that is just committed.
    """
    found: dict[str, list[str]] = {}
    for path in files:
        folder, _, name = path.partition("/")
        match = _STEP_FOLDER.fullmatch(folder)
        if match and int(match[1]) not in steps and int(match[1]) < max(steps) and is_own_file(name):
            found.setdefault(folder, []).append(path)
    # asked for by name, as a list may lag behind
    return [p for folder in found if not store.exists(f"{folder}/{MANIFEST_PATH}") for p in found[folder]]
