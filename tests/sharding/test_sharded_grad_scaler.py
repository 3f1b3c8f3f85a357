"""Gradient scaling over shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import sharding
from sharding import FullyShardedDataParallel, ShardedGradScaler
from tests.ranks import run_ranks


def _steps() -> None:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=1)
    before = sharding.full_state_dict(model)
    scaler.scale(model(torch.ones(2, 5)).sum()).backward()
    spans = [parameter for parameter in model.parameters() if parameter.numel()]
    if dist.get_rank() == 1:  # the other rank sees finite numbers only
        assert spans[0].grad is not None
        spans[0].grad.view(-1)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(value, before[name]) for name, value in sharding.full_state_dict(model).items())
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 5)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    after = sharding.full_state_dict(model)
    torch.testing.assert_close(after["weight"], before["weight"] - 0.2)
    torch.testing.assert_close(after["bias"], before["bias"] - 0.2)


def test_an_infinity_on_one_rank_skips_the_step_on_all() -> None:
    """The scale falls on all ranks and no weight moves; the next step is unscaled and taken."""
    run_ranks(2, _steps)
