"""Tests of trying again: when, how often, and what is told at the end."""

from __future__ import annotations

import logging
import random
import time

import pytest

from shardckpt.retry import GaveUp, RetryPolicy

QUICK = RetryPolicy(deadline_s=0.3, first_wait_s=0.001, longest_wait_s=0.02)


class Flaky:
    """Fails a number of times, differently each time, then gives how often it was called."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures, self.num_calls = num_failures, 0

    def __call__(self) -> int:
        """Fail or not."""
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise ConnectionError(f"failure {self.num_calls}")
        return self.num_calls


def is_connection(error: Exception) -> bool:
    """Hold for what `Flaky` raises."""
    return isinstance(error, ConnectionError)


def test_what_passes_is_tried_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    """The result is that of the first attempt that succeeds, and each failure is logged."""
    with caplog.at_level(logging.INFO):
        assert QUICK.run("read 'x'", Flaky(5), is_connection) == 6
    assert [record.args[2] for record in caplog.records if record.args] == [1, 2, 3, 4, 5]  # type: ignore[index]
    assert "cannot read 'x' (failure 1), attempt 1; trying again in" in caplog.text


def test_what_does_not_pass_is_raised_at_once() -> None:
    """A failure that will not go away costs one attempt."""
    attempt = Flaky(5)
    with pytest.raises(ConnectionError, match="failure 1"):
        QUICK.run("read", attempt, lambda error: False)
    assert attempt.num_calls == 1


def test_at_the_deadline_the_first_and_the_last_error_are_told() -> None:
    """Nothing is tried for ever, and the error holds what began it."""
    started, attempt = time.monotonic(), Flaky(1 << 30)
    with pytest.raises(GaveUp) as caught:
        QUICK.run("read", attempt, is_connection)
    assert 0.1 < time.monotonic() - started < 5
    assert (str(caught.value.first), str(caught.value.last)) == ("failure 1", f"failure {attempt.num_calls}")
    assert caught.value.num_attempts == attempt.num_calls > 3
    assert caught.value.seconds <= 5


def test_waits_grow_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait is drawn from a range that doubles up to a ceiling."""
    ceilings: list[float] = []

    def draw(low: float, high: float) -> float:
        assert low == 0
        ceilings.append(high)
        return 0

    monkeypatch.setattr(random, "uniform", draw)
    assert RetryPolicy(5, first_wait_s=1, longest_wait_s=6).run("read", Flaky(5), is_connection) == 6
    assert ceilings == [1, 2, 4, 6, 6]


def test_an_interrupt_is_no_failure() -> None:
    """Ctrl-C ends it, whatever is held to pass."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        QUICK.run("read", interrupted, lambda error: True)
