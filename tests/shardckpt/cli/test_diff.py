"""`shardckpt diff`: the answer as text, as JSON and as exit code."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import error_of, run, run_json


def _write(root: Path, last: float, world_size: int) -> Path:
    write_checkpoint(str(root), {"model.a": np.array([0.0, 1.0, last]), "model.b": np.arange(3)}, world_size=world_size)
    return root


def test_equal_checkpoints_give_exit_code_0(tmp_path: Path) -> None:
    """Whatever their number of ranks."""
    a, b = _write(tmp_path / "a", 2.0, 2), _write(tmp_path / "b", 2.0, 3)
    assert "same         yes" in run("diff", a, b).stdout
    assert run_json("diff", a, b) == {
        "a": str(a),
        "b": str(b),
        "is_same": True,
        "is_quick": False,
        "num_compared": 2,
        "nbytes": 96,
        "num_differences": 0,
        "differences": [],
    }


def test_a_difference_gives_exit_code_3(tmp_path: Path) -> None:
    """The row tells tensor, number of elements, distance and place."""
    a, b = _write(tmp_path / "a", 2.0, 2), _write(tmp_path / "b", 2.5, 3)
    lines = run("diff", a, b, exit_code=3).stdout.splitlines()
    assert lines[-1].split() == ["model.a", "values", "2.0", "2.5", "1", "0.5", "[2]"]
    assert run_json("diff", a, b, "--quick")["is_same"] is True
    assert run_json("diff", a, b, "--skip", "model.a")["is_same"] is True


def test_a_missing_side_is_an_error(tmp_path: Path) -> None:
    """Exit code 1 and the path."""
    a = _write(tmp_path / "a", 2.0, 2)
    assert f"{str(tmp_path / 'void')!r}: nothing is there" in error_of("diff", a, tmp_path / "void")
