"""Processes that run one command together, and meet at the place they write to: no network between them, no torch.

They leave small files there, named like unfinished ones, so that whoever finds them later knows them for leftovers.
What one fails at, all fail with. Knows who does what when; refuses to know what is done.

[Note: nonces] Each process takes a random nonce, which is part of the names of its files. Process 0 first removes all
such files; who lives says hello again. It lists the nonces of these in its first message, and the others believe only
a message that lists theirs. So no file of an earlier run that was killed is taken for one of this run.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import msgspec

from shardckpt.errors import CheckpointError, CheckpointNotFoundError, MismatchError, RankFailedError
from shardckpt.store import TEMPORARY_SUFFIX, Store

_FAREWELL_S = 15.0
_MAX_MESSAGE_NBYTES = 1 << 30
_FILE = re.compile(r"\.team-([a-z0-9]+)-(\d{5,})\.([0-9a-f]{16})" + re.escape(TEMPORARY_SUFFIX))


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, in seconds.

    Attributes:
        arrival_s: For a process that has not yet come.
        silence_s: For one that has come and gives no more signs of life.
        poll_s: Between two looks.
        pulse_s: Between two signs of life.
    """

    arrival_s: float = 120.0
    silence_s: float = 300.0
    poll_s: float = 0.1
    pulse_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Team:
    """This process's place among those that run the same command."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Team:
        """Give the place that `torchrun` (RANK, WORLD_SIZE) or `srun` (SLURM_PROCID, SLURM_NTASKS) gave this process.

        A Slurm batch script is no member of a team: only what it starts with `srun` is.

        Raises:
            MismatchError: If these say nothing sensible.
        """
        is_batch_script = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
        for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
            if rank not in environment or size not in environment or (rank == "SLURM_PROCID" and is_batch_script):
                continue
            if not (environment[rank].isdigit() and environment[size].isdigit()):
                raise MismatchError(f"{rank} and {size} in the environment are no numbers; unset them")
            team = cls(int(environment[rank]), int(environment[size]))
            if team.rank >= team.size:
                raise MismatchError(f"{rank} is {team.rank}, which is not below {size}, {team.size}; unset both")
            return team
        return cls()


class _Message(msgspec.Struct, array_like=True):
    """What a process says: a payload, or what it failed at; process 0 adds the nonces of all that it knows."""

    payload: bytes = b""
    error: str = ""
    nonces: list[str] = []


class Meeting:
    """The processes of a team at one place: a context, which ends for all alike.

    Each calls the same methods in the same order. `on_wait` is called now and then; what it raises ends the wait.
    """

    def __init__(
        self,
        store: Store,
        team: Team,
        *,
        on_wait: Callable[[], None] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.team = team
        self._store = store
        self._patience = patience or Patience()
        self._on_wait = on_wait or (lambda: None)
        self._nonces = {team.rank: secrets.token_hex(8)}
        self._step = 0
        self._pulse = 0
        self._next_pulse = 0.0

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.team.size == 1:
            return
        if self.team.rank == 0:
            if error is not None:  # those who are still on their way must hear of it
                with suppress(RankFailedError):
                    self._gather_arrivals(min(self._patience.arrival_s, _FAREWELL_S))
            self._say("end", _Message(error=_text(error)))
            self._clean()
            return
        try:
            if error is None:
                self._believe(self._wait("end", 0), 0)
        finally:
            is_own_failure = error is not None and not isinstance(error, RankFailedError)
            with suppress(CheckpointError):
                self._say(*("failed", _Message(error=_text(error))) if is_own_failure else ("bye", _Message()))

    def share(self, make: Callable[[], bytes]) -> bytes:
        """Let process 0 do `make`, and give what it made to all.

        Raises:
            RankFailedError: On the others, if process 0 failed.
        """
        kind = self._next_step()
        if self.team.size == 1:
            return make()
        if self.team.rank == 0:
            if len(self._nonces) == 1:  # see [Note: nonces]
                self._remove_all()
            payload = make()
            self._gather_arrivals(self._patience.arrival_s)
            self._say(kind, _Message(payload, nonces=list(self._nonces.values())))
            return payload
        if 0 not in self._nonces:
            self._arrive(kind)
        return self._believe(self._wait(kind, 0), 0)

    def gather(self, payload: bytes) -> list[bytes]:
        """Give the payloads of all processes, in order, to process 0, and an empty list to the others.

        Raises:
            RankFailedError: On process 0, if one of the others has failed or is gone.
        """
        kind = self._next_step()
        if self.team.rank > 0:
            self._say(kind, _Message(payload))
            return []
        return [payload, *(self._believe(self._wait(kind, rank), rank) for rank in range(1, self.team.size))]

    def beat(self) -> None:
        """Show that this process is alive; to be called now and then in long work."""
        now = time.monotonic()
        if self.team.size > 1 and now >= self._next_pulse:
            self._pulse = self._pulse % 64 + 1
            with suppress(CheckpointError):  # process 0 may be cleaning up just now
                self._store.put(
                    self._path("pulse", self.team.rank), b"." * self._pulse
                )  # others see its size in the list
            self._next_pulse = now + self._patience.pulse_s

    # Coming together

    def _arrive(self, kind: str) -> None:
        """Say hello until process 0 answers with a message that lists this process's nonce."""
        own = self._nonces[self.team.rank]
        deadline = time.monotonic() + self._patience.arrival_s
        while time.monotonic() < deadline:
            found = self._files()
            if ("hello", self.team.rank, own) not in found:
                with suppress(CheckpointError):  # process 0 may be cleaning up just now; once more then
                    self._say("hello", _Message())
            for name, rank, nonce in found:
                if rank == 0 and name in (kind, "end"):
                    message = self._read(name, 0, nonce)
                    if message is not None and own in message.nonces:
                        self._nonces[0] = nonce
                        return
            self._pause()
        raise RankFailedError(_absent([0], self.team, self._patience.arrival_s), (0,))

    def _gather_arrivals(self, seconds: float) -> None:
        """Learn the nonces of all others."""
        deadline = time.monotonic() + seconds
        while len(self._nonces) < self.team.size:
            self._nonces |= {rank: nonce for name, rank, nonce in self._files() if name == "hello" and rank > 0}
            if time.monotonic() > deadline:
                absent = [rank for rank in range(self.team.size) if rank not in self._nonces]
                raise RankFailedError(_absent(absent, self.team, seconds), tuple(absent))
            if len(self._nonces) < self.team.size:
                self._pause()

    # Saying and hearing

    def _next_step(self) -> str:
        self._step += 1
        return f"step{self._step}"

    def _say(self, kind: str, message: _Message) -> None:
        if kind == "end":
            message.nonces = list(self._nonces.values())
        self._store.put(self._path(kind, self.team.rank), msgspec.msgpack.encode(message))

    def _wait(self, kind: str, rank: int) -> _Message:
        """Wait for a message.

        Raises:
            RankFailedError: If any process failed, if process 0 ended, or if the one waited for falls silent.
        """
        pulse, seen = -1, time.monotonic()
        while True:
            self.beat()
            found = self._files()
            if (message := self._message(found, kind, rank)) is not None:
                return message
            for other, name in (*((other, "failed") for other in self._nonces), (0, "end")):
                if (failure := self._message(found, name, other)) is not None:
                    self._believe(failure, other)
            size = found.get(("pulse", rank, self._nonces[rank]), 0)
            if size != pulse:
                pulse, seen = size, time.monotonic()
            if time.monotonic() - seen > self._patience.silence_s:
                raise RankFailedError(
                    f"process {rank} of {self.team.size} has shown no sign of life for {self._patience.silence_s:.0f} "
                    "s; see what became of it, and run the command again",
                    (rank,),
                )
            self._pause()

    def _believe(self, message: _Message, sender: int) -> bytes:
        """Give the payload, or raise what the sender failed at."""
        if message.error:
            raise RankFailedError(f"process {sender} of {self.team.size} failed: {message.error}", (sender,))
        return message.payload

    def _files(self) -> dict[tuple[str, int, str], int]:
        """Give the size of each file of the team by kind, process and nonce."""
        matches = ((_FILE.fullmatch(path), nbytes) for path, nbytes in self._store.list().items())
        return {(m[1], int(m[2]), m[3]): nbytes for m, nbytes in matches if m is not None}

    def _message(self, found: Mapping[tuple[str, int, str], int], kind: str, rank: int) -> _Message | None:
        """Read a message of a process that is known, if it is among the files found."""
        nonce = self._nonces.get(rank, "")
        return self._read(kind, rank, nonce) if (kind, rank, nonce) in found else None

    def _read(self, kind: str, rank: int, nonce: str) -> _Message | None:
        try:
            data = self._store.get(_path_of(kind, rank, nonce), max_nbytes=_MAX_MESSAGE_NBYTES)
            return msgspec.msgpack.decode(data, type=_Message)
        except (CheckpointNotFoundError, msgspec.MsgspecError):  # cleaned away, or no message of this version
            return None

    def _pause(self) -> None:
        self._on_wait()
        time.sleep(self._patience.poll_s)

    def _path(self, kind: str, rank: int) -> str:
        return _path_of(kind, rank, self._nonces[rank])

    def _clean(self) -> None:
        """Remove the team's files once all others have gone, or are taken to have."""
        deadline = time.monotonic() + min(self._patience.arrival_s, _FAREWELL_S)
        others = set(self._nonces.items()) - {(0, self._nonces[0])}
        while others and time.monotonic() < deadline:
            gone = {(rank, nonce) for name, rank, nonce in self._files() if name in ("bye", "failed")}
            others -= gone
            time.sleep(self._patience.poll_s if others else 0)
        self._remove_all()

    def _remove_all(self) -> None:
        for kind, rank, nonce in self._files():
            self._store.delete(_path_of(kind, rank, nonce))


def is_team_file(path: str) -> bool:
    """Tell whether a file is one that a meeting left."""
    return path.lstrip(".").startswith("team-") and path.endswith(TEMPORARY_SUFFIX)


def _text(error: BaseException | None) -> str:
    return "" if error is None else str(error) or type(error).__name__


def _path_of(kind: str, rank: int, nonce: str) -> str:
    return f".team-{kind}-{rank:05}.{nonce}{TEMPORARY_SUFFIX}"


def _absent(ranks: list[int], team: Team, seconds: float) -> str:
    return (
        f"of the {team.size} processes that are to run this command together, {ranks} did not come to the destination "
        f"within {seconds:.0f} s; start it on all of them with a common destination, or unset RANK, WORLD_SIZE and "
        "SLURM_PROCID to run it alone"
    )
