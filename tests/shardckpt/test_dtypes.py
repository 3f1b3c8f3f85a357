"""Tests of element types."""

from __future__ import annotations

import pytest

from shardckpt.dtypes import ITEM_BYTES, item_bytes
from shardckpt.errors import UnsupportedError
from shardckpt.tensors import TORCH_DTYPES


def test_sizes_are_those_of_torch() -> None:
    """Every name that torch has a dtype for has that dtype's size, and torch 2.13 has nearly all."""
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == {
        name: ITEM_BYTES[name] for name in TORCH_DTYPES
    }
    assert set(ITEM_BYTES) == set(TORCH_DTYPES)


def test_an_unknown_dtype_is_refused_by_the_tensors_name() -> None:
    """The message names the tensor and says what to do."""
    with pytest.raises(UnsupportedError, match=r"tensor 'w' has dtype 'F4'.*Convert the tensor, or leave it out"):
        item_bytes("F4", fqn="w")
