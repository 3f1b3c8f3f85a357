"""Processes that meet at a store: here as threads, each with its own view of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardckpt.errors import FormatError, MismatchError, RankFailedError
from shardckpt.storage import open_store
from shardckpt.team import Meeting, Patience, Team, is_team_file

QUICK = Patience(arrival_s=10.0, silence_s=10.0, poll_s=0.005, pulse_s=0.05)


def run_team(root: Path, size: int, work: Callable[[Meeting], object], patience: Patience = QUICK) -> list[object]:
    """Run `work` as each member of a team, and give what it gave, or raised."""
    found: list[object] = [None] * size

    def member(rank: int) -> None:
        try:
            with Meeting(open_store(root), Team(rank, size), patience=patience) as meeting:
                found[rank] = work(meeting)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def say_and_hear(meeting: Meeting) -> tuple[bytes, list[bytes], bytes]:
    """Two shares with a gather between them."""
    rank = meeting.team.rank
    first = meeting.share(lambda: b"from %d" % rank)
    return first, meeting.gather(b"part %d" % rank), meeting.share(lambda: b"last")


@pytest.mark.parametrize("root", ["local", "memory://team"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_hear_the_first_and_the_first_hears_all(tmp_path: Path, root: str, size: int) -> None:
    """In the order of ranks; and nothing is left of the meeting."""
    place = tmp_path / root if root == "local" else f"{root}{size}"
    found = run_team(place, size, say_and_hear)  # type: ignore[arg-type]  # a URL serves as well
    parts = [b"part %d" % rank for rank in range(size)]
    assert found == [(b"from 0", parts if rank == 0 else [], b"last") for rank in range(size)]
    assert open_store(place).list() == {}


def test_files_of_a_run_that_was_killed_mislead_nobody(tmp_path: Path) -> None:
    """Whatever they say: their nonces are not those of this run."""

    def die(meeting: Meeting) -> None:
        meeting.share(lambda: b"old")
        meeting.gather(b"old part")

    for rank in range(3):
        threading.Thread(target=_abandon, args=(tmp_path, rank, die), daemon=True).start()
    time.sleep(0.5)
    assert any("step1-00000" in path for path in open_store(tmp_path).list())
    assert run_team(tmp_path, 3, say_and_hear)[1] == (b"from 0", [], b"last")


def _abandon(root: Path, rank: int, work: Callable[[Meeting], object]) -> None:
    """Take part, and go without leaving the context, as a killed process does."""
    work(Meeting(open_store(root), Team(rank, 3), patience=QUICK))


@pytest.mark.parametrize("guilty", [0, 1, 2])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_what_one_fails_at_all_fail_with(tmp_path: Path, guilty: int, step: int) -> None:
    """Within moments, by its rank and words, wherever it happens."""

    def work(meeting: Meeting) -> None:
        def fail(at: int) -> bytes:
            if meeting.team.rank == guilty and at == step:
                raise FormatError("it broke")
            return b""

        meeting.share(lambda: b"")
        fail(0)
        meeting.gather(fail(1))
        fail(2)

    started = time.monotonic()
    found = run_team(tmp_path, 3, work)
    assert time.monotonic() - started < 5
    for rank, error in enumerate(found):
        if rank == guilty:
            assert isinstance(error, FormatError)
        elif step == 2 and guilty > 0 and error is None:
            continue  # it had done its part, and nobody waits for it
        else:
            assert isinstance(error, RankFailedError), (rank, error)
            assert "it broke" in str(error)
    assert not [path for path in open_store(tmp_path).list() if is_team_file(path)]


def test_a_failure_of_the_first_before_anybody_came_is_heard(tmp_path: Path) -> None:
    """As when the destination is taken."""

    def work(meeting: Meeting) -> bytes:
        if meeting.team.rank > 0:
            time.sleep(0.3)
        return meeting.share(lambda: (_ for _ in ()).throw(FormatError("taken")))

    found = run_team(tmp_path, 3, work)
    assert isinstance(found[0], FormatError)
    assert [str(error) for error in found[1:]] == ["process 0 of 3 failed: taken"] * 2


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    """On both sides, with what to do."""
    patience = Patience(arrival_s=0.2, silence_s=1.0, poll_s=0.01)
    for rank, absent in ((0, (1, 2)), (1, (0,))):
        with pytest.raises(RankFailedError, match=r"did not come.*unset RANK, WORLD_SIZE") as caught:  # noqa: SIM117
            with Meeting(open_store(tmp_path), Team(rank, 3), patience=patience) as meeting:
                meeting.share(lambda: b"")
        assert caught.value.ranks == absent


def test_who_falls_silent_is_named(tmp_path: Path) -> None:
    """But not who is slow and shows signs of life."""

    def work(meeting: Meeting) -> object:
        meeting.share(lambda: b"")
        if meeting.team.rank == 1:
            for _ in range(20):
                time.sleep(0.05)
                meeting.beat()
            time.sleep(2.0)
        return meeting.gather(b"")

    patience = Patience(arrival_s=5.0, silence_s=0.5, poll_s=0.01, pulse_s=0.05)
    started = time.monotonic()
    found = run_team(tmp_path, 2, work, patience)
    assert isinstance(found[0], RankFailedError)
    assert "process 1 of 2 has shown no sign of life" in str(found[0])
    assert time.monotonic() - started > 1.4


def test_waiting_can_be_stopped(tmp_path: Path) -> None:
    """By what `on_wait` raises."""

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Meeting(open_store(tmp_path), Team(1, 2), on_wait=stop) as meeting:
        meeting.share(lambda: b"")


@pytest.mark.parametrize(
    ("environment", "team"),
    [
        ({}, Team()),
        ({"RANK": "2", "WORLD_SIZE": "4"}, Team(2, 4)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "3"}, Team(1, 3)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, Team(1, 3)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"}, Team()),
        ({"RANK": "2"}, Team()),
    ],
)
def test_the_place_in_a_team_is_that_of_the_launcher(environment: dict[str, str], team: Team) -> None:
    """torchrun's or srun's; a batch script is alone."""
    assert Team.of_environment(environment) == team


@pytest.mark.parametrize("environment", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_a_place_that_makes_no_sense_is_refused(environment: dict[str, str]) -> None:
    """With what to unset."""
    with pytest.raises(MismatchError, match="unset"):
        Team.of_environment(environment)
