"""CRC-32C: of bytes, and of ranges put together from the checksums of their parts.

`crc(a + b)` follows from `crc(a)`, `crc(b)` and `len(b)`: appending n zero bytes to a message multiplies its CRC
register by x^(8n) modulo the polynomial, which is linear over GF(2). `shift` is that product, done for whole arrays
at once with one byte-sliced table for each power of two of n (the idea of zlib's `crc32_combine`, vectorised).
"""

from __future__ import annotations

import functools

import google_crc32c
import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bit-reversed

U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]


def crc32c(data: NDArray[np.uint8] | bytes, value: int = 0) -> int:
    """Give the CRC-32C of `data`, continuing from `value`; releases the GIL."""
    return int(google_crc32c.extend(value, data))


def shift(values: U32, num_bytes: I64) -> U32:
    """Give the part that each of `values` has in the checksum of a message with `num_bytes` more bytes behind it.

    Args:
        values: Checksums of the front parts.
        num_bytes: How many bytes follow each; not negative.
    """
    result = values.astype(np.uint32, copy=True)
    remaining = num_bytes.astype(np.int64, copy=True)
    power = 0
    while remaining.any():
        odd = (remaining & 1).astype(bool)
        if odd.any():
            table, picked = _tables(power), result[odd]
            result[odd] = (
                table[0][picked & 255]
                ^ table[1][(picked >> 8) & 255]
                ^ table[2][(picked >> 16) & 255]
                ^ table[3][picked >> 24]
            )
        remaining >>= 1
        power += 1
    return result


def combine(first: int, second: int, second_nbytes: int) -> int:
    """Give the checksum of two adjacent ranges from theirs."""
    shifted = shift(np.array([first], np.uint32), np.array([second_nbytes], np.int64))
    return int(shifted[0]) ^ second


def combine_groups(crcs: U32, nbytes: I64, group_starts: I64) -> U32:
    """Give the checksum of each group of adjacent ranges.

    Args:
        crcs: Checksum of each range, groups one behind the other, ranges of a group in order.
        nbytes: Length of each range.
        group_starts: Index of each group's first range, ascending; no group is empty.

    Returns:
        One checksum a group.
    """
    if len(group_starts) == 0:
        return np.empty(0, np.uint32)
    ends = np.cumsum(nbytes)
    lasts = np.append(group_starts[1:], len(crcs)) - 1
    sizes = np.diff(np.append(group_starts, len(crcs)))
    behind = np.repeat(ends[lasts], sizes) - ends
    return np.bitwise_xor.reduceat(shift(crcs, behind), group_starts).astype(np.uint32)


@functools.cache
def _tables(power: int) -> U32:
    """Four 256-entry tables that multiply a register by x^(8 * 2**power), one for each of its bytes. # [4, 256]"""
    columns = _columns(power)
    table = np.zeros((4, 256), np.uint32)
    for byte in range(4):
        for bit in range(8):
            has_bit = (np.arange(256) >> bit) & 1 == 1
            table[byte][has_bit] ^= np.uint32(columns[8 * byte + bit])
    return table


@functools.cache
def _columns(power: int) -> tuple[int, ...]:
    """The matrix of that product, by columns: what each single bit of the register becomes."""
    if power == 0:
        return tuple(_one_zero_byte(1 << bit) for bit in range(32))
    half = _columns(power - 1)
    return tuple(_apply(half, column) for column in half)


def _one_zero_byte(register: int) -> int:
    for _ in range(8):
        register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
    return register


def _apply(columns: tuple[int, ...], register: int) -> int:
    result = 0
    for bit in range(32):
        if register >> bit & 1:
            result ^= columns[bit]
    return result
