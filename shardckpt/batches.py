"""What one worker does in one go: the copies of a plan, cut into batches that fit a buffer.

Integers only: it knows no file, no thread and no checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardckpt.part_copies import Handover
from shardckpt.plan import Copies, Plan

I64 = NDArray[np.int64]


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
class Batch:
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


@dataclass(frozen=True, slots=True)
class Work:
    """The copies of a plan, cut so that workers share them.

    Attributes:
        plan: What they are of.
        copies: Those that pass through here, then those that a server does.
        parts: Which copies make each part that a server copies.
        src_file: Of each copy. # [copies]
        dst_file: Of each copy. # [copies]
        sizes: How they were cut, and are put together.
    """

    plan: Plan
    copies: Copies
    parts: Sequence[I64]
    src_file: I64
    dst_file: I64
    sizes: Sizes

    @classmethod
    def of(cls, plan: Plan, handed: Handover, sizes: Sizes) -> Work:
        """Cut long plain copies, but for those that a server does."""
        rest = _cut_long(handed.rest, sizes.piece_bytes)
        copies = Copies.concatenate([rest, handed.handed])
        parts = _split(np.arange(len(rest), len(copies)), handed.part)
        files = plan.source.chunk_file[copies.src_chunk], plan.target.chunk_file[copies.dst_chunk]
        return cls(plan, copies, parts, *files, sizes)

    def batches(self, is_memory: Sequence[bool], buffer_bytes: int) -> list[Batch]:
        """Put all copies into batches, those of one target file one after the other.

        Args:
            is_memory: Of each target file, whether it is memory, which is filled in any order.
            buffer_bytes: What each of a worker's two buffers holds.
        """
        copies = self.copies
        is_strided = np.zeros(len(self.plan.target.chunk_byte_offset), bool)
        is_strided[copies.dst_chunk[copies.count > 1]] = True
        num_handed = sum(map(len, self.parts))
        rows = np.arange(len(copies) - num_handed)
        strided = is_strided[copies.dst_chunk[rows]]
        in_memory = np.array(is_memory, bool)[self.dst_file[rows]]
        limit = min(self.sizes.batch_bytes, buffer_bytes)
        batches = self._scatters(np.flatnonzero(~strided & in_memory), limit)
        batches += self._writes(np.flatnonzero(~strided & ~in_memory), limit)
        batches += self._weaves(np.flatnonzero(strided), min(self.sizes.window_bytes, buffer_bytes))
        batches += map(self._handover, self.parts)
        is_mixed = strided.any() or num_handed
        return sorted(batches, key=lambda batch: (batch.dst_file, batch.low)) if is_mixed else batches

    def _handover(self, rows: I64) -> Batch:
        """Give the batch of a part that the server copies."""
        low, nbytes = int(self.copies.dst_offset[rows[0]]), int(self.copies.run_nbytes[rows].sum())
        return Batch("hand over", int(self.dst_file[rows[0]]), rows, low, low + nbytes)

    def _writes(self, rows: I64, limit: int) -> list[Batch]:
        """Put copies together that are adjacent in their target file."""
        copies = self.copies
        groups = _group(
            rows, self.dst_file[rows], copies.dst_offset[rows], copies.run_nbytes[rows], limit=limit, max_gap=0
        )
        return [
            Batch("write", int(self.dst_file[group[0]]), group, low=int(copies.dst_offset[group[0]]))
            for group in groups
        ]

    def _scatters(self, rows: I64, limit: int) -> list[Batch]:
        """Put copies together that are near each other in their source file."""
        copies = self.copies
        rows = rows[np.lexsort((copies.src_offset[rows], self.src_file[rows]))]
        at, size = copies.src_offset[rows], copies.run_nbytes[rows]
        groups = _group(rows, self.src_file[rows], at, size, limit=limit, max_gap=self.sizes.max_gap_bytes)
        return [Batch("scatter", int(self.dst_file[group[0]]), group) for group in groups]

    def _weaves(self, rows: I64, window_bytes: int) -> list[Batch]:
        """Cut target chunks that take strided copies into windows."""
        rows = rows[np.argsort(self.copies.dst_chunk[rows], kind="stable")]
        batches = []
        for group in _split(rows, self.copies.dst_chunk[rows]):
            chunk = int(self.copies.dst_chunk[group[0]])
            begin = int(self.plan.target.chunk_byte_offset[chunk])
            end = begin + int(self.plan.target.chunk_nbytes[chunk])
            file = int(self.dst_file[group[0]])
            batches += [
                Batch("weave", file, group, low, min(low + window_bytes, end))
                for low in range(begin, end, window_bytes)
            ]
        return batches


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
