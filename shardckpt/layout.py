"""How a writer splits its tensors over ranks, as a stored rule: `regions(layout, tensors, world size)` is a pure
function.

The rule for flat buckets is the runtime's own (`sharding.layout`), so that an offline reshard writes just the files
that the runtime would have written at the new world size. Refuses to know files and headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Tensor
from shardckpt.errors import FormatError
from sharding.layout import Slot, lay_out

I64 = NDArray[np.int64]

CUT_BYTES = 16 << 20
"""Replicated tensors are spread over one rank more for each so many bytes, so that small ones stay together."""

_REPLICA_ALIGN_BYTES = 64


class Bucket(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors that one flat buffer holds end to end.

    Attributes:
        align: Multiple, in elements, of every start and of the shard.
        numel: Elements of each slot, in order.
        granularity: Elements between allowed cuts, by slot.
        columns: One row a kind of tensor that is cut like the slots (the parameters, first moments ...): the tensor's
            index by slot, or -1.
    """

    align: int
    numel: list[int]
    granularity: list[int]
    columns: list[list[int]]

    def is_sound(self) -> bool:
        """Tell whether the columns are equally long and all counts make sense."""
        if not 1 <= self.align <= 1 << 20 or len(self.granularity) != len(self.numel):
            return False
        if any(len(column) != len(self.numel) for column in self.columns):
            return False
        if any(n < 0 or g < 1 or n % g for n, g in zip(self.numel, self.granularity, strict=True)):
            return False
        return sum(self.numel) < 1 << 62


class Layout(msgspec.Struct, forbid_unknown_fields=True):
    """The rule by which all tensors of a checkpoint are split over its ranks.

    Attributes:
        buckets: Tensors in flat buckets, each cut in equal shards.
        replicated: Indices of the tensors that every rank holds whole; writing them is shared out.
        cut_bytes: See `CUT_BYTES`.
    """

    buckets: list[Bucket]
    replicated: list[int]
    cut_bytes: int = CUT_BYTES

    def check(self, num_tensors: int, path: str) -> None:
        """Check that every tensor stands in the rule exactly once and that all counts make sense.

        Raises `FormatError`.
        """
        placed = [*self.replicated, *(t for b in self.buckets for column in b.columns for t in column if t != -1)]
        if sorted(placed) != list(range(num_tensors)):
            wrong = f"does not place each of {num_tensors} tensors once"
        elif not all(bucket.is_sound() for bucket in self.buckets):
            wrong = "has a malformed bucket"
        elif self.cut_bytes < 1:
            wrong = f"cuts replicas every {self.cut_bytes} bytes"
        else:
            return
        raise FormatError(f"the layout in {path!r} {wrong}; it was not written by a sound shardckpt")


@dataclass(frozen=True, slots=True)
class RankSpans:
    """Which span of which tensor each rank writes: columns, one row a chunk, in the order of ranks and their files."""

    rank: I64
    tensor: I64
    start: I64
    stop: I64

    def of_rank(self, rank: int) -> RankSpans:
        """Give the rows of one rank."""
        low, high = np.searchsorted(self.rank, [rank, rank + 1])
        return RankSpans(*(column[low:high] for column in (self.rank, self.tensor, self.start, self.stop)))


def regions(layout: Layout, tensors: Sequence[Tensor], world_size: int) -> RankSpans:
    """Give what every rank of `world_size` writes.

    Raises:
        FormatError: If a tensor's number of elements is not that of its slot.
    """
    parts = [_bucket_spans(bucket, tensors, world_size) for bucket in layout.buckets]
    parts.append(_replica_spans(layout, tensors, world_size))
    rank, tensor, start, stop = np.concatenate(parts).T
    item = np.array([t.item_bytes for t in tensors], np.int64)
    order = np.lexsort((start, tensor, -item[tensor], rank)) if len(rank) else np.empty(0, np.int64)
    return RankSpans(rank[order], tensor[order], start[order], stop[order])


def single_bucket(tensors: Sequence[Tensor], align: int = 1) -> Layout:
    """Give the layout with one bucket a dtype: for weights whose training units are not known."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    members = [[i for i, tensor in enumerate(tensors) if tensor.dtype == dtype] for dtype in dtypes]
    return Layout(
        [Bucket(align, [tensors[i].numel for i in group], [1] * len(group), [group]) for group in members],
        replicated=[],
    )


def _bucket_spans(bucket: Bucket, tensors: Sequence[Tensor], world_size: int) -> I64:
    for column in bucket.columns:
        for tensor, numel in zip(column, bucket.numel, strict=True):
            if tensor >= 0 and tensors[tensor].numel != numel:
                raise FormatError(
                    f"the layout gives {tensors[tensor].name!r} {numel} elements, its global shape "
                    f"{tensors[tensor].shape} has "
                    f"{tensors[tensor].numel}; the checkpoint was not written by a sound shardckpt"
                )
    slots = [Slot("", (n,), g) for n, g in zip(bucket.numel, bucket.granularity, strict=True)]
    placed = lay_out(slots, world_size=world_size, align=bucket.align)
    columns = np.array(bucket.columns, np.int64).reshape(len(bucket.columns), len(slots))
    return _cut(np.array(placed.starts, np.int64), np.array(bucket.numel, np.int64), placed.shard_numel, columns)


def _replica_spans(layout: Layout, tensors: Sequence[Tensor], world_size: int) -> I64:
    replicated = [i for i in layout.replicated if tensors[i].numel]
    nbytes = [tensors[i].nbytes for i in replicated]
    writers = min(world_size, max(1, -(-sum(nbytes) // layout.cut_bytes)))
    placed = lay_out([Slot("", (n,)) for n in nbytes], world_size=writers, align=_REPLICA_ALIGN_BYTES)
    rows = _cut(
        np.array(placed.starts, np.int64),
        np.array(nbytes, np.int64),
        placed.shard_numel,
        np.array([replicated], np.int64),
    )
    item = np.array([t.item_bytes for t in tensors], np.int64)
    if len(rows):
        rows[:, 2:] //= item[rows[:, 1], None]
    return rows


def _cut(starts: I64, numel: I64, shard_numel: int, columns: I64) -> I64:
    """Cut slots at the shard boundaries, for every column of tensors. # [chunks, (rank, tensor, start, stop)]"""
    slots = np.flatnonzero(numel)
    first, last = starts[slots] // max(shard_numel, 1), (starts[slots] + numel[slots] - 1) // max(shard_numel, 1)
    number = last - first + 1
    slot = np.repeat(slots, number)
    rank = np.arange(len(slot)) - np.repeat(np.cumsum(number) - number, number) + np.repeat(first, number)
    start = np.maximum(rank * shard_numel, starts[slot]) - starts[slot]
    stop = np.minimum((rank + 1) * shard_numel, starts[slot] + numel[slot]) - starts[slot]
    rows = [np.stack([rank, column[slot], start, stop], axis=1)[column[slot] >= 0] for column in columns]
    return np.concatenate(rows) if rows else np.empty((0, 4), np.int64)
