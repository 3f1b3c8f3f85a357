"""Parameters made whole for people: to look at them, to change them, to run something that is not training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from sharding.bucket import Bucket, set_gradient
from sharding.errors import StateError, UnsupportedError
from sharding.unit import Unit


@contextlib.contextmanager
def summon(
    units: Sequence[Unit],
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Make the parameters of units whole, in their own dtype, while the context is open.

    Args:
        units: All of their parameters.
        writeback: Keep what was changed; each rank keeps its own part.
        rank0_only: Leave the other ranks their spans.
        offload_to_cpu: Lay the whole tensors in host memory.
        with_grads: Make gradients whole, too; otherwise `.grad` is None meanwhile.

    Raises:
        UnsupportedError: If `writeback` and `rank0_only` are both true: the ranks would not agree.
        StateError: If a backward is under way.

    Collective:
        All ranks, at the beginning; blocks.
    """
    if writeback and rank0_only:
        raise UnsupportedError("writeback=True with rank0_only=True would change rank 0's part alone; pass one of them")
    if any(unit.is_in_backward for unit in units):
        raise StateError("a backward is under way, or was cut short: wait for its end, or call sharding.reset(module)")
    opened: list[tuple[Bucket, list[torch.Tensor | None]]] = []
    try:
        for unit in units:
            for bucket in unit.buckets:
                if not bucket.is_always_whole and not bucket.is_summoned:
                    holds = not rank0_only or unit.is_first_rank
                    gradients = _summon(bucket, holds=holds, offload_to_cpu=offload_to_cpu, with_grads=with_grads)
                    if holds:
                        opened.append((bucket, gradients))
        yield
    finally:
        for bucket, gradients in reversed(opened):
            _dismiss(bucket, gradients, writeback=writeback)


@torch.no_grad()
def _summon(bucket: Bucket, *, holds: bool, offload_to_cpu: bool, with_grads: bool) -> list[torch.Tensor | None]:
    """Make a bucket's parameters whole, and give the gradients of their spans."""
    gradients = [member.shard.grad for member in bucket.members]
    whole = bucket.gather_values(bucket.shard)
    whole_gradients = bucket.gather_values(bucket.collect(gradients, bucket.kind.grad_dtype)) if with_grads else []
    if holds:
        bucket.summon([value.cpu() for value in whole] if offload_to_cpu else whole)
        for member, gradient, value in zip(bucket.members, gradients, whole_gradients, strict=False):
            set_gradient(member.shard, value.to(member.shard.device) if gradient is not None else None)
    return gradients


@torch.no_grad()
def _dismiss(bucket: Bucket, gradients: Sequence[torch.Tensor | None], *, writeback: bool) -> None:
    whole = [member.shard.grad for member in bucket.members]
    bucket.dismiss(writeback=writeback)
    for index, (member, gradient, changed) in enumerate(zip(bucket.members, gradients, whole, strict=True)):
        if gradient is not None and changed is not None and writeback:
            start, stop = bucket.span(index)
            gradient.copy_(changed.reshape(-1)[start:stop].view(gradient.shape))
        set_gradient(member.shard, gradient)
