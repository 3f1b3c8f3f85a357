"""Elements as numbers: the same as torch's, for every bit pattern."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardckpt.dtypes import ITEM_BYTES
from shardckpt.elements import FLOATS, TARGETS, decode, encode
from shardckpt.errors import UnsupportedError
from shardckpt.tensors import TORCH_DTYPES

NARROW = [dtype for dtype in TORCH_DTYPES if ITEM_BYTES[dtype] <= 2 and dtype != "BOOL"]


def _as_torch(data: np.ndarray, dtype: str) -> torch.Tensor:  # type: ignore[type-arg]  # any
    return torch.from_numpy(data.copy()).view(TORCH_DTYPES[dtype])


@pytest.mark.parametrize("dtype", NARROW)
def test_every_bit_pattern_of_narrow_dtypes_is_decoded_as_by_torch(dtype: str) -> None:
    """All 256 or 65,536 of them; NaN is NaN."""
    patterns = np.arange(1 << (8 * ITEM_BYTES[dtype]), dtype=f"<u{ITEM_BYTES[dtype]}").view(np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        found = decode(patterns, dtype).astype(np.float64)
    np.testing.assert_array_equal(found, _as_torch(patterns, dtype).to(torch.float64).numpy())


@pytest.mark.parametrize("dtype", [dtype for dtype in TORCH_DTYPES if dtype not in NARROW])
def test_wide_dtypes_are_decoded_as_by_torch(dtype: str) -> None:
    """Random bits of every dtype that NumPy has."""
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "BOOL" else 256, 8 * 500).astype(np.uint8)
    found = decode(bits, dtype)
    np.testing.assert_array_equal(found, _as_torch(bits, dtype).numpy())


@pytest.mark.parametrize("target", TARGETS)
def test_numbers_are_rounded_as_by_torch(target: str) -> None:
    """Random numbers, all half-way cases of the target, its limits, signed zero, infinities and NaN."""
    narrow = target in NARROW
    size = ITEM_BYTES[target]
    every = decode(np.arange(1 << (8 * size), dtype=f"<u{size}").view(np.uint8), target) if narrow else np.zeros(1)
    every = np.unique(every[np.isfinite(every)].astype(np.float64))
    halves = (every[1:] + every[:-1]) / 2
    random = np.random.default_rng(1).standard_normal(20000) * 10.0 ** np.random.default_rng(2).integers(-9, 9, 20000)
    edges = [every[-1] * f for f in (1.0, 1.01, 1.06, 1.07, 1.125, 1.2, 2)] + [0.0, -0.0, np.inf, -np.inf, np.nan]
    with np.errstate(over="ignore"):
        values = np.concatenate([every, halves, -halves, random, edges]).astype(np.float32)
    found = encode(values, target)
    expected = torch.from_numpy(values).to(TORCH_DTYPES[target])
    is_nan = torch.isnan(expected.to(torch.float64)).numpy()
    assert np.isnan(decode(found, target)[is_nan].astype(np.float64)).all()
    found_bits = found.reshape(-1, size)[~is_nan]
    np.testing.assert_array_equal(found_bits, expected.view(torch.uint8).numpy().reshape(-1, size)[~is_nan])


def test_other_targets_are_refused() -> None:
    """Integers and exotic floats are no targets of a conversion; the message names those that are."""
    with pytest.raises(UnsupportedError, match="choose one of F64, F32"):
        encode(np.zeros(1), "I32")


def test_floats_are_the_floating_dtypes() -> None:
    """The set agrees with torch."""
    assert {d for d, t in TORCH_DTYPES.items() if t.is_floating_point} == FLOATS
