"""Signals that ask a command to stop, raised where nothing is half done.

An exception out of nowhere may fall between a file's creation and the note that it is there to be removed. So while
bytes move, a signal only leaves a request, which the next report of progress raises; a second one does not wait.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Terminated(BaseException):
    """The system asked this process to end, as `KeyboardInterrupt` is for the user."""


class Stopper:
    """Turns SIGINT and SIGTERM into exceptions, at once or at the next `check`."""

    def __init__(self) -> None:
        self._is_deferring = False
        self._request: BaseException | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while the block runs; outside the main thread, which gets none, do nothing."""
        try:
            before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Leave the first signal to `check` while the block runs; what it has finished by then stays done."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False

    def check(self) -> None:
        """Raise what was asked for, from any thread."""
        if self._request is not None:
            raise self._request

    def _handle(self, number: int, _: object) -> None:
        kind = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if not self._is_deferring or self._request is not None:
            raise kind
        self._request = kind
