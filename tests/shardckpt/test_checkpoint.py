"""Opening a checkpoint: names at once, tensors by slices, only the bytes needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shardckpt
from tests.shardckpt.checkpoints import write_checkpoint

ARRAY = np.arange(7 * 5 * 4, dtype=np.float32).reshape(7, 5, 4)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[shardckpt.Checkpoint]:
    """A checkpoint of three ranks, cut in the middle of rows."""
    write_checkpoint(
        str(tmp_path / "a"),
        {"model.w": ARRAY, "model.scalar": np.array(3.0), "model.none": np.zeros((0, 4), np.float32)},
        world_size=3,
        objects={"model": {}, "lr": {"$tensor": "model.scalar"}},
        sections={"model": "module", "lr": "value"},
    )
    with shardckpt.open(tmp_path / "a") as checkpoint:
        yield checkpoint


def test_names_shapes_and_dtypes_are_there_without_reading(opened: shardckpt.Checkpoint) -> None:
    """The mapping gives tensors that know themselves."""
    assert opened.names == ("model.w", "model.scalar", "model.none")
    assert list(opened) == list(opened.names)
    assert len(opened) == 3
    stored = opened["model.w"]
    assert (stored.name, stored.dtype, stored.shape, stored.nbytes) == ("model.w", "F32", (7, 5, 4), 560)
    assert repr(stored) == "StoredTensor('model.w', F32, shape=(7, 5, 4))"
    assert (opened.step, opened.world_size, opened.sections["lr"]) == (7, 3, "value")


INDICES = [
    ...,
    3,
    -1,
    (2, 3, 1),
    slice(2, 5),
    (slice(None), 2),
    (..., slice(1, 3)),
    (slice(1, 6, 2), ..., 0),
    (slice(None, None, 3), slice(4, 1), 0),
    (),
    (1, ..., slice(-2, None)),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slices_read_what_numpy_would_give(opened: shardckpt.Checkpoint, index: object) -> None:
    """Integers, slices, steps, negative ends and ellipses, across the cuts between ranks."""
    found = opened["model.w"][index]  # type: ignore[index]
    expected = torch.from_numpy(ARRAY)[index]  # type: ignore[index]
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_scalars_and_empty_tensors_are_read(opened: shardckpt.Checkpoint) -> None:
    """A 0-d tensor keeps its shape; an empty one needs no chunk."""
    assert opened["model.scalar"][...].shape == ()
    assert opened["model.scalar"][...].item() == 3.0
    assert opened["model.none"][...].shape == (0, 4)


def test_objects_refer_to_tensors_unread(opened: shardckpt.Checkpoint) -> None:
    """Objects come as values; tensors in them as stored tensors."""
    assert isinstance(opened.objects["lr"], shardckpt.StoredTensor)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (7, "out of range for a dim of 7"),
        ((0, 0, 0, 0), "4 indices for a tensor of 3 dims"),
        (slice(None, None, -1), "flip the result"),
        ((..., ...), "one '...' only"),
        (1.5, "neither an integer nor a slice"),
        (True, "neither an integer nor a slice"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(opened: shardckpt.Checkpoint, index: object, text: str) -> None:
    """Bad indices are IndexErrors that say why."""
    with pytest.raises(IndexError, match=text):
        opened["model.w"][index]  # type: ignore[index]


def test_an_unknown_name_is_a_key_error(opened: shardckpt.Checkpoint) -> None:
    """The error lists names that are there."""
    with pytest.raises(KeyError, match=r"no tensor named 'nope'.*model\.w"):
        opened["nope"]
    assert "nope" not in opened


def test_opening_and_listing_needs_no_torch(tmp_path: Path) -> None:
    """Names, shapes and objects are there before torch is imported."""
    write_checkpoint(str(tmp_path / "a"), {"model.w": ARRAY})
    code = (
        "import sys, shardckpt\n"
        f"c = shardckpt.open({str(tmp_path / 'a')!r})\n"
        "assert c['model.w'].shape == (7, 5, 4) and c.objects == {}\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
