"""Parity of the sharded with the unsharded model: losses, gradients, updated weights, and the count of collectives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sharding
from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
from tests.ranks import run_ranks
from tests.sharding.models import Block, net, train

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "OPTIM", "NO_SHARD")


def _wrapped(model: nn.Module, strategy: str, **options: object) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy([Block]),
        **options,  # type: ignore[arg-type]  # as the caller says
    )


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def _parity(strategy: str, options: dict[str, bool | str], forward_prefetch: bool, **others: object) -> None:
    """Compare four AdamW steps with clipping, in every state by name, with a model that is not sharded."""
    plain = net(**options)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    model = _wrapped(net(**options), strategy, forward_prefetch=forward_prefetch, **others)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    expected = train(
        plain,
        plain_optimizer,
        range(4),
        is_distributed=False,
        clip=lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.5),
    )
    found = train(model, optimizer, range(4), is_distributed=True, clip=lambda: model.clip_grad_norm_(0.5))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    _assert_close(sharding.full_state_dict(model), plain.state_dict())
    full = sharding.full_optimizer_state_dict(model, optimizer)
    for name, parameter in plain.named_parameters():
        for key, value in plain_optimizer.state[parameter].items():
            torch.testing.assert_close(full["state"][name][key], value, rtol=1e-4, atol=1e-6)  # type: ignore[index]


def _cases(world_size: int) -> list[tuple[str, dict[str, bool | str], bool]]:
    """Give strategy, model and forward prefetch: everything at two ranks, models by turns at the others."""
    variants: list[dict[str, bool | str]] = [
        {},
        {"twice": True},
        {"recompute": "reentrant"},
        {"recompute": "other"},
        {"recompute": "reentrant", "twice": True},
    ]
    cases = [(s, v, (i + j) % 2 == 0) for i, s in enumerate(STRATEGIES) for j, v in enumerate(variants)]
    return cases if world_size == 2 else cases[world_size % 2 :: 2]


def _all_parities(world_size: int) -> None:
    for case in _cases(world_size):
        _parity(*case)


def _hybrid_parities() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        _parity(strategy, {"twice": True}, False, device_mesh=mesh)


def test_hybrid_training_equals_that_of_the_unsharded_model() -> None:
    """Sharded over two ranks and replicated over two, training agrees too."""
    run_ranks(4, _hybrid_parities)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_equals_that_of_the_unsharded_model(world_size: int) -> None:
    """Losses, norms, weights and moments agree: tied and scalar parameters, a block used twice, both checkpoints."""
    run_ranks(world_size, _all_parities, world_size)
