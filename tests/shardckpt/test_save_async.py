"""Background saves: a snapshot, one buffer, failures that are not lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardckpt
from shardckpt.errors import CheckpointExistsError, UnsupportedError
from tests.ranks import run_ranks
from tests.shardckpt.models import adamw, tied, train


def test_what_changes_after_the_call_is_not_in_the_file(tmp_path: Path) -> None:
    """Weights, buffers, moments and the 0-d step are those of the call, whatever happens to them right after it."""
    model = tied(0)
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    values = {"bytes": torch.arange(5, dtype=torch.uint8), "view": torch.arange(12.0).reshape(3, 4).T}
    state = {"model": model, "optimizer": optimizer, "values": values}
    shardckpt.save(tmp_path / "sync", state)
    pending = shardckpt.AsyncSaver().save(tmp_path / "async", state)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), *values.values()):
            tensor.fill_(1)
        for per_parameter in optimizer.state.values():
            for tensor in per_parameter.values():
                tensor.fill_(99)
    report = pending.result()
    assert pending.is_done
    assert report.nbytes > 0
    name = "shard-00000-of-00001.safetensors"
    assert (tmp_path / "async" / name).read_bytes() == (tmp_path / "sync" / name).read_bytes()


def test_many_saves_use_one_buffer(tmp_path: Path) -> None:
    """The staging buffer is as large as the state, and does not grow from save to save."""
    saver = shardckpt.AsyncSaver()
    state = {"x": torch.zeros(1000), "y": torch.zeros(7)}
    sizes = set()
    for step in range(20):
        state["x"].fill_(step)
        saver.save(tmp_path / str(step), state, step=step)
        sizes.add(saver.staging_nbytes)
    saver.wait()
    assert sizes == {4032 + 64}
    for step in range(20):
        assert shardckpt.open(tmp_path / str(step))["x"][0].item() == step


def test_a_state_over_the_budget_is_written_before_the_call_returns(tmp_path: Path) -> None:
    """The ceiling of host memory holds; the save is complete all the same."""
    saver = shardckpt.AsyncSaver(staging_budget_bytes=100)
    pending = saver.save(tmp_path / "a", {"x": torch.ones(1000)})
    assert pending.is_done
    assert saver.staging_nbytes == 0
    assert torch.equal(shardckpt.open(tmp_path / "a")["x"][...], torch.ones(1000))


def test_a_failure_is_raised_by_result(tmp_path: Path) -> None:
    """What goes wrong in the background, or while the snapshot is taken, is raised where one asks for it, once."""
    saver = shardckpt.AsyncSaver()
    saver.save(tmp_path / "a", {"x": torch.ones(1)}).result()
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint already"):
        saver.save(tmp_path / "a", {"x": torch.ones(1)}).result()
    pending = saver.save(tmp_path / "b", {"x": object()})
    with pytest.raises(UnsupportedError, match="leave it out"):
        pending.result()
    saver.save(tmp_path / "c", {"x": torch.ones(1)}).result()


def test_a_failure_that_nobody_saw_is_raised_by_the_next_save(tmp_path: Path) -> None:
    """A training loop that never asks still learns of it, at the next save at the latest."""
    saver = shardckpt.AsyncSaver()
    saver.save(tmp_path / "a", {"x": torch.ones(1)}).result()
    saver.save(tmp_path / "a", {"x": torch.ones(1)})
    with pytest.raises(CheckpointExistsError):
        saver.save(tmp_path / "b", {"x": torch.ones(1)})
    saver.save(tmp_path / "b", {"x": torch.ones(1)}).result()


def test_five_thousand_tensors_need_no_descriptors(tmp_path: Path) -> None:
    """Staging opens nothing, however many tensors there are."""
    count = len(list(Path("/proc/self/fd").iterdir()))
    saver = shardckpt.AsyncSaver()
    pending = saver.save(tmp_path / "a", {"many": {str(i): torch.full((3,), i) for i in range(5000)}})
    assert len(list(Path("/proc/self/fd").iterdir())) <= count + 6
    pending.result()
    assert shardckpt.open(tmp_path / "a")["many.4321"][0].item() == 4321


def _several_ranks(folder: str) -> tuple[str, float]:
    """Save in the background while collectives run in the foreground; then let one rank fail."""
    saver = shardckpt.AsyncSaver()
    value = torch.arange(100_000.0)
    pending = saver.save(f"{folder}/a", {"x": value})
    for _ in range(50):
        value.add_(1)
        dist.all_reduce(torch.ones(10))
    assert pending.result().nbytes > 400_000
    assert torch.equal(shardckpt.open(f"{folder}/a")["x"][...], torch.arange(100_000.0))
    bad = {"x": object()} if dist.get_rank() == 1 else {"x": 1}
    with pytest.raises(UnsupportedError) as caught:
        saver.save(f"{folder}/b", bad).result()
    saver.save(f"{folder}/c", {"x": 2}).result()
    return str(caught.value), 0.0


def test_ranks_save_in_the_background_together(tmp_path: Path) -> None:
    """Background saves and the training's own collectives do not meet; a failure on one rank is the same on all."""
    (first, _), (second, _) = run_ranks(2, _several_ranks, str(tmp_path))
    assert first == second
    assert "raised on rank 1 of 2" in first


def test_result_waits_no_longer_than_asked(tmp_path: Path) -> None:
    """A save that is under way is no failure; it goes on."""
    saver = shardckpt.AsyncSaver()
    pending = saver.save(tmp_path / "a", {"x": torch.zeros(30_000_000)})
    with pytest.raises(TimeoutError, match="goes on in the background"):
        pending.result(timeout_s=0)
    assert pending.result().nbytes > 0
