"""Save a state from all ranks, and wait until it is committed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardckpt.coordinate import Coordinator, Deadlines, coordinator
from shardckpt.per_rank import RankOf
from shardckpt.save_phases import Held, SavePhases, SaveReport, SaveRequest
from shardckpt.state import collect
from shardckpt.storage import Store, open_store
from shardckpt.tensors import source_of
from shardckpt.transfer import DEFAULT_BUDGET_BYTES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    step: int | None = None,
    overwrite: bool = False,
    process_group: ProcessGroup | None = None,
    deadlines: Deadlines | None = None,
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
        deadlines: How long to wait for other ranks; None for the defaults.
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
    return run_save(
        open_store(path, storage_options),
        state,
        SaveRequest(step, overwrite, budget_bytes),
        coordinator(process_group, deadlines),
    )


def run_save(store: Store, state: Mapping[str, object], request: SaveRequest, together: Coordinator) -> SaveReport:
    """Save as `save` does.

    Collective:
        All ranks of the coordinator.
    """
    place = RankOf(together.rank, together.world_size)
    return SavePhases(together, store, request).run(lambda: _live(state, place))


def _live(state: Mapping[str, object], place: RankOf) -> Held:
    """Give what this rank holds, where it lies."""
    local = collect(state, place)
    return Held(local, [source_of(one.shard.local, fqn=one.tensor.name) for one in local.tensors])
