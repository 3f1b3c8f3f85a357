"""Whole optimizer states from shards: what ranks that hold nothing know, and what it costs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sharding
from sharding import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    UnsupportedError,
)
from sharding.collectives import Group, Work
from tests.ranks import run_ranks
from tests.sharding.models import global_batch, loss_of, net


class Uneven(nn.Module):
    """Two parameters, each of them on one of two ranks; rank 0 does not use the one that it does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, both: bool) -> torch.Tensor:
        """Compute."""
        return self.first.sum() + (self.second.sum() if both else 0)


def _states() -> dict[str, float]:
    model = FullyShardedDataParallel(Uneven())
    optimizer = torch.optim.Adam(model.parameters())
    model(dist.get_rank() == 1).backward()
    with model.summon_full_params(model, with_grads=True):
        assert model.first.shape == (8,)
    optimizer.step()
    held = sharding.local_state_dict(model)["second"].tensor
    assert (held in optimizer.state) == (dist.get_rank() == 1)  # or this tests nothing
    full = sharding.full_optimizer_state_dict(model, optimizer)["state"]
    sharding.load_full_optimizer_state_dict(model, optimizer, sharding.full_optimizer_state_dict(model, optimizer))
    return {name: float(state["exp_avg"].sum()) + float(state["step"]) for name, state in full.items()}


def test_a_state_that_only_other_ranks_have_is_in_the_whole() -> None:
    """The whole state is the same on all ranks, though one of them has no state for a parameter."""
    first, second = run_ranks(2, _states)
    assert first == second
    assert abs(first["first"] - (0.1 * 8 + 1)) < 1e-5
    assert abs(first["second"] - (0.05 * 8 + 1)) < 1e-5


def _gathers() -> int:
    model = FullyShardedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, global_batch(0)).backward()
    optimizer.step()
    count = 0
    gather = Group.all_gather

    def counting(self: Group, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        nonlocal count
        count += 1
        return gather(self, whole, shard)

    with mock.patch.object(Group, "all_gather", counting):
        sharding.full_optimizer_state_dict(model, optimizer)
    return count


def test_the_whole_state_takes_one_gather_for_each_key() -> None:
    """Two moments of one bucket are two gathers, however many parameters there are."""
    assert run_ranks(2, _gathers) == [2, 2]


def _trained(strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train, carry the state over to another model and optimizer by torch's interface, and train both on."""
    pairs = []
    for _ in range(2):
        model = FullyShardedDataParallel(net(), sharding_strategy=ShardingStrategy[strategy])
        parameters = list(model.parameters())
        groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}]
        pairs.append((model, torch.optim.AdamW(groups, lr=0.01)))
    (model, optimizer), (other, fresh) = pairs
    loss_of(model, global_batch(0)).backward()
    optimizer.step()
    other.load_state_dict(model.state_dict())
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    fresh.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, fresh, state))
    for one, its in pairs:
        its.zero_grad()
        loss_of(one, global_batch(1)).backward()
        its.step()
    options = FullOptimStateDictConfig(rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=options
    ):
        on_first = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    assert bool(on_first) == (dist.get_rank() == 0)
    with (
        FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT),
        pytest.raises(UnsupportedError, match="save the shards with shardckpt"),
    ):
        FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return model.state_dict(), other.state_dict()


def _all_trained() -> None:
    for strategy in ("FULL_SHARD", "OPTIM", "NO_SHARD"):
        found, expected = _trained(strategy)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (strategy, name)


def test_torchs_interface_carries_the_state_to_another_optimizer() -> None:
    """Training goes on bit for bit the same with what `optim_state_dict_to_load` gives, groups and all."""
    run_ranks(3, _all_trained)
