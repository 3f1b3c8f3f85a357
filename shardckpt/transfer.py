"""Runs a plan: shares the byte budget and the work between threads, and tells what was done.

Copies are cut into batches that fit the budget (`batches.py`); workers take them in order and do them (`copier.py`).
Every byte that passes goes into a CRC-32C on the way: those of source chunks are compared with what was recorded, those
of target chunks are handed back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardckpt.batches import REMOTE_SIZES, Sizes
from shardckpt.copier import Copier
from shardckpt.endpoints import Sink, Source
from shardckpt.parts import Parts, compare, compose
from shardckpt.plan import Plan

I64 = NDArray[np.int64]

DEFAULT_BUDGET_BYTES = 128 << 20
NUM_LOCAL_WORKERS = 4
"""At most; no more than there are cores."""
NUM_REMOTE_WORKERS = 8
"""At most: one connection does not fill a network, and workers wait for it rather than compute."""
_LEAST_BUFFER_BYTES = 1 << 20


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
    copier = Copier(plan, sources, sinks, means.sizes, options.on_progress)
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


def _run(copier: Copier, num_workers: int, buffer_bytes: int) -> None:
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
