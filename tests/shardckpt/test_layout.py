"""Tests of the layout rule: which rank writes which span."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.catalogue import Tensor
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.layout import Bucket, Layout, Mesh, RankChunks, regions, scaled_axes, single_bucket
from shardckpt.region import Box, normalise
from sharding.layout import Slot, lay_out

DIM0 = (0, 1, 2, 3, 5, 7, 10, 17, 4097)
WORLD_SIZES = (*range(1, 13), 101, 512)


def tensors_of(dtype: str, kind: str) -> list[Tensor]:
    """Give a tensor for every first dim, one of one dim and one of two."""
    return [Tensor(f"{kind}.{n}x{k}", dtype, (n, k) if k else (n,)) for n in DIM0 for k in (0, 3)]


def with_moments() -> tuple[list[Tensor], Layout]:
    """Give parameters in two buckets, moments cut like them, and replicated tensors of several dtypes."""
    weights, moments = tensors_of("BF16", "model"), tensors_of("F32", "exp_avg")
    scalars = [Tensor("step", "F32", ()), Tensor("count", "I64", (3,)), Tensor("mask", "BOOL", (5,))]
    half, n = len(weights) // 2, len(weights)
    buckets = []
    for low, high in ((0, half), (half, n)):
        numel = [tensor.numel for tensor in weights[low:high]]
        second = [n + i if i % 3 else -1 for i in range(low, high)]  # some have no state
        buckets.append(Bucket(8, numel, [1] * len(numel), [list(range(low, high)), second]))
    placed = sorted({t for bucket in buckets for column in bucket.columns for t in column if t >= 0})
    tensors = [*weights, *moments, *scalars]
    replicated = [i for i in range(len(tensors)) if i not in placed]
    return tensors, Layout(buckets, replicated)


def spans_by_tensor(found: RankChunks) -> dict[int, list[tuple[int, int, int]]]:
    """Give (start, stop, rank) by tensor, in order of start."""
    rows = zip(found.tensor.tolist(), found.start.tolist(), found.stop.tolist(), found.rank.tolist(), strict=True)
    return {
        tensor: [(start, stop, rank) for _, start, stop, rank in group]
        for tensor, group in itertools.groupby(sorted(rows), key=lambda row: row[0])
    }


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_ranks_spans_tile_every_tensor(world_size: int) -> None:
    """Every element of every tensor is written by exactly one rank, at any world size."""
    tensors, layout = with_moments()
    layout.check(len(tensors), "manifest.json")
    found = spans_by_tensor(regions(layout, tensors, world_size))
    for index, tensor in enumerate(tensors):
        ends = [(0, 0), *((start, stop) for start, stop, _ in found.get(index, [])), (tensor.numel, tensor.numel)]
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ends)), (tensor.name, ends)
        ranks = [rank for _, _, rank in found.get(index, [])]
        assert ranks == sorted(ranks)
        assert all(0 <= rank < world_size for rank in ranks)


@pytest.mark.parametrize("world_size", [1, 3, 8, 101])
def test_buckets_are_cut_where_the_runtime_cuts_them(world_size: int) -> None:
    """Parameters, and what is cut like them, lie where the runtime's own layout puts them."""
    tensors, layout = with_moments()
    found = spans_by_tensor(regions(layout, tensors, world_size))
    for bucket in layout.buckets:
        slots = [Slot("", (n,), g) for n, g in zip(bucket.numel, bucket.granularity, strict=True)]
        placed = lay_out(slots, world_size=world_size, align=bucket.align)
        for column in bucket.columns:
            for slot, tensor in enumerate(column):
                held = [(*placed.span(slot, rank), rank) for rank in range(world_size)]
                wanted = [(start, stop, rank) for start, stop, rank in held if start < stop]
                assert tensor < 0 or found.get(tensor, []) == wanted


@given(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 4))
def test_granules_stay_on_one_rank(world_size: int, rows: list[int], width: int) -> None:
    """A slot of whole rows is cut between rows only."""
    tensors = [Tensor(f"w{i}", "F32", (n, width)) for i, n in enumerate(rows)]
    layout = Layout([Bucket(4, [n * width for n in rows], [width] * len(rows), [list(range(len(rows)))])], [])
    found = regions(layout, tensors, world_size)
    assert (found.start % width == 0).all()
    assert (found.stop % width == 0).all()
    assert int((found.stop - found.start).sum()) == sum(rows) * width


def test_a_ranks_file_begins_with_the_widest_elements() -> None:
    """Chunks of a rank are ordered by item size, tensor and start, so that all are aligned."""
    tensors, layout = with_moments()
    found = regions(layout, tensors, 5)
    for rank in range(5):
        mine = found.of_rank(rank)
        item = [-tensors[t].item_bytes for t in mine.tensor]
        keys = list(zip(item, mine.tensor.tolist(), mine.start.tolist(), strict=True))
        assert keys == sorted(keys)
        assert set(mine.rank.tolist()) == {rank}


def test_small_replicas_are_written_by_one_rank_and_large_ones_by_many() -> None:
    """The work of replicated tensors is shared out once it is worth it."""
    tensors = [Tensor(f"buffer.{i}", "F32", (1000,)) for i in range(8)]
    replicated = list(range(8))
    assert set(regions(Layout([], replicated), tensors, 4).rank.tolist()) == {0}
    shared = regions(Layout([], replicated, cut_bytes=8000), tensors, 4)
    written = np.bincount(shared.rank, weights=shared.stop - shared.start)
    assert len(written) == 4
    assert written.max() <= 1.05 * written.mean()


def test_a_single_bucket_a_dtype_holds_all_tensors() -> None:
    """Weights of unknown units are put in one bucket for each dtype, in order."""
    tensors = [Tensor("a", "F32", (3,)), Tensor("b", "BF16", (5,)), Tensor("c", "F32", (2, 2))]
    layout = single_bucket(tensors)
    assert [bucket.columns for bucket in layout.buckets] == [[[0, 2]], [[1]]]
    layout.check(3, "manifest.json")


def test_nothing_at_all_has_no_spans() -> None:
    """No tensors, and tensors without elements, give no chunks."""
    assert len(regions(Layout([], []), [], 3).rank) == 0
    empty = [Tensor("e", "F32", (0, 4))]
    assert len(regions(single_bucket(empty), empty, 3).rank) == 0


GOOD = Layout([Bucket(4, [6], [1], [[0]])], [1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"replicated": []}, "does not place each of 2 tensors once"),
        ({"replicated": [0]}, "does not place each of 2 tensors once"),
        ({"replicated": [2]}, "does not place each of 2 tensors once"),
        ({"buckets": [Bucket(0, [6], [1], [[0]])]}, "malformed bucket"),
        ({"buckets": [Bucket(4, [-6], [1], [[0]])]}, "malformed bucket"),
        ({"buckets": [Bucket(4, [6], [4], [[0]])]}, "malformed bucket"),
        ({"buckets": [Bucket(4, [6], [0], [[0]])]}, "malformed bucket"),
        ({"buckets": [Bucket(4, [6], [], [[0]])]}, "malformed bucket"),
        ({"buckets": [Bucket(4, [6, 6], [1, 1], [[0]])]}, "malformed bucket"),
        ({"buckets": [Bucket(4, [1 << 61] * 5, [1] * 5, [[0, -1, -1, -1, -1]])]}, "malformed bucket"),
        ({"cut_bytes": 0}, "cuts replicas every 0 bytes"),
    ],
)
def test_a_malformed_layout_is_refused(change: dict[str, object], text: str) -> None:
    """A rule from a file is checked before it is used."""
    GOOD.check(2, "manifest.json")
    with pytest.raises(FormatError, match=f"the layout in 'manifest.json' .*{text}.*sound shardckpt"):
        msgspec.structs.replace(GOOD, **change).check(2, "manifest.json")


def test_a_slot_that_does_not_fit_its_tensor_is_refused() -> None:
    """The message shows the tensor and both counts."""
    tensors = [Tensor("w", "F32", (7,)), Tensor("b", "F32", (1,))]
    with pytest.raises(FormatError, match=r"gives 'w' 6 elements, its global shape \(7,\) has 7; .* sound shardckpt"):
        regions(GOOD, tensors, 2)


# Hybrid buckets and meshes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_shards", "world_size"), [(1, 1), (1, 5), (2, 4), (2, 6), (3, 12), (4, 4)])
def test_hybrid_buckets_are_written_once_by_those_who_hold_them(num_shards: int, world_size: int) -> None:
    """Rank r writes of shard r modulo n only, the ranks of a shard share it out, and together they tile all."""
    tensors = tensors_of("F32", "model")
    numel = [tensor.numel for tensor in tensors]
    layout = Layout([Bucket(4, numel, [1] * len(numel), [list(range(len(numel)))], num_shards)], [])
    found = regions(layout, tensors, world_size)
    placed = lay_out([Slot("", (n,)) for n in numel], world_size=num_shards, align=4)
    for tensor, unsorted in spans_by_tensor(found).items():
        spans = sorted(unsorted)
        assert [start for start, _, _ in spans] == [0, *(stop for _, stop, _ in spans[:-1])]
        assert spans[-1][1] == numel[tensor]
        for start, stop, rank in spans:
            low, high = placed.span(tensor, rank % num_shards)
            assert low <= start < stop <= high
    written = np.bincount(found.rank, weights=found.stop - found.start, minlength=world_size)
    assert written.max() <= sum(numel) / world_size + 4 * len(numel) + 4 * world_size


def test_a_hybrid_bucket_needs_a_multiple_of_its_shards() -> None:
    """The message names the number that must divide the ranks."""
    tensors = [Tensor("w", "F32", (8,))]
    layout = Layout([Bucket(4, [8], [1], [[0]], 4)], [])
    with pytest.raises(UnsupportedError, match=r"of 4 shards .* cannot be held by 6 ranks; choose a multiple of 4"):
        regions(layout, tensors, 6)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Mesh, list[Tensor]]:
    """Draw a mesh with placements, and tensors to cut."""
    axes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    named = draw(st.lists(st.integers(0, len(axes) - 1), unique=True, max_size=len(axes)))
    cuts = [(axis, draw(st.integers(0, 2))) for axis in named]
    shapes = draw(st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3).map(tuple), min_size=1, max_size=3))
    tensors = [Tensor(f"w{i}", "F32", shape) for i, shape in enumerate(shapes)]
    return Mesh(axes, cuts, list(range(len(tensors)))), tensors


@given(meshes())
def test_chunks_on_a_mesh_are_those_of_nested_chunking(case: tuple[Mesh, list[Tensor]]) -> None:
    """Each rank writes what cutting an array axis by axis leaves it, and every element is written once."""
    mesh, tensors = case
    found = regions(Layout([], [], [mesh]), tensors, math.prod(mesh.axes))
    written = [np.zeros(tensor.numel, int) for tensor in tensors]
    for row in range(len(found.rank)):
        tensor = tensors[found.tensor[row]]
        indices = np.arange(tensor.numel).reshape(tensor.shape)
        held = indices
        coordinate = np.unravel_index(found.rank[row], mesh.axes)
        for axis, dim in mesh.cuts:
            size = -(-held.shape[dim] // mesh.axes[axis])
            low = size * int(coordinate[axis])
            held = np.take(held, range(min(low, held.shape[dim]), min(low + size, held.shape[dim])), axis=dim)
        if found.box[row] < 0:
            mine = np.arange(found.start[row], found.stop[row])
        else:
            box = zip(found.offset[found.box[row]].tolist(), found.shape[found.box[row]].tolist(), strict=True)
            mine = indices[tuple(slice(o, o + n) for o, n in box)]
            assert normalise(Box(*_box(found, row)), tensor.shape, fqn="") == Box(*_box(found, row))
        assert mine.reshape(-1).tolist() == held.reshape(-1).tolist()
        written[found.tensor[row]][held.reshape(-1)] += 1
    assert all((counts == 1).all() for counts in written)


def _box(found: RankChunks, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(found.offset[found.box[row]].tolist()), tuple(found.shape[found.box[row]].tolist())


def test_the_outermost_axis_of_a_mesh_takes_what_the_others_leave() -> None:
    """A mesh keeps its inner axes at another world size, and refuses one that they do not divide."""
    mesh = Mesh([2, 4], [(0, 0), (1, 1)], [0])
    tensors = [Tensor("w", "F32", (12, 8))]
    assert scaled_axes(mesh, 12) == [3, 4]
    assert len(regions(Layout([], [], [mesh]), tensors, 12).rank) == 12
    with pytest.raises(UnsupportedError, match="a mesh of 2x4 cannot have 6 ranks, which 4 does not divide; choose"):
        regions(Layout([], [], [mesh]), tensors, 6)


def test_a_cut_along_a_dim_that_is_not_there_is_refused() -> None:
    """The message names the tensor and its shape."""
    tensors = [Tensor("w", "F32", (12,))]
    with pytest.raises(FormatError, match=r"cuts dim 1 of 'w', whose global shape is \(12,\); .* sound shardckpt"):
        regions(Layout([], [], [Mesh([2], [(0, 1)], [0])]), tensors, 2)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh([2], [(1, 0)], [1]),
        Mesh([2], [(0, -1)], [1]),
        Mesh([2], [(0, 0), (0, 1)], [1]),
        Mesh([0], [], [1]),
        Mesh([1 << 31], [], [1]),
    ],
)
def test_a_malformed_mesh_is_refused(mesh: Mesh) -> None:
    """Axes, dims and sizes out of range are told apart from a wrong tensor."""
    with pytest.raises(FormatError, match="has a malformed mesh; it was not written by a sound shardckpt"):
        msgspec.structs.replace(GOOD, replicated=[], meshes=[mesh]).check(2, "manifest.json")
