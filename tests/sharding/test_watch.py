"""A rank that fails in the middle of a step, or does something else, stops all; none hangs, and training goes on."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sharding
from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, StateError, runtime, watch
from tests.ranks import RankError, run_ranks
from tests.sharding.models import GLOBAL_BATCH, Block, global_batch, loss_of, net

STEPS_UNTIL_AGREED = 3
"""After this many alike, ranks issue collectives without a word to each other."""


def _wrap(model: nn.Module, strategy: str) -> FullyShardedDataParallel:
    watch.SLICE_S = 0.05  # in this process, which is a rank's
    mesh = init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy([Block]),
    )


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _mine(step: int) -> torch.Tensor:
    part = GLOBAL_BATCH // dist.get_world_size()
    return global_batch(step)[dist.get_rank() * part : (dist.get_rank() + 1) * part]


def _train_both(
    plain: nn.Module, wrapped: nn.Module, optimizers: Sequence[torch.optim.Optimizer], steps: range
) -> None:
    """Train on all ranks, and compare with the model that one process trains."""
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(plain, global_batch(step)).backward()
        loss_of(wrapped, _mine(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    _assert_same(plain, wrapped)


def _assert_same(plain: nn.Module, wrapped: nn.Module) -> None:
    torch.testing.assert_close(sharding.full_state_dict(wrapped), dict(plain.state_dict()))


class PlantedError(Exception):
    """What the tests raise on one rank."""


@contextmanager
def _planted(module: nn.Module, where: str) -> Iterator[None]:
    """Let `module` raise, on the last rank, before its forward or in its backward."""

    def fail_forward(module: nn.Module, args: object) -> None:
        raise PlantedError("no luck")

    def fail_backward(module: nn.Module, gradients: object, more: object) -> None:
        raise PlantedError("no luck")

    if not _is_last():
        yield
        return
    hook = (
        module.register_forward_pre_hook(fail_forward)
        if where == "forward"
        else module.register_full_backward_hook(fail_backward)
    )
    with hook:
        yield


def _fails(strategy: str) -> list[str]:
    """One rank fails in forward, backward or between, in the first step and in later ones; give this rank's errors."""
    plain, model = net().double(), net().double()
    wrapped = _wrap(model, strategy)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, wrapped)]
    errors = []
    for begin, where in ((0, "forward"), (0, "backward"), (0, "forward"), (3, "backward"), (6, "loss"), (9, "forward")):
        if begin:
            _train_both(plain, wrapped, optimizers, range(begin, begin + 3))
        begun = time.monotonic()
        with _planted(model.blocks[1].up, where):  # type: ignore[index,union-attr]
            try:
                loss = loss_of(wrapped, _mine(12))
                if where == "loss" and _is_last():
                    loss_of(wrapped, _mine(13))  # as after an exception between forward and backward
                loss.backward()
                errors.append("")
            except (PlantedError, StateError) as error:
                errors.append(f"{type(error).__name__} {error}")
        assert time.monotonic() - begun < 10
        if begin == 9:
            sharding.reset(wrapped)  # by hand this time
    _train_both(plain, wrapped, optimizers, range(12, 15))
    return errors


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [*itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "OPTIM", "NO_SHARD"), (2, 3)), ("HYBRID_SHARD", 4)],
)
def test_a_failure_on_one_rank_stops_all_and_training_goes_on(strategy: str, world_size: int) -> None:
    """The others say which rank failed, where and why; the steps after are right."""
    *others, failed = run_ranks(world_size, _fails, strategy)
    rank = world_size - 1
    forward = f"on rank {rank} the forward of the whole model raised PlantedError: no luck"
    other = "ranks run different units. Rank "
    backward = f"an exception ended the backward of rank {rank}; see its traceback"
    assert [error for error in failed if error != "PlantedError no luck"] == [others[0][4]]
    for errors in others:
        for error, cause in zip(errors, (forward, backward, forward, backward, other, forward), strict=True):
            assert error.startswith(f"StateError this step cannot go on: {cause}")


class Choosy(nn.Module):
    """Runs the blocks whose numbers it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block(7) for _ in range(4)])
        self.chosen = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them."""
        for index in self.chosen:
            x = self.blocks[index](x)
        return x


def _chooses(strategy: str, choice: list[int]) -> list[str]:
    """The last rank runs other blocks, in the first step and in a later one; give the errors of this rank."""
    model = Choosy()
    wrapped = _wrap(model, strategy)
    errors = []

    def step() -> None:
        try:
            wrapped(torch.ones(2, 7)).sum().backward()
        except StateError as error:
            errors.append(str(error))

    for _ in range(2):
        model.chosen = choice if _is_last() else [0, 1, 2]
        step()
        model.chosen = [0, 1, 2]
        count = len(errors)
        for _ in range(3):
            step()
        assert len(errors) == count, errors
    model.chosen = choice  # on all ranks: that is no mistake
    step()
    return errors


@pytest.mark.parametrize("choice", [[0, 1], [0, 2, 1], [0, 1, 2, 3], [0, 1, 3]])
def test_ranks_that_run_other_units_all_say_so(choice: list[int]) -> None:
    """Skipped, swapped and added units: the same error on all ranks, and none hangs."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        first, *others = run_ranks(3, _chooses, strategy, choice)
        assert len(first) == 2
        assert all(other == first for other in others)
        for error in first:
            assert "ranks run different units" in error
            assert "Rank 2: " in error
            assert "Run the same modules, in the same order, on every rank" in error


class Partial(nn.Module):
    """A stack of which some ranks use every layer's second weight, and others do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([_TwoWays() for _ in range(8)])

    def forward(self, x: torch.Tensor, uses_both: bool) -> torch.Tensor:
        """Run them."""
        for block in self.blocks:
            x = block(x, uses_both)
        return x


class _TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, uses_both: bool) -> torch.Tensor:
        x = torch.tanh(self.one(x))
        return self.two(x) if uses_both else x


def _uses_part() -> None:
    runtime.STALL_S = 0.05
    plain, model = Partial().double(), Partial().double()
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy([_TwoWays]))
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        for other in range(size):
            (plain(torch.full((2, 5), 1.0 + other, dtype=torch.float64), other == 0).sum() / size).backward()
        wrapped(torch.full((2, 5), 1.0 + rank, dtype=torch.float64), rank == 0).sum().backward()
        for trained in (plain, wrapped):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    _assert_same(plain, wrapped)


def test_parameters_used_on_some_ranks_only_do_not_hang() -> None:
    """More buckets than reductions under way wait for gradients that never come on one rank."""
    run_ranks(2, _uses_part)


def _waits() -> list[str]:
    watch.PATIENCE_S = 0.2
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sharding").addHandler(handler)
    wrapped = _wrap(net(), "FULL_SHARD")
    for step in range(STEPS_UNTIL_AGREED + 1):
        if step == STEPS_UNTIL_AGREED and _is_last():
            time.sleep(1)
        loss_of(wrapped, _mine(step)).backward()
    logging.getLogger("sharding").removeHandler(handler)
    watch.PATIENCE_S = 10.0
    return records


def test_a_long_wait_is_logged_with_what_is_waited_for() -> None:
    """The rank that waits names the unit; the one that is late says nothing."""
    early, late = run_ranks(2, _waits)
    assert early
    assert "rank 0 has waited" in early[0]
    assert "for the all_gather of the whole model" in early[0]
    assert not late


def _dies() -> None:
    wrapped = _wrap(net(), "FULL_SHARD")
    for step in range(STEPS_UNTIL_AGREED):
        loss_of(wrapped, _mine(step)).backward()
    if _is_last():
        os._exit(7)
    loss_of(wrapped, _mine(STEPS_UNTIL_AGREED)).backward()


def test_ranks_say_so_when_another_died() -> None:
    """At once, not when the timeout of the group is over."""
    begun = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(2, _dies, timeout_s=100)
    assert time.monotonic() - begun < 60
    assert caught.value.errors[0][0] == "StateError"
    assert "perhaps because a rank died" in caught.value.errors[0][1]


def _handles() -> None:
    """A model that handles an exception of a unit inside it, on all ranks alike, trains on."""
    model = Handler()
    wrapped = _wrap(model, "FULL_SHARD")
    for step in range(3):
        wrapped(torch.ones(2, 7)).sum().backward()
        assert model.handled == step + 1


class Handler(nn.Module):
    """Goes another way if a block raises."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(7), Block(7)])
        self.handled = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run a block that raises, and one that does not."""
        with suppress(RuntimeError):
            x = self.blocks[0](x[:, :3])
        self.handled += 1
        out: torch.Tensor = self.blocks[1](x)
        return out


def test_a_model_may_handle_an_exception_of_a_unit() -> None:
    """It is no failure of the step."""
    run_ranks(2, _handles)
