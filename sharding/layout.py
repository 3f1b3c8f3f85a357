"""How a bucket of parameters is cut over ranks: integers only.

This file knows slots, starts and spans. It refuses to know torch, devices and processes, so that offline
tools, tests and the runtime all ask the same pure function where an element lives.

A bucket lays its parameters (slots) end to end in one flat, padded buffer of `world_size * shard_numel`
elements; rank `r` owns elements `[r * shard_numel, (r + 1) * shard_numel)`. Starts are multiples of `align`, so
that every parameter's view of the gathered buffer is aligned in memory, and so is every shard.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ALIGN_BYTES = 16
"""Alignment of every slot's start: what tensor-core matrix products and compiled kernels ask of their inputs."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a bucket.

    Args:
        fqn: The parameter's fully qualified name.
        shape: Its global shape.
        granularity: Cuts between ranks fall only on multiples of this many elements of the flattened
            parameter: 1 anywhere, a row's numel for whole rows, `numel` to keep it on one rank.
    """

    fqn: str
    shape: tuple[int, ...]
    granularity: int = 1

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class LocalSpan:
    """What one rank holds of one slot: elements `[start, stop)` of the flattened parameter.

    `shard_offset` is where they begin in the rank's shard of the bucket, in elements.
    """

    slot: int
    start: int
    stop: int
    shard_offset: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Where every slot of a bucket lies, for one world size. Made by `lay_out`.

    Attributes:
        slots: The parameters, in order.
        starts: The first element of each slot in the flat buffer.
        world_size: Number of ranks that share the bucket.
        shard_numel: Elements each rank owns, padding included.
        align: Every start and `shard_numel` is a multiple of this many elements.
    """

    slots: tuple[Slot, ...]
    starts: tuple[int, ...]
    world_size: int
    shard_numel: int
    align: int

    @property
    def numel(self) -> int:
        """Elements of the whole flat buffer, padding included."""
        return self.world_size * self.shard_numel

    def span(self, slot: int, rank: int) -> tuple[int, int]:
        """Give the half-open range of the flattened slot that `rank` owns; empty is `(0, 0)`."""
        start, numel = self.starts[slot], self.slots[slot].numel
        low = max(rank * self.shard_numel, start)
        high = min((rank + 1) * self.shard_numel, start + numel)
        return (low - start, high - start) if low < high else (0, 0)

    def local_spans(self, rank: int) -> Iterator[LocalSpan]:
        """Yield the non-empty spans of `rank`, in buffer order."""
        begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        first = max(bisect_right(self.starts, begin) - 1, 0)
        for slot in range(first, len(self.slots)):
            if self.starts[slot] >= end:
                return
            start, stop = self.span(slot, rank)
            if start < stop:
                yield LocalSpan(slot, start, stop, self.starts[slot] + start - begin)


def align_numel(item_sizes: Iterable[int]) -> int:
    """Give the alignment in elements which is `ALIGN_BYTES` in the narrowest of the dtypes a bucket is held in.

    Args:
        item_sizes: Bytes of one element, for each dtype (storage, compute, reduce) the bucket takes.
    """
    return max(1, ALIGN_BYTES // min(item_sizes))


def lay_out(slots: Sequence[Slot], *, world_size: int, align: int = 1) -> BucketLayout:
    """Lay slots end to end and cut the result into equal shards.

    With granularity 1 everywhere the padding is below `align` elements a slot and `align * world_size` a bucket.
    Coarser slots are moved forward to where no shard boundary cuts a granule, and the shard grows
    until all fit.

    Args:
        slots: The parameters, in the order of the buffer.
        world_size: Number of shards.
        align: Multiple, in elements, of every start and of the shard.

    Raises:
        ValueError: If a count is not positive or a granularity does not divide its slot.
    """
    if world_size < 1 or align < 1:
        raise ValueError(f"world_size and align must be positive, found {world_size} and {align}")
    for slot in slots:
        if slot.granularity < 1 or (slot.numel and slot.numel % slot.granularity):
            raise ValueError(
                f"granularity {slot.granularity} of {slot.fqn!r} does not divide its {slot.numel} elements; "
                "use 1, the elements of a row or block, or all of them"
            )
    padded = sum(_round_up(slot.numel, align) for slot in slots)
    step = math.lcm(align, *(s.granularity for s in slots if 1 < s.granularity < s.numel))
    whole = max((s.numel for s in slots if s.granularity > 1 and s.granularity == s.numel), default=0)
    smallest = max(_round_up(-(-padded // world_size), step), _round_up(whole, step))
    shard_numel, starts = _smallest_fitting(slots, world_size, align, step=step, smallest=smallest)
    return BucketLayout(tuple(slots), tuple(starts), world_size, shard_numel, align)


def _smallest_fitting(
    slots: Sequence[Slot], world_size: int, align: int, *, step: int, smallest: int
) -> tuple[int, list[int]]:
    """Find by bisection a shard size, in multiples of `step`, into which all slots can be placed."""

    def place_all(shard_numel: int) -> list[int] | None:
        starts, position = [], 0
        for slot in slots:
            position = _place(slot, _round_up(position, align), shard_numel, align)
            starts.append(position)
            position += slot.numel
        return starts if position <= shard_numel * world_size else None

    if (starts := place_all(smallest)) is not None:
        return smallest, starts
    low, high = 0, 1  # smallest + low * step does not fit; smallest + high * step does
    while (starts := place_all(smallest + high * step)) is None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if (found := place_all(smallest + middle * step)) is None:
            low = middle
        else:
            high, starts = middle, found
    return smallest + high * step, starts


def _place(slot: Slot, position: int, shard_numel: int, align: int) -> int:
    """Give the first aligned start at or after `position` at which no shard boundary cuts a granule of `slot`."""
    if slot.granularity == 1 or slot.numel == 0:
        return position
    boundary = (position // shard_numel + 1) * shard_numel
    if position + slot.numel <= boundary:
        return position
    granules = 0 if slot.granularity == slot.numel else (boundary - position) // slot.granularity
    while (boundary - granules * slot.granularity) % align:
        granules -= 1
    return boundary - granules * slot.granularity


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
