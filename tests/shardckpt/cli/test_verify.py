"""`shardckpt verify`: the answer as text, as JSON and as exit code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import error_of, run, run_json

SHARD = "shard-00001-of-00002.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small checkpoint of two ranks."""
    write_checkpoint(str(tmp_path / "a"), {"model.a": np.arange(64.0), "model.b": np.arange(7)})
    return tmp_path / "a"


def test_a_sound_checkpoint_passes(root: Path) -> None:
    """Exit code 0, and how much was read."""
    found = run_json("verify", root)
    size = sum(path.stat().st_size for path in root.glob("shard-*"))
    assert found == {
        "source": str(root),
        "format": "shardckpt",
        "is_good": True,
        "is_quick": False,
        "num_files": 2,
        "num_tensors": 2,
        "nbytes": size,
        "unverified_bytes": 0,
        "num_problems": 0,
        "problems": [],
    }
    assert "good              yes" in run("verify", root).stdout


def test_damage_is_told_by_file_and_tensor(root: Path) -> None:
    """Exit code 3; text and JSON name the file, the tensor and what is wrong."""
    data = bytearray((root / SHARD).read_bytes())
    data[-1] ^= 1
    (root / SHARD).write_bytes(data)
    text = run("verify", root, exit_code=3).stdout
    assert f"damaged: {SHARD}: the bytes of 1 chunks are not those that were saved" in text
    (problem,) = run_json("verify", root, exit_code=3)["problems"]  # type: ignore[misc]
    assert problem["path"] == SHARD
    assert len(problem["tensors"]) == 1


def test_quick_reads_no_data(root: Path) -> None:
    """`--quick` sees sizes only: a flipped bit passes, a missing byte does not."""
    data = bytearray((root / SHARD).read_bytes())
    data[-1] ^= 1
    (root / SHARD).write_bytes(data)
    assert run_json("verify", root, "--quick")["nbytes"] == 0
    (root / SHARD).write_bytes(data[:-1])
    assert "truncated" in run("verify", root, "--quick", exit_code=3).stdout


def test_foreign_files_are_mentioned(root: Path) -> None:
    """On stderr, unless quiet; they make no difference to the answer."""
    (root / "notes.txt").write_text("mine")
    assert run("verify", root).stderr == "not part of the checkpoint: 'notes.txt'\n"
    assert run("verify", root, "-q").stderr == ""


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    """Exit code 1: there is no answer."""
    assert "nothing is there; check the path" in error_of("verify", tmp_path / "void")
