"""Elements that change their dtype on the way into a file, and the count of what that did to them.

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
class Stretch:
    """Adjacent elements of one target tensor that come in one dtype and are written in one.

    Attributes:
        name: The target tensor.
        begin: Where they come to, in bytes of a file without conversions.
        real_begin: Where they belong, in bytes of the file.
        numel: How many.
        dtype: As they come.
        to_dtype: As they are written.
        item_bytes: Of one as it comes.
        to_item_bytes: Of one as it is written.
    """

    name: str
    begin: int
    real_begin: int
    numel: int
    dtype: str
    to_dtype: str
    item_bytes: int
    to_item_bytes: int


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


class ConvertingSink(Sink):
    """Writes elements in other dtypes than they come in; takes whole elements only."""

    def __init__(self, inner: Sink, stretches: Sequence[Stretch], tally: Tally) -> None:
        self._tally = tally
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
            nbytes = min(len(data) - done, stretch.numel * stretch.item_bytes - within)
            first, rest = divmod(within, stretch.item_bytes)
            assert rest == nbytes % stretch.item_bytes == 0, "transfers cut between elements"
            at = stretch.real_begin + first * stretch.to_item_bytes
            self._inner.write(at, self._converted(stretch, data[done : done + nbytes]))
            done += nbytes

    def finish(self) -> None:
        self._inner.finish()

    def commit(self) -> None:
        self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()

    def _converted(self, stretch: Stretch, data: Bytes) -> Bytes:
        if stretch.dtype == stretch.to_dtype:
            return data
        before = decode(data, stretch.dtype)
        out = encode(before, stretch.to_dtype)
        after = decode(out, stretch.to_dtype)
        is_changed = (before != after) & ~np.isnan(before)
        is_overflowed = is_changed & np.isfinite(before) & ~np.isfinite(after)
        counts = len(before), int(is_changed.sum()), int(is_overflowed.sum())
        self._tally.add(Conversion(stretch.name, stretch.dtype, stretch.to_dtype, *counts))
        return out
