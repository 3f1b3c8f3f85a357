"""The only file that issues collectives. Each gives a handle, so that callers overlap them with computation.

Gathers and reductions use process groups of their own where there is more than one rank: their orders need not agree
with each other, only each with itself over the ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until it is done (on an accelerator: make the current stream wait)."""


class Done:
    """A collective that needed no communication."""

    def wait(self) -> None:
        """Return at once."""


class _Sum:
    """An exchange of parts under way, and the sum to be made of them."""

    def __init__(self, work: Work, parts: torch.Tensor, out: torch.Tensor) -> None:
        self._work = work
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
        self._parts = None


class Group:
    """The ranks that share something; a group of one communicates nothing."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.process_group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self._is_gloo = group is not None and "gloo" in dist.get_backend(group)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        """Fill `whole` [size * n] with every rank's `shard` [n], in the order of ranks.

        Collective:
            All ranks of the group; does not block.
        """
        if self.size == 1:
            whole.copy_(shard)
            return Done()
        return _work(_gather_single(_as_bytes(whole), _as_bytes(shard), group=self.process_group, async_op=True))

    def reduce_scatter(self, whole: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Sum `whole` [size * n] over the ranks; give this rank's part of the sum [n], valid when the work is done.

        The content of `whole` is used up; the part may be a view of it, and `whole` must live until the work is done.
        gloo makes a reduce-scatter of a clone and an all-reduce; so there each rank is sent its parts, and sums them
        in the order of ranks: half of the bytes, a third to two thirds less time.

        Collective:
            All ranks of the group; does not block.
        """
        numel = whole.numel() // self.size
        mine = whole.narrow(0, self.rank * numel, numel)
        if self.size == 1:
            return mine, Done()
        if self._is_gloo:
            parts = torch.empty_like(whole)
            work = dist.all_to_all_single(parts, whole, group=self.process_group, async_op=True)
            return mine, _Sum(_work(work), parts.view(self.size, numel), mine)
        out = torch.empty_like(mine)
        return out, _work(_scatter_single(out, whole, op=dist.ReduceOp.SUM, group=self.process_group, async_op=True))

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Work:
        """Reduce `tensor` over the ranks, in place.

        Collective:
            All ranks of the group; does not block.
        """
        if self.size == 1:
            return Done()
        return _work(dist.all_reduce(tensor, op=op, group=self.process_group, async_op=True))

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
        ranks = dist.get_process_group_ranks(self._group())
        return Group(dist.new_group(ranks, use_local_synchronization=True))

    def _group(self) -> dist.ProcessGroup:
        assert self.process_group is not None
        return self.process_group


# Newer releases call these *_single; the older names warn there.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _work(work: object) -> Work:
    assert work is not None  # this rank is in the group, and the call was asynchronous
    return work  # type: ignore[return-value]  # torch types it loosely


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View as bytes what the backends may not know, such as 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor
