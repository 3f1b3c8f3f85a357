"""Tests of what a server is left to copy: all bytes in their places, and parts that S3 allows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.catalogue import NO_CRC, Catalogue, File, Spans, Tensor
from shardckpt.errors import CorruptError
from shardckpt.part_copies import Handover, check_part, hand_over
from shardckpt.plan import Plan, plan
from shardckpt.store import PartRule
from tests.shardckpt.test_plan import execute, two_tilings
from tests.shardckpt.tilings import Arrays, Tiled, wrong_chunks

RULE = PartRule(3, part_bytes=4, least_copied_bytes=5, most_copied_bytes=20)


def handed_over(found: Plan, rule: PartRule = RULE) -> Handover:
    """Hand over all that can be, for every target file alike."""
    rules = dict.fromkeys(range(len(found.target.files)), rule)
    return hand_over(found, rules, np.ones(len(found.copies), bool))


def in_a_row(sizes: list[int], crcs: list[int] | None = None, header: int = 0) -> Plan:
    """Plan to copy a file of tensors of bytes, one chunk each, behind a header of another size than in the source."""
    ends = np.cumsum(sizes)
    number, zero = np.arange(len(sizes)), np.zeros(len(sizes), np.int64)
    tensors = tuple(Tensor(f"t{i}", "U8", (size,)) for i, size in enumerate(sizes))
    crc = np.array(crcs or zero, np.int64)
    source = Spans(number, zero, np.array(sizes), zero, ends - sizes, crc)
    target = Spans(number, zero, np.array(sizes), zero, ends - sizes + header, crc)
    total = int(ends[-1])
    return plan(
        Catalogue(tensors, (File("a", total, 0),), source),
        Catalogue(tensors, (File("b", total + header, header),), target),
    )


def parts_of(found: Handover) -> list[tuple[int, int, int]]:
    """Give target offset, bytes, and number of chunks of each part."""
    groups = [np.flatnonzero(found.part == number) for number in dict.fromkeys(found.part.tolist())]
    nbytes, begin = found.handed.run_nbytes, found.handed.dst_offset
    return [(int(begin[rows[0]]), int(nbytes[rows].sum()), len(rows)) for rows in groups]


@given(two_tilings, st.sampled_from([RULE, PartRule(1, 1, 1, 2), PartRule(2, 7, 2, 9)]))
def test_client_and_server_together_copy_every_byte(case: tuple[Arrays, Tiled, Tiled], rule: PartRule) -> None:
    """Whatever is handed over, each target byte is copied once and right, in parts that the rule allows."""
    whole, source, target = case
    found = plan(source.catalogue, target.catalogue)
    handed = handed_over(found, rule)
    sinks = [np.full_like(file, 0xEE) for file in target.files]
    for copies in (handed.rest, handed.handed):
        execute(Plan(found.source, found.target, copies), source.files, sinks)
    assert wrong_chunks(target.catalogue, whole, sinks) == []
    assert handed.rest.nbytes + handed.handed.nbytes == found.copies.nbytes
    of_handed = Plan(found.source, found.target, handed.handed)
    free = dict.fromkeys(range(len(target.files)), 0)
    for number in range(int(handed.part.max(initial=-1)) + 1):
        rows = np.flatnonzero(handed.part == number)
        assert len({*of_handed.src_file[rows].tolist()}) == len({*of_handed.dst_file[rows].tolist()}) == 1
        nbytes = handed.handed.run_nbytes[rows]
        for offset in (handed.handed.src_offset[rows], handed.handed.dst_offset[rows]):
            assert np.array_equal(offset[1:], (offset + nbytes)[:-1])
        assert rule.least_copied_bytes <= nbytes.sum() <= rule.most_copied_bytes
        file, begin = int(of_handed.dst_file[rows[0]]), int(handed.handed.dst_offset[rows[0]])
        assert rule.missing_bytes(begin - free[file]) == 0
        free[file] = begin + int(nbytes.sum())


def test_neighbours_are_copied_as_one_part() -> None:
    """Whole chunks that lie side by side in both files are put together up to the most that is allowed."""
    assert parts_of(handed_over(in_a_row([2, 2, 2, 7, 1, 1, 1, 9, 9]))) == [(0, 13, 4), (13, 12, 4), (25, 9, 1)]


def test_what_is_before_a_part_is_filled_up_from_its_first_chunk() -> None:
    """A header too small for a part takes bytes of the chunk behind it; the rest of that chunk is a part by itself."""
    found = handed_over(in_a_row([10, 6, 8], header=1))
    assert parts_of(found) == [(3, 8, 1), (11, 14, 2)]
    assert found.rest.run_nbytes.tolist() == [2]


def test_a_large_chunk_is_cut_evenly() -> None:
    """No part has more than the most that is allowed, none too little."""
    assert [nbytes for _, nbytes, _ in parts_of(handed_over(in_a_row([45])))] == [15, 15, 15]


def test_chunks_without_a_checksum_are_parts_by_themselves() -> None:
    """The checksum of several together would prove nothing of those."""
    assert parts_of(handed_over(in_a_row([6, 6, 6], [1, NO_CRC, 1]))) == [(0, 6, 1), (6, 6, 1), (12, 6, 1)]


def test_a_part_with_another_checksum_than_its_chunks_is_refused() -> None:
    """What the server has copied is compared with what was recorded; the message names the place and what to do."""
    found = in_a_row([6, 6])
    crcs = check_part(found, found.copies.take(np.arange(1)), 7)
    assert crcs == [7]
    with pytest.raises(CorruptError, match=r"one of 2 chunks.*'t0'.*shardckpt verify"):
        check_part(found, found.copies, 7)


@pytest.mark.parametrize("nbytes", range(30))
def test_missing_bytes_make_the_last_part_large_enough(nbytes: int) -> None:
    """With them, a stretch cut into usual parts has none that is too small."""
    total = nbytes + RULE.missing_bytes(nbytes)
    sizes = [high - low for low, high in itertools.pairwise([*range(0, total, RULE.part_bytes), total])]
    assert all(size >= RULE.least_bytes for size in sizes if total)
    assert total - nbytes < RULE.least_bytes
