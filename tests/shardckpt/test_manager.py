"""Many checkpoints of one run: the newest, what is kept, and falling back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt.errors import CheckpointError, MismatchError, UnsupportedError
from tests.ranks import run_ranks


def _state(value: float) -> dict[str, object]:
    return {"x": torch.full((100,), value), "epoch": value}


def test_the_newest_and_every_nth_are_kept(tmp_path: Path) -> None:
    """After each save the last `keep` and the multiples of `keep_every` remain, others leave nothing behind."""
    manager = shardckpt.Manager(tmp_path, keep=2, keep_every=30)
    for step in range(10, 80, 10):
        manager.save(step, _state(step))
    assert manager.steps() == [30, 60, 70]
    assert manager.latest() == 70
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000060", "step-00000070"]


def test_restore_loads_the_newest(tmp_path: Path) -> None:
    """The state is that of the newest checkpoint; without any, nothing is changed and None is given."""
    manager = shardckpt.Manager(tmp_path)
    state = _state(0)
    assert manager.restore(state) is None
    for step in (1, 2):
        manager.save(step, _state(step))
    restored = manager.restore(state)
    assert restored is not None
    assert (restored.step, restored.skipped, state["epoch"]) == (2, (), 2)


def test_restore_falls_back_and_says_what_it_skipped(tmp_path: Path) -> None:
    """A flipped bit, a cut file and a lost one are passed over, newest first, each with its reason."""
    manager = shardckpt.Manager(tmp_path, keep=None)
    for step in (1, 2, 3, 4):
        manager.save(step, _state(step))
    shard = "shard-00000-of-00001.safetensors"
    flipped = tmp_path / "step-00000004" / shard
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    (tmp_path / "step-00000003" / shard).unlink()
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    state = _state(0)
    restored = manager.restore(state)
    assert restored is not None
    assert (restored.step, state["epoch"]) == (1, 1)
    assert [step for step, _ in restored.skipped] == [4, 3]
    assert "damaged" in restored.skipped[0][1]
    assert "no file" in restored.skipped[1][1]


def test_restore_raises_if_nothing_can_be_read(tmp_path: Path) -> None:
    """Damaged checkpoints alone are an error, not a fresh start."""
    manager = shardckpt.Manager(tmp_path)
    manager.save(5, _state(1))
    (tmp_path / "step-00000005" / "shard-00000-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* of step 5: there is no file"):
        manager.restore(_state(0))


def test_a_state_that_does_not_fit_is_no_reason_to_fall_back(tmp_path: Path) -> None:
    """A model of another shape is the caller's mistake, and raised at the first checkpoint."""
    manager = shardckpt.Manager(tmp_path)
    manager.save(1, {"model": torch.nn.Linear(2, 2)})
    with pytest.raises(MismatchError, match="global shape"):
        manager.restore({"model": torch.nn.Linear(2, 3)})


def test_a_failed_save_removes_nothing(tmp_path: Path) -> None:
    """What cannot be saved does not count, and no older checkpoint goes for it."""
    manager = shardckpt.Manager(tmp_path, keep=1)
    manager.save(1, _state(1))
    with pytest.raises(UnsupportedError):
        manager.save(2, {"x": object()})
    manager.save_async(3, {"x": object()})
    with pytest.raises(UnsupportedError):
        manager.wait()
    assert manager.steps() == [1]


def test_background_saves_prune_too(tmp_path: Path) -> None:
    """Each background save, once committed, leaves the newest `keep`."""
    manager = shardckpt.Manager(tmp_path, keep=2)
    for step in range(5):
        manager.save_async(step, _state(step))
    manager.wait()
    assert manager.steps() == [3, 4]


def test_keep_must_make_sense(tmp_path: Path) -> None:
    """Keeping nothing is refused."""
    with pytest.raises(MismatchError, match="must be at least 1"):
        shardckpt.Manager(tmp_path, keep=0)


def test_it_works_on_any_store() -> None:
    """The same on a remote kind of store."""
    manager = shardckpt.Manager("memory://run", keep=1)
    for step in (1, 2):
        manager.save(step, _state(step))
    assert manager.steps() == [2]
    state = _state(0)
    assert manager.restore(state) is not None
    assert state["epoch"] == 2


def _on_ranks(root: str) -> tuple[list[int], int | None]:
    manager = shardckpt.Manager(root, keep=2)
    for step in range(1, 4):
        manager.save_async(step, _state(step))
    manager.save(4, _state(4))
    state = _state(0)
    restored = manager.restore(state)
    dist.barrier()
    return manager.steps(), restored and restored.step


def test_ranks_share_a_manager(tmp_path: Path) -> None:
    """All ranks save and restore together; one of them prunes."""
    assert run_ranks(2, _on_ranks, str(tmp_path)) == [([3, 4], 4)] * 2
