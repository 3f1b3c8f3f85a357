"""Being told to stop: real signals to real processes, one of several is enough."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt.errors import PreemptedError, UnsupportedError
from shardckpt.preemption import SignalWatch


def _train(rank: int, store: str, root: str, preemption: shardckpt.Preemption) -> None:
    """Train until told to stop; the ranks meet in every step, as in real training."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    state = {"x": torch.zeros(100)}
    with shardckpt.Manager(root, every=5, keep=None, preemption=preemption) as manager:
        for step in range(1, 10_000):
            state["x"] += 1
            dist.all_reduce(torch.zeros(1))
            time.sleep(0.01 if rank else 0.0)
            (Path(root).parent / f"rank-{rank}").write_text(str(step))
            manager.save_if_due(step, state)


@pytest.mark.parametrize(
    ("number", "told", "exit_code", "ended_with"),
    [(signal.SIGTERM, 1, 75, 75), (signal.SIGUSR1, 0, 3, 3), (signal.SIGUSR1, 1, None, 1)],
)
def test_one_rank_that_is_told_stops_all(
    tmp_path: Path, number: signal.Signals, told: int, exit_code: int | None, ended_with: int
) -> None:
    """A signal to one of two processes: both save the same step, once, and end as asked."""
    root = tmp_path / "run"
    context = multiprocessing.get_context("spawn")
    preemption = shardckpt.Preemption(exit_code=exit_code)
    ranks = [
        context.Process(target=_train, args=(rank, str(tmp_path / "store"), str(root), preemption)) for rank in range(2)
    ]
    try:
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 60
        while not (root / "step-00000005" / "manifest.json").exists():
            assert time.monotonic() < deadline, "training did not begin"
            time.sleep(0.05)
        pid = ranks[told].pid
        assert pid is not None
        at = int((tmp_path / "rank-0").read_text() or 0)
        os.kill(pid, number)
        for process in ranks:
            process.join(60)
        assert [process.exitcode for process in ranks] == [ended_with] * 2
    finally:
        for process in ranks:
            process.kill()
    steps = shardckpt.Manager(root).steps()
    last = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert last == [steps[-1]] * 2
    assert at <= steps[-1] <= at + 50
    assert sum(step % 5 != 0 for step in steps) <= 1
    assert shardckpt.open(root / f"step-{steps[-1]:08}")["x"][0] == steps[-1]


def test_a_lone_process_saves_at_the_next_step(tmp_path: Path) -> None:
    """The error says where the state is, and signals then do what they did before."""
    before = signal.getsignal(signal.SIGUSR1)
    manager = shardckpt.Manager(tmp_path, preemption=shardckpt.Preemption((signal.SIGUSR1,), exit_code=None))
    assert manager.save_if_due(1, {"epoch": 1}) is False
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(PreemptedError, match=r"step 2 is saved under .*Start again") as caught:
        manager.save_if_due(2, {"epoch": 2})
    assert caught.value.step == 2
    assert manager.steps() == [2]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_failed_save_before_does_not_hinder_the_last_one(tmp_path: Path) -> None:
    """The state is saved all the same, and the failure is the cause of the error."""
    with shardckpt.Manager(tmp_path, every=1, preemption=shardckpt.Preemption((signal.SIGUSR1,), None)) as manager:
        manager.save_if_due(1, {"x": object()})
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(PreemptedError) as caught:
            manager.save_if_due(2, {"x": 1})
        assert isinstance(caught.value.__cause__, UnsupportedError)
    assert manager.steps() == [2]


def test_signals_are_left_alone_unless_asked(tmp_path: Path) -> None:
    """A manager without preemption, and one that is closed, watch for none."""
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
    shardckpt.Manager(tmp_path)
    with shardckpt.Manager(tmp_path, preemption=shardckpt.Preemption()):
        assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)] != before
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_only_the_main_thread_can_watch() -> None:
    """The error of another thread says what to do."""
    errors: list[BaseException] = []

    def watch() -> None:
        try:
            SignalWatch((signal.SIGUSR1,))
        except UnsupportedError as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "cannot watch for SIGUSR1" in str(errors[0])
    assert "Make the manager in the main thread" in str(errors[0])
