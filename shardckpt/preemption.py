"""Being told to stop: signals of a scheduler, and how the process is to end once its state is saved.

Knows this process's signals; refuses to know other ranks and checkpoints.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from shardckpt.errors import UnsupportedError

_Handler = Callable[[int, FrameType | None], object] | int | None


@dataclass(frozen=True, slots=True)
class Preemption:
    """What a run does when it is told to stop.

    Attributes:
        signals: Those that tell it.
        exit_code: What every process ends with after the save, by `SystemExit`; None to raise `PreemptedError` instead.
    """

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)
    exit_code: int | None = 75  # "try again", in sysexits.h


class SignalWatch:
    """Notes that one of some signals has come, in place of what it did before, until it is closed."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        """Begin to watch.

        Raises:
            UnsupportedError: If this is not the main thread, the only one that may.
        """
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, _Handler] = {}
        for one in signals:
            try:
                self._before[one] = signal.signal(one, self._note)
            except ValueError as error:
                raise UnsupportedError(
                    f"cannot watch for {one.name}: {error}. Make the manager in the main thread, or without preemption."
                ) from None

    def close(self) -> None:
        """Let the signals do again what they did before."""
        while self._before:
            one, handler = self._before.popitem()
            signal.signal(one, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
