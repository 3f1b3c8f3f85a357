"""Trying again: how often, how long to wait, and when to stop. The one policy of all remote operations.

Knows time and chance; refuses to know which failures pass by themselves: whoever calls tells it.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class GaveUp(Exception):  # noqa: N818  # never leaves this package: what it holds goes into a StorageError
    """No attempt succeeded.

    Attributes:
        first: The error of the first attempt: most often the cause of the others.
        last: The error of the last one.
        num_attempts: How many there were.
        seconds: From the first attempt to the end of the last.
    """

    def __init__(self, first: Exception, last: Exception, num_attempts: int, seconds: float) -> None:
        super().__init__(f"{num_attempts} attempts in {seconds:.1f} s")
        self.first, self.last, self.num_attempts, self.seconds = first, last, num_attempts, seconds


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter, up to a deadline.

    The wait after attempt n is drawn from [0, min(longest, first * 2 ** (n - 1))]: ranks throttled together do
    not come back together.

    Attributes:
        deadline_s: No attempt begins later than this after the first began.
        first_wait_s: Ceiling of the first wait.
        longest_wait_s: Ceiling of all waits.
    """

    deadline_s: float = 120.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0

    def run(self, what: str, attempt: Callable[[], T], is_transient: Callable[[Exception], bool]) -> T:
        """Give what `attempt` gives, trying again as long as it fails in a way that passes.

        Args:
            what: What is attempted, for the log.
            attempt: Does it, from the start each time.
            is_transient: Whether to try again after this error.

        Raises:
            GaveUp: At the deadline.
        """
        started = time.monotonic()
        first: Exception | None = None
        for number in itertools.count():
            try:
                return attempt()
            except Exception as error:
                if not is_transient(error):
                    raise
                first = first or error
                wait = random.uniform(0, min(self.longest_wait_s, self.first_wait_s * 2 ** min(number, 30)))
                elapsed = time.monotonic() - started
                if elapsed + wait > self.deadline_s:
                    raise GaveUp(first, error, number + 1, elapsed) from error
                _LOG.info("cannot %s (%s), attempt %d; trying again in %.1f s", what, error, number + 1, wait)
            time.sleep(wait)
        raise AssertionError("unreachable")
