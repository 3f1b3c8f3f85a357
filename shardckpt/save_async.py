"""Save in the background: stage a snapshot, return, write and commit on a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from shardckpt.coordinate import Coordinator, Deadlines, coordinator
from shardckpt.per_rank import RankOf
from shardckpt.save_phases import Held, SavePhases, SaveReport, SaveRequest
from shardckpt.staging import Staging
from shardckpt.state import collect
from shardckpt.storage import Store, open_store
from shardckpt.tensors import source_of
from shardckpt.transfer import DEFAULT_BUDGET_BYTES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PendingSave:
    """A save under way."""

    def __init__(self, run: Callable[[], SaveReport]) -> None:
        self._run = run
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._is_raised = False
        self._thread = threading.Thread(target=self._work, name="shardckpt save")
        self._thread.start()

    def _work(self) -> None:
        try:
            self._report = self._run()
        except BaseException as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        """True if it is committed, or has failed."""
        return not self._thread.is_alive()

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Wait until the checkpoint is committed.

        Args:
            timeout_s: How long to wait; None for as long as it takes.

        Raises:
            TimeoutError: If it is still under way; it goes on.
            CheckpointError: If it failed, on all ranks alike.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the save is not done after {timeout_s:g} s; it goes on in the background")
        self._is_raised = True
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def wait(self) -> None:
        """Wait until it is over; raise its failure, unless `result` has raised it already."""
        self._thread.join()
        if not self._is_raised:
            self.result()


class AsyncSaver:
    """Saves one state after another in the background, out of one staging buffer.

    Example:
        >>> import tempfile, torch, shardckpt
        >>> folder = tempfile.mkdtemp()
        >>> saver = shardckpt.AsyncSaver()
        >>> weights = torch.zeros(3)
        >>> pending = saver.save(f"{folder}/a", {"weights": weights})
        >>> _ = weights.fill_(1.0)
        >>> _ = pending.result()
        >>> shardckpt.open(f"{folder}/a")["weights"][...]
        tensor([0., 0., 0.])
    """

    def __init__(self, *, staging_budget_bytes: int | None = None) -> None:
        """Hold nothing yet.

        Args:
            staging_budget_bytes: Ceiling of the staging buffer; a state that is larger is written before `save`
                returns, from where it lies. None for no ceiling.
        """
        self._staging = Staging()
        self._budget_bytes = staging_budget_bytes
        self._pending: PendingSave | None = None

    @property
    def staging_nbytes(self) -> int:
        """Bytes of host memory that the staging buffer holds."""
        return self._staging.nbytes

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, object],
        *,
        step: int | None = None,
        overwrite: bool = False,
        process_group: ProcessGroup | None = None,
        deadlines: Deadlines | None = None,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        storage_options: Mapping[str, object] | None = None,
    ) -> PendingSave:
        """Take a snapshot of a state, and save it in the background.

        When this returns, the state may change: nothing of it is read again. A save that is still under way is waited
        for first.

        Args:
            path, state, step, overwrite, process_group, deadlines, budget_bytes, storage_options: As for `save`.

        Returns:
            The save under way. Ask it for its `result()` before the process group is destroyed.

        Raises:
            CheckpointError: The failure of the save before, if nobody has seen it yet. This save's own failures,
                those of taking the snapshot too, are raised by `result()`, on all ranks alike.

        Collective:
            All ranks of the group call, with the same `path`. Does not wait for other ranks, unless over the budget.
        """
        self.wait()
        return self.start(
            open_store(path, storage_options),
            state,
            SaveRequest(step, overwrite, budget_bytes),
            coordinator(process_group, deadlines),
        )

    def start(
        self, store: Store, state: Mapping[str, object], request: SaveRequest, together: Coordinator
    ) -> PendingSave:
        """Take a snapshot and save it as `save` does.

        Collective:
            All ranks of the coordinator.
        """
        self.wait()
        phases = SavePhases(together, store, request)
        held, is_staged = self._snapshot(state, RankOf(together.rank, together.world_size))
        self._pending = PendingSave(lambda: phases.run(held))
        if not is_staged:
            self._pending.wait()
        return self._pending

    def wait(self) -> None:
        """Wait for the save under way, and raise its failure if nobody has seen it yet."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()

    def _snapshot(self, state: Mapping[str, object], place: RankOf) -> tuple[Callable[[], Held], bool]:
        """Give what this rank holds, or its failure, for the first phase; and whether it is a copy."""
        try:
            local = collect(state, place)
            tensors = [one.shard.local for one in local.tensors]
            fqns = [one.tensor.name for one in local.tensors]
            nbytes = sum(one.nbytes for one in local.tensors)
            is_staged = self._budget_bytes is None or nbytes <= self._budget_bytes
            if is_staged:
                held = Held(local, self._staging.copy(tensors, fqns=fqns))
            else:
                held = Held(local, [source_of(t, fqn=fqn) for t, fqn in zip(tensors, fqns, strict=True)])
        except Exception as error:
            return _raising(error), True
        return lambda: held, is_staged


def _raising(error: Exception) -> Callable[[], Held]:
    def fail() -> Held:
        raise error

    return fail
