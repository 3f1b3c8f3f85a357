"""Load a checkpoint into a state, on any number of ranks: open, plan, transfer, fill in place."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardckpt.committed import read_committed
from shardckpt.coordinate import Deadlines, coordinator
from shardckpt.endpoints import ReaderPool
from shardckpt.errors import MismatchError, listing
from shardckpt.manifest import Stored
from shardckpt.parts import Parts, compare
from shardckpt.per_rank import RankOf
from shardckpt.plan import plan
from shardckpt.storage import Store, open_store
from shardckpt.transfer import DEFAULT_BUDGET_BYTES, TransferOptions, transfer
from shardckpt.wanted import Wanted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did on this rank.

    Attributes:
        step: The step of the checkpoint.
        nbytes: Bytes that this rank read.
        loaded: Names of the tensors that were filled.
        missing: What the state of any rank has and the checkpoint lacks; only with `strict=False`.
        unexpected: What the loaded sections of the checkpoint have and no rank's state has; only with `strict=False`.
        unverified_nbytes: Bytes, over all ranks, of chunks that they read in part only, and so could not check.
    """

    step: int | None
    nbytes: int
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    unverified_nbytes: int


def load(
    path: str | os.PathLike[str],
    state: MutableMapping[str, object],
    *,
    strict: bool = True,
    process_group: ProcessGroup | None = None,
    deadlines: Deadlines | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    storage_options: Mapping[str, object] | None = None,
) -> LoadReport:
    """Fill a state from a checkpoint that any number of ranks wrote.

    Modules, optimizers and tensors are filled in place; objects get their `load_state_dict`; other values are
    replaced in `state`. Only sections that `state` has are read, and of those only what this rank holds.

    Args:
        path: A folder or any fsspec URL.
        state: As for `save`, with the same sections or fewer.
        strict: False lets names differ, as reported; but matching nothing is an error.
        process_group: The ranks that load together; None for all.
        deadlines: How long to wait for other ranks; None for the defaults.
        budget_bytes: Ceiling of the buffers that this rank uses beside the state itself.
        storage_options: For the fsspec file system of `path`.

    Raises:
        CheckpointError: The same on all ranks. If it is a `CorruptError` or `StorageError`, the state may be filled
        in part.

    Collective:
        All ranks of the group call, with the same `path`. Blocks until all have loaded.

    Example:
        >>> import tempfile, torch, shardckpt
        >>> folder = tempfile.mkdtemp()
        >>> _ = shardckpt.save(f"{folder}/a", {"model": torch.nn.Linear(2, 3), "epoch": 4})
        >>> state = {"model": torch.nn.Linear(2, 3), "epoch": 0}
        >>> _ = shardckpt.load(f"{folder}/a", state)
        >>> state["epoch"]
        4
    """
    with coordinator(process_group, deadlines) as together:
        place = RankOf(together.rank, together.world_size)
        loading = _Loading(open_store(path, storage_options), state, strict, place)
        answer = together.exchange("match the checkpoint with the state", loading.prepare, loading.check_names)
        matched = msgspec.msgpack.decode(answer, type=_Names)
        answer = together.exchange("read the tensors", lambda: loading.read(budget_bytes), loading.compare_partial)
        together.exchange("take the state", loading.finish)
    return loading.report(matched, unverified_nbytes=msgspec.msgpack.decode(answer, type=int))


class _Loading:
    """One load, as one rank sees it; the methods are its phases.

    `check_names` and `compare_partial` run on rank 0 alone.
    """

    def __init__(self, store: Store, state: MutableMapping[str, object], strict: bool, place: RankOf) -> None:
        self._place = place
        self._store = store
        self._state = state
        self._strict = strict
        self._found: Stored
        self._wanted: Wanted
        self._nbytes = 0
        self._unchecked_nbytes = 0

    def prepare(self) -> bytes:
        """Open the checkpoint and match it with the state; nothing in the state is changed."""
        self._found = read_committed(self._store)
        self._wanted = Wanted(self._found, self._state, self._place)
        wanted = self._wanted
        return msgspec.msgpack.encode(_Names(tuple(wanted.missing), tuple(wanted.unexpected()), wanted.is_empty))

    def check_names(self, payloads: Sequence[bytes]) -> bytes:
        """Refuse a match that is not complete, or (not strict) that is empty; give what all ranks together miss."""
        names = [msgspec.msgpack.decode(payload, type=_Names) for payload in payloads]
        missing = tuple(dict.fromkeys(name for one in names for name in one.missing))
        unexpected = tuple(name for name in names[0].unexpected if all(name in one.unexpected for one in names))
        if self._strict and (missing or unexpected):
            lacking = f"it lacks {listing(missing)}" if missing else ""
            extra = f"it has {listing(unexpected)}, which the state lacks" if unexpected else ""
            raise MismatchError(
                f"the checkpoint does not fit the state: {'; '.join(filter(None, (lacking, extra)))}. "
                "Build the state as it was saved, or pass strict=False to load what fits."
            )
        is_empty = all(one.is_empty for one in names)
        if is_empty and self._found.catalogue.tensors:
            raise MismatchError(
                f"nothing of the checkpoint fits the state: it has {listing(self._found.catalogue.by_name)}, the state "
                f"wants {listing(missing)}. Compare the names with `shardckpt inspect --tensors`."
            )
        return msgspec.msgpack.encode(_Names(missing, unexpected, is_empty))

    def read(self, budget_bytes: int) -> bytes:
        """Read the tensors, and give the checksums of chunks that were read in part."""
        catalogue = self._found.catalogue
        copies = plan(catalogue, self._wanted.catalogue())
        with closing(ReaderPool(self._store)) as pool:
            report = transfer(
                copies,
                pool.sources([file.path for file in catalogue.files]),
                [fill.sink for fill in self._wanted.fills],
                options=TransferOptions(budget_bytes=budget_bytes),
            )
        self._nbytes = report.nbytes
        partial = report.partial
        return msgspec.msgpack.encode(
            _ReadReport(
                np.stack([partial.chunk, partial.begin, partial.nbytes, partial.crc]).astype(np.int64).tobytes(),
                report.unchecked_nbytes,
            )
        )

    def compare_partial(self, payloads: Sequence[bytes]) -> bytes:
        """Compare the chunks that no rank read whole, but all together did; give the bytes that stay unchecked."""
        reports = [msgspec.msgpack.decode(payload, type=_ReadReport) for payload in payloads]
        columns = [np.frombuffer(report.partial, np.int64).reshape(4, -1) for report in reports]
        rest = compare(self._found.catalogue, Parts(*np.concatenate(columns, axis=1)))
        return msgspec.msgpack.encode(int(rest.nbytes.sum()) + sum(report.unchecked_nbytes for report in reports))

    def finish(self) -> bytes:
        """Put into place what was read."""
        self._wanted.finish()
        return b""

    def report(self, matched: _Names, *, unverified_nbytes: int) -> LoadReport:
        """Say what was done."""
        return LoadReport(
            self._found.manifest.step,
            self._nbytes,
            tuple(self._wanted.loaded()),
            matched.missing,
            matched.unexpected,
            unverified_nbytes,
        )


class _Names(msgspec.Struct):
    """What of names does not match: on a rank, or on all together."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    is_empty: bool


class _ReadReport(msgspec.Struct):
    """What a rank says of its reading."""

    partial: bytes  # int64 [4, n], the columns of `Parts`
    unchecked_nbytes: int
