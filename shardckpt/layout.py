"""How a writer splits its tensors over ranks, as a stored rule: `regions(layout, tensors, world size)` is a pure
function.

The rule for flat buckets is the runtime's own (`sharding.layout`), so that an offline reshard writes just the files
that the runtime would have written at the new world size. Refuses to know files and headers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Tensor
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.region import strides
from sharding.layout import BucketLayout, Slot, lay_out

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
        num_shards: Shards of the bucket, held by this many ranks in a row and again by the next (hybrid sharding); 0
            for as many as there are ranks.
    """

    align: int
    numel: list[int]
    granularity: list[int]
    columns: list[list[int]]
    num_shards: int = 0

    def is_sound(self) -> bool:
        """Tell whether the columns are equally long and all counts make sense."""
        if not 1 <= self.align <= 1 << 20 or len(self.granularity) != len(self.numel) or self.num_shards < 0:
            return False
        if any(len(column) != len(self.numel) for column in self.columns):
            return False
        if any(n < 0 or g < 1 or n % g for n, g in zip(self.numel, self.granularity, strict=True)):
            return False
        return sum(self.numel) < 1 << 62


class Mesh(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors cut along dims over the axes of a mesh of all ranks (tensor parallel, dim-0 sharding, hybrids).

    Attributes:
        axes: Size of each mesh axis; ranks lie row-major in it.
        cuts: (axis, dim) pairs in the order in which they apply, each cutting what the ones before left into ceil(n /
            size) pieces. Along axes that no cut names, ranks hold the same.
        tensors: Indices of the tensors.
    """

    axes: list[int]
    cuts: list[tuple[int, int]]
    tensors: list[int]

    def is_sound(self) -> bool:
        """Tell whether all numbers make sense; dims are checked against the tensors when the rule is applied."""
        named = [axis for axis, _ in self.cuts]
        in_range = all(0 <= axis < len(self.axes) and dim >= 0 for axis, dim in self.cuts)
        return in_range and len(set(named)) == len(named) and all(1 <= size < 1 << 31 for size in self.axes)


class Layout(msgspec.Struct, forbid_unknown_fields=True):
    """The rule by which all tensors of a checkpoint are split over its ranks.

    Attributes:
        buckets: Tensors in flat buckets, each cut in equal shards.
        replicated: Indices of the tensors that every rank holds whole; writing them is shared out.
        meshes: Tensors cut along dims over a mesh.
        per_rank: (tensor, rank) of tensors that one rank alone has.
        cut_bytes: See `CUT_BYTES`.
    """

    buckets: list[Bucket]
    replicated: list[int]
    meshes: list[Mesh] = []
    per_rank: list[tuple[int, int]] = []
    cut_bytes: int = CUT_BYTES

    def check(self, num_tensors: int, path: str) -> None:
        """Check that every tensor stands in the rule exactly once and that all counts make sense.

        Raises `FormatError`.
        """
        placed = [*self.replicated, *(t for mesh in self.meshes for t in mesh.tensors), *(t for t, _ in self.per_rank)]
        placed += [t for bucket in self.buckets for column in bucket.columns for t in column if t != -1]
        if sorted(placed) != list(range(num_tensors)):
            wrong = f"does not place each of {num_tensors} tensors once"
        elif not all(bucket.is_sound() for bucket in self.buckets):
            wrong = "has a malformed bucket"
        elif not all(mesh.is_sound() for mesh in self.meshes):
            wrong = "has a malformed mesh"
        elif any(rank < 0 for _, rank in self.per_rank):
            wrong = "has a tensor of a negative rank"
        elif self.cut_bytes < 1:
            wrong = f"cuts replicas every {self.cut_bytes} bytes"
        else:
            return
        raise FormatError(f"the layout in {path!r} {wrong}; it was not written by a sound shardckpt")


@dataclass(frozen=True, slots=True)
class RankChunks:
    """Which region of which tensor each rank writes: columns, one row a chunk, in the order of ranks and their files.

    A row is a span where `box` is -1. Otherwise `box` is a row of `offset` and `shape`, `start` is the box's first
    element in the flattened tensor, and `stop - start` its number of elements.
    """

    rank: I64  # [n]
    tensor: I64  # [n]
    start: I64  # [n]
    stop: I64  # [n]
    box: I64  # [n]
    offset: I64  # [boxes, max ndim], 0 in unused trailing dims
    shape: I64  # [boxes, max ndim], 1 in unused trailing dims

    def of_rank(self, rank: int) -> RankChunks:
        """Give the rows of one rank."""
        low, high = np.searchsorted(self.rank, [rank, rank + 1])
        return self.take(np.arange(low, high))

    def take(self, rows: I64) -> RankChunks:
        """Give the rows of an index; `offset` and `shape` stay whole."""
        rank, tensor, start, stop, box = (
            column[rows] for column in (self.rank, self.tensor, self.start, self.stop, self.box)
        )
        return RankChunks(rank, tensor, start, stop, box, self.offset, self.shape)

    def in_file_order(self, tensors: Sequence[Tensor]) -> RankChunks:
        """Give the rows by rank, and as they lie in its file: wider elements first, then by tensor and start."""
        item = np.array([tensor.item_bytes for tensor in tensors], np.int64)
        return self.take(np.lexsort((self.start, self.tensor, -item[self.tensor], self.rank)))

    @classmethod
    def of_spans(cls, rows: I64) -> RankChunks:
        """Give a table of spans from rows of (rank, tensor, start, stop)."""
        no_boxes = np.empty((0, 0), np.int64)
        rank, tensor, start, stop = np.ascontiguousarray(rows.reshape(-1, 4).T)
        return cls(rank, tensor, start, stop, np.full(len(rows), -1, np.int64), no_boxes, no_boxes)


def regions(layout: Layout, tensors: Sequence[Tensor], world_size: int) -> RankChunks:
    """Give what every rank of `world_size` writes, in file order.

    Raises:
        FormatError: If a tensor's number of elements is not that of its slot.
        UnsupportedError: If the layout is that of a mesh which cannot have `world_size` ranks.
    """
    parts = [_bucket_spans(bucket, tensors, world_size) for bucket in layout.buckets]
    parts.append(_replica_spans(layout, tensors, world_size))
    own = [(rank % world_size, tensor, 0, tensors[tensor].numel) for tensor, rank in layout.per_rank]
    parts.append(np.array([row for row in own if row[3]], np.int64).reshape(-1, 4))
    spans = RankChunks.of_spans(np.concatenate(parts))
    meshed = [_mesh_chunks(mesh, tensors, world_size) for mesh in layout.meshes]
    return _joined([spans, *meshed]).in_file_order(tensors)


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
    num_shards = bucket.num_shards or world_size
    if world_size % num_shards:
        raise UnsupportedError(
            f"buckets of {num_shards} shards (hybrid sharding) cannot be held by {world_size} ranks; "
            f"choose a multiple of {num_shards}, or another layout"
        )
    placed = lay_out(slots, world_size=num_shards, align=bucket.align)
    columns = np.array(bucket.columns, np.int64).reshape(len(bucket.columns), len(slots))
    starts, lengths = np.array(placed.starts, np.int64), np.array(bucket.numel, np.int64)
    if num_shards == world_size:
        return _cut(starts, lengths, placed.shard_numel, columns)
    return _cut_replicas(starts, lengths, placed, columns, world_size // num_shards)


def _cut_replicas(starts: I64, numel: I64, placed: BucketLayout, columns: I64, num_replicas: int) -> I64:
    """Cut slots at the shard boundaries and each shard among its replicas. # [chunks, (rank, tensor, start, stop)]"""
    slots = np.arange(len(starts))[None]
    by_shard = _cut(starts, numel, placed.shard_numel, slots)  # the "tensor" of these rows is the slot
    part = max(-(-placed.shard_numel // num_replicas // placed.align) * placed.align, placed.align)
    shard, slot, start, stop = by_shard.T
    within = starts[slot] + start - shard * placed.shard_numel
    rows = []
    for column in columns:
        pieces = _cut(within, stop - start, part, np.arange(len(shard))[None])  # and of these, the row of `by_shard`
        replica, row, low, high = pieces.T
        found = np.stack(
            [replica * placed.world_size + shard[row], column[slot[row]], start[row] + low, start[row] + high], 1
        )
        rows.append(found[found[:, 1] >= 0])
    return np.concatenate(rows) if rows else np.empty((0, 4), np.int64)


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


def scaled_axes(mesh: Mesh, world_size: int) -> list[int]:
    """Give the axes of a mesh with `world_size` ranks: the outermost takes what the others leave.

    Raises:
        UnsupportedError: If the others do not divide `world_size`.
    """
    inner = math.prod(mesh.axes[1:])
    if not mesh.axes or world_size % inner:
        raise UnsupportedError(
            f"a mesh of {'x'.join(map(str, mesh.axes))} cannot have {world_size} ranks, which {inner} does not divide; "
            "choose a multiple, or another layout"
        )
    return [world_size // inner, *mesh.axes[1:]]


def _mesh_chunks(mesh: Mesh, tensors: Sequence[Tensor], world_size: int) -> RankChunks:
    """Give what each rank writes of the tensors on a mesh; where several hold the same, they take turns by tensor."""
    axes = scaled_axes(mesh, world_size)
    coordinates = np.stack(np.unravel_index(np.arange(world_size), axes), axis=1)  # [world, axes]
    kept = [axis for axis in range(len(axes)) if axis not in {named for named, _ in mesh.cuts}]
    replica = np.ravel_multi_index(tuple(coordinates[:, kept].T), [axes[axis] for axis in kept]) if kept else 0
    num_replicas = math.prod(axes[axis] for axis in kept)
    parts = []
    for position, index in enumerate(mesh.tensors):
        writers = np.flatnonzero(np.broadcast_to(replica == position % num_replicas, world_size))
        offset, shape = cut_along(mesh.cuts, axes, coordinates[writers], tensors[index].shape, fqn=tensors[index].name)
        held = shape.prod(axis=1) > 0
        parts.append(_regions_of(writers[held], index, offset[held], shape[held], tensors[index].shape))
    return _joined(parts)


def cut_along(
    cuts: Sequence[tuple[int, int]], axes: Sequence[int], coordinates: I64, shape: Sequence[int], *, fqn: str
) -> tuple[I64, I64]:
    """Cut a tensor along dims over mesh axes, as `torch.chunk` and DTensor do.

    Args:
        cuts: (axis, dim) pairs, in the order in which they apply.
        axes: Size of each axis.
        coordinates: Where each rank stands in the mesh. # [ranks, axes]
        shape: Global shape.
        fqn: The tensor, for messages.

    Returns:
        Offset and shape of each rank's box. # [ranks, ndim] each

    Raises:
        FormatError: If a cut names a dim that the tensor does not have.
    """
    offset = np.zeros((len(coordinates), len(shape)), np.int64)
    extent = np.tile(np.array(shape, np.int64), (len(coordinates), 1))
    for axis, dim in cuts:
        if dim >= len(shape):
            raise FormatError(
                f"the layout cuts dim {dim} of {fqn!r}, whose global shape is {tuple(shape)}; the checkpoint was not "
                "written by a sound shardckpt"
            )
        piece = -(-extent[:, dim] // axes[axis])
        low = np.minimum(coordinates[:, axis] * piece, extent[:, dim])
        offset[:, dim] += low
        extent[:, dim] = np.minimum(piece, extent[:, dim] - low)
    return offset, extent


def _regions_of(rank: I64, tensor: int, offset: I64, shape: I64, global_shape: tuple[int, ...]) -> RankChunks:
    """Give boxes as rows, those that lie in one range as spans."""
    start = offset @ np.array(strides(global_shape), np.int64) if global_shape else np.zeros(len(rank), np.int64)
    is_whole = np.concatenate([shape == np.array(global_shape, np.int64), np.ones((len(rank), 1), bool)], axis=1)
    rest_is_whole = np.logical_and.accumulate(is_whole[:, ::-1], axis=1)[:, ::-1]  # dims from d on are whole
    before_is_one = np.logical_and.accumulate(
        np.concatenate([np.ones((len(rank), 1), bool), shape == 1], axis=1), axis=1
    )
    is_span = (before_is_one[:, :-1] & rest_is_whole[:, 1:]).any(axis=1) | rest_is_whole[:, 0]
    box = np.full(len(rank), -1, np.int64)
    box[~is_span] = np.arange(int((~is_span).sum()))
    stop = start + shape.prod(axis=1)
    return RankChunks(rank, np.full(len(rank), tensor, np.int64), start, stop, box, offset[~is_span], shape[~is_span])


def _joined(parts: Sequence[RankChunks]) -> RankChunks:
    """Give all rows of all parts."""
    width = max((part.offset.shape[1] for part in parts), default=0)
    begins = np.cumsum([0, *(len(part.offset) for part in parts)])

    def column(name: str) -> I64:
        return np.concatenate([getattr(part, name) for part in parts] or [np.empty(0, np.int64)])

    box = [np.where(part.box < 0, -1, part.box + begin) for part, begin in zip(parts, begins, strict=False)]
    offset = [np.pad(part.offset, ((0, 0), (0, width - part.offset.shape[1]))) for part in parts]
    shape = [np.pad(part.shape, ((0, 0), (0, width - part.shape.shape[1])), constant_values=1) for part in parts]
    empty = np.empty((0, width), np.int64)
    return RankChunks(
        column("rank"),
        column("tensor"),
        column("start"),
        column("stop"),
        np.concatenate(box or [np.empty(0, np.int64)]),
        np.concatenate(offset or [empty]),
        np.concatenate(shape or [empty]),
    )
