"""Finding out what lies at a path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardckpt.errors import CheckpointNotFoundError, FormatError
from shardckpt.formats.origin import find_origin
from shardckpt.storage import open_store
from tests.shardckpt.checkpoints import write_checkpoint


def test_each_format_is_recognised(tmp_path: Path) -> None:
    """A checkpoint, a folder with weights, and a file of any name."""
    write_checkpoint(str(tmp_path / "a"), {"model.x": np.arange(3)})
    (tmp_path / "hf").mkdir()
    save_file({"x": np.arange(3)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "odd.weights").write_bytes((tmp_path / "hf" / "model.safetensors").read_bytes())
    found = [
        find_origin(str(tmp_path / name), open_store) for name in ("a", "hf", "hf/model.safetensors", "odd.weights")
    ]
    assert [origin.format for origin in found] == ["shardckpt", "safetensors", "safetensors", "safetensors"]
    assert [origin.catalogue.tensors[0].name for origin in found] == ["model.x", "x", "x", "x"]
    assert [origin.stored is None for origin in found] == [False, True, True, True]


def test_nothing_unfinished_and_foreign_are_told_apart(tmp_path: Path) -> None:
    """Each says what is there in place of a checkpoint."""
    with pytest.raises(CheckpointNotFoundError, match="nothing is there; check the path"):
        find_origin(str(tmp_path / "void"), open_store)
    write_checkpoint(str(tmp_path / "a"), {"model.x": np.arange(3)})
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match="an unfinished save"):
        find_origin(str(tmp_path / "a"), open_store)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointNotFoundError, match=r"it has 'notes\.txt' but no manifest\.json"):
        find_origin(str(tmp_path / "b"), open_store)
    with pytest.raises(FormatError, match="too few for a safetensors file"):
        find_origin(str(tmp_path / "b" / "notes.txt"), open_store)
    write_checkpoint(str(tmp_path / "runs" / "step-1"), {"model.x": np.arange(3)})
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint itself, but 'step-1'; name one of these"):
        find_origin(str(tmp_path / "runs"), open_store)
