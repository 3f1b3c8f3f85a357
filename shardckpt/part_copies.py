"""Which copies of a plan a server can make by itself, as parts of the files that come about there.

Pure integer arithmetic on plans; refuses to know servers. What remains must fill allowed parts too: between two parts
that the server copies lie enough bytes for parts of their own, or none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardckpt.catalogue import NO_CRC
from shardckpt.checksum import combine_groups
from shardckpt.errors import CorruptError
from shardckpt.plan import Copies, Plan
from shardckpt.store import PartRule

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Handover:
    """The copies of a plan, divided between client and server, some cut in two or more for that.

    Attributes:
        rest: What passes through the client, in order.
        handed: What the server copies, in order.
        part: Number of the part that each of these is of, from 0, ascending. A part is one range of one source file,
            and one of one target file. # [handed]
    """

    rest: Copies
    handed: Copies
    part: I64


def hand_over(plan: Plan, rules: Mapping[int, PartRule], is_possible: NDArray[np.bool_]) -> Handover:
    """Find the parts that a server can copy.

    Neighbours in both files become one part if each is a whole chunk with a recorded checksum: that of the part then
    proves theirs. A range of a chunk is a part by itself, whose checksum the server tells.

    Args:
        plan: What to copy.
        rules: Target file -> rule, where a server can copy something.
        is_possible: Whether the server can read the source of each copy, and write its target. # [copies]
    """
    copies = plan.copies
    found = list(_found(plan, rules, is_possible & (copies.count == 1))) if rules else []
    if not found:
        return Handover(copies, copies.take(np.empty(0, np.int64)), np.empty(0, np.int64))
    rows = np.concatenate([rows for rows, _, _ in found])
    low, high = copies.dst_offset[rows], copies.dst_offset[rows] + copies.run_nbytes[rows]
    sizes = np.array([len(rows) for rows, _, _ in found])
    last = np.cumsum(sizes) - 1
    low[last - sizes + 1] = [begin for _, begin, _ in found]
    high[last] = [end for _, _, end in found]
    rest = _rest(copies, rows, low)
    order = np.lexsort((rest.dst_offset, plan.target.chunk_file[rest.dst_chunk]))
    return Handover(rest.take(order), _cut(copies, rows, low, high), np.repeat(np.arange(len(found)), sizes))


def check_part(plan: Plan, copies: Copies, crc: int) -> list[int]:
    """Give the checksums of the copies of one part, whose checksum as a whole the server has told.

    Raises:
        CorruptError: If it is not that of the chunks it is of.
    """
    if len(copies) == 1:
        return [crc]
    recorded = plan.source.chunk_crc[copies.src_chunk]
    expected = int(combine_groups(recorded.astype(np.uint32), copies.run_nbytes, np.zeros(1, np.int64))[0])
    if expected != crc:
        first = plan.source.describe(int(copies.src_chunk[0]))
        raise CorruptError(
            f"damaged: one of {len(copies)} chunks, the first of which is {first}: together they have checksum "
            f"{crc:08x}, recorded is {expected:08x}. `shardckpt verify` says which; restore the file from a copy, or "
            "use an earlier checkpoint."
        )
    return [int(one) for one in recorded]


def _found(plan: Plan, rules: Mapping[int, PartRule], is_possible: NDArray[np.bool_]) -> Iterator[tuple[I64, int, int]]:
    """Yield the parts in order: rows of copies, and where the part begins and ends in its target file."""
    begins, ends = plan.copies.dst_offset, plan.copies.dst_offset + plan.copies.run_nbytes
    free: dict[int, int] = {}  # target file -> where its last copied part ends
    for group in _groups(plan, rules, is_possible):
        rows = group
        file = int(plan.dst_file[rows[0]])
        rule = rules[file]
        while len(rows):
            begin = int(begins[rows[0]])
            missing = rule.missing_bytes(begin - free.get(file, 0))
            taken = rows if not missing else rows[:1]  # what is missing is cut off one chunk alone
            begin, end = begin + missing, int(ends[taken[-1]])
            if end - begin >= rule.least_copied_bytes:
                free[file] = end
                yield from _even(taken, begin, end, rule.most_copied_bytes)
            rows = rows[len(taken) :]


def _even(rows: I64, begin: int, end: int, most: int) -> Iterator[tuple[I64, int, int]]:
    """Cut a part of one copy evenly if it is larger than `most`."""
    number = -(-(end - begin) // most) if len(rows) == 1 else 1
    edges = [begin + (end - begin) * i // number for i in range(number + 1)]
    yield from ((rows, low, high) for low, high in itertools.pairwise(edges))


def _groups(plan: Plan, rules: Mapping[int, PartRule], is_possible: NDArray[np.bool_]) -> Iterator[I64]:
    """Yield the rows that may be a part, or several, each group in order."""
    copies, source = plan.copies, plan.source
    least, half = np.zeros(len(plan.target.files), np.int64), np.ones(len(plan.target.files), np.int64)
    for file, rule in rules.items():
        least[file], half[file] = rule.least_copied_bytes, rule.most_copied_bytes // 2
    least, half = least[plan.dst_file], half[plan.dst_file]
    nbytes = copies.run_nbytes
    is_whole = (nbytes == source.chunk_nbytes[copies.src_chunk]) & (source.chunk_crc[copies.src_chunk] != NO_CRC)
    can_join = is_possible & is_whole & (nbytes <= half)
    is_next = np.zeros(len(copies), bool)
    is_next[1:] = can_join[1:] & can_join[:-1] & (np.diff(plan.dst_file) == 0) & (np.diff(plan.src_file) == 0)
    is_next[1:] &= (np.diff(copies.dst_offset) == nbytes[:-1]) & (np.diff(copies.src_offset) == nbytes[:-1])
    first = np.maximum.accumulate(np.where(is_next, 0, np.arange(len(copies))))
    is_next[1:] &= np.diff((copies.dst_offset - copies.dst_offset[first]) // half) == 0  # no more than twice the half
    starts = np.flatnonzero(~is_next)
    stops = np.append(starts[1:], len(copies))
    is_enough = (np.add.reduceat(nbytes, starts) >= least[starts]) & is_possible[starts]
    return (np.arange(starts[number], stops[number]) for number in np.flatnonzero(is_enough).tolist())


def _cut(copies: Copies, rows: I64, low: I64, high: I64) -> Copies:
    """Give, of plain copies, the bytes `[low, high)` of their target file."""
    cut = copies.take(rows)
    skip = low - cut.dst_offset
    return replace(cut, src_offset=cut.src_offset + skip, dst_offset=low, run_nbytes=high - low)


def _rest(copies: Copies, rows: I64, low: I64) -> Copies:
    """Give what remains of all copies without those from `low` to the end of the copy, in each of `rows`."""
    untouched = np.ones(len(copies), bool)
    untouched[rows] = False
    rows, first = np.unique(rows, return_index=True)  # a row may be of several parts, the first of which comes first
    fronts = _cut(copies, rows, copies.dst_offset[rows], low[first])
    return Copies.concatenate([copies.take(untouched), fronts.take(fronts.run_nbytes > 0)])
