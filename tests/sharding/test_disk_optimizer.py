"""Optimizer state in files: equal steps, its place in checkpoints, its memory, and what it says when files fail."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import shardckpt
import sharding
from sharding import DiskOptimizer, FullyShardedDataParallel, ModuleWrapPolicy
from sharding.errors import StateError, UnsupportedError
from tests.ranks import run_ranks
from tests.sharding.models import Block, net, train

BUCKET_BYTES = 200


def _sharded() -> FullyShardedDataParallel:
    return FullyShardedDataParallel(net(), auto_wrap_policy=ModuleWrapPolicy([Block]))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _on_disk(model: nn.Module, folder: Path) -> DiskOptimizer:
    return DiskOptimizer(_adamw(model), folder=folder, bucket_bytes=BUCKET_BYTES)


def _assert_same(found: nn.Module, expected: nn.Module) -> None:
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def _trains_and_resumes(folder: Path) -> None:
    plain, model = _sharded(), _sharded()
    plain_optimizer, optimizer = _adamw(plain), _on_disk(model, folder / "one")
    expected = train(plain, plain_optimizer, range(3), is_distributed=True)
    assert train(model, optimizer, range(3), is_distributed=True) == expected
    _assert_same(model, plain)
    found = sharding.full_optimizer_state_dict(model, optimizer)["state"]
    whole = sharding.full_optimizer_state_dict(plain, plain_optimizer)["state"]
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
    shardckpt.save(str(folder / "checkpoint"), {"model": model, "optimizer": optimizer})
    expected = train(plain, plain_optimizer, range(3, 5), is_distributed=True)
    for number, make in enumerate((_adamw, lambda module: _on_disk(module, folder / "two"))):
        other = _sharded()
        resumed = make(other)
        shardckpt.load(str(folder / "checkpoint"), {"model": other, "optimizer": resumed})
        assert train(other, resumed, range(3, 5), is_distributed=True) == expected, number
        _assert_same(other, plain)


def test_training_and_resuming_equal_those_with_the_state_in_memory(tmp_path: Path) -> None:
    """Bit for bit, over uneven shards; checkpoints pass the state to an optimizer of either kind."""
    run_ranks(3, _trains_and_resumes, tmp_path)
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert {"rank-00000-bucket-00001.pt", "rank-00002-bucket-00001.pt"} <= names
    assert not [name for name in names if name.endswith(".partial")]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_other_optimizers_and_torch_state_dicts_work(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    """State that an optimizer has from the start is taken over; `state_dict` goes both ways; a schedule is followed."""
    plain, model = net(), net()
    plain_optimizer = kind(plain.parameters(), lr=1e-2)  # type: ignore[call-arg]  # every one of them has it
    optimizer = DiskOptimizer(
        kind(model.parameters(), lr=1e-2),  # type: ignore[call-arg]  # as above
        folder=tmp_path,
        bucket_bytes=BUCKET_BYTES,
    )
    for step in range(3):
        for one, other in ((plain, plain_optimizer), (model, optimizer)):
            train(one, other, range(step, step + 1), is_distributed=False)
            other.param_groups[0]["lr"] *= 0.5
        optimizer.load_state_dict(plain_optimizer.state_dict())
        plain_optimizer.load_state_dict(optimizer.state_dict())
    _assert_same(model, plain)


def test_at_most_three_buckets_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that have begun lead the writes that have ended by three at most, in a step of many buckets."""
    model = net()
    optimizer = _on_disk(model, tmp_path)
    train(model, optimizer, range(1), is_distributed=False)
    held, most, lock = 0, 0, threading.Lock()
    read, write = torch.load, torch.save

    def _load(*args: object, **options: object) -> object:
        nonlocal held, most
        with lock:
            held += 1
            most = max(most, held)
        return read(*args, **options)  # type: ignore[arg-type]  # passed on

    def _save(*args: object) -> None:
        nonlocal held
        write(*args)  # type: ignore[arg-type]  # passed on
        with lock:
            held -= 1

    monkeypatch.setattr(torch, "load", _load)
    monkeypatch.setattr(torch, "save", _save)
    train(model, optimizer, range(1, 3), is_distributed=False)
    assert len(list(tmp_path.iterdir())) > 4
    assert held == 0
    assert 2 <= most <= 3


def test_a_step_that_failed_half_way_is_not_followed_by_another(tmp_path: Path) -> None:
    """A folder that two optimizers write to is told, and so is each step after it."""
    model, other = net(), net()
    optimizer = _on_disk(model, tmp_path)
    train(model, optimizer, range(1), is_distributed=False)
    _on_disk(other, tmp_path)
    with pytest.raises(StateError, match="Give each optimizer a folder of its own"):
        train(model, optimizer, range(1), is_distributed=False)
    with pytest.raises(StateError, match="load the last checkpoint"):
        optimizer.step()


def test_what_cannot_be_stepped_by_bucket_is_refused(tmp_path: Path) -> None:
    """LBFGS, and groups that come late."""
    model = net()
    with pytest.raises(UnsupportedError, match="use an optimizer that steps each by itself"):
        DiskOptimizer(torch.optim.LBFGS(model.parameters()), folder=tmp_path)
    with pytest.raises(UnsupportedError, match="before making the DiskOptimizer"):
        _on_disk(model, tmp_path).add_param_group({"params": [nn.Parameter(torch.ones(1))]})
