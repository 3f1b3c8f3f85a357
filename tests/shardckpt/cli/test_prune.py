"""`shardckpt prune`: old checkpoints go, the newest and everything foreign stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import error_of, run, run_json, tree


def _write(root: Path, step: int | None) -> Path:
    write_checkpoint(str(root), {"model.a": np.arange(50.0)}, step=step)
    return root


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Checkpoints of the steps 10 to 50, whose folders sort otherwise, and a note."""
    for step in (10, 20, 30, 40, 50):
        _write(tmp_path / "runs" / f"{'zyxwv'[step // 10 - 1]}-{step}", step)
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    return tmp_path / "runs"


def _steps(runs: Path) -> list[int]:
    return sorted(int(path.parent.name.rpartition("-")[2]) for path in runs.glob("*/manifest.json"))


def test_the_newest_by_step_and_every_nth_are_kept(runs: Path) -> None:
    """The step in the manifest counts, not the folder's name; a dry run foretells all and removes nothing."""
    before = tree(runs)
    planned = run_json("prune", runs, "--keep", 1, "--keep-every", 20, "--dry-run")
    assert tree(runs) == before
    done = run_json("prune", runs, "--keep", 1, "--keep-every", 20)
    assert _steps(runs) == [20, 40, 50]
    assert {**done, "is_dry_run": True} == planned
    assert done["freed_bytes"] == sum(len(data) for path, data in before.items() if path not in tree(runs))
    assert (runs / "notes.txt").read_text() == "mine"
    assert not (runs / "z-10").exists()


def test_files_of_others_in_a_doomed_folder_stay(runs: Path) -> None:
    """What no save wrote is not removed."""
    (runs / "z-10" / "config.json").write_text("{}")
    run("prune", runs, "--keep", 4)
    assert tree(runs / "z-10") == {"config.json": b"{}"}


def test_unfinished_saves_go_on_request_only(runs: Path) -> None:
    """Shards without a manifest, and remains in a checkpoint's folder."""
    (runs / "v-50" / "manifest.json").unlink()
    (runs / "w-40" / f".shard-00000-of-00002.safetensors.{'0' * 16}.tmp").write_bytes(b"half")
    run("prune", runs, "--keep", 9)
    assert (runs / "v-50").exists()
    done = run_json("prune", runs, "--unfinished")
    assert done["num_removed"] == 2
    assert not (runs / "v-50").exists()
    assert _steps(runs) == [10, 20, 30, 40]
    assert len(tree(runs / "w-40")) == 4
    run("verify", runs / "w-40")


def test_what_cannot_be_read_or_has_no_step_is_kept(runs: Path) -> None:
    """A damaged manifest does not count as the newest, and is not removed either."""
    (runs / "v-50" / "manifest.json").write_bytes(b"damaged")
    _write(runs / "final", None)
    result = run("prune", runs, "--keep", 1)
    assert "its manifest cannot be read" in result.stdout
    assert (runs / "v-50").exists()
    assert (runs / "final" / "manifest.json").exists()
    assert (runs / "w-40" / "manifest.json").exists()
    assert not (runs / "x-30").exists()


def test_wrong_roots_are_refused(runs: Path, tmp_path: Path) -> None:
    """A checkpoint itself, a folder without any, and a command that says nothing to do."""
    assert "is a checkpoint itself; name the folder that holds" in error_of("prune", runs / "v-50", "--keep", 1)
    (tmp_path / "empty").mkdir()
    assert "there are no checkpoints below" in error_of("prune", tmp_path / "empty", "--keep", 1)
    assert "Say what to remove" in run("prune", runs, exit_code=2).stderr
    assert run("prune", runs, "--keep", 0, exit_code=2)
    assert _steps(runs) == [10, 20, 30, 40, 50]
