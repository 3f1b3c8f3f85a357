"""Ranks agree, or all raise the same error.

Everything goes through the key-value store that `torch.distributed` was started with, not through collectives: a rank
that fails says so at once, one that dies is missed within seconds, one that never comes is named when the deadline
passes, and nobody hangs in a collective that others never enter. The only file of this package that knows other ranks.

[Note: signs of life] From its first phase to its last, each rank raises a counter in the store about once a second, on
a thread of its own. A rank whose counter stands still is taken for dead; one that has no counter yet has not arrived,
and may still be training.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from shardckpt import errors
from shardckpt.errors import CheckpointError, RankFailedError

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup, Work

_BEAT_S = 1.0
_POLL_S = (0.001, 0.05)  # the first wait between two looks at the store, and the longest


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long to wait for other ranks, in seconds.

    Attributes:
        arrival_s: For a rank that has not begun to save or load.
        silence_s: For a rank that has begun and gives no more signs of life.
    """

    arrival_s: float = 600.0
    silence_s: float = 15.0


class _Message(msgspec.Struct, array_like=True):
    """What a rank says at the end of a phase: a payload, or an error's type, text and the ranks at fault."""

    payload: bytes = b""
    error_type: str = ""
    error: str = ""
    ranks: tuple[int, ...] = ()


class Coordinator:
    """This process's place among the ranks that save or load together; a context: leave it when all phases are over."""

    def __init__(
        self, rank: int, ranks: Sequence[int], store: Store | None, prefix: str, deadlines: Deadlines | None = None
    ) -> None:
        self.rank = rank
        self.world_size = len(ranks)
        self._store = store
        self._prefix = prefix
        self._deadlines = deadlines or Deadlines()
        self._last_phase: str | None = None  # rank 0: its verdict can go once all are in the next phase
        self._left = threading.Event()

    def __enter__(self) -> Coordinator:
        """Begin to give signs of life; see [Note: signs of life]."""
        if self._store is not None:
            threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give no more signs of life."""
        self._left.set()

    def exchange(
        self, phase: str, work: Callable[[], bytes], decide: Callable[[Sequence[bytes]], bytes] = lambda payloads: b""
    ) -> bytes:
        """Run `work` on every rank, hand all results to rank 0's `decide`, and give its answer to everyone.

        Args:
            phase: What is being done, for messages ("write shard files").
            work: Gives this rank's payload.
            decide: Called on rank 0 alone, with the payloads by rank.

        Raises:
            CheckpointError: The same on all ranks, if `work` raised on any rank, `decide` raised, or a rank died or did
                not arrive in time. With one rank, whatever was raised.

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
        try:
            verdict = self._exchange(phase, message, decide)
        except RuntimeError as error:  # the stores raise DistError, a RuntimeError, when their host is gone
            raise RankFailedError(
                f"the store that the ranks share is gone, to {phase}: {error}. The process that hosts it (rank 0, or "
                "the "
                "launcher) has ended; see why."
            ) from error
        if not verdict.error_type:
            return verdict.payload
        if own is not None and not isinstance(own, Exception):
            raise own
        raise _rebuilt(verdict) from own

    def _exchange(self, phase: str, message: _Message, decide: Callable[[Sequence[bytes]], bytes]) -> _Message:
        self._set(f"{phase}/{self.rank}", message)
        if self.rank == 0:
            verdict = self._verdict(phase, decide)
            self._set(f"{phase}/verdict", verdict)
            return verdict
        if lost := self._wait_for({0: f"{phase}/verdict"}):
            return self._lost(phase, lost)
        verdict = self._get(f"{phase}/verdict")
        self._forget(f"{phase}/{self.rank}")  # rank 0 has read it, since the verdict is there
        return verdict

    def _verdict(self, phase: str, decide: Callable[[Sequence[bytes]], bytes]) -> _Message:
        if lost := self._wait_for({rank: f"{phase}/{rank}" for rank in range(self.world_size)}):
            return self._lost(phase, lost)
        messages = [self._get(f"{phase}/{rank}") for rank in range(self.world_size)]
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
        text = f"{first.error} (raised on {_ranks_text(failed)} of {self.world_size}, to {phase})"
        if is_same and len(failed) == self.world_size and len({message.error for message in messages}) == 1:
            text = first.error
        kind = first.error_type if is_same else RankFailedError.__name__
        return _Message(error_type=kind, error=text, ranks=tuple(failed))

    def _lost(self, phase: str, lost: _Lost) -> _Message:
        who = f"{_ranks_text(lost.ranks)} of {self.world_size}"
        if lost.has_begun:
            text = (
                f"{who} gave no sign of life for {self._deadlines.silence_s:g} s, to {phase}: dead or stopped. "
                "See the logs and the exit codes of those processes."
            )
        else:
            text = (
                f"{who} did not arrive to {phase} within {self._deadlines.arrival_s:g} s. "
                "See what those ranks were doing; all ranks must save and load together."
            )
        return _Message(error_type=RankFailedError.__name__, error=text, ranks=lost.ranks)

    # The store

    def _wait_for(self, keys: dict[int, str]) -> _Lost | None:
        """Wait until the key of every rank is there; give the ranks that are lost, if any are."""
        started = time.monotonic()
        pending = dict(keys)
        beats: dict[int, tuple[bytes, float]] = {}  # rank -> its counter, and when it was seen to change
        pause, looked = _POLL_S[0], started
        while True:
            pending = {rank: key for rank, key in pending.items() if not self._has(key)}
            if not pending:
                return None
            now = time.monotonic()
            if now - looked >= _BEAT_S:
                looked = now
                for rank in pending:
                    beat = self._last_beat(rank)
                    if beat != beats.get(rank, (b"", 0.0))[0]:
                        beats[rank] = (beat, now)
                silent = [r for r in pending if r in beats and now - beats[r][1] > self._deadlines.silence_s]
                if silent:
                    return _Lost(tuple(silent), has_begun=True)
            absent = tuple(rank for rank in pending if rank not in beats)
            if absent and now - started > max(self._deadlines.arrival_s, _BEAT_S * 2):
                return _Lost(absent, has_begun=False)
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_S[1])

    def _beat(self) -> None:
        number = 0
        while not self._left.is_set():
            number += 1
            try:
                self._store_().set(f"{self._prefix}/alive/{self.rank}", str(number))
            except RuntimeError:  # the store is gone: the next phase says so
                return
            self._left.wait(_BEAT_S)

    def _last_beat(self, rank: int) -> bytes:
        key = f"{self._prefix}/alive/{rank}"
        return bytes(self._store_().get(key)) if self._store_().check([key]) else b""

    def _has(self, key: str) -> bool:
        return self._store_().check([f"{self._prefix}/{key}"])

    def _set(self, key: str, message: _Message) -> None:
        self._store_().set(f"{self._prefix}/{key}", msgspec.msgpack.encode(message).hex())

    def _get(self, key: str) -> _Message:
        text = self._store_().get(f"{self._prefix}/{key}")
        return msgspec.msgpack.decode(bytes.fromhex(text.decode()), type=_Message)

    def _forget(self, key: str) -> None:
        self._store_().delete_key(f"{self._prefix}/{key}")

    def _store_(self) -> Store:
        assert self._store is not None
        return self._store


class FlagPoll:
    """Ranks learn together whether any of them has raised a flag, one call late.

    Each call starts a reduction of one byte on the CPU and takes the answer of the call before, which is there by then:
    nobody waits for more than the slowest rank's last call, and all ranks get the same answer at the same call.
    """

    def __init__(self, process_group: ProcessGroup | None, deadlines: Deadlines | None) -> None:
        """Set up nothing yet: the first call does."""
        self._group = process_group
        self._timeout = datetime.timedelta(seconds=(deadlines or Deadlines()).arrival_s)
        self._channel: ProcessGroup | None = None  # its own: training may use no CPU collectives, or other streams
        self._pending: tuple[Work, Tensor] | None = None

    def ask(self, is_raised: bool) -> bool:
        """Say whether this rank's flag is raised; give whether any rank's was, at the call before.

        Raises:
            RankFailedError: If another rank is gone.

        Collective:
            All ranks of the group call. One process alone gets its own flag, at once.
        """
        import torch  # as in `coordinator`
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return is_raised
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        if len(ranks) == 1:
            return is_raised
        try:
            if self._channel is None:
                self._channel = dist.new_group(
                    ranks, timeout=self._timeout, backend="gloo", use_local_synchronization=self._group is not None
                )
            answer = self._last_answer()
            flag = torch.tensor([is_raised], dtype=torch.uint8)
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._channel, async_op=True)
        except RuntimeError as error:
            raise RankFailedError(
                f"cannot learn from the other ranks whether one was told to stop: {error}. "
                "See their logs and exit codes."
            ) from error
        assert work is not None
        self._pending = (work, flag)
        return answer

    def _last_answer(self) -> bool:
        if self._pending is None:
            return False
        work, flag = self._pending
        work.wait()
        return bool(flag.item())


@dataclass(frozen=True, slots=True)
class _Lost:
    """Ranks that will not come: they have gone silent, or never began."""

    ranks: tuple[int, ...]
    has_begun: bool


def coordinator(process_group: ProcessGroup | None = None, deadlines: Deadlines | None = None) -> Coordinator:
    """Give the coordinator for a process group; a lone process where `torch.distributed` is not initialised.

    Args:
        process_group: The ranks that save or load together; None for all.
        deadlines: How long to wait for other ranks; None for the defaults.

    Collective:
        All ranks of the group call, the same number of times; does not block.
    """
    import torch.distributed as dist  # a lone process that only moves files needs no torch

    if not (dist.is_available() and dist.is_initialized()):
        return Coordinator(0, [0], None, "")
    group = process_group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return Coordinator(0, ranks, None, "")
    # The public API gives no store; this one is what other checkpoint libraries use too. A clone has a connection of
    # its
    # own, so that a background save and the training do not wait for each other.
    default = dist.distributed_c10d._get_default_store()
    store: Store = default.clone() if hasattr(default, "clone") else default
    name = f"shardckpt/{'-'.join(_intervals(ranks))}"
    number = store.add(f"{name}/calls/{dist.get_rank()}", 1)
    return Coordinator(ranks.index(dist.get_rank()), ranks, store, f"{name}/{number}", deadlines)


def _intervals(ranks: Sequence[int]) -> list[str]:
    """Write ranks as few intervals, so that a group of thousands has a short name."""
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
