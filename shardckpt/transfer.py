"""Runs a plan: the only place where bytes move and threads live.

Copies are cut into batches that fit the byte budget; workers take them in order. Every byte that passes goes into a
CRC-32C on the way: those of source chunks are compared with what was recorded, those of target chunks are handed back.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardckpt.checksum import crc32c
from shardckpt.endpoints import Bytes, Sink, Source
from shardckpt.part_copies import check_part, hand_over
from shardckpt.parts import Parts, Row, compare, compose
from shardckpt.plan import Copies, Plan
from shardckpt.store import PartRule

I64 = NDArray[np.int64]

DEFAULT_BUDGET_BYTES = 128 << 20
NUM_LOCAL_WORKERS = 4
"""At most; no more than there are cores."""
NUM_REMOTE_WORKERS = 8
"""At most: one connection does not fill a network, and workers wait for it rather than compute."""
_LEAST_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How copies are cut and put together, in bytes.

    Attributes:
        piece_bytes: Longer copies are cut, so that workers share them.
        step_bytes: A copy passes through a buffer of this size, which stays in the cache.
        batch_bytes: Small copies are put together up to this.
        window_bytes: As much of a chunk is put together at a time from strided copies.
        max_gap_bytes: As much is read in vain rather than reading twice.
    """

    piece_bytes: int = 32 << 20
    step_bytes: int = 1 << 20
    batch_bytes: int = 4 << 20
    window_bytes: int = 8 << 20
    max_gap_bytes: int = 64 << 10


REMOTE_SIZES = Sizes(8 << 20, step_bytes=8 << 20, batch_bytes=8 << 20, window_bytes=32 << 20, max_gap_bytes=1 << 20)
"""A round trip takes as long as the transfer of some MiB: fewer and larger requests."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How bytes are moved.

    Attributes:
        budget_bytes: Ceiling of the buffers held at a time.
        num_workers: Threads; None for as many as fit the ends and the budget.
        is_verified: False skips the comparison with recorded checksums.
        on_progress: Called with the bytes done since the last call, from one thread at a time.
        sizes: How copies are cut and put together; None for what fits the ends.
    """

    budget_bytes: int = DEFAULT_BUDGET_BYTES
    num_workers: int | None = None
    is_verified: bool = True
    on_progress: Callable[[int], None] | None = None
    sizes: Sizes | None = None


@dataclass(frozen=True)
class TransferReport:
    """What a transfer did.

    Attributes:
        nbytes: Bytes copied.
        target_crc: Checksum of every target chunk. # [target chunks]
        partial: Ranges of source chunks that were read only in part, and so could not be compared here.
        unchecked_nbytes: Bytes that were read in runs with gaps between them, and so have no checksum at all.
        unchecked: The source chunks that these bytes are of. # [n]
    """

    nbytes: int
    target_crc: I64
    partial: Parts
    unchecked_nbytes: int
    unchecked: I64


def transfer(
    plan: Plan, sources: Sequence[Source], sinks: Sequence[Sink], *, options: TransferOptions | None = None
) -> TransferReport:
    """Copy everything that `plan` says, and compare the checksums of the source chunks.

    Sinks are finished, not committed: the caller commits once it is content. On any failure all sinks are aborted.

    Args:
        plan: What to copy.
        sources: One a file of the source catalogue.
        sinks: One a file of the target catalogue.
        options: How; None for the defaults.

    Raises:
        CorruptError: If a source chunk's bytes are not those recorded; names tensor, region and file.
        StorageError: If reading or writing fails.
    """
    options = options or TransferOptions()
    means = _means(options, sources, sinks)
    copier = _Copier(plan, sources, sinks, means.sizes, options.on_progress)
    try:
        _run(copier, means.num_workers, means.buffer_bytes)
        read = copier.source_parts() if options.is_verified else Parts.of_rows([])
        partial = compare(plan.source, read)
    except BaseException:
        for sink in sinks:
            sink.abort()
        raise
    crcs = compose(copier.target_parts(), len(plan.target.chunk_nbytes))
    unchecked = np.array(sorted(copier.unchecked), np.int64)
    return TransferReport(plan.copies.nbytes, crcs, partial, copier.unchecked_nbytes, unchecked)


@dataclass(frozen=True, slots=True)
class _Means:
    """With what a transfer is done.

    Attributes:
        num_workers: Threads.
        buffer_bytes: Of each of a worker's two buffers.
        sizes: How copies are cut; a step fits a buffer.
    """

    num_workers: int
    buffer_bytes: int
    sizes: Sizes


def _means(options: TransferOptions, sources: Sequence[Source], sinks: Sequence[Sink]) -> _Means:
    """Share the budget between workers: each has two buffers and one part of a file; one more part is begun."""
    is_remote = any(source.is_remote for source in sources) or any(sink.is_remote for sink in sinks)
    sizes = options.sizes or (REMOTE_SIZES if is_remote else Sizes())
    part = max((sink.part_bytes for sink in sinks), default=0)
    least = min(sizes.step_bytes, _LEAST_BUFFER_BYTES)
    room = (options.budget_bytes - part) // (2 * least + part)
    usual = NUM_REMOTE_WORKERS if is_remote else min(NUM_LOCAL_WORKERS, os.cpu_count() or 1)
    workers = options.num_workers or max(1, min(usual, room))
    buffer = max((options.budget_bytes - (workers + 1) * part) // (2 * workers), least)
    buffer -= buffer % 64 if buffer > 64 else 0  # so that no element of any dtype is cut
    return _Means(workers, buffer, replace(sizes, step_bytes=min(sizes.step_bytes, buffer)))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Copies that one worker does in one go.

    Attributes:
        kind: "hand over": a part of the target file, which the server copies. "write": adjacent in the target file,
            written at once. "scatter": near each other in the source file, read at once into memory. "weave": the
            window `[low, high)` of a target chunk, put together from strided copies.
        rows: Indices of the copies.
    """

    kind: Literal["hand over", "write", "scatter", "weave"]
    dst_file: int
    rows: I64
    low: int = 0
    high: int = 0


def _run(copier: _Copier, num_workers: int, buffer_bytes: int) -> None:
    """Do all batches on `num_workers` threads, the caller's among them.

    Raises the first error when all have stopped.
    """
    jobs = copier.jobs(buffer_bytes)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        buffers = (np.empty(buffer_bytes, np.uint8), np.empty(buffer_bytes, np.uint8))
        try:
            while not errors:
                with lock:
                    batches = next(jobs, ())
                if not batches:
                    return
                for batch in batches:
                    if not errors:
                        copier.copy(batch, *buffers)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_workers - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        try:
            thread.join()
        except BaseException as error:  # an interrupt: the workers must stop before their sinks are aborted
            errors.append(error)
            thread.join()
    if errors:
        raise errors[0]


class _Copier:
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
        handed = hand_over(plan, *_server_copies(plan, sources, sinks))
        rest = _cut_long(handed.rest, sizes.piece_bytes)
        self._copies = copies = Copies.concatenate([rest, handed.handed])
        self._parts = _split(np.arange(len(rest), len(copies)), handed.part)
        self._src_file = plan.source.chunk_file[copies.src_chunk]
        self._dst_file = plan.target.chunk_file[copies.dst_chunk]
        self._src_chunk_at = plan.source.chunk_byte_offset
        self._dst_chunk_at = plan.target.chunk_byte_offset
        self._dst_chunk_nbytes = plan.target.chunk_nbytes
        self._pending = [0] * len(sinks)  # batches not yet done, by target file

    def source_parts(self) -> Parts:
        """Give the checksums of all that was read, but for runs with gaps."""
        return Parts.concatenate([*self._copied[0], Parts.of_rows(self._woven[0])])

    def target_parts(self) -> Parts:
        """Give the checksums of all that was written."""
        return Parts.concatenate([*self._copied[1], Parts.of_rows(self._woven[1])])

    # What is done together

    def jobs(self, buffer_bytes: int) -> Iterator[Sequence[_Batch]]:
        """Yield sequences of batches; a sequence is run in order by one worker."""
        batches = self._batches(buffer_bytes)
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

    def _batches(self, buffer_bytes: int) -> list[_Batch]:
        copies = self._copies
        is_strided = np.zeros(len(self._dst_chunk_at), bool)
        is_strided[copies.dst_chunk[copies.count > 1]] = True
        num_handed = sum(map(len, self._parts))
        rows = np.arange(len(copies) - num_handed)
        strided = is_strided[copies.dst_chunk[rows]]
        in_memory = np.array([sink.is_memory for sink in self._sinks], bool)[self._dst_file[rows]]
        limit = min(self._sizes.batch_bytes, buffer_bytes)
        batches = self._scatters(np.flatnonzero(~strided & in_memory), limit)
        batches += self._writes(np.flatnonzero(~strided & ~in_memory), limit)
        batches += self._weaves(np.flatnonzero(strided), min(self._sizes.window_bytes, buffer_bytes))
        batches += map(self._handover, self._parts)
        is_mixed = strided.any() or num_handed
        return sorted(batches, key=lambda batch: (batch.dst_file, batch.low)) if is_mixed else batches

    def _handover(self, rows: I64) -> _Batch:
        """Give the batch of a part that the server copies."""
        low, nbytes = int(self._copies.dst_offset[rows[0]]), int(self._copies.run_nbytes[rows].sum())
        return _Batch("hand over", int(self._dst_file[rows[0]]), rows, low, low + nbytes)

    def _writes(self, rows: I64, limit: int) -> list[_Batch]:
        """Put copies together that are adjacent in their target file."""
        copies = self._copies
        groups = _group(
            rows, self._dst_file[rows], copies.dst_offset[rows], copies.run_nbytes[rows], limit=limit, max_gap=0
        )
        return [
            _Batch("write", int(self._dst_file[group[0]]), group, low=int(copies.dst_offset[group[0]]))
            for group in groups
        ]

    def _scatters(self, rows: I64, limit: int) -> list[_Batch]:
        """Put copies together that are near each other in their source file."""
        copies = self._copies
        rows = rows[np.lexsort((copies.src_offset[rows], self._src_file[rows]))]
        at, size = copies.src_offset[rows], copies.run_nbytes[rows]
        groups = _group(rows, self._src_file[rows], at, size, limit=limit, max_gap=self._sizes.max_gap_bytes)
        return [_Batch("scatter", int(self._dst_file[group[0]]), group) for group in groups]

    def _weaves(self, rows: I64, window_bytes: int) -> list[_Batch]:
        """Cut target chunks that take strided copies into windows."""
        rows = rows[np.argsort(self._copies.dst_chunk[rows], kind="stable")]
        batches = []
        for group in _split(rows, self._copies.dst_chunk[rows]):
            chunk = int(self._copies.dst_chunk[group[0]])
            begin = int(self._dst_chunk_at[chunk])
            end = begin + int(self._dst_chunk_nbytes[chunk])
            file = int(self._dst_file[group[0]])
            batches += [
                _Batch("weave", file, group, low, min(low + window_bytes, end))
                for low in range(begin, end, window_bytes)
            ]
        return batches

    # Doing it

    def copy(self, batch: _Batch, buffer: Bytes, other: Bytes) -> None:
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

    def _hand_over(self, batch: _Batch) -> int:
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

    def _weave(self, batch: _Batch, buffer: Bytes, other: Bytes) -> int:
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


def _cut_long(copies: Copies, piece_bytes: int) -> Copies:
    """Cut plain copies of more than `piece_bytes`, so that workers share them."""
    times = np.where(copies.count == 1, -(-copies.run_nbytes // piece_bytes), 1)
    if not (times > 1).any():
        return copies
    rows = np.repeat(np.arange(len(copies)), times)
    skip = (np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)) * piece_bytes
    cut = copies.take(rows)
    is_plain = cut.count == 1
    return Copies(
        cut.src_chunk,
        cut.dst_chunk,
        cut.src_offset + skip,
        cut.dst_offset + skip,
        np.where(is_plain, np.minimum(cut.run_nbytes - skip, piece_bytes), cut.run_nbytes),
        cut.count,
        cut.src_stride,
        cut.dst_stride,
    )


def _split(rows: I64, keys: I64) -> list[I64]:
    """Split rows where the (sorted) key changes."""
    return np.split(rows, np.flatnonzero(np.diff(keys)) + 1) if len(rows) else []


def _group(rows: I64, file: I64, at: I64, nbytes: I64, *, limit: int, max_gap: int) -> list[I64]:
    """Group rows, sorted by file and offset, into stretches of at most `limit` bytes without a gap over `max_gap`."""
    if not len(rows):
        return []
    gap = at[1:] - (at[:-1] + nbytes[:-1])
    is_near = ((np.diff(file) == 0) & (gap >= 0) & (gap <= max_gap)).tolist()
    begins, ends = at.tolist(), (at + nbytes).tolist()
    cuts, first = [], 0
    for i, near in enumerate(is_near, start=1):
        if not near or ends[i] - begins[first] > limit:
            cuts.append(i)
            first = i
    return np.split(rows, cuts)
