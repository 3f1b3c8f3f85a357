"""The test harness itself: it must fail when a rank fails."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def _sum_of_ranks() -> int:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return int(total)


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("planted")


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def _sleep() -> None:
    time.sleep(60)


@pytest.mark.parametrize("world_size", [1, 3, 2])
def test_ranks_share_a_process_group(world_size: int) -> None:
    """Every rank sees the sum over all ranks."""
    assert run_ranks(world_size, _sum_of_ranks) == [sum(range(world_size))] * world_size


def test_a_raising_rank_fails_the_call() -> None:
    """The error names the rank and carries its message."""
    with pytest.raises(RankError, match="rank 1: ValueError: planted"):
        run_ranks(2, _raise_on, 1, timeout_s=30)


def test_a_dying_rank_fails_the_call() -> None:
    """A rank that exits without a word is reported."""
    with pytest.raises(RankError, match="rank 1: Died"):
        run_ranks(2, _die_on, 1, timeout_s=60)


def test_a_hanging_rank_fails_the_call() -> None:
    """A rank that does not finish in time is reported."""
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish"):
        run_ranks(2, _sleep, timeout_s=3)
