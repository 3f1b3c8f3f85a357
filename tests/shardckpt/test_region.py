"""Tests of regions."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import FormatError
from shardckpt.region import Box, Region, Shape, Span, boxes_of, normalise, strides, whole
from tests.shardckpt.tilings import elements, shapes


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Shape, Box]:
    """Draw a shape and a box inside it."""
    shape = draw(shapes)
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return shape, Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def flat_indices(region: Region, shape: Shape) -> list[int]:
    """List the flattened indices of a region's elements, row-major."""
    return elements(np.arange(math.prod(shape)).reshape(shape), region).reshape(-1).tolist()


@given(boxes())
def test_normalise_keeps_the_elements_and_finds_every_span(case: tuple[Shape, Box]) -> None:
    """A box becomes a span just when its elements are adjacent, and stays itself otherwise."""
    shape, box = case
    found = normalise(box, shape, fqn="w")
    indices = flat_indices(box, shape)
    assert flat_indices(found, shape) == indices
    is_adjacent = indices == list(range(indices[0], indices[0] + len(indices))) if indices else True
    assert isinstance(found, Span) == is_adjacent


@given(shapes, st.data())
def test_boxes_of_a_span_tile_it_in_order(shape: Shape, data: st.DataObject) -> None:
    """The boxes of a span hold its elements, in order, and are few."""
    numel = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    found = list(boxes_of(Span(start, stop), shape))
    assert [index for box in found for index in flat_indices(box, shape)] == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert all(len(box.offset) == len(box.shape) == len(shape) for box in found)


@given(shapes)
def test_strides_are_those_of_a_contiguous_array(shape: Shape) -> None:
    """An index times the strides is its place in the flattened array."""
    places = [sum(i * s for i, s in zip(index, strides(shape), strict=True)) for index in product(*map(range, shape))]
    assert places == list(range(math.prod(shape)))


@given(boxes())
def test_numel_counts_the_elements(case: tuple[Shape, Box]) -> None:
    """The number of elements of a box and of a span is what they hold."""
    shape, box = case
    assert box.numel == len(flat_indices(box, shape))
    assert whole(shape).numel == math.prod(shape)


@pytest.mark.parametrize("region", [Span(2, 2), Box((0, 1), (2, 0))])
def test_empty_regions_are_one_and_the_same(region: Region) -> None:
    """Wherever an empty region is said to be, it becomes the empty span at 0."""
    assert normalise(region, (2, 3), fqn="w") == Span(0, 0)


@pytest.mark.parametrize(
    ("region", "text"),
    [
        (Span(0, 7), r"span \[0, 7\) of 'w' is outside its 6 elements \(global shape \(2, 3\)\)"),
        (Span(-1, 2), r"span \[-1, 2\) of 'w' is outside"),
        (Span(3, 2), r"span \[3, 2\) of 'w' is outside"),
        (Box((0,), (2,)), r"offset \(0,\) and shape \(2,\), but the tensor has 2 dims"),
        (Box((0, 0), (2,)), r"but the tensor has 2 dims"),
        (Box((0, 1), (2, 3)), r"box at \(0, 1\) of shape \(2, 3\) reaches outside 'w' of global shape \(2, 3\)"),
        (Box((-1, 0), (2, 3)), r"reaches outside 'w'"),
        (Box((0, 0), (2, -1)), r"reaches outside 'w'"),
    ],
)
def test_a_region_outside_its_tensor_is_refused(region: Region, text: str) -> None:
    """The message names the tensor, both geometries and whose fault it is."""
    with pytest.raises(FormatError, match=text + ".*; the writer's layout is wrong"):
        normalise(region, (2, 3), fqn="w")
