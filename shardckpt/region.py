"""Regions of tensors: spans and boxes. Integers only.

A span is a half-open range of the row-major flattened tensor; a box is an offset and a shape, one integer a dim; both
in elements. A box whose elements lie in one range is that range: `normalise` turns it into a span at the door, so
that all but real column shards is span arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardckpt.errors import FormatError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `[start, stop)` of the flattened tensor."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Box:
    """The elements whose index in every dim `d` is in `[offset[d], offset[d] + shape[d])`."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Region = Span | Box


def whole(shape: Shape) -> Span:
    """Give the region that is all of a tensor of this global shape."""
    return Span(0, math.prod(shape))


def normalise(region: Region, shape: Shape, *, fqn: str) -> Region:
    """Check a region against the tensor's global shape, and give the span that it is, if it is one.

    Args:
        region: What a writer or a file says.
        shape: The tensor's global shape.
        fqn: The tensor, for messages.

    Returns:
        A span, or a box that lies in more than one range. Empty regions are `Span(0, 0)`.

    Raises:
        FormatError: If the region reaches outside the tensor or has another number of dims.
    """
    if isinstance(region, Span):
        if not 0 <= region.start <= region.stop <= math.prod(shape):
            raise FormatError(
                f"span [{region.start}, {region.stop}) of {fqn!r} is outside its {math.prod(shape)} elements "
                f"(global shape {shape}); the writer's layout is wrong"
            )
        return region if region.numel else Span(0, 0)
    if not len(region.offset) == len(region.shape) == len(shape):
        raise FormatError(
            f"region of {fqn!r} has offset {region.offset} and shape {region.shape}, but the tensor has {len(shape)} "
            f"dims (global shape {shape}); the writer's layout is wrong"
        )
    if any(o < 0 or n < 0 or o + n > s for o, n, s in zip(region.offset, region.shape, shape, strict=True)):
        raise FormatError(
            f"box at {region.offset} of shape {region.shape} reaches outside {fqn!r} of global shape {shape}; "
            "the writer's layout is wrong"
        )
    return _as_span(region, shape) or region


def _as_span(box: Box, shape: Shape) -> Span | None:
    if box.numel == 0:
        return Span(0, 0)
    split = len(shape)
    while split and box.shape[split - 1] == shape[split - 1]:
        split -= 1
    if any(n != 1 for n in box.shape[: max(split - 1, 0)]):
        return None
    start = sum(o * stride for o, stride in zip(box.offset, strides(shape), strict=True))
    return Span(start, start + box.numel)


def strides(shape: Sequence[int]) -> Shape:
    """Give the row-major strides of a contiguous tensor, in elements."""
    result = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        result[dim] = result[dim + 1] * shape[dim + 1]
    return tuple(result)


def boxes_of(span: Span, shape: Shape) -> Iterator[Box]:
    """Cut a span into boxes, in order: at most `2 * ndim - 1` of them."""
    if span.numel == 0:
        return
    if not shape:
        yield Box((), ())
        return
    if span.numel == math.prod(shape):
        yield Box((0,) * len(shape), shape)
        return
    inner = math.prod(shape[1:])
    first, last = span.start // inner, (span.stop - 1) // inner
    if first == last:
        yield from _in_row(first, Span(span.start - first * inner, span.stop - first * inner), shape)
        return
    if span.start % inner:
        yield from _in_row(first, Span(span.start - first * inner, inner), shape)
        first += 1
    rows_stop = last + 1 if span.stop % inner == 0 else last
    if first < rows_stop:
        yield Box((first, *(0,) * (len(shape) - 1)), (rows_stop - first, *shape[1:]))
    if rows_stop == last:
        yield from _in_row(last, Span(0, span.stop - last * inner), shape)


def _in_row(row: int, span: Span, shape: Shape) -> Iterator[Box]:
    for box in boxes_of(span, shape[1:]):
        yield Box((row, *box.offset), (1, *box.shape))
