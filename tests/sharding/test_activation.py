"""Activations computed again or kept in host memory, with units around and inside the wrappers."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import sharding
from sharding import CheckpointImpl, FullyShardedDataParallel, ModuleWrapPolicy
from tests.ranks import run_ranks
from tests.sharding.models import Block, global_batch, loss_of, net

WRAPPERS = {
    "reentrant": functools.partial(sharding.checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "other": sharding.checkpoint_wrapper,
    "offload": sharding.offload_wrapper,
}


def _trains_alike(name: str, is_inside: bool) -> list[str]:
    plain, model = net(), net()
    policy, kind = ModuleWrapPolicy([Block]), Block if is_inside else FullyShardedDataParallel
    if is_inside:
        sharding.apply_activation_checkpointing(model, WRAPPERS[name], lambda module: isinstance(module, kind))
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy)
    if not is_inside:
        sharding.apply_activation_checkpointing(wrapped, WRAPPERS[name], lambda module: isinstance(module, kind))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, wrapped)]
    for step in range(2):
        for one, optimizer in zip((plain, wrapped), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(one, global_batch(step)).backward()
            optimizer.step()
    state = wrapped.state_dict()
    assert sorted(state) == sorted(plain.state_dict())
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)
    return [type(module).__name__ for module in wrapped.modules()]


def _all_of(name: str) -> None:
    for is_inside in (True, False):
        kinds = _trains_alike(name, is_inside)
        assert kinds.count("OffloadWrapper" if name == "offload" else "CheckpointWrapper") == 3


@pytest.mark.parametrize("name", WRAPPERS)
def test_training_and_names_are_those_of_the_plain_model(name: str) -> None:
    """Weights after two steps and the state dict's names agree, wrapped before and after sharding."""
    run_ranks(2, _all_of, name)


class Counted(nn.Module):
    """Counts its forwards, and takes a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, factor: torch.Tensor) -> torch.Tensor:
        """Compute."""
        self.calls += 1
        return torch.sin(self.linear(x) * factor)


@pytest.mark.parametrize("kind", CheckpointImpl)
def test_a_checkpointed_module_runs_again_in_backward(kind: CheckpointImpl) -> None:
    """Both kinds run it twice, pass keywords, and give gradients to all inputs."""
    module = Counted()
    factor = torch.tensor(2.0, requires_grad=True)
    x = torch.ones(2, 3, requires_grad=True)
    sharding.checkpoint_wrapper(module, kind)(x, factor=factor).sum().backward()
    assert module.calls == 2
    assert x.grad is not None
    assert factor.grad is not None


def test_offloaded_activations_are_copies() -> None:
    """What backward needs lies in memory of its own: a change of the result does no harm."""
    linear = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    out = sharding.offload_wrapper(nn.Sequential(linear, nn.Tanh()))(x)
    with torch.no_grad():
        out.data.zero_()
    out.sum().backward()
    plain = torch.tanh(linear(torch.ones(2, 3)))
    torch.testing.assert_close(x.grad, ((1 - plain.square()) @ linear.weight).detach())
