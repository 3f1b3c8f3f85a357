"""What to copy: source catalogue + target catalogue -> copies. Pure integer arithmetic: no I/O, no threads, no torch.

The target catalogue says which regions are wanted and where in which file (or memory) they go. Span against span is
done for all tensors at once on one axis, on which all tensors lie end to end in bytes; tensors with real boxes on
either side are intersected box by box, vectorised over pairs. Coverage is proved on the way: each wanted region is
tiled exactly once.

[Note: strided copies] A copy is `count` runs of `run_nbytes`, `src_stride` and `dst_stride` apart: 1 run for spans,
rows for column shards. Intersections with more levels are expanded into several such copies.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Boxes, Catalogue, Spans, byte_strides
from shardckpt.errors import CoverageError, MismatchError, listing
from shardckpt.region import Box, Span, boxes_of, strides

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Copies:
    """Copies as columns, all equally long; offsets and strides in bytes. See [Note: strided copies]."""

    src_chunk: I64  # [n] chunk number in the source catalogue
    dst_chunk: I64  # [n] chunk number in the target catalogue
    src_offset: I64  # [n] in the source file
    dst_offset: I64  # [n] in the target file
    run_nbytes: I64  # [n]
    count: I64  # [n]
    src_stride: I64  # [n] 0 where count is 1
    dst_stride: I64  # [n]

    def __len__(self) -> int:
        return len(self.src_chunk)

    @property
    def nbytes(self) -> int:
        """Bytes that all copies move."""
        return int((self.run_nbytes * self.count).sum())

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Copies:
        """Give the rows picked by an index or mask."""
        return Copies(*(getattr(self, column.name)[rows] for column in fields(self)))

    @classmethod
    def concatenate(cls, parts: list[Copies]) -> Copies:
        """Give all rows of all parts."""
        return cls(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(cls)))


@dataclass(frozen=True)
class Plan:
    """The copies that fill `target` from `source`, ordered by target file and offset in it."""

    source: Catalogue
    target: Catalogue
    copies: Copies

    @functools.cached_property
    def src_file(self) -> I64:
        """Source file of every copy. # [copies]"""
        return self.source.chunk_file[self.copies.src_chunk]

    @functools.cached_property
    def dst_file(self) -> I64:
        """Target file of every copy. # [copies]"""
        return self.target.chunk_file[self.copies.dst_chunk]


def plan(source: Catalogue, target: Catalogue) -> Plan:
    """Find the copies that give every chunk of `target` its bytes.

    Args:
        source: What is there.
        target: What is wanted; only its tensors need to be in `source`, under the same name or an alias.

    Raises:
        MismatchError: If a tensor is missing in the source, or its dtype or global shape differs.
        CoverageError: If the source chunks leave a hole in a wanted region, or overlap.
    """
    tensor_map = _match(source, target)
    boxed = _boxed_tensors(source, target, tensor_map)
    parts = [_plan_spans(source, target, tensor_map, boxed)]
    parts += [_plan_boxes(source, target, int(tensor_map[t]), t) for t in np.flatnonzero(boxed).tolist()]
    copies = Copies.concatenate(parts)
    order = np.lexsort((copies.dst_offset, target.chunk_file[copies.dst_chunk]))
    return Plan(source, target, copies.take(order))


def prove_coverage(source: Catalogue) -> None:
    """Prove that the chunks of every tensor tile it exactly.

    Raises:
        CoverageError: If not; names tensor, region and file.
    """
    numel = np.array([tensor.numel for tensor in source.tensors], np.int64)
    index = np.flatnonzero(numel)
    zero = np.zeros(len(index), np.int64)
    plan(source, Catalogue(source.tensors, source.files, Spans(index, zero, numel[index], zero, zero, zero)))


def _match(source: Catalogue, target: Catalogue) -> I64:
    """Give the source index of each target tensor. # [target tensors]"""
    names = [tensor.name for tensor in target.tensors]
    missing = [name for name in names if name not in source.by_name]
    if missing:
        raise MismatchError(
            f"the source has no tensor {listing(missing)} ({len(missing)} of {len(names)} wanted are missing). "
            "Compare the names with `shardckpt inspect --tensors`."
        )
    for name, wanted in zip(names, target.tensors, strict=True):
        stored = source.tensors[source.by_name[name]]
        if (stored.dtype, stored.shape) != (wanted.dtype, wanted.shape):
            raise MismatchError(
                f"cannot copy {name!r}: the source has dtype {stored.dtype} and global shape {stored.shape}, "
                f"the target {wanted.dtype} and {wanted.shape}. Build the target from the same config."
            )
    return np.array([source.by_name[name] for name in names], np.int64)


def _boxed_tensors(source: Catalogue, target: Catalogue, tensor_map: I64) -> NDArray[np.bool_]:
    """Tell which target tensors have a real box on either side. # [target tensors]"""
    source_boxed = np.zeros(len(source.tensors), bool)
    source_boxed[source.boxes.tensor] = True
    boxed = np.zeros(len(target.tensors), bool)
    boxed[target.boxes.tensor] = True
    return boxed | source_boxed[tensor_map] if len(tensor_map) else boxed


# Spans against spans ------------------------------------------------------------------------------------------------


def _plan_spans(source: Catalogue, target: Catalogue, tensor_map: I64, boxed: NDArray[np.bool_]) -> Copies:
    base = np.concatenate([[0], np.cumsum([tensor.nbytes for tensor in source.tensors], dtype=np.int64)])
    spans, item = source.spans, source.tensor_item_bytes
    low = base[spans.tensor] + spans.start * item[spans.tensor]
    high = base[spans.tensor] + spans.stop * item[spans.tensor]
    skipped = np.zeros(len(source.tensors), bool)
    skipped[source.boxes.tensor] = True
    rows = _disjoint_rows(source, low, high, skipped)
    low, high = low[rows], high[rows]

    wanted = np.flatnonzero(~boxed[target.spans.tensor])
    tensor = tensor_map[target.spans.tensor[wanted]]
    want_low = base[tensor] + target.spans.start[wanted] * item[tensor]
    want_high = base[tensor] + target.spans.stop[wanted] * item[tensor]
    first = np.searchsorted(high, want_low, side="right")
    number = np.maximum(np.searchsorted(low, want_high, side="left") - first, 0)

    which = np.repeat(np.arange(len(wanted)), number)
    piece = np.arange(len(which)) - np.repeat(np.cumsum(number) - number, number) + np.repeat(first, number)
    start = np.maximum(low[piece], want_low[which])
    nbytes = np.minimum(high[piece], want_high[which]) - start
    found = np.bincount(which, weights=nbytes, minlength=len(wanted)).astype(np.int64)
    if (short := np.flatnonzero(found != want_high - want_low)).size:
        row = int(short[0])
        _raise_hole(
            source,
            int(tensor[row]),
            int(want_low[row] - base[tensor[row]]),
            start[which == row],
            nbytes[which == row],
            base,
        )
    one = np.ones(len(piece), np.int64)
    return Copies(
        src_chunk=rows[piece],
        dst_chunk=wanted[which],
        src_offset=spans.byte_offset[rows[piece]] + start - low[piece],
        dst_offset=target.spans.byte_offset[wanted[which]] + start - want_low[which],
        run_nbytes=nbytes,
        count=one,
        src_stride=one * 0,
        dst_stride=one * 0,
    )


def _disjoint_rows(source: Catalogue, low: I64, high: I64, skipped: NDArray[np.bool_]) -> I64:
    """Give the rows of the source's span table in order, exact replicas once.

    Raises:
        CoverageError: If two spans of one tensor overlap otherwise.
    """
    rows: I64 = np.flatnonzero(~skipped[source.spans.tensor] & (high > low))
    rows = rows[np.lexsort((high[rows], low[rows]))]
    if not len(rows):
        return rows
    is_new = np.concatenate([[True], (np.diff(low[rows]) != 0) | (np.diff(high[rows]) != 0)])
    rows = rows[is_new]
    overlapping = np.flatnonzero(low[rows][1:] < high[rows][:-1])
    if len(overlapping):
        first, second = int(rows[overlapping[0]]), int(rows[overlapping[0] + 1])
        raise CoverageError(
            f"chunks overlap: {source.describe(first)}, and {source.describe(second)}. The files are of different "
            "saves or "
            "the writer's layout is wrong; find the right set of files."
        )
    return rows


def _raise_hole(source: Catalogue, tensor: int, wanted: int, starts: I64, nbytes: I64, base: I64) -> None:
    """Raise for the first byte of a wanted span that no chunk holds."""
    position = wanted + int(base[tensor])
    for start, length in zip(starts.tolist(), nbytes.tolist(), strict=True):
        if start > position:
            break
        position = start + length
    stored = source.tensors[tensor]
    element = (position - int(base[tensor])) // stored.item_bytes
    following = source.spans.start[(source.spans.tensor == tensor) & (source.spans.start > element)]
    stop = int(following.min()) if len(following) else stored.numel
    raise CoverageError(
        f"{stored.name!r} is incomplete: no chunk holds elements [{element}, {stop}) of {stored.numel} "
        f"(global shape {stored.shape}). A file is missing or was not written; run `shardckpt verify`."
    )


# Boxes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operands:
    """One side of a box intersection: boxes, and where their first element and its neighbours lie in the file."""

    chunk: I64  # [n]
    offset: I64  # [n, ndim]
    shape: I64  # [n, ndim]
    byte_offset: I64  # [n]
    byte_stride: I64  # [n, ndim]


def _operands(catalogue: Catalogue, tensor: int) -> _Operands:
    """Give all chunks of one tensor as boxes: real boxes as they are, spans cut into boxes."""
    stored = catalogue.tensors[tensor]
    ndim, item = len(stored.shape), stored.item_bytes
    rows: list[tuple[int, Box, int, tuple[int, ...]]] = []
    for row in np.flatnonzero(catalogue.spans.tensor == tensor).tolist():
        start, at = int(catalogue.spans.start[row]), int(catalogue.spans.byte_offset[row])
        for box in boxes_of(Span(start, int(catalogue.spans.stop[row])), stored.shape):
            element = sum(o * s for o, s in zip(box.offset, strides(stored.shape), strict=True))
            rows.append((row, box, at + (element - start) * item, byte_strides(stored)))
    table: Boxes = catalogue.boxes
    picked = np.flatnonzero(table.tensor == tensor)
    offset, shape = (
        table_column[picked, :ndim].reshape(len(picked), ndim) for table_column in (table.offset, table.shape)
    )
    inner = np.cumprod(np.concatenate([np.full((len(picked), 1), item), shape[:, :0:-1]], axis=1), axis=1)[:, ::-1]
    return _Operands(
        np.concatenate([_column([r[0] for r in rows]), picked + len(catalogue.spans)]),
        np.concatenate([_matrix([r[1].offset for r in rows], ndim), offset]),
        np.concatenate([_matrix([r[1].shape for r in rows], ndim), shape]),
        np.concatenate([_column([r[2] for r in rows]), table.byte_offset[picked]]),
        np.concatenate([_matrix([r[3] for r in rows], ndim), inner]),
    )


def _plan_boxes(source: Catalogue, target: Catalogue, src_tensor: int, dst_tensor: int) -> Copies:
    src, dst = _operands(source, src_tensor), _operands(target, dst_tensor)
    src = _distinct(source, src)
    pairs = _intersecting(src, dst)
    s, d = pairs[:, 0], pairs[:, 1]
    low = np.maximum(src.offset[s], dst.offset[d])
    shape = np.minimum(src.offset[s] + src.shape[s], dst.offset[d] + dst.shape[d]) - low
    _prove_box_coverage(target, dst, d, shape)
    copies = Copies(
        src_chunk=src.chunk[s],
        dst_chunk=dst.chunk[d],
        src_offset=src.byte_offset[s] + ((low - src.offset[s]) * src.byte_stride[s]).sum(axis=1),
        dst_offset=dst.byte_offset[d] + ((low - dst.offset[d]) * dst.byte_stride[d]).sum(axis=1),
        run_nbytes=np.full(len(s), source.tensors[src_tensor].item_bytes, np.int64),
        count=np.ones(len(s), np.int64),
        src_stride=np.zeros(len(s), np.int64),
        dst_stride=np.zeros(len(s), np.int64),
    )
    return _runs(copies, shape, src.byte_stride[s], dst.byte_stride[d])


def _intersecting(one: _Operands, other: _Operands, rows_at_once: int = 256) -> I64:
    """Give all pairs (row of one, row of other) whose boxes have an element in common. # [pairs, 2]"""
    found = [np.empty((0, 2), np.int64)]
    for begin in range(0, len(one.chunk), rows_at_once):
        low, size = one.offset[begin : begin + rows_at_once, None], one.shape[begin : begin + rows_at_once, None]
        meets = (np.maximum(low, other.offset) < np.minimum(low + size, other.offset + other.shape)).all(axis=2)
        found.append(np.argwhere(meets).astype(np.int64) + np.array([begin, 0]))
    return np.concatenate(found)


def _distinct(source: Catalogue, operands: _Operands) -> _Operands:
    """Drop exact replicas; refuse other overlaps."""
    keys = np.concatenate([operands.offset, operands.shape], axis=1)
    keep = np.sort(np.unique(keys, axis=0, return_index=True)[1]) if len(keys) else np.empty(0, np.int64)
    kept = _Operands(*(getattr(operands, column.name)[keep] for column in fields(_Operands)))
    pairs = _intersecting(kept, kept)
    overlapping = pairs[pairs[:, 0] < pairs[:, 1]]
    if len(overlapping):
        first, second = (int(kept.chunk[row]) for row in overlapping[0])
        raise CoverageError(
            f"chunks overlap: {source.describe(first)}, and {source.describe(second)}. The files are of different "
            "saves or "
            "the writer's layout is wrong; find the right set of files."
        )
    return kept


def _prove_box_coverage(target: Catalogue, dst: _Operands, d: I64, shape: I64) -> None:
    """Check that the (disjoint) intersections fill every wanted box."""
    found = np.bincount(d, weights=shape.prod(axis=1), minlength=len(dst.chunk)).astype(np.int64)
    wanted = dst.shape.prod(axis=1)
    short = np.flatnonzero(found != wanted)
    if len(short):
        row = int(short[0])
        tensor = target.tensors[int(target.chunk_tensor[dst.chunk[row]])]
        raise CoverageError(
            f"{tensor.name!r} is incomplete: of the box at {tuple(dst.offset[row].tolist())} of shape "
            f"{tuple(dst.shape[row].tolist())}, {int(wanted[row] - found[row])} of {int(wanted[row])} elements are in "
            "no chunk "
            f"(global shape {tensor.shape}). A file is missing or was not written; run `shardckpt verify`."
        )


def _runs(copies: Copies, shape: I64, src_stride: I64, dst_stride: I64) -> Copies:
    """Fold the dims of each intersection, inner first, into runs and counts; expand what is left.

    See [Note: strided copies].
    """
    is_counting = np.zeros(len(copies), bool)
    for dim in range(shape.shape[1] - 1, -1, -1):
        n, ss, ds = shape[:, dim], src_stride[:, dim], dst_stride[:, dim]
        longer = ~is_counting & (n > 1) & (ss == copies.run_nbytes) & (ds == copies.run_nbytes)
        begins = ~is_counting & (n > 1) & ~longer
        more = is_counting & (ss == copies.count * copies.src_stride) & (ds == copies.count * copies.dst_stride)
        expanded = is_counting & (n > 1) & ~more
        copies = Copies(
            copies.src_chunk,
            copies.dst_chunk,
            copies.src_offset,
            copies.dst_offset,
            np.where(longer, copies.run_nbytes * n, copies.run_nbytes),
            np.where(begins | more, copies.count * n, copies.count),
            np.where(begins, ss, copies.src_stride),
            np.where(begins, ds, copies.dst_stride),
        )
        is_counting |= begins
        if expanded.any():
            times = np.where(expanded, n, 1)
            rows = np.repeat(np.arange(len(copies)), times)
            step = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)
            copies = copies.take(rows)
            copies.src_offset[:] += step * ss[rows]
            copies.dst_offset[:] += step * ds[rows]
            shape, src_stride, dst_stride, is_counting = (
                shape[rows],
                src_stride[rows],
                dst_stride[rows],
                is_counting[rows],
            )
    return copies


def _column(values: list[int]) -> I64:
    return np.array(values, np.int64)


def _matrix(rows: list[tuple[int, ...]], width: int) -> I64:
    return np.array(rows, np.int64).reshape(len(rows), width)
