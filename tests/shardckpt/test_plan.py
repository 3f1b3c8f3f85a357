"""Tests of planning, against copies done one by one in bytearrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.catalogue import Boxes, Catalogue, CatalogueBuilder, File, Spans, Tensor
from shardckpt.errors import CoverageError, MismatchError
from shardckpt.plan import Plan, plan, prove_coverage
from shardckpt.region import Box, Region, Span
from tests.shardckpt.tilings import Arrays, Bytes, Tiled, arrays, tilings, wrong_chunks

two_tilings = arrays().flatmap(lambda whole: st.tuples(st.just(whole), tilings(whole), tilings(whole)))


def execute(found: Plan, sources: list[Bytes], sinks: list[Bytes]) -> None:
    """Do every run of every copy, the slow and obvious way."""
    copies = found.copies
    for i in range(len(copies)):
        for run in range(int(copies.count[i])):
            src = int(copies.src_offset[i] + run * copies.src_stride[i])
            dst = int(copies.dst_offset[i] + run * copies.dst_stride[i])
            nbytes = int(copies.run_nbytes[i])
            sinks[found.dst_file[i]][dst : dst + nbytes] = sources[found.src_file[i]][src : src + nbytes]


def one_tensor(shape: tuple[int, ...], regions: list[Region], dtype: str = "F32") -> Catalogue:
    """Give a catalogue of one tensor 'w', each chunk in a file of its own."""
    builder = CatalogueBuilder()
    builder.add_tensor(Tensor("w", dtype, shape))
    for region in regions:
        file = builder.add_file(File(f"file-{len(builder.files)}", 0, 0))
        builder.add_chunk(0, region, file=file, byte_offset=0)
    return builder.build()


@given(two_tilings)
def test_a_plan_gives_every_chunk_its_bytes(case: tuple[Arrays, Tiled, Tiled]) -> None:
    """Between any two ways to cut tensors into spans and boxes, each target byte is copied once and right."""
    whole, source, target = case
    found = plan(source.catalogue, target.catalogue)
    sinks = [np.full_like(file, 0xEE) for file in target.files]
    execute(found, source.files, sinks)
    assert wrong_chunks(target.catalogue, whole, sinks) == []
    assert found.copies.nbytes == sum(array.nbytes for array in whole.values())
    order = list(zip(found.dst_file.tolist(), found.copies.dst_offset.tolist(), strict=True))
    assert order == sorted(order)


@given(two_tilings, st.data())
def test_a_missing_chunk_is_a_hole(case: tuple[Arrays, Tiled, Tiled], data: st.DataObject) -> None:
    """Whichever chunk is dropped, planning and the proof of coverage refuse, and name the tensor."""
    _, source, target = case
    number = len(source.catalogue.chunk_nbytes)
    if not number:
        return
    dropped = data.draw(st.integers(0, number - 1))
    name = source.catalogue.tensors[int(source.catalogue.chunk_tensor[dropped])].name
    keep = np.arange(number) != dropped
    num_spans = len(source.catalogue.spans)
    holed = dataclasses.replace(
        source.catalogue,
        spans=source.catalogue.spans.take(keep[:num_spans]),
        boxes=source.catalogue.boxes.take(keep[num_spans:]),
    )
    for check in (lambda: plan(holed, target.catalogue), lambda: prove_coverage(holed)):
        with pytest.raises(CoverageError, match=rf"'{name}' is incomplete.*missing or was not written.*verify"):
            check()


@given(two_tilings, st.data())
def test_exact_replicas_change_nothing(case: tuple[Arrays, Tiled, Tiled], data: st.DataObject) -> None:
    """A chunk that is there twice is read once."""
    _, source, target = case
    rows = data.draw(st.lists(st.integers(0, max(len(source.catalogue.spans) - 1, 0)), max_size=2))
    rows = rows if len(source.catalogue.spans) else []
    twice = np.concatenate([np.arange(len(source.catalogue.spans)), np.array(rows, np.int64)])
    doubled = dataclasses.replace(source.catalogue, spans=source.catalogue.spans.take(twice))
    prove_coverage(doubled)
    assert plan(doubled, target.catalogue).copies.nbytes == plan(source.catalogue, target.catalogue).copies.nbytes


@pytest.mark.parametrize(
    ("shape", "regions", "hole"),
    [
        ((10,), [Span(0, 4), Span(6, 10)], r"elements \[4, 6\) of 10"),
        ((10,), [Span(1, 10)], r"elements \[0, 1\) of 10"),
        ((10,), [Span(0, 4)], r"elements \[4, 10\) of 10"),
        ((4, 4), [Box((0, 0), (4, 2)), Box((0, 2), (4, 1))], r"box at \(0, 0\) of shape \(4, 4\), 4 of 16 elements"),
    ],
)
def test_a_hole_is_named_to_the_element(shape: tuple[int, ...], regions: list[Region], hole: str) -> None:
    """The message says which elements of how many no chunk holds."""
    with pytest.raises(CoverageError, match=hole):
        prove_coverage(one_tensor(shape, regions))


@pytest.mark.parametrize(
    ("shape", "regions"),
    [
        ((10,), [Span(0, 6), Span(5, 10)]),
        ((10,), [Span(0, 10), Span(2, 3)]),
        ((4, 4), [Box((0, 0), (4, 2)), Box((0, 1), (4, 3))]),
        ((4, 4), [Box((0, 0), (4, 2)), Box((0, 2), (4, 2)), Span(2, 4)]),
    ],
)
def test_an_overlap_is_refused_with_both_chunks(shape: tuple[int, ...], regions: list[Region]) -> None:
    """Two chunks that share elements, but are not the same region, are named with their files."""
    with pytest.raises(
        CoverageError, match=r"chunks overlap: .* in 'file-\d', and .* in 'file-\d'.*find the right set"
    ):
        prove_coverage(one_tensor(shape, regions))


def test_only_what_is_wanted_needs_to_be_whole() -> None:
    """A hole elsewhere does not keep a tensor's other elements from being read."""
    source = one_tensor((10,), [Span(0, 4), Span(6, 10)])
    assert plan(source, one_tensor((10,), [Span(7, 9)])).copies.nbytes == 8
    with pytest.raises(CoverageError, match=r"\[4, 6\)"):
        plan(source, one_tensor((10,), [Span(3, 5)]))


def test_a_tied_tensor_is_found() -> None:
    """A target name may be an alias in the source."""
    tied = dataclasses.replace(one_tensor((4,), [Span(0, 4)]), tensors=(Tensor("first", "F32", (4,), aliases=("w",)),))
    assert plan(tied, one_tensor((4,), [Span(0, 4)])).copies.nbytes == 16


def test_a_missing_tensor_is_named() -> None:
    """The message counts what is missing and says where to look."""
    target = dataclasses.replace(one_tensor((4,), [Span(0, 4)]), tensors=(Tensor("x", "F32", (4,)),))
    with pytest.raises(MismatchError, match=r"no tensor 'x' \(1 of 1 wanted are missing\).*inspect --tensors"):
        plan(one_tensor((4,), [Span(0, 4)]), target)


@pytest.mark.parametrize("tensor", [Tensor("w", "I32", (4,)), Tensor("w", "F32", (2, 2))])
def test_another_dtype_or_shape_is_refused(tensor: Tensor) -> None:
    """Bytes are never taken for those of another dtype or shape; both sides are shown."""
    target = dataclasses.replace(one_tensor((4,), [Span(0, 4)]), tensors=(tensor,))
    with pytest.raises(MismatchError, match=r"cannot copy 'w': the source has dtype F32 .* from the same config"):
        plan(one_tensor((4,), [Span(0, 4)]), target)


def test_a_column_shard_is_one_strided_copy() -> None:
    """A column shard of a big matrix is one copy of many runs, not a copy a row."""
    columns = [Box((0, 256 * i), (10_000, 256)) for i in range(4)]
    found = plan(one_tensor((10_000, 1024), [*columns]), one_tensor((10_000, 1024), [Span(0, 10_240_000)])).copies
    assert found.count.tolist() == [10_000] * 4
    assert found.run_nbytes.tolist() == [1024] * 4
    assert (found.src_stride.tolist(), found.dst_stride.tolist()) == ([1024] * 4, [4096] * 4)


def test_planning_a_million_chunks_takes_a_copy_each() -> None:
    """1,024 ranks x 1,000 tensors to 512 ranks: as many copies as there are source chunks, each of one shard."""
    num_tensors, shard = 1000, 12
    source, target = (_even_shards(num_tensors, ranks, 12 * 1024 // ranks) for ranks in (1024, 512))
    assert len(source.chunk_nbytes) == 1_024_000
    found = plan(source, target).copies
    assert len(found) == 1_024_000
    assert (found.run_nbytes == shard * 4).all()
    assert (np.diff(found.src_offset.reshape(512, num_tensors, 2), axis=2) == 0).all()


def _even_shards(num_tensors: int, ranks: int, shard: int) -> Catalogue:
    tensor, rank = (grid.reshape(-1) for grid in np.meshgrid(range(num_tensors), range(ranks), indexing="ij"))
    zero = np.zeros(len(rank), np.int64)
    return Catalogue(
        tuple(Tensor(f"layers.{i}.weight", "F32", (ranks * shard,)) for i in range(num_tensors)),
        tuple(File(f"rank-{i}", num_tensors * shard * 4, 0) for i in range(ranks)),
        Spans(tensor, rank * shard, (rank + 1) * shard, rank, tensor * shard * 4, zero),
        Boxes.empty(),
    )
