"""Ranks agree, or all raise the same error."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from shardckpt.coordinate import Deadlines, coordinator
from shardckpt.errors import CheckpointError, CheckpointExistsError, CorruptError, RankFailedError
from tests.ranks import run_ranks


def test_a_lone_process_needs_no_process_group() -> None:
    """Without torch.distributed, the one rank decides on its own payload."""
    assert coordinator().exchange("agree", lambda: b"a", lambda payloads: payloads[0] + b"!") == b"a!"


def test_a_lone_process_raises_what_was_raised() -> None:
    """One rank gets its own error, not a wrapped one."""
    with pytest.raises(ZeroDivisionError):
        coordinator().exchange("agree", lambda: bytes(1 // 0))


def _several_phases() -> tuple[list[bytes], int]:
    together = coordinator()
    rank = dist.get_rank()
    answers = [
        together.exchange(f"phase {n}", lambda n=n: b"%d.%d" % (rank, n), lambda payloads: b"|".join(payloads))
        for n in range(3)
    ]
    again = coordinator().exchange("phase 0", lambda: b"x" * rank, lambda payloads: b"|".join(payloads))
    return [*answers, again], len(answers)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_get_the_answer_of_rank_0(world_size: int) -> None:
    """Payloads arrive by rank, phase by phase, and again in a second coordinator."""
    expected = [b"|".join(b"%d.%d" % (rank, n) for rank in range(world_size)) for n in range(3)]
    expected.append(b"|".join(b"x" * rank for rank in range(world_size)))
    assert [answers for answers, _ in run_ranks(world_size, _several_phases)] == [expected] * world_size


def _in_a_group() -> bytes:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return b""
    return coordinator(group).exchange("agree", lambda: b"%d" % dist.get_rank(), lambda payloads: b"".join(payloads))


def test_a_group_has_its_own_rank_0() -> None:
    """The first rank of the group decides for the group alone."""
    assert run_ranks(3, _in_a_group) == [b"", b"12", b"12"]


def _caught(kind: str) -> tuple[str, str, tuple[int, ...], float]:
    rank = dist.get_rank()

    def work() -> bytes:
        if kind == "one" and rank == 1:
            raise ValueError("planted")
        if kind == "ours" and rank == 1:
            raise CorruptError("damaged: planted")
        if kind == "all":
            raise CheckpointExistsError("taken: planted")
        return b""

    def decide(payloads: object) -> bytes:
        if kind == "decide":
            raise CheckpointExistsError("taken: planted")
        return b""

    started = time.monotonic()
    try:
        coordinator(deadlines=Deadlines(30)).exchange("test", work, decide)
    except CheckpointError as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ()), time.monotonic() - started
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("kind", "expected_type", "text"),
    [
        ("one", "RankFailedError", "ValueError: planted (raised on rank 1 of 3, to test)"),
        ("ours", "CorruptError", "damaged: planted (raised on rank 1 of 3, to test)"),
        ("all", "CheckpointExistsError", "taken: planted"),
        ("decide", "CheckpointExistsError", "taken: planted"),
    ],
)
def test_an_error_on_one_rank_is_raised_alike_on_all(kind: str, expected_type: str, text: str) -> None:
    """Type and text are the same everywhere, within seconds, and name the rank at fault."""
    for error_type, message, ranks, seconds in run_ranks(3, _caught, kind):
        assert (error_type, message) == (expected_type, text)
        assert ranks == ((1,) if kind == "one" else ())
        assert seconds < 10


def _raised(deadlines: Deadlines) -> tuple[str, tuple[int, ...], float]:
    started = time.monotonic()
    with pytest.raises(RankFailedError) as caught, coordinator(deadlines=deadlines) as together:
        together.exchange("test", lambda: b"")
    return str(caught.value), caught.value.ranks, time.monotonic() - started


def _absent(rank: int) -> tuple[str, tuple[int, ...], float]:
    if dist.get_rank() == rank:
        time.sleep(6)
        return "", (), 0.0
    return _raised(Deadlines(arrival_s=2.5, silence_s=30))


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_arrive_is_named(absent: int) -> None:
    """After the deadline the ranks that did arrive say who did not, and what to look at."""
    found = run_ranks(3, _absent, absent)
    del found[absent]
    for message, ranks, _ in found:
        assert message == found[0][0]
        assert message.startswith(f"rank {absent} of 3 did not arrive to test within 2.5 s. See what")
        assert ranks == (absent,)


def _silent(rank: int) -> tuple[str, tuple[int, ...], float]:
    if dist.get_rank() == rank:
        with coordinator():
            time.sleep(1.5)
        time.sleep(6)  # as if killed while it worked: begun, and no more signs of life
        return "", (), 0.0
    return _raised(Deadlines(arrival_s=60, silence_s=2.5))


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_dies_at_work_is_missed_within_seconds(silent: int) -> None:
    """Long before the deadline for arrival, a rank without signs of life is taken for dead, and named."""
    found = run_ranks(3, _silent, silent)
    del found[silent]
    for message, ranks, seconds in found:
        assert message.startswith(
            f"rank {silent} of 3 gave no sign of life for 2.5 s, to test: dead or stopped. See the"
        )
        assert ranks == (silent,)
        assert seconds < 15
