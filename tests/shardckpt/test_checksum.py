"""Tests of CRC-32C and of putting checksums together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.checksum import combine, combine_groups, crc32c, shift

parts = st.lists(st.binary(max_size=40), min_size=1, max_size=6)


def bitwise_crc32c(data: bytes) -> int:
    """Compute CRC-32C bit by bit, from its definition."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def test_the_published_check_value_comes_out() -> None:
    """The check value of the CRC catalogue for this polynomial."""
    assert crc32c(b"123456789") == 0xE3069283


@given(st.binary(max_size=100))
def test_crc32c_is_what_the_definition_says(data: bytes) -> None:
    """The fast implementation agrees with the slow one, for bytes and for arrays."""
    assert crc32c(data) == bitwise_crc32c(data) == crc32c(np.frombuffer(data, np.uint8))


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_combine_equals_the_direct_checksum(first: bytes, second: bytes) -> None:
    """Two checksums give that of the joined bytes; so does continuing."""
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)
    assert crc32c(second, crc32c(first)) == crc32c(first + second)


@given(st.lists(parts, max_size=5))
def test_combine_groups_equals_the_direct_checksums(groups: list[list[bytes]]) -> None:
    """Every group of ranges gets the checksum of its joined bytes."""
    flat = [part for group in groups for part in group]
    starts = np.cumsum([0, *(len(group) for group in groups)])[:-1]
    found = combine_groups(
        np.array([crc32c(part) for part in flat], np.uint32), np.array([len(part) for part in flat], np.int64), starts
    )
    assert found.tolist() == [crc32c(b"".join(group)) for group in groups]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.integers(0, 2**40))
def test_shifts_add_up(register: int, one: int, other: int) -> None:
    """A shift by far more bytes than fit in memory is the same in one go and in two."""
    value = np.array([register], np.uint32)
    by = [np.array([n], np.int64) for n in (one, other, one + other)]
    assert shift(shift(value, by[0]), by[1]) == shift(value, by[2])


def test_a_long_range_of_zeros_is_combined_right() -> None:
    """The power tables are right for lengths with many bits set."""
    zeros = np.zeros(0b1011_0111_0101_1101_0111, np.uint8)
    assert combine(crc32c(b"front"), crc32c(zeros), len(zeros)) == crc32c(b"front" + zeros.tobytes())
