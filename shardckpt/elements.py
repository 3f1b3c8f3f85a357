"""Elements of every dtype as NumPy numbers: to compare and to convert them without torch.

NumPy knows neither bfloat16 nor the 8-bit floats. Their bits are decoded here, by the definitions of the formats
(bfloat16: the upper half of a float32; the others: sign, exponent and mantissa as in IEEE 754, with the exceptions that
OCP's 8-bit floating point specification and its "FNUZ" variants state).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardckpt.errors import UnsupportedError

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.generic]

_NUMPY = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "I64": "<i8",
    "U64": "<u8",
    "F64": "<f8",
    "C64": "<c8",
}


@dataclass(frozen=True, slots=True)
class _Small:
    """An 8-bit float.

    Attributes:
        num_exponent_bits: Bits of the exponent.
        num_mantissa_bits: Bits of the mantissa.
        bias: Of the exponent.
        kind: "ieee" has infinities and NaNs at the largest exponent, "fn" only NaN where all bits are 1, "fnuz" only
            NaN where -0 would be.
    """

    num_exponent_bits: int
    num_mantissa_bits: int
    bias: int
    kind: str


_SMALL = {
    "F8_E4M3": _Small(4, 3, 7, "fn"),
    "F8_E5M2": _Small(5, 2, 15, "ieee"),
    "F8_E4M3FNUZ": _Small(4, 3, 8, "fnuz"),
    "F8_E5M2FNUZ": _Small(5, 2, 16, "fnuz"),
}

FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E8M0", *_SMALL})
"""Dtypes of floating-point numbers."""

TARGETS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Dtypes that `encode` gives."""


def decode(data: Bytes, dtype: str) -> Numbers:
    """Give the elements that `data` holds, exactly, in a NumPy dtype that can carry them.

    Args:
        data: Bytes of whole elements, little-endian.
        dtype: As in a safetensors header.

    Returns:
        A view where NumPy has the dtype, else float32.
    """
    if dtype in _NUMPY:
        return data.view(_NUMPY[dtype])
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    values: Numbers = _table(dtype)[data]
    return values


def encode(values: Numbers, dtype: str) -> Bytes:
    """Give floating-point numbers as bytes of `dtype`, rounded to nearest, ties to even.

    What is beyond the largest number becomes infinity, or the largest number where there is no infinity, as in torch.

    Raises:
        UnsupportedError: If `dtype` is not one of `TARGETS`.
    """
    if dtype not in TARGETS:
        raise UnsupportedError(f"cannot convert to {dtype!r}; choose one of {', '.join(TARGETS)}")
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in _NUMPY:
            return np.ascontiguousarray(values.astype(_NUMPY[dtype])).view(np.uint8)
        if dtype == "BF16":
            return _to_bfloat16(values.astype(np.float32)).view(np.uint8)
        return _to_small(values.astype(np.float32), dtype)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _to_small(values: NDArray[np.float32], dtype: str) -> Bytes:
    """Round to the nearest of at most 128 magnitudes: by search among the points half-way between them."""
    table = _table(dtype)[:128]
    is_finite = np.isfinite(table)
    largest = int(np.flatnonzero(is_finite)[-1])
    magnitudes = table[: largest + 1].astype(np.float64)
    halves = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = np.abs(values.astype(np.float64))
    code = np.searchsorted(halves, size, side="left")
    is_tie = (code < largest) & (size == halves[np.minimum(code, largest - 1)])
    code = np.where(is_tie & (code % 2 == 1), code + 1, code)
    step = magnitudes[-1] - magnitudes[-2]
    beyond = ~(size < magnitudes[-1] + step / 2) & ~((size == magnitudes[-1] + step / 2) & (largest % 2 == 0))
    has_infinity = _SMALL[dtype].kind == "ieee"
    code = np.where(beyond, largest + has_infinity, code)
    code = np.where(np.isnan(values), 0x7F, code)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


@functools.cache
def _table(dtype: str) -> NDArray[np.float32]:
    """Give the number of each of the 256 codes. # [256]"""
    code = np.arange(256)
    if dtype == "F8_E8M0":
        return np.where(code == 255, np.nan, np.ldexp(1.0, np.minimum(code, 254) - 127)).astype(np.float32)
    small = _SMALL[dtype]
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent = (code >> small.num_mantissa_bits) & ((1 << small.num_exponent_bits) - 1)
    mantissa = (code & ((1 << small.num_mantissa_bits) - 1)) / (1 << small.num_mantissa_bits)
    is_normal = exponent > 0
    value = sign * np.ldexp(mantissa + is_normal, np.where(is_normal, exponent, 1) - small.bias)
    is_highest = exponent == (1 << small.num_exponent_bits) - 1
    if small.kind == "ieee":
        value = np.where(is_highest, np.where(mantissa == 0, sign * np.inf, np.nan), value)
    elif small.kind == "fn":
        value = np.where(code & 0x7F == 0x7F, np.nan, value)
    else:
        value = np.where(code == 0x80, np.nan, value)
    return value.astype(np.float32)
