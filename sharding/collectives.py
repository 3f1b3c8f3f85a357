"""The only file that issues collectives. Each gives a handle, so that callers overlap them with computation.

Gathers and reductions use process groups of their own where there is more than one rank: their orders need not agree
with each other, only each with itself over the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist

from sharding.pool import Pool


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until it is done (on an accelerator: make the current stream wait)."""

    def is_done_within(self, seconds: float) -> bool:
        """Block for at most this long, and tell whether it is done, or failed: then `wait` does not block."""


class Store(Protocol):
    """What is used of the store of `torch.distributed`."""

    timeout: timedelta

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: Sequence[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


def shared_store() -> Store:
    """Give the store that all ranks share."""
    assert dist.group.WORLD is not None
    return cast(Store, dist.group.WORLD.get_group_store())


class Done:
    """A collective that needed no communication."""

    def wait(self) -> None:
        """Return at once."""

    def is_done_within(self, seconds: float) -> bool:
        """Tell that it is done."""
        return True


class _Issued:
    """A collective under way in a backend; only gloo's blocks this thread."""

    def __init__(self, work: dist.Work, is_gloo: bool) -> None:
        self._work = work
        self._is_gloo = is_gloo

    def wait(self) -> None:
        """Block until it is done, or make the current stream wait."""
        self._work.wait()

    def is_done_within(self, seconds: float) -> bool:
        """Block for at most this long, and tell whether it is done or failed."""
        if not self._is_gloo:
            return True
        deadline = time.monotonic() + seconds
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:  # the time is over, or it failed before that
            return self._work.is_completed() or time.monotonic() < deadline
        return True


class _Sum:
    """An exchange of parts under way, and the sum to be made of them."""

    def __init__(self, work: Work, parts: torch.Tensor, out: torch.Tensor, pool: Pool) -> None:
        self._work = work
        self._pool = pool
        self._parts: torch.Tensor | None = parts  # [size, n]
        self._out = out  # [n]

    def wait(self) -> None:
        """Block until the parts are here, and sum them."""
        self._work.wait()
        if self._parts is None:
            return
        first, second, *others = self._parts
        torch.add(first, second, out=self._out)
        for part in others:
            self._out.add_(part)
        self._pool.give_back(self._parts)
        self._parts = None

    def is_done_within(self, seconds: float) -> bool:
        """Block for at most this long, and tell whether the parts are here."""
        return self._work.is_done_within(seconds)


class Group:
    """The ranks that share something; a group of one communicates nothing."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.process_group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.ranks = dist.get_process_group_ranks(group) if group is not None else [dist.get_rank()]
        self._is_gloo = group is not None and "gloo" in dist.get_backend(group)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        """Fill `whole` [size * n] with every rank's `shard` [n], in the order of ranks.

        Collective:
            All ranks of the group; does not block.
        """
        if self.size == 1:
            whole.copy_(shard)
            return Done()
        return self._issued(_gather_single(_as_bytes(whole), _as_bytes(shard), group=self.process_group, async_op=True))

    def reduce_scatter(self, whole: torch.Tensor, pool: Pool) -> Work:
        """Sum `whole` [size * n] over the ranks, each rank its own part [n], which it then finds in its place there.

        The other parts are used up, and `whole` must live until the work is done. Memory that it takes is the pool's.
        gloo makes a reduce-scatter of a clone and an all-reduce; so there each rank is sent its parts, and sums them
        in the order of ranks: half of the bytes, a third to two thirds less time.

        Collective:
            All ranks of the group; does not block.
        """
        numel = whole.numel() // self.size
        mine = whole.narrow(0, self.rank * numel, numel)
        if self.size == 1:
            return Done()
        if self._is_gloo:
            parts = pool.take(whole.numel(), whole.dtype, whole.device)
            work = dist.all_to_all_single(parts, whole, group=self.process_group, async_op=True)
            return _Sum(self._issued(work), parts.view(self.size, numel), mine, pool)
        work = _scatter_single(mine, whole, op=dist.ReduceOp.SUM, group=self.process_group, async_op=True)
        return self._issued(work)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work:
        """Reduce `tensor` over the ranks, in place.

        Collective:
            All ranks of the group; does not block.
        """
        if self.size == 1:
            return Done()
        return self._issued(dist.all_reduce(tensor, op=op, group=self.process_group, async_op=True))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank the group's first rank's `tensor`, in place.

        Collective:
            All ranks of the group; blocks.
        """
        if self.size > 1:
            dist.broadcast(tensor, dist.get_global_rank(self._group(), 0), group=self.process_group)

    def gather_objects(self, value: object) -> list[object]:
        """Give every rank the picklable `value` of all, by rank: small things at set-up, never data.

        Collective:
            All ranks of the group; blocks.
        """
        if self.size == 1:
            return [value]
        found: list[object] = [None] * self.size
        dist.all_gather_object(found, value, group=self.process_group)
        return found

    def part(self, ranks: list[int]) -> Group:
        """Give the group of some of the ranks.

        Collective:
            Those ranks; blocks.
        """
        return Group(dist.new_group(ranks, use_local_synchronization=True))

    def twin(self) -> Group:
        """Give a group of the same ranks with its own order of collectives.

        Collective:
            All ranks of the group; blocks.
        """
        if self.size == 1:
            return self
        timeout = shared_store().timeout  # that of `init_process_group`; without, it would be torch's default
        # A group made by its ranks alone has a name of 40 letters, and torch keeps one with each of the last 2,000
        # collectives: small pieces that stay among the large ones, so that the memory of a process grew with each step.
        is_part = self.size < dist.get_world_size()
        return Group(dist.new_group(self.ranks, timeout=timeout, use_local_synchronization=is_part))

    @staticmethod
    def own_rank() -> int:
        """Give this process's rank among all."""
        return dist.get_rank()

    def _issued(self, work: dist.Work | None) -> Work:
        assert work is not None  # this rank is in the group, and the call was asynchronous
        return _Issued(work, self._is_gloo)

    def _group(self) -> dist.ProcessGroup:
        assert self.process_group is not None
        return self.process_group


class Collectives(Protocol):
    """What units issue their collectives on: a `Group`, or one under watch."""

    size: int

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        """See `Group.all_gather`."""

    def reduce_scatter(self, whole: torch.Tensor, pool: Pool) -> Work:
        """See `Group.reduce_scatter`."""

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """See `Group.all_reduce`."""


# Newer releases call these *_single; the older names warn there.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View as bytes what the backends may not know, such as 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor
