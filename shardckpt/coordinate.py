"""Ranks agree, or all raise the same error.

Everything goes through the key-value store that `torch.distributed` was started with, not through collectives: a rank
that fails says so at once, one that never comes is named when the deadline passes, and nobody hangs in a collective
that others never enter. The only file of this package that knows other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from shardckpt import errors
from shardckpt.errors import CheckpointError, RankFailedError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

DEFAULT_TIMEOUT_S = 600.0


class _Message(msgspec.Struct, array_like=True):
    """What a rank says at the end of a phase: a payload, or an error's type and text."""

    payload: bytes = b""
    error_type: str = ""
    error: str = ""
    ranks: tuple[int, ...] = ()


class Coordinator:
    """This process's place among the ranks that save or load together."""

    def __init__(self, rank: int, ranks: Sequence[int], store: Store | None, prefix: str, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = len(ranks)
        self._ranks = ranks
        self._store = store
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._last_phase: str | None = None  # rank 0: its verdict can go once all are in the next phase

    def exchange(
        self, phase: str, work: Callable[[], bytes], decide: Callable[[Sequence[bytes]], bytes] = lambda payloads: b""
    ) -> bytes:
        """Run `work` on every rank, hand all results to rank 0's `decide`, and give its answer to everyone.

        Args:
            phase: What is being done, for messages ("write shard files").
            work: Gives this rank's payload.
            decide: Called on rank 0 alone, with the payloads by rank.

        Raises:
            CheckpointError: The same on all ranks, if `work` raised on any rank, `decide` raised, or a rank did not
                arrive in time. With one rank, whatever was raised.

        Collective:
            All ranks call, with the same phases in the same order. Blocks until all have arrived.
        """
        if self._store is None:
            return decide([work()])
        own: BaseException | None = None
        try:
            message = _Message(work())
        except BaseException as error:
            own, message = error, _failure(error)
        self._set(f"{phase}/{self.rank}", message)
        if self.rank == 0:
            verdict = self._verdict(phase, decide)
            self._set(f"{phase}/verdict", verdict)
        else:
            verdict = self._get(f"{phase}/verdict", self._timeout_s * 2, phase)
        self._forget(f"{phase}/{self.rank}")  # rank 0 has read it, since the verdict is there
        if not verdict.error_type:
            return verdict.payload
        if own is not None and not isinstance(own, Exception):
            raise own
        raise _rebuilt(verdict) from own

    def _verdict(self, phase: str, decide: Callable[[Sequence[bytes]], bytes]) -> _Message:
        deadline = time.monotonic() + self._timeout_s
        missing = self._wait([f"{phase}/{rank}" for rank in range(self.world_size)], deadline)
        if missing:
            return _Message(
                error_type=RankFailedError.__name__,
                ranks=tuple(missing),
                error=f"{_ranks_text(missing)} of {self.world_size} did not arrive to {phase} "
                f"within {self._timeout_s:g} s. See what those ranks were doing; all ranks must save and load "
                "together.",
            )
        messages = [self._get(f"{phase}/{rank}", 1.0, phase) for rank in range(self.world_size)]
        if self._last_phase is not None:
            self._forget(f"{self._last_phase}/verdict")
        self._last_phase = phase
        failed = [rank for rank, message in enumerate(messages) if message.error_type]
        if failed:
            return self._joint_failure(phase, failed, messages)
        try:
            return _Message(decide([message.payload for message in messages]))
        except Exception as error:
            return _failure(error)

    def _joint_failure(self, phase: str, failed: Sequence[int], messages: Sequence[_Message]) -> _Message:
        first = messages[failed[0]]
        is_same = len({messages[rank].error_type for rank in failed}) == 1
        who = f"{_ranks_text(failed)} of {self.world_size}"
        text = f"{first.error} (raised on {who}, to {phase})"
        if is_same and len(failed) == self.world_size and len({message.error for message in messages}) == 1:
            text = first.error
        kind = first.error_type if is_same else RankFailedError.__name__
        return _Message(error_type=kind, error=text, ranks=tuple(failed))

    def _wait(self, keys: Sequence[str], deadline: float) -> list[int]:
        """Wait for all keys; give the positions of those that are not there at the deadline."""
        assert self._store is not None
        pending = dict(enumerate(keys))
        for position, key in enumerate(keys):
            try:
                left = max(deadline - time.monotonic(), 0.01)
                self._store.wait([f"{self._prefix}/{key}"], timedelta(seconds=left))
                del pending[position]
            except RuntimeError:  # the stores raise DistStoreError, a RuntimeError, on a timeout
                if time.monotonic() < deadline:
                    raise
                break
        return [position for position, key in pending.items() if not self._store.check([f"{self._prefix}/{key}"])]

    def _set(self, key: str, message: _Message) -> None:
        assert self._store is not None
        self._store.set(f"{self._prefix}/{key}", msgspec.msgpack.encode(message).hex())

    def _get(self, key: str, timeout_s: float, phase: str) -> _Message:
        assert self._store is not None
        try:
            self._store.wait([f"{self._prefix}/{key}"], timedelta(seconds=timeout_s))
            text = self._store.get(f"{self._prefix}/{key}")
        except RuntimeError as error:
            raise RankFailedError(
                f"rank 0 of {self.world_size} gave no answer within {timeout_s:g} s to {phase}: {error}. "
                "See what rank 0 was doing.",
                (0,),
            ) from error
        return msgspec.msgpack.decode(bytes.fromhex(text.decode()), type=_Message)

    def _forget(self, key: str) -> None:
        assert self._store is not None
        self._store.delete_key(f"{self._prefix}/{key}")


def coordinator(process_group: ProcessGroup | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Coordinator:
    """Give the coordinator for a process group; a lone process where `torch.distributed` is not initialised.

    Args:
        process_group: The ranks that save or load together; None for all.
        timeout_s: How long to wait for the slowest rank in each phase.

    Collective:
        All ranks of the group call, the same number of times; does not block.
    """
    import torch.distributed as dist  # a lone process that only moves files needs no torch

    if not (dist.is_available() and dist.is_initialized()):
        return Coordinator(0, [0], None, "", timeout_s)
    group = process_group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return Coordinator(0, ranks, None, "", timeout_s)
    # The public API gives no store; this one is what DCP and torchelastic use too.
    store = dist.distributed_c10d._get_default_store()
    name = f"shardckpt/{'-'.join(map(str, _intervals(ranks)))}"
    number = store.add(f"{name}/calls/{dist.get_rank()}", 1)
    return Coordinator(ranks.index(dist.get_rank()), ranks, store, f"{name}/{number}", timeout_s)


def _intervals(ranks: Sequence[int]) -> list[str]:
    """Write ascending ranks as few intervals, so that a group of thousands has a short name."""
    starts = [i for i, rank in enumerate(ranks) if i == 0 or rank != ranks[i - 1] + 1]
    stops = [*starts[1:], len(ranks)]
    return [f"{ranks[start]}:{ranks[stop - 1] + 1}" for start, stop in zip(starts, stops, strict=True)]


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _failure(error: BaseException) -> _Message:
    if isinstance(error, CheckpointError):
        return _Message(error_type=type(error).__name__, error=str(error))
    return _Message(error_type=RankFailedError.__name__, error=f"{type(error).__name__}: {error}")


def _rebuilt(message: _Message) -> CheckpointError:
    """Give the error of a message, of the same type if it is one of ours."""
    kind = getattr(errors, message.error_type, RankFailedError)
    if kind is RankFailedError:
        return RankFailedError(message.error, message.ranks)
    error: CheckpointError = kind(message.error)
    return error
