"""Who holds what: bytes of every rank, the ranges of every tensor by rank, and what a reshard moves.

Numbers only, cut down to what a picture can show whatever the size of the checkpoint; refuses to know how they are
drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Catalogue, Tensor
from shardckpt.manifest import Stored
from shardckpt.plan import plan
from shardckpt.tools.selection import tensors_by_section

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of a tensor's picture, in fractions of it, and the rank that holds it."""

    x: float
    y: float
    width: float
    height: float
    rank: int


@dataclass(frozen=True, slots=True)
class Strip:
    """One tensor, or several of one shape that are cut alike, such as those of all blocks.

    Attributes:
        name: Name of the first.
        form: Dtype and global shape, for people.
        nbytes: Bytes of one.
        cells: Which rank holds which part; from left to right in row-major order, or as a grid of its first two dims.
        num_ranks: Ranks that hold any of it.
        num_replicas: How often each byte is held.
        others: Names of the others.
    """

    name: str
    form: str
    nbytes: int
    cells: tuple[Cell, ...]
    num_ranks: int
    num_replicas: int
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Holdings:
    """What the ranks of a checkpoint hold.

    Attributes:
        kinds: Names of the kinds of tensors: a section, or a section and a key of the optimizer's state.
        nbytes: Bytes by rank and kind. # [ranks, kinds]
        strips: The largest tensors, in the order of the checkpoint, those that are alike as one.
        num_left_out: Tensors that are not among `strips`.
    """

    kinds: tuple[str, ...]
    nbytes: I64
    strips: tuple[Strip, ...]
    num_left_out: int

    @property
    def by_rank(self) -> I64:
        """Bytes by rank. # [ranks]"""
        total: I64 = self.nbytes.sum(axis=1)
        return total

    @property
    def imbalance(self) -> float:
        """The fullest rank's bytes over the mean."""
        mean = float(self.by_rank.mean())
        return float(self.by_rank.max()) / mean if mean else 1.0


def holdings(found: Stored, *, max_tensors: int = 400, num_pixels: int = 540) -> Holdings:
    """Work out the numbers of a picture.

    Args:
        found: The checkpoint.
        max_tensors: How many to work out, the largest first.
        num_pixels: How finely a tensor is cut.
    """
    catalogue = found.catalogue
    kind_of, kinds = _kinds(found)
    nbytes = np.zeros((len(catalogue.files), max(len(kinds), 1)), np.int64)
    np.add.at(nbytes, (catalogue.chunk_file, kind_of[catalogue.chunk_tensor]), catalogue.chunk_nbytes)
    sizes = np.array([tensor.nbytes for tensor in catalogue.tensors], np.int64)
    shown = np.sort(np.argsort(-sizes, kind="stable")[:max_tensors])
    strips = [_strip(catalogue, int(number), num_pixels) for number in shown if sizes[number]]
    return Holdings(tuple(kinds) or ("nothing",), nbytes, _alike(strips), int((sizes > 0).sum()) - len(strips))


def moved(source: Catalogue, target: Catalogue) -> I64:
    """Give the bytes that go from each rank of one layout to each of another. # [source ranks, target ranks]"""
    found = plan(source, target)
    matrix = np.zeros((len(source.files), len(target.files)), np.int64)
    np.add.at(matrix, (found.src_file, found.dst_file), found.copies.run_nbytes * found.copies.count)
    return matrix


def _kinds(found: Stored) -> tuple[I64, list[str]]:
    """Give the kind of every tensor, and the names of the kinds."""
    numbers: dict[str, int] = {}
    kind_of = np.zeros(len(found.catalogue.tensors), np.int64)
    for section, tensors in tensors_by_section(found).items():
        is_optimizer = found.manifest.sections.get(section) == "optimizer"
        for tensor in tensors:
            kind = f"{section}: {tensor.name.rpartition('.')[2]}" if is_optimizer else section or "(no section)"
            kind_of[found.catalogue.by_name[tensor.name]] = numbers.setdefault(kind, len(numbers))
    return kind_of, list(numbers)


def _alike(strips: list[Strip]) -> tuple[Strip, ...]:
    """Join those that look the same, in place of the first."""
    groups: dict[tuple[object, ...], list[Strip]] = {}
    for strip in strips:
        groups.setdefault((strip.form, strip.cells), []).append(strip)
    return tuple(replace(first, others=tuple(other.name for other in rest)) for first, *rest in groups.values())


def _strip(catalogue: Catalogue, number: int, num_pixels: int) -> Strip:
    tensor = catalogue.tensors[number]
    spans = catalogue.spans.take(np.flatnonzero(catalogue.spans.tensor == number))
    boxes = catalogue.boxes.take(np.flatnonzero(catalogue.boxes.tensor == number))
    ranks = np.unique(np.concatenate([spans.file, boxes.file]))
    if len(boxes) and len(tensor.shape) >= 2:
        cells = _grid(tensor, boxes.offset, boxes.shape, boxes.file)
    else:
        cells = _line(tensor, spans.start, spans.stop, spans.file, num_pixels)
    held = int((spans.stop - spans.start).sum() + boxes.shape.prod(axis=1).sum())
    form = f"{tensor.dtype} {'×'.join(map(str, tensor.shape)) or 'scalar'}"
    return Strip(tensor.name, form, tensor.nbytes, cells, len(ranks), -(-held // max(tensor.numel, 1)))


def _line(tensor: Tensor, start: I64, stop: I64, rank: I64, num_pixels: int) -> tuple[Cell, ...]:
    """Cut the flattened tensor by rank; no finer than pixels."""
    order = np.lexsort((stop, start))
    start, stop, rank = start[order], stop[order], rank[order]
    if len(start) > num_pixels:
        centres = ((np.arange(num_pixels) + 0.5) / num_pixels * tensor.numel).astype(np.int64)
        row = np.clip(np.searchsorted(start, centres, side="right") - 1, 0, len(start) - 1)
        edges = (np.arange(num_pixels + 1) / num_pixels * tensor.numel).astype(np.int64)
        start, stop, rank = edges[:-1], edges[1:], rank[row]
    is_new = np.concatenate([[True], (np.diff(rank) != 0) | (start[1:] != stop[:-1])])
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(start)) - 1
    low, high = start[first] / tensor.numel, stop[last] / tensor.numel
    columns = zip(low.tolist(), high.tolist(), rank[first].tolist(), strict=True)
    return tuple(Cell(x, 0.0, end - x, 1.0, owner) for x, end, owner in columns)


def _grid(tensor: Tensor, offset: I64, shape: I64, rank: I64) -> tuple[Cell, ...]:
    """Draw boxes by their first two dims."""
    rows, columns = max(tensor.shape[0], 1), max(tensor.shape[1], 1)
    return tuple(
        Cell(o[1] / columns, o[0] / rows, n[1] / columns, n[0] / rows, owner)
        for o, n, owner in zip(offset.tolist(), shape.tolist(), rank.tolist(), strict=True)
    )
