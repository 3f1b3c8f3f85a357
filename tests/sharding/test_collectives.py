"""How often a step communicates, and how much: the strategies' arithmetic."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
from sharding.collectives import Group, Work
from sharding.pool import Pool
from tests.ranks import run_ranks
from tests.sharding.models import Block, global_batch, loss_of, net


def _counted(strategy: str) -> tuple[dict[str, int], dict[str, int], int]:
    """Run three steps, and count the collectives and their elements in the third."""
    model = FullyShardedDataParallel(
        net(), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy([Block])
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    gather, scatter, reduce = Group.all_gather, Group.reduce_scatter, Group.all_reduce

    def all_gather(self: Group, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        calls["all-gather"] += self.size > 1
        elements["all-gather"] += shard.numel() * (self.size > 1)
        return gather(self, whole, shard)

    def reduce_scatter(self: Group, whole: torch.Tensor, pool: Pool) -> Work:
        calls["reduce-scatter"] += self.size > 1
        elements["reduce-scatter"] += whole.numel() * (self.size > 1)
        return scatter(self, whole, pool)

    def all_reduce(self: Group, tensor: torch.Tensor, *args: object) -> Work:
        calls["all-reduce"] += self.size > 1
        elements["all-reduce"] += tensor.numel() * (self.size > 1)
        return reduce(self, tensor, *args)  # type: ignore[arg-type]  # passed on

    counting = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
    with mock.patch.multiple(Group, **counting):
        for step in range(3):
            calls.clear()
            elements.clear()
            loss_of(model, global_batch(step)[dist.get_rank() :: dist.get_world_size()]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(+calls), dict(+elements), sum(parameter.numel() for parameter in net().parameters())


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("FULL_SHARD", {"all-gather": 7, "reduce-scatter": 4}),  # 4 units in forward, all but the root in backward
        ("SHARD_GRAD_OP", {"all-gather": 4, "reduce-scatter": 4}),
        ("OPTIM", {"all-gather": 4, "reduce-scatter": 4}),
        ("NO_SHARD", {"all-reduce": 4}),
    ],
)
def test_a_step_communicates_as_its_strategy_says(strategy: str, expected: dict[str, int]) -> None:
    """Each unit is gathered once a pass that needs it, and reduced once; not more than its padded elements are sent."""
    for calls, elements, numel in run_ranks(2, _counted, strategy):
        assert calls == expected
        padded = numel + 4 * 2 * 20  # 4 elements a start and a shard
        if strategy == "NO_SHARD":
            assert numel <= elements["all-reduce"] <= padded
            return
        assert numel <= elements["reduce-scatter"] <= padded
        passes = 2 if strategy == "FULL_SHARD" else 1
        assert elements["all-gather"] <= passes * padded / 2
