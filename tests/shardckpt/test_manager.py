"""Many checkpoints of one run: the newest, what is kept, and falling back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt.errors import CheckpointError, CheckpointNotFoundError, MismatchError, StorageError, UnsupportedError
from shardckpt.local_store import LocalStore
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


def _losses(manager: shardckpt.Manager, losses: list[float]) -> None:
    for step, loss in enumerate(losses, start=1):
        manager.save(step, _state(step), metrics={"loss": loss})


@pytest.mark.parametrize(("mode", "kept", "best"), [("min", [3, 5, 7], 5), ("max", [1, 2, 7], 2)])
def test_the_best_are_kept(tmp_path: Path, mode: str, kept: list[int], best: int) -> None:
    """Beside the newest the best two stay; a number that is not finite is best of nothing."""
    manager = shardckpt.Manager(tmp_path, keep=1, best=shardckpt.Best("loss", mode=mode, keep=2))
    _losses(manager, [5.0, 6.0, 2.0, 3.0, 1.0, float("nan"), float("inf")])
    assert manager.steps() == kept
    assert manager.best() == best
    assert manager.metrics(7) == {"loss": None}


def test_the_best_are_known_to_a_new_manager(tmp_path: Path) -> None:
    """Metrics are read back from the manifests, so that a restarted run keeps what was best before it."""
    best = shardckpt.Best("loss")
    _losses(shardckpt.Manager(tmp_path, keep=1, best=best), [1.0, 4.0])
    manager = shardckpt.Manager(tmp_path, keep=1, best=best)
    manager.save(3, _state(3), metrics={"loss": 2.0})
    assert manager.steps() == [1, 3]
    state = _state(0)
    restored = manager.restore(state, step=manager.best())
    assert restored is not None
    assert (restored.step, state["epoch"]) == (1, 1)


def test_a_checkpoint_saved_again_has_its_new_metrics(tmp_path: Path) -> None:
    """What a step was worth before it was replaced is forgotten."""
    manager = shardckpt.Manager(tmp_path, keep=None, best=shardckpt.Best("loss"))
    _losses(manager, [1.0, 2.0])
    assert manager.best() == 1
    manager.save(1, _state(1), metrics={"loss": torch.tensor(3.0)})
    assert (manager.best(), manager.metrics(1)) == (2, {"loss": 3.0})


def test_metrics_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """Nothing is saved with them, and the metric is named."""
    manager = shardckpt.Manager(tmp_path)
    with pytest.raises(UnsupportedError, match="the metric 'loss' is 'low', which is no number"):
        manager.save(1, _state(1), metrics={"loss": "low"})  # type: ignore[dict-item]
    assert manager.steps() == []


def test_what_is_best_must_be_said(tmp_path: Path) -> None:
    """Asking for the best without a metric, or with a senseless one, says what to give."""
    with pytest.raises(MismatchError, match=r"best=Best\(metric\)"):
        shardckpt.Manager(tmp_path).best()
    with pytest.raises(MismatchError, match="'min' or 'max'"):
        shardckpt.Best("loss", mode="least")
    with pytest.raises(MismatchError, match="at least 1"):
        shardckpt.Best("loss", keep=0)


def test_restoring_a_step_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """A step that was asked for is never replaced by another."""
    manager = shardckpt.Manager(tmp_path)
    manager.save(1, _state(1))
    with pytest.raises(CheckpointNotFoundError):
        manager.restore(_state(0), step=2)


def test_a_save_before_a_damaged_checkpoint_stays(tmp_path: Path) -> None:
    """After falling back past damaged files, they do not count as the newest: what can be read stays."""
    manager = shardckpt.Manager(tmp_path, keep=1)
    manager.save(1, _state(1))
    shardckpt.save(manager.path(9), _state(9), step=9)
    (tmp_path / "step-00000009" / "shard-00000-of-00001.safetensors").unlink()
    manager.restore(_state(0))
    manager.save(2, _state(2))
    assert manager.steps() == [2, 9]
    manager.prune()
    assert manager.steps() == [2, 9]
    restored = manager.restore(_state(0))
    assert restored is not None
    assert restored.step == 2


def test_what_was_just_saved_stays(tmp_path: Path) -> None:
    """A save of an earlier step than the newest is not removed at once."""
    manager = shardckpt.Manager(tmp_path, keep=1)
    manager.save(9, _state(9))
    manager.save(2, _state(2))
    assert manager.steps() == [2, 9]


def test_remains_of_broken_off_removals_go(tmp_path: Path) -> None:
    """Shards that lost their manifest to a killed removal go with the next save; files of no save stay."""
    manager = shardckpt.Manager(tmp_path, keep=2)
    for step in (1, 2, 7):
        manager.save(step, _state(step))
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    (tmp_path / "step-00000002" / "notes.txt").write_text("mine")
    manager.save(4, _state(4))
    assert manager.steps() == [4, 7]
    assert [path.name for path in (tmp_path / "step-00000002").iterdir()] == ["notes.txt"]


def test_files_that_are_gone_already_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that removes the same checkpoints meanwhile does no harm."""
    manager = shardckpt.Manager(tmp_path, keep=None)
    for step in (1, 2, 3):
        manager.save(step, _state(step))
    lister = LocalStore.list

    def list_then_lose(store: LocalStore) -> dict[str, int]:
        found = lister(store)
        for path in (tmp_path / "step-00000001").glob("*"):
            path.unlink()
        return found

    monkeypatch.setattr(LocalStore, "list", list_then_lose)
    assert shardckpt.Manager(tmp_path, keep=1).prune() == [1, 2]
    assert manager.steps() == [3]


def test_a_save_stands_though_old_files_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says what is still there; the next save removes it."""
    manager = shardckpt.Manager(tmp_path, keep=1)
    manager.save(1, _state(1))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", _refuse)
        report = manager.save(2, _state(2))
        assert manager.steps() == [1, 2]
        with pytest.raises(StorageError, match="of the steps \\[1\\] could be removed: cannot delete"):
            manager.prune()
    assert len(report.not_removed) == 1
    assert "manifest.json" in report.not_removed[0]
    assert manager.save(3, _state(3)).not_removed == ()
    assert manager.steps() == [3]


def _refuse(store: LocalStore, path: str) -> None:
    raise StorageError.wrap("delete", path, PermissionError(13, "Permission denied"))


def _metrics_on_ranks(root: str) -> tuple[dict[str, float | None], list[int], int]:
    manager = shardckpt.Manager(root, keep=1, best=shardckpt.Best("loss"))
    report = manager.save(1, _state(1), metrics={"loss": 1.0 + dist.get_rank()})
    manager.save(2, _state(2), metrics={"loss": 2.0 + dist.get_rank()})
    manager.save_async(3, _state(3), metrics={"loss": 3.0}).result()
    return dict(manager.metrics(1)), manager.steps(), len(report.not_removed)


def test_metrics_of_rank_0_count(tmp_path: Path) -> None:
    """Ranks with losses of their own agree all the same on what is best."""
    assert run_ranks(2, _metrics_on_ranks, str(tmp_path)) == [({"loss": 1.0}, [1, 3], 0)] * 2


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
