"""Compare the tensors of two places, whatever their formats and layouts.

Knows what makes two tensors equal: name, dtype, shape and every bit. Where bits differ it says how far the numbers are
apart. Both sides are read window by window, so that memory does not grow with the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import Catalogue, CatalogueBuilder, File, Tensor
from shardckpt.elements import decode
from shardckpt.endpoints import MemorySink, ReaderPool, Source
from shardckpt.errors import MismatchError
from shardckpt.formats.origin import Origin
from shardckpt.manifest import Json
from shardckpt.plan import plan
from shardckpt.region import Span
from shardckpt.tools.selection import Choice, Selection, select
from shardckpt.transfer import TransferOptions, transfer

Bytes = NDArray[np.uint8]

_ALIGN = 16
_LEAST_WINDOW_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor, or one value of the other state, that is not the same on both sides.

    Attributes:
        name: Its name.
        kind: "only in A", "only in B", "dtype", "shape", "values", or "state" for what is no tensor.
        a: What A has: dtype and shape, or the first element that differs.
        b: What B has.
        num_differing: Elements whose bits differ.
        max_abs: Largest absolute difference of two elements; None if it is not a number.
        first_index: Of the first element that differs.
    """

    name: str
    kind: str
    a: str = ""
    b: str = ""
    num_differing: int = 0
    max_abs: float | None = None
    first_index: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors of one name, dtype and shape."""

    name: str
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class DiffJob:
    """A comparison that is worked out but not begun.

    Attributes:
        a: One side.
        b: The other.
        pairs: What to compare by value.
        differences: What differs already by name, dtype or shape.
    """

    a: Origin
    b: Origin
    pairs: tuple[Pair, ...]
    differences: tuple[Difference, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to read, of both sides."""
        return 2 * sum(pair.a.nbytes for pair in self.pairs)


def plan_diff(a: Origin, b: Origin, choice: Choice) -> DiffJob:
    """Match the tensors of two places by name.

    A checkpoint is compared with another by full names, and with weights of other programs by the names in its module.

    Raises:
        MismatchError: If nothing is left to compare.
    """
    names_a, names_b = _names(a, b, choice)
    if not names_a and not names_b:
        raise MismatchError("neither side has a tensor that is to be compared; check --only and --skip")
    matched_a = {tensor.name for name, tensor in names_a.items() if name in names_b}
    matched_b = {tensor.name for name, tensor in names_b.items() if name in names_a}
    pairs: dict[tuple[str, str], Pair] = {}
    found: dict[str, Difference] = {}
    for name, tensor in names_a.items():
        other = names_b.get(name)
        if other is None:
            if tensor.name not in matched_a:
                found.setdefault(f"a{tensor.name}", Difference(name, "only in A", a=_form(tensor)))
        elif (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            kind = "dtype" if tensor.dtype != other.dtype else "shape"
            found[f"c{name}"] = Difference(name, kind, _form(tensor), _form(other))
        else:
            pairs.setdefault((tensor.name, other.name), Pair(name, tensor, other))
    for name, tensor in names_b.items():
        if tensor.name not in matched_b:
            found.setdefault(f"b{tensor.name}", Difference(name, "only in B", b=_form(tensor)))
    differences = [*found.values(), *_state_differences(a, b, choice)]
    return DiffJob(a, b, tuple(pairs.values()), tuple(differences))


def compare_values(job: DiffJob, *, options: TransferOptions) -> tuple[Difference, ...]:
    """Read all pairs and give those that differ, in order.

    Raises:
        CheckpointError: If reading fails, or a chunk that was read whole is damaged.
    """
    window_bytes = max(options.budget_bytes // 4, _LEAST_WINDOW_BYTES)
    halved = replace(options, budget_bytes=max(options.budget_bytes // 2, 1))
    buffers = np.empty(window_bytes, np.uint8), np.empty(window_bytes, np.uint8)
    found: dict[str, _Tally] = {}
    sides = [_side(job.a, [p.a for p in job.pairs]), _side(job.b, [p.b for p in job.pairs])]
    with closing(ReaderPool(job.a.store)) as pool_a, closing(ReaderPool(job.b.store)) as pool_b:
        sources = [
            pool.sources([file.path for file in side.files]) for pool, side in zip((pool_a, pool_b), sides, strict=True)
        ]
        for window in _windows(job.pairs, window_bytes):
            _fill(sides[0], sources[0], [(part.pair.a, part) for part in window], buffers[0], halved)
            _fill(sides[1], sources[1], [(part.pair.b, part) for part in window], buffers[1], halved)
            for part in window:
                one, other = (buffer[part.at : part.at + part.nbytes] for buffer in buffers)
                if not np.array_equal(one, other):
                    found.setdefault(part.pair.name, _Tally(part.pair)).add(part.start, one, other)
    return tuple(tally.difference() for tally in found.values())


# Names --------------------------------------------------------------------------------------------------------------


def _names(a: Origin, b: Origin, choice: Choice) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Give name -> tensor of both sides, in the way of naming that has most in common."""
    ways = [(one, other) for one in _namings(a) for other in _namings(b)]
    names_a, names_b = max(ways, key=lambda names: len(names[0].keys() & names[1].keys()))
    return _filtered(names_a, choice), _filtered(names_b, choice)


def _namings(origin: Origin) -> list[dict[str, Tensor]]:
    """Give the ways to name its tensors: in full, and for a checkpoint with weights, as in the module."""
    tensors = origin.catalogue.tensors
    ways = [{name: tensor for tensor in tensors for name in (tensor.name, *tensor.aliases)}]
    if origin.stored is not None:
        try:
            weights = select(origin.stored, Choice())
        except MismatchError:
            weights = Selection(())
        by_name = origin.catalogue.by_name
        ways.append(
            {
                name: tensors[by_name[weights.source_names(tensor)[0]]]
                for tensor in weights.tensors
                for name in (tensor.name, *tensor.aliases)
            }
        )
    return ways


def _filtered(names: Mapping[str, Tensor], choice: Choice) -> dict[str, Tensor]:
    def fits(name: str, tensor: Tensor, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(known, pattern) for pattern in patterns for known in (name, tensor.name))

    return {
        name: tensor
        for name, tensor in names.items()
        if (not choice.only or fits(name, tensor, choice.only)) and not fits(name, tensor, choice.skip)
    }


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _state_differences(a: Origin, b: Origin, choice: Choice) -> list[Difference]:
    """Give where the state that is no tensor differs, for two checkpoints that are compared as wholes."""
    if a.stored is None or b.stored is None or choice != Choice():
        return []
    pairs = [("step", a.stored.manifest.step, b.stored.manifest.step), ("", a.stored.objects, b.stored.objects)]
    found = [leaf for path, one, other in pairs for leaf in _leaves_apart(one, other, path)]
    return [Difference(path, "state", _shown(one), _shown(other)) for path, one, other in found]


def _leaves_apart(a: Json, b: Json, path: str) -> Iterator[tuple[str, Json, Json]]:
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            yield from _leaves_apart(a[key], b[key], f"{path}.{key}" if path else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _leaves_apart(one, other, f"{path}[{number}]")
    elif type(a) is not type(b) or a != b:
        yield path or "state", a, b


def _shown(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Values -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements `[start, stop)` of both tensors of a pair, at a byte of the window."""

    pair: Pair
    start: int
    stop: int
    at: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.pair.a.item_bytes


def _windows(pairs: Sequence[Pair], window_bytes: int) -> Iterator[list[_Part]]:
    """Pack all elements of all pairs into windows."""
    window: list[_Part] = []
    end = 0
    for pair in pairs:
        start = 0
        while start < pair.a.numel:
            room = (window_bytes - end) // pair.a.item_bytes
            if room < 1:
                yield window
                window, end = [], 0
                continue
            stop = min(start + room, pair.a.numel)
            window.append(_Part(pair, start, stop, end))
            end += -(-window[-1].nbytes // _ALIGN) * _ALIGN
            start = stop
    if window:
        yield window


def _side(origin: Origin, tensors: Sequence[Tensor]) -> Catalogue:
    return origin.catalogue.select([tensor.name for tensor in tensors])


def _fill(
    source: Catalogue,
    sources: Sequence[Source],
    parts: Sequence[tuple[Tensor, _Part]],
    buffer: Bytes,
    options: TransferOptions,
) -> None:
    """Read the elements of one side into a buffer."""
    target = CatalogueBuilder()
    target.add_file(File("memory", len(buffer), 0))
    numbers: dict[str, int] = {}
    for tensor, part in parts:
        if tensor.name not in numbers:
            numbers[tensor.name] = target.add_tensor(tensor)
        target.add_chunk(numbers[tensor.name], Span(part.start, part.stop), file=0, byte_offset=part.at)
    transfer(plan(source, target.build()), sources, [MemorySink(buffer)], options=options)


class _Tally:
    """Collects what differs in one pair."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._num_differing = 0
        self._max_abs = 0.0
        self._first = -1
        self._shown = ("", "")

    def add(self, start: int, one: Bytes, other: Bytes) -> None:
        """Take the bytes of both sides from element `start` on."""
        item = self._pair.a.item_bytes
        rows = np.flatnonzero((one.reshape(-1, item) != other.reshape(-1, item)).any(axis=1))
        if not len(rows):
            return
        a, b = (decode(data, self._pair.a.dtype)[rows] for data in (one, other))
        if self._first < 0:
            self._first = start + int(rows[0])
            self._shown = (str(a[0]), str(b[0]))
        self._num_differing += len(rows)
        self._max_abs = max(self._max_abs, _distance(a, b), key=lambda value: (np.isnan(value), value))

    def difference(self) -> Difference:
        """Give what was found."""
        shape = self._pair.a.shape
        index = tuple(int(i) for i in np.unravel_index(self._first, shape)) if shape else ()
        largest = None if np.isnan(self._max_abs) else self._max_abs
        return Difference(self._pair.name, "values", *self._shown, self._num_differing, largest, index)


def _distance(a: NDArray[np.generic], b: NDArray[np.generic]) -> float:
    """Give the largest absolute difference; NaN where one is a number and the other is none."""
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        left, right = a.astype(wide), b.astype(wide)
        apart = np.abs(left - right)
    alike = (left == right) | (np.isnan(left) & np.isnan(right))
    return float(np.where(alike, 0.0, apart).max())
