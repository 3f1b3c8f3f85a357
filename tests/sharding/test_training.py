"""Training in other ways than step by step: accumulation, frozen parameters, evaluation, failures."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sharding
from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
from tests.ranks import run_ranks
from tests.sharding.models import GLOBAL_BATCH, Block, global_batch, loss_of, net

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "OPTIM", "NO_SHARD")


def _pair(strategy: str, freeze: str = "") -> tuple[nn.Module, FullyShardedDataParallel]:
    """Give a model and its sharded twin; parameters whose name holds `freeze` take no gradient."""
    plain, other = net(), net()
    for model in (plain, other):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (freeze and freeze in name))
    wrapped = FullyShardedDataParallel(
        other, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy([Block])
    )
    return plain, wrapped


def _mine(step: int) -> torch.Tensor:
    part = GLOBAL_BATCH // dist.get_world_size()
    return global_batch(step)[dist.get_rank() * part : (dist.get_rank() + 1) * part]


def _step(plain: nn.Module, wrapped: nn.Module, step: int) -> None:
    loss_of(plain, global_batch(step)).backward()
    loss_of(wrapped, _mine(step)).backward()


def _assert_same_after_sgd(plain: nn.Module, wrapped: nn.Module) -> None:
    """Update both by their gradients, compare all weights, and zero the gradients."""
    for model in (plain, wrapped):
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in sharding.full_state_dict(wrapped).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


def _accumulates(strategy: str) -> None:
    """Three backwards, two of them without synchronisation, sum up; then two plain ones on top of each other do."""
    plain, wrapped = _pair(strategy)
    with wrapped.no_sync():
        _step(plain, wrapped, 0)
        _step(plain, wrapped, 1)
    _step(plain, wrapped, 2)
    _assert_same_after_sgd(plain, wrapped)
    _step(plain, wrapped, 3)
    _step(plain, wrapped, 4)
    _assert_same_after_sgd(plain, wrapped)


def _freezes(strategy: str) -> None:
    """Frozen parameters, alone in a unit or not, stay as they are, take no gradient, and pass gradients on."""
    for freeze in ("up", "blocks.1", "embed"):
        plain, wrapped = _pair(strategy, freeze)
        before = {name: value.clone() for name, value in sharding.full_state_dict(wrapped).items() if freeze in name}
        assert before
        _step(plain, wrapped, 0)
        assert all(p.grad is None for p in wrapped.parameters() if not p.requires_grad)
        _assert_same_after_sgd(plain, wrapped)
        after = sharding.full_state_dict(wrapped)
        assert all(torch.equal(after[name], value) for name, value in before.items())


def _evaluates(strategy: str) -> None:
    """An evaluation between steps sees the weights of the last update, and disturbs no step."""
    plain, wrapped = _pair(strategy)
    for step in range(3):
        with torch.no_grad():
            torch.testing.assert_close(wrapped(_mine(9)), plain(_mine(9)), rtol=1e-5, atol=1e-6)
        _step(plain, wrapped, step)
        _assert_same_after_sgd(plain, wrapped)


def _uses_several_forwards(strategy: str) -> None:
    """Two forwards before one backward of both."""
    plain, wrapped = _pair(strategy)
    (loss_of(plain, global_batch(0)) + loss_of(plain, global_batch(1))).backward()
    (loss_of(wrapped, _mine(0)) + loss_of(wrapped, _mine(1))).backward()
    _assert_same_after_sgd(plain, wrapped)


def _recovers(strategy: str) -> None:
    """After an exception in forward, and one in backward, the next step is right."""
    plain, wrapped = _pair(strategy)
    with pytest.raises(IndexError):
        wrapped(torch.full((1, 1), 99))
    _step(plain, wrapped, 0)
    _assert_same_after_sgd(plain, wrapped)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("planted")

    logits = wrapped(_mine(1))
    logits.register_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        logits.sum().backward()
    for parameter in wrapped.parameters():
        parameter.grad = None
    _step(plain, wrapped, 2)
    _assert_same_after_sgd(plain, wrapped)


@dataclass
class Output:
    """What some libraries' modules give."""

    hidden: torch.Tensor
    name: str


class Boxed(nn.Module):
    """Gives its result in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Output:
        """Compute."""
        return Output(torch.tanh(self.inner(x)), "boxed")


class Stack(nn.Module):
    """Two such modules, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Boxed(), Boxed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.second(self.first(x).hidden).hidden


def _gives_dataclasses(strategy: str) -> None:
    """Gradients are right where units give dataclasses."""
    torch.manual_seed(1)
    plain = Stack()
    torch.manual_seed(1)
    wrapped = FullyShardedDataParallel(
        Stack(), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy([Boxed])
    )
    x = torch.randn(4, 4)
    plain(x).square().sum().backward()
    wrapped(x).square().sum().backward()
    _assert_same_after_sgd(plain, wrapped)


def _leaves_unused_parameters(strategy: str) -> None:
    """A parameter without a gradient on any rank has None; with one on some rank only, all have their mean."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"both": nn.Linear(5, 3), "first": nn.Linear(5, 3), "none": nn.Linear(5, 3)})
    model.forward = lambda x, keys: sum(model[key](x) for key in keys).sum()  # type: ignore[method-assign,assignment]
    wrapped = FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy[strategy])
    x = torch.ones(2, 5)
    wrapped(x, ["both", "first"] if dist.get_rank() == 0 else ["both"]).backward()
    for name, held in sharding.local_state_dict(wrapped).items():
        gradient = held.tensor.grad
        if held.start == held.stop:
            continue
        if name.startswith("none"):
            assert gradient is None
        else:
            assert gradient is not None
            share = 1.0 if name.startswith("both") else 1 / dist.get_world_size()
            torch.testing.assert_close(gradient, torch.full_like(gradient, 2 * share))


def _keeps_zero_gradients(strategy: str) -> None:
    """A gradient that is -0.0 everywhere is a gradient."""
    wrapped = FullyShardedDataParallel(nn.Linear(5, 3), sharding_strategy=ShardingStrategy[strategy])
    (wrapped(torch.ones(2, 5)) * -0.0).sum().backward()
    assert all(p.grad is not None for p in wrapped.parameters() if p.numel())


def _freezes_later(strategy: str) -> None:
    """What `requires_grad_` says after wrapping holds from the next step on, both ways."""
    plain, wrapped = _pair(strategy, "up")
    for model in (plain, wrapped):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("down" not in name)
    _step(plain, wrapped, 0)
    for name, held in sharding.local_state_dict(wrapped).items():
        assert "down" not in name or held.tensor.grad is None
    _assert_same_after_sgd(plain, wrapped)


def _goes_backward_twice(strategy: str) -> None:
    """A graph that is kept can be gone through again; gradients of inputs alone touch no parameter."""
    plain, wrapped = _pair(strategy)
    for model, tokens in ((plain, global_batch(0)), (wrapped, _mine(0))):
        loss = loss_of(model, tokens)
        loss.backward(retain_graph=True)
        loss.backward()
    _assert_same_after_sgd(plain, wrapped)
    outer = FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=ShardingStrategy[strategy])
    x = torch.ones(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(outer(x).sum(), x)
    weight = sharding.full_state_dict(outer)["weight"]
    torch.testing.assert_close(gradient, weight.sum(0).expand(2, 4))
    assert all(parameter.grad is None for parameter in outer.parameters())


CHECKS = (
    _accumulates,
    _freezes,
    _evaluates,
    _uses_several_forwards,
    _recovers,
    _gives_dataclasses,
    _leaves_unused_parameters,
    _keeps_zero_gradients,
    _freezes_later,
    _goes_backward_twice,
)


def _check(number: int) -> None:
    for strategy in STRATEGIES:
        CHECKS[number](strategy)


@pytest.mark.parametrize("number", range(len(CHECKS)), ids=[check.__name__.strip("_") for check in CHECKS])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_equals_that_of_the_unsharded_model(number: int, world_size: int) -> None:
    """What the check of that number says holds, under every strategy."""
    run_ranks(world_size, _check, number)
