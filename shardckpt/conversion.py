"""Elements that change dtype or order on the way into a file, and the count of what that did to them.

Knows stretches of one dtype; refuses to know where they come from. See `derivation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np

from shardckpt.elements import decode, encode
from shardckpt.endpoints import Bytes, Sink


@dataclass(frozen=True, slots=True)
class Conversion:
    """How many numbers of one target tensor were changed by being written in another dtype.

    Attributes:
        name: The tensor.
        dtype: What it was.
        to_dtype: What it is.
        numel: Its elements.
        num_rounded: Elements that are no longer equal to what they were.
        num_overflowed: Of these, finite ones that became infinite.
    """

    name: str
    dtype: str
    to_dtype: str
    numel: int
    num_rounded: int
    num_overflowed: int

    def plus(self, more: Conversion) -> Conversion:
        """Give the sum of two parts of one tensor."""
        return replace(
            self,
            numel=self.numel + more.numel,
            num_rounded=self.num_rounded + more.num_rounded,
            num_overflowed=self.num_overflowed + more.num_overflowed,
        )


@dataclass(frozen=True, slots=True)
class Form:
    """How elements lie in bytes."""

    dtype: str
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Adjacent elements of one target tensor that come in one form and are written in one.

    Attributes:
        name: The target tensor.
        begin: Where they come to, in bytes of a file without conversions.
        real_begin: Where they belong, in bytes of the file.
        numel: How many.
        come: As they come.
        go: As they are written.
        num_rows: Of the matrix that comes, row by row, if it is written column by column; 0 if it is not.
    """

    name: str
    begin: int
    real_begin: int
    numel: int
    come: Form
    go: Form
    num_rows: int = 0

    @property
    def is_changed(self) -> bool:
        """Whether other bytes are written than come."""
        return self.come != self.go or self.num_rows > 0

    @property
    def nbytes(self) -> int:
        """Bytes that come."""
        return self.numel * self.come.item_bytes


class Tally:
    """Counts what is converted, by tensor; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: dict[str, Conversion] = {}

    def add(self, more: Conversion) -> None:
        """Count a part of a tensor."""
        with self._lock:
            before = self._found.get(more.name)
            self._found[more.name] = more if before is None else before.plus(more)

    @property
    def conversions(self) -> list[Conversion]:
        """What was counted, one a tensor."""
        return list(self._found.values())


class _Matrices:
    """Matrices that have come in part; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: dict[int, tuple[Bytes, int]] = {}

    def add(self, number: int, within: int, part: Bytes, nbytes: int) -> Bytes | None:
        """Put a part where it belongs in matrix `number`, and give the matrix if it was the last."""
        with self._lock:
            if number not in self._found:
                self._found[number] = (np.empty(nbytes, np.uint8), 0)
            whole, found = self._found.pop(number)
            whole[within : within + len(part)] = part
            found += len(part)
            if found == nbytes:
                return whole
            self._found[number] = (whole, found)
            return None


class ConvertingSink(Sink):
    """Writes elements in other forms than they come in; takes whole elements only."""

    def __init__(self, inner: Sink, stretches: Sequence[Stretch], tally: Tally) -> None:
        self._tally = tally
        self._matrices = _Matrices()
        self.is_sequential, self.is_remote, self.part_bytes = inner.is_sequential, inner.is_remote, inner.part_bytes
        self._inner = inner
        self._stretches = [one for one in stretches if one.numel]
        self._begins = np.array([one.begin for one in self._stretches], np.int64)

    def write(self, byte_offset: int, data: Bytes) -> None:
        done = 0
        while done < len(data):
            number = int(np.searchsorted(self._begins, byte_offset + done, side="right")) - 1
            stretch = self._stretches[number]
            within = byte_offset + done - stretch.begin
            part = data[done : done + stretch.nbytes - within]
            self._write(number, within, part)
            done += len(part)

    def _write(self, number: int, within: int, part: Bytes) -> None:
        """Write a part of one stretch; that of a matrix waits until all of it is there."""
        stretch = self._stretches[number]
        if not stretch.num_rows:
            first, rest = divmod(within, stretch.come.item_bytes)
            assert rest == len(part) % stretch.come.item_bytes == 0, "transfers cut between elements"
            self._inner.write(stretch.real_begin + first * stretch.go.item_bytes, self._converted(stretch, part))
        elif (whole := self._matrices.add(number, within, part, stretch.nbytes)) is not None:
            elements = whole.reshape(stretch.num_rows, -1, stretch.come.item_bytes)
            turned = np.ascontiguousarray(elements.swapaxes(0, 1)).reshape(-1)
            self._inner.write(stretch.real_begin, self._converted(stretch, turned))

    def finish(self) -> None:
        self._inner.finish()

    def commit(self) -> None:
        self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()

    def _converted(self, stretch: Stretch, data: Bytes) -> Bytes:
        if stretch.come == stretch.go:
            return data
        before = decode(data, stretch.come.dtype)
        out = encode(before, stretch.go.dtype)
        after = decode(out, stretch.go.dtype)
        is_changed = (before != after) & ~np.isnan(before)
        is_overflowed = is_changed & np.isfinite(before) & ~np.isfinite(after)
        counts = len(before), int(is_changed.sum()), int(is_overflowed.sum())
        self._tally.add(Conversion(stretch.name, stretch.come.dtype, stretch.go.dtype, *counts))
        return out
