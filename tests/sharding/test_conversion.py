"""Wrapped modules that people convert, or whose parameters' data they replace, go on to train what they see."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardedGradScaler, ShardingStrategy, StateError
from tests.ranks import run_ranks

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "OPTIM", "NO_SHARD")


def _pair(strategy: str) -> tuple[nn.Module, FullyShardedDataParallel]:
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    return plain, FullyShardedDataParallel(
        copy.deepcopy(plain),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy([nn.Linear]),
    )


def _assert_trains_alike(plain: nn.Module, wrapped: nn.Module, dtype: torch.dtype) -> None:
    for model in (plain, wrapped):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 3), 0.1 * step + 0.1, dtype=dtype)).square().sum().backward()
            optimizer.step()
    state = wrapped.state_dict()
    for name, value in plain.state_dict().items():
        assert state[name].dtype == dtype
        torch.testing.assert_close(state[name], value, msg=name)


def _converts(strategy: str) -> None:
    plain, wrapped = _pair(strategy)
    identities = [id(parameter) for parameter in wrapped.parameters()]
    _assert_trains_alike(plain.double(), wrapped.double(), torch.float64)
    _assert_trains_alike(plain.float(), wrapped.float(), torch.float32)
    assert identities == [id(parameter) for parameter in wrapped.parameters()]


def _replaces(strategy: str) -> None:
    plain, wrapped = _pair(strategy)
    for model in (plain, wrapped):
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 0.25)
    _assert_trains_alike(plain, wrapped, torch.float32)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_converted_module_trains_in_its_new_dtype(strategy: str) -> None:
    """`double()` and `float()` after wrapping convert what is sharded, and parameters keep their identity."""
    run_ranks(2, _converts, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replaced_data_is_what_trains(strategy: str) -> None:
    """Data given to parameters after wrapping is in the next forward and in states."""
    run_ranks(2, _replaces, strategy)


def _refuses() -> None:
    _, wrapped = _pair("FULL_SHARD")
    alone = FullyShardedDataParallel(nn.Linear(3, 5))
    alone.module.weight.data = alone.module.weight.data.double()
    with pytest.raises(StateError, match=r"'bias' is now torch.float32.*convert the outermost module"):
        alone(torch.ones(1, 3))
    first = next(wrapped.parameters())
    first.data = torch.zeros(5, 3)
    with pytest.raises(StateError, match=r"shape \(5, 3\).*inside of summon_full_params"):
        wrapped(torch.ones(1, 3))


def test_data_that_fits_no_shard_is_refused() -> None:
    """A part of a unit in another dtype, or a whole tensor in place of a span, raises and says what to do."""
    run_ranks(2, _refuses)


def test_a_scaled_loss_keeps_its_dtype() -> None:
    """Scaling gives float16 losses back as float16, in lists too."""
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    half, single = scaler.scale([torch.ones((), dtype=torch.float16), torch.ones(())])
    assert (half.dtype, single.dtype, float(half)) == (torch.float16, torch.float32, 4.0)
