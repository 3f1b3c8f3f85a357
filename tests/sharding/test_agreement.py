"""Ranks that do not shard the same module all fail, with the same error."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from sharding import CustomPolicy, FullyShardedDataParallel, ShardingStrategy, WrapError
from tests.ranks import run_ranks


def _messages() -> list[str]:
    last = dist.get_world_size() - 1
    is_other = dist.get_rank() == last
    strategy = ShardingStrategy.HYBRID_SHARD if last == 3 else ShardingStrategy.FULL_SHARD
    mesh = init_device_mesh("cpu", (2, 2)) if last == 3 else None
    wrong = CustomPolicy(lambda module: 7 if is_other else False)  # type: ignore[arg-type,return-value]
    found = []
    for module, policy in (
        (nn.Linear(3, 3 + is_other), None),
        (nn.Linear(3, 3, dtype=torch.float64 if is_other else None), None),
        (nn.Linear(3, 3, bias=not is_other), None),
        (nn.Sequential(nn.Linear(3, 3)), wrong),
        (nn.Linear(3, 3), None),
    ):
        begun = time.monotonic()
        try:
            FullyShardedDataParallel(
                module, sharding_strategy=strategy, device_mesh=mesh, auto_wrap_policy=policy, sync_module_states=True
            )
            found.append("")
        except WrapError as error:
            found.append(str(error))
        assert time.monotonic() - begun < 20
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_raise_when_one_shards_another_module(world_size: int) -> None:
    """Shapes, dtypes, numbers of parameters, and a policy that fails on one rank: all say so, in time, and go on."""
    for shape, dtype, number, failed, alike in run_ranks(world_size, _messages):
        assert "shape (3, 3)" in shape
        assert "shape (4, 3)" in shape
        assert "Build the same module, with the same policy, on every rank" in shape
        assert "float64" in dtype
        assert "no more parameters" in number
        assert "a CustomPolicy gave 7" in failed
        assert alike == ""
