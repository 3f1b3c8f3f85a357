"""Does batches: fetches, writes, weaves, and keeps the checksum of every byte that passes.

It starts no thread and holds no buffer: `transfer.py` lends both.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardckpt.batches import Batch, Sizes, Work
from shardckpt.checksum import crc32c
from shardckpt.endpoints import Bytes, Sink, Source
from shardckpt.part_copies import check_part, hand_over
from shardckpt.parts import Parts, Row
from shardckpt.plan import Plan
from shardckpt.store import PartRule

I64 = NDArray[np.int64]


class Copier:
    """Does the batches of one plan; safe to call from several threads."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[Source],
        sinks: Sequence[Sink],
        sizes: Sizes,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._copied: tuple[list[Parts], list[Parts]] = [], []  # checksums of whole copies, by side
        self._woven: tuple[list[Row], list[Row]] = [], []  # of parts of strided copies, by side
        self.unchecked_nbytes = 0
        self.unchecked: set[int] = set()
        self._sources, self._sinks, self._on_progress = sources, sinks, on_progress
        self._sizes = sizes
        self._lock = threading.Lock()
        self._plan = plan
        self._work = work = Work.of(plan, hand_over(plan, *_server_copies(plan, sources, sinks)), sizes)
        self._copies, self._src_file, self._dst_file = work.copies, work.src_file, work.dst_file
        self._src_chunk_at = plan.source.chunk_byte_offset
        self._dst_chunk_at = plan.target.chunk_byte_offset
        self._pending = [0] * len(sinks)  # batches not yet done, by target file

    def source_parts(self) -> Parts:
        """Give the checksums of all that was read, but for runs with gaps."""
        return Parts.concatenate([*self._copied[0], Parts.of_rows(self._woven[0])])

    def target_parts(self) -> Parts:
        """Give the checksums of all that was written."""
        return Parts.concatenate([*self._copied[1], Parts.of_rows(self._woven[1])])

    # What is done together

    def jobs(self, buffer_bytes: int) -> Iterator[Sequence[Batch]]:
        """Yield sequences of batches; a sequence is run in order by one worker."""
        batches = self._work.batches([sink.is_memory for sink in self._sinks], buffer_bytes)
        ranges: dict[int, list[tuple[int, int]]] = {}
        for batch in batches:
            self._pending[batch.dst_file] += 1
            if batch.kind == "hand over":
                ranges.setdefault(batch.dst_file, []).append((batch.low, batch.high))
        for file, copied in ranges.items():
            self._sinks[file].expect_copies(copied)
        for file, sink in enumerate(self._sinks):
            if not self._pending[file]:
                sink.finish()
        for file, group in itertools.groupby(batches, key=lambda batch: batch.dst_file):
            if self._sinks[file].is_sequential:
                yield tuple(group)
            else:
                yield from ((batch,) for batch in group)

    # Doing it

    def copy(self, batch: Batch, buffer: Bytes, other: Bytes) -> None:
        """Do one batch with two buffers."""
        match batch.kind:
            case "hand over":
                nbytes = self._hand_over(batch)
            case "write":
                nbytes = self._write(batch.rows, buffer)
            case "scatter":
                nbytes = self._scatter(batch.rows, buffer)
            case "weave":
                nbytes = self._weave(batch, buffer, other)
        with self._lock:
            self._pending[batch.dst_file] -= 1
            is_last = not self._pending[batch.dst_file]
            if self._on_progress is not None:
                self._on_progress(nbytes)
        if is_last:
            self._sinks[batch.dst_file].finish()

    def _hand_over(self, batch: Batch) -> int:
        copies = self._copies.take(batch.rows)
        source, nbytes = self._sources[int(self._src_file[batch.rows[0]])], batch.high - batch.low
        crc = self._sinks[batch.dst_file].copy_from(source, int(copies.src_offset[0]), batch.low, nbytes)
        self._record(batch.rows, check_part(self._plan, copies, crc))
        return nbytes

    def _write(self, rows: I64, buffer: Bytes) -> int:
        copies, sink = self._copies, self._sinks[int(self._dst_file[rows[0]])]
        at = int(copies.dst_offset[rows[0]])
        if len(rows) == 1:
            nbytes = int(copies.run_nbytes[rows[0]])
            crc = 0
            for step in range(0, nbytes, self._sizes.step_bytes):
                data = self._fetch(int(rows[0]), step, buffer[: min(self._sizes.step_bytes, nbytes - step)])
                crc = crc32c(data, crc)
                sink.write(at + step, data)
            self._record(rows, [crc])
            return nbytes
        ends = np.cumsum(copies.run_nbytes[rows])
        begins = (ends - copies.run_nbytes[rows]).tolist()
        joined = np.append(np.diff(copies.src_offset[rows]) == copies.run_nbytes[rows][:-1], False)
        joined[:-1] &= np.diff(self._src_file[rows]) == 0
        first = 0
        for last in np.flatnonzero(~joined).tolist():
            out = buffer[begins[first] : ends[last]]
            data = self._fetch(int(rows[first]), 0, out)
            if data is not out:
                out[:] = data
            first = last + 1
        self._record(rows, [crc32c(buffer[begin:end]) for begin, end in zip(begins, ends.tolist(), strict=True)])
        sink.write(at, buffer[: ends[-1]])
        return int(ends[-1])

    def _scatter(self, rows: I64, buffer: Bytes) -> int:
        copies = self._copies
        low = int(copies.src_offset[rows[0]])
        nbytes = copies.run_nbytes[rows].tolist()
        fetched = None
        if len(rows) > 1:
            last = int(rows[-1])
            fetched = self._fetch(
                int(rows[0]), 0, buffer[: int(copies.src_offset[last] + copies.run_nbytes[last]) - low]
            )
        crcs = []
        for row, size in zip(rows.tolist(), nbytes, strict=True):
            out = self._sinks[int(self._dst_file[row])].memory(int(copies.dst_offset[row]), size)
            crc = 0
            for step in range(0, size, self._sizes.step_bytes):
                part = out[step : step + self._sizes.step_bytes]
                if fetched is None:
                    data = self._fetch(row, step, part)
                else:
                    begin = int(copies.src_offset[row]) - low + step
                    data = fetched[begin : begin + len(part)]
                crc = crc32c(data, crc)
                if data is not part:
                    part[:] = data
            crcs.append(crc)
        self._record(rows, crcs)
        return sum(nbytes)

    def _weave(self, batch: Batch, buffer: Bytes, other: Bytes) -> int:
        sink, nbytes = self._sinks[batch.dst_file], batch.high - batch.low
        window = sink.memory(batch.low, nbytes) if sink.is_memory else buffer[:nbytes]
        for row in batch.rows.tolist():
            for first, last, skip, length in self._runs_within(row, batch.low, batch.high):
                self._weave_runs(row, range(first, last), slice(skip, skip + length), window, batch.low, other)
        chunk = int(self._copies.dst_chunk[batch.rows[0]])
        crc = crc32c(window)
        with self._lock:
            self._woven[1].append((chunk, batch.low - int(self._dst_chunk_at[chunk]), nbytes, crc))
        if not sink.is_memory:
            sink.write(batch.low, window)
        return nbytes

    def _runs_within(self, row: int, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first run, stop run, bytes skipped of each, bytes of each) of a copy inside a window."""
        copies = self._copies
        run, count = int(copies.run_nbytes[row]), int(copies.count[row])
        at, stride = int(copies.dst_offset[row]), max(int(copies.dst_stride[row]), 1)
        if count == 1:
            begin, end = max(low, at), min(high, at + run)
            if begin < end:
                yield 0, 1, begin - at, end - begin
            return
        first = max(-(-(low - at) // stride), 0)  # the first run that begins inside
        if first > 0 and first - 1 < count and at + (first - 1) * stride + run > low:
            skip = low - (at + (first - 1) * stride)
            yield first - 1, first, skip, min(run, high - low + skip) - skip
        stop = min(max((high - run - at) // stride + 1, first), count)  # runs before it end inside
        if first < stop:
            yield first, stop, 0, run
        if stop < count and low <= at + stop * stride < high:
            yield stop, stop + 1, 0, high - (at + stop * stride)

    def _weave_runs(self, row: int, runs: range, part: slice, window: Bytes, low: int, other: Bytes) -> None:
        """Copy the bytes `part` of each of `runs` of a strided copy into the window."""
        copies = self._copies
        run, length = int(copies.run_nbytes[row]), part.stop - part.start
        src_stride, dst_stride = int(copies.src_stride[row]), int(copies.dst_stride[row])
        is_dense = len(runs) == 1 or (src_stride == run and length == run)
        at_once = max(1, (len(other) - length) // max(src_stride, 1) + 1) if len(runs) > 1 else 1
        for first in range(runs.start, runs.stop, at_once):
            number = min(at_once, runs.stop - first)
            skip = first * src_stride + part.start
            stretch = (number - 1) * src_stride + length
            data = self._fetch(row, skip, other[:stretch])
            out = window[int(copies.dst_offset[row]) + first * dst_stride + part.start - low :]
            _as_runs(out, number, length, dst_stride)[:] = _as_runs(data, number, length, src_stride)
            self._record_source(row, skip, number * length, crc32c(data) if is_dense else None)

    def _fetch(self, row: int, skip: int, out: Bytes) -> Bytes:
        return self._sources[int(self._src_file[row])].fetch(int(self._copies.src_offset[row]) + skip, out)

    def _record(self, rows: I64, crcs: Sequence[int]) -> None:
        """Keep the checksums of whole copies, for both sides."""
        copies, crc = self._copies, np.array(crcs, np.int64)
        src, dst, nbytes = copies.src_chunk[rows], copies.dst_chunk[rows], copies.run_nbytes[rows]
        source = Parts(src, copies.src_offset[rows] - self._src_chunk_at[src], nbytes, crc)
        target = Parts(dst, copies.dst_offset[rows] - self._dst_chunk_at[dst], nbytes, crc)
        with self._lock:
            self._copied[0].append(source)
            self._copied[1].append(target)

    def _record_source(self, row: int, skip: int, nbytes: int, crc: int | None) -> None:
        chunk = int(self._copies.src_chunk[row])
        begin = int(self._copies.src_offset[row]) + skip - int(self._src_chunk_at[chunk])
        with self._lock:
            if crc is None:
                self.unchecked_nbytes += nbytes
                self.unchecked.add(chunk)
            else:
                self._woven[0].append((chunk, begin, nbytes, crc))


def _server_copies(
    plan: Plan, sources: Sequence[Source], sinks: Sequence[Sink]
) -> tuple[dict[int, PartRule], NDArray[np.bool_]]:
    """Give the rules of target files that a server can copy something to, and for which copies it can."""
    pairs, which = np.unique(plan.dst_file * len(sources) + plan.src_file, return_inverse=True)
    files = [divmod(pair, len(sources)) for pair in pairs.tolist()]
    rules = [sinks[dst].rule_of_copies(sources[src]) for dst, src in files]
    found = {dst: rule for (dst, _), rule in zip(files, rules, strict=True) if rule is not None}
    return found, np.array([rule is not None for rule in rules], bool)[which]


def _as_runs(data: Bytes, number: int, nbytes: int, stride: int) -> NDArray[np.void]:
    """View bytes as runs `stride` apart, each one element: NumPy copies those far faster than rows of bytes."""
    view: NDArray[np.void] = np.ndarray((number,), np.dtype((np.void, nbytes)), data.data, 0, (stride,))
    return view
