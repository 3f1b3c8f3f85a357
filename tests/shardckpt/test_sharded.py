"""The main job on real ranks: train with `sharding`, save, reshard, resume at other world sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardckpt
import sharding
from shardckpt.storage import open_store
from shardckpt.tools.reshard import plan_reshard
from shardckpt.tools.rewrite import rewrite
from shardckpt.transfer import TransferOptions
from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
from tests.ranks import run_ranks
from tests.sharding.models import Block, net, train

State = dict[str, object]


def _state(strategy: str) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer, State]:
    model = FullyShardedDataParallel(
        net(), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy([Block])
    )
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if "weight" in name]
    others = [p for name, p in named.items() if "weight" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": []}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    return model, optimizer, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 1}


def _save_after_training(folder: str, strategy: str) -> tuple[list[float], list[float]]:
    """Train two steps, save, train two more; give the losses before and after."""
    model, optimizer, state = _state(strategy)
    before = train(model, optimizer, range(2), is_distributed=True)
    shardckpt.save(folder, state, step=2)
    return before, train(model, optimizer, range(2, 4), is_distributed=True)


def _resume(folder: str, strategy: str, copy: str = "") -> tuple[list[float], int, int, int]:
    """Load into a fresh state, save a copy of it if asked, train two steps.

    Give losses, bytes read, held, unverified.
    """
    model, optimizer, state = _state(strategy)
    state["epoch"] = 0
    report = shardckpt.load(folder, state)
    assert (report.step, state["epoch"]) == (2, 1)
    local = sharding.local_state_dict(model)
    held = {id(h.tensor): h.tensor.numel() * h.tensor.element_size() for h in local.values()}
    moments = sum(value.numel() * value.element_size() for s in optimizer.state.values() for value in s.values())
    if copy:
        shardckpt.save(copy, state, step=2)
    losses = train(model, optimizer, range(2, 4), is_distributed=True)
    return losses, report.nbytes, sum(held.values()) + moments, report.unverified_nbytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint of 4 ranks in the middle of a training, and the losses that follow it."""
    folder = tmp_path_factory.mktemp("sharded")
    results = run_ranks(4, _save_after_training, str(folder / "at-4"), "FULL_SHARD")
    return folder, results[0][1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_resumes_at_any_world_size(saved: tuple[Path, list[float]], world_size: int) -> None:
    """The losses go on as if nothing had happened; each rank reads just what it holds, all of it verified."""
    folder, expected = saved
    for losses, read, held, unverified in run_ranks(world_size, _resume, str(folder / "at-4"), "FULL_SHARD"):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        assert read == held
        assert unverified == 0


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_another_strategy_resumes(saved: tuple[Path, list[float]], strategy: str) -> None:
    """What FULL_SHARD saved, the other strategies load."""
    folder, expected = saved
    for losses, *_ in run_ranks(2, _resume, str(folder / "at-4"), strategy):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_offline_reshard_writes_what_the_runtime_would(saved: tuple[Path, list[float]], world_size: int) -> None:
    """Resharded offline, every file is byte by byte that of a save at the new world size."""
    folder, expected = saved
    offline, online = folder / f"offline-{world_size}", folder / f"online-{world_size}"
    job = plan_reshard(open_store(folder / "at-4"), to_ranks=world_size, from_ranks=4)
    rewrite(job, open_store(offline), overwrite=False, options=TransferOptions())
    run_ranks(world_size, _resume, str(folder / "at-4"), "FULL_SHARD", str(online))
    names = sorted(path.name for path in offline.iterdir())
    assert names == sorted(path.name for path in online.iterdir())
    assert len(names) == world_size + 2
    for name in set(names) - {"manifest.json"}:
        assert (offline / name).read_bytes() == (online / name).read_bytes(), name
    for losses, *_ in run_ranks(world_size, _resume, str(offline), "FULL_SHARD"):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_the_unsharded_model_loads_it(saved: tuple[Path, list[float]]) -> None:
    """One process without any process group loads the weights, tied ones tied."""
    folder, _ = saved
    model = net()
    shardckpt.load(folder / "at-4", {"model": model})
    with shardckpt.open(folder / "at-4") as checkpoint:
        for name, value in model.state_dict().items():
            assert torch.equal(checkpoint[f"model.{name}"][...], value)
    assert model.head.weight is model.embed.weight


def _save_with_a_broken_rank(folder: str) -> str:
    model, optimizer, state = _state("FULL_SHARD")
    train(model, optimizer, range(1), is_distributed=True)
    state["note"] = object() if dist.get_rank() == 1 else 5
    try:
        shardckpt.save(folder, state)
    except shardckpt.CheckpointError as error:
        state["note"] = 5
        shardckpt.save(folder, state)  # the ranks are still in step
        return str(error)
    raise AssertionError("nothing was raised")


def test_a_rank_that_cannot_save_fails_all_alike(tmp_path: Path) -> None:
    """All ranks get the same error, which names the rank and the value; the next save works."""
    messages = run_ranks(3, _save_with_a_broken_rank, str(tmp_path / "a"))
    assert messages[0] == messages[1] == messages[2]
    assert "state['note']" in messages[0]
    assert "raised on rank 1 of 3" in messages[0]
    assert shardckpt.open(tmp_path / "a").world_size == 3
