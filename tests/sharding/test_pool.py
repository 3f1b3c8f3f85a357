"""Buffers are used again, and no more memory is held than was once in use."""

from __future__ import annotations

import pytest
import torch

from sharding import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
from sharding.hooks import hooks_below
from sharding.pool import Pool
from tests.ranks import run_ranks
from tests.sharding.models import Block, global_batch, loss_of, net

CPU = torch.device("cpu")


def test_a_buffer_given_back_is_taken_again_in_any_dtype() -> None:
    """The memory of one buffer serves the next one that fits."""
    pool = Pool()
    first = pool.take(8, torch.float32, CPU)
    address = first.data_ptr()
    pool.give_back(first)
    second = pool.take(16, torch.bfloat16, CPU)
    assert (second.data_ptr(), second.numel(), second.dtype) == (address, 16, torch.bfloat16)
    assert pool.num_allocations == 1


def test_the_smallest_that_fits_is_taken() -> None:
    """A large free buffer is left for those that need it."""
    pool = Pool()
    large, small = pool.take(100, torch.uint8, CPU), pool.take(10, torch.uint8, CPU)
    address = small.data_ptr()
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take(8, torch.uint8, CPU).data_ptr() == address


def test_two_in_use_do_not_share_memory() -> None:
    """What one holder writes, the other does not see."""
    pool = Pool()
    first, second = pool.take(4, torch.float32, CPU).fill_(1), pool.take(4, torch.float32, CPU).fill_(2)
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [2.0] * 4


@pytest.mark.parametrize("sizes", [range(1, 200), range(200, 0, -1), (3, 1, 2, 200, 1, 199, 7)])
def test_no_more_is_held_than_was_once_in_use(sizes: range | tuple[int, ...]) -> None:
    """One buffer at a time, of whatever sizes, holds at most the largest."""
    pool = Pool()
    for index, size in enumerate(sizes, start=1):
        pool.give_back(pool.take(size, torch.uint8, CPU))
        assert pool.nbytes <= max(sizes[:index])


def test_a_cleared_pool_holds_nothing_and_takes_nothing_back() -> None:
    """What was in use before is its holders' own."""
    pool = Pool()
    buffer = pool.take(8, torch.float32, CPU)
    pool.give_back(pool.take(4, torch.float32, CPU))
    pool.clear()
    pool.give_back(buffer)
    assert pool.nbytes == 0


def _allocations(strategy: str) -> list[int]:
    model = FullyShardedDataParallel(
        net(), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy([Block])
    )
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(5):
        loss_of(model, global_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(hooks_below(model)[0].start().pool.num_allocations)
    return found


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_reductions_allocate_nothing_after_the_second_step(strategy: str) -> None:
    """All memory of reductions is that of the first steps."""
    for counts in run_ranks(2, _allocations, strategy):
        assert counts[0] > 0
        assert len(set(counts[1:])) == 1
