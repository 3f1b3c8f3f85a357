"""Communication hooks beside torch's own class: its default hooks, and what people write."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

import sharding
from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, StateError, UnsupportedError
from tests.ranks import run_ranks

Hook = Callable[..., None]


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _with_noise(state: list[int], gradients: torch.Tensor, part: torch.Tensor | None = None) -> None:
    """Reduce by hand, add what no reduction would, and count the calls."""
    state[0] += 1
    dist.all_reduce(gradients)
    if part is None:
        gradients.add_(0.25)
    else:
        part.copy_(gradients.chunk(dist.get_world_size())[dist.get_rank()]).add_(0.25)


def _torchs(strategy: str) -> fsdp.FullyShardedDataParallel:
    with warnings.catch_warnings():  # of its own deprecations
        warnings.simplefilter("ignore")
        return fsdp.FullyShardedDataParallel(
            _model(),
            sharding_strategy=fsdp.ShardingStrategy[strategy],
            auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy([nn.Linear]),
            device_id=torch.device("cpu"),
        )


def _ours(strategy: str) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        _model(), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy([nn.Linear])
    )


def _hooks(strategy: str) -> list[tuple[object, object, Hook]]:
    """Give, for torch and for us, a state each, and a hook."""
    group = dist.group.WORLD
    default = default_hooks.allreduce_hook if strategy == "NO_SHARD" else default_hooks.reduce_scatter_hook
    return [
        (default_hooks.DefaultState(group), default_hooks.DefaultState(group), default),
        ([0], [0], _with_noise),
    ]


def _trained(model: nn.Module) -> None:
    """Train on other inputs on each rank; the second step is of two backwards, one of them without synchronisation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:
                with model.no_sync():  # type: ignore[operator]
                    model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            optimizer.step()


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: value.clone() for name, value in model.state_dict().items()}


def _compared(strategy: str) -> None:
    for their_state, our_state, hook in _hooks(strategy):
        theirs, ours = _torchs(strategy), _ours(strategy)
        theirs.register_comm_hook(their_state, hook)
        ours.register_comm_hook(our_state, hook)
        for model in (theirs, ours):
            _trained(model)
        expected, found = _full(theirs), _full(ours)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=f"{hook.__name__}: {name}")
        if hook is _with_noise:
            assert our_state == their_state == [9]  # three units, three steps, none without synchronisation


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_hooks_train_as_under_torchs_class(strategy: str, world_size: int) -> None:
    """Default hooks and one that changes gradients give the weights that they give there, in as many calls."""
    run_ranks(world_size, _compared, strategy)


def _compresses(state: dict[str, torch.dtype], gradients: torch.Tensor, part: torch.Tensor | None = None) -> None:
    """Do as torch's compressing hooks, which themselves need an accelerator's streams."""
    out = gradients if part is None else part
    gradients.data = gradients.data.to(state["dtype"])
    dist.all_reduce(gradients)
    gradients.div_(dist.get_world_size())
    mine = gradients if part is None else gradients.chunk(dist.get_world_size())[dist.get_rank()]
    out.data = mine.data.to(torch.float32)


def _compressed(strategy: str) -> None:
    plain, model = _ours(strategy), _ours(strategy)
    model.register_comm_hook({"dtype": torch.bfloat16}, _compresses)
    for one in (plain, model):
        _trained(one)
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    exact, rough = _full(plain), _full(model)
    assert any(not torch.equal(exact[name], rough[name]) for name in exact)
    for name, value in exact.items():
        torch.testing.assert_close(rough[name], value, rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "OPTIM", "NO_SHARD"])
def test_hooks_may_give_their_tensors_another_dtype(strategy: str) -> None:
    """A hook that replaces `.data`, as compressing ones do, spoils no buffer."""
    run_ranks(2, _compressed, strategy)


def _refuses() -> None:
    model = _ours("FULL_SHARD")
    with pytest.raises(sharding.WrapError, match="must be callable but got 3; give a function"):
        model.register_comm_hook(None, 3)  # type: ignore[arg-type]
    model.register_comm_hook([0], _with_noise)
    with pytest.raises(StateError, match="already registered; make one hook"):
        model.register_comm_hook([0], _with_noise)
    inner = model.module[0]
    with pytest.raises(UnsupportedError, match="only be called on a root instance; this one is inside"):
        inner.register_comm_hook([0], _with_noise)
    hybrid = FullyShardedDataParallel(
        _model(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=init_device_mesh("cpu", (1, 2))
    )
    with pytest.raises(UnsupportedError, match=r"hybrid strategies: HYBRID_SHARD.*use FULL_SHARD"):
        hybrid.register_comm_hook([0], _with_noise)


def test_hooks_that_cannot_be_are_refused() -> None:
    """A second hook, one below the root, one under a hybrid strategy, and what is no function."""
    run_ranks(2, _refuses)


def _alone() -> None:
    state = [0]
    model = _ours("FULL_SHARD")
    model.register_comm_hook(state, _with_noise)
    model(torch.ones(1, 6)).sum().backward()
    assert state == [3]
    assert model.module[4].bias.grad is not None
    torch.testing.assert_close(model.module[4].bias.grad, torch.full((3,), 1.25))


def test_a_lone_rank_calls_the_hook_without_a_part() -> None:
    """There is nothing to scatter: the hook works in place, as under NO_SHARD."""
    run_ranks(1, _alone)
