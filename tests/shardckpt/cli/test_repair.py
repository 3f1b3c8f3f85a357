"""`shardckpt repair`: a lost manifest comes back as it was, and nothing is made up."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.shardckpt.checkpoints import read_checkpoint, write_checkpoint
from tests.shardckpt.cli.invocation import error_of, run, run_json, tree
from tests.shardckpt.cli.sources import FOREIGN, SHARDS, spoilt, without_time, write_ours
from tests.shardckpt.tools.meshes import write_on_mesh

TABLE = "chunks.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of three ranks."""
    return write_ours(tmp_path / "a")


def _same(one: dict[str, bytes], other: dict[str, bytes]) -> bool:
    """Tell whether two trees are equal but for the order of the chunks and the time of the commit."""
    return {n: d for n, d in one.items() if n.startswith("shard")} == {
        n: d for n, d in other.items() if n.startswith("shard")
    } and len(without_time(one["manifest.json"])) == len(without_time(other["manifest.json"]))


@pytest.mark.parametrize("lost", [["manifest.json"], ["manifest.json", TABLE], [TABLE]])
def test_what_is_lost_comes_back(root: Path, lost: list[str]) -> None:
    """Manifest, table or both: the checkpoint is whole again, its objects and layout too; a dry run changes nothing."""
    before = tree(root)
    inspected = run_json("inspect", root), run_json("inspect", root, "--objects")
    for name in lost:
        (root / name).unlink()
    broken = tree(root)
    planned = run_json("repair", root, "--dry-run")
    assert tree(root) == broken
    done = run_json("repair", root)
    assert {**done, "is_dry_run": True} == planned
    assert done["is_verified"] is (TABLE not in lost)
    run("verify", root)
    found = run_json("inspect", root), run_json("inspect", root, "--objects")
    for one, other in zip(found, inspected, strict=True):
        assert {**one, "created": ""} == {**other, "created": ""}
    assert _same(tree(root), before)
    assert run_json("reshard", root, root.parent / "b", "--to", 2)["num_files"] == 2


@pytest.mark.parametrize("kind", sorted(FOREIGN))
def test_a_damaged_manifest_is_replaced(root: Path, kind: str) -> None:
    """Whatever lies in its place."""
    (root / "manifest.json").write_bytes(FOREIGN[kind])
    assert "to be repaired: " in run("repair", root).stderr
    run("verify", root)


def test_boxes_come_back_too(tmp_path: Path) -> None:
    """Column shards and grids, whose regions are no spans."""
    arrays = {f"model.{rows}": np.arange(rows * 5.0).reshape(rows, 5) for rows in (1, 4, 7)}
    write_on_mesh(tmp_path / "a", arrays, [2, 3], [(0, 0), (1, 1)])
    (tmp_path / "a" / "manifest.json").unlink()
    assert run_json("repair", tmp_path / "a")["is_verified"] is True
    run("verify", tmp_path / "a")
    for name, array in read_checkpoint(str(tmp_path / "a")).items():
        np.testing.assert_array_equal(array, arrays[name])


def test_a_sound_checkpoint_is_left_alone(root: Path) -> None:
    """Nothing is read or written."""
    before = tree(root)
    assert run_json("repair", root)["is_needed"] is False
    assert tree(root) == before


def test_damaged_shards_are_not_blessed(root: Path) -> None:
    """While the table is left, every changed byte behind a header is found; the error names file and tensor."""
    (root / "manifest.json").unlink()
    header = int.from_bytes((root / SHARDS[1]).read_bytes()[:8], "little") + 8
    for way in spoilt(root / SHARDS[1]):
        if way.startswith("bit flipped") and int(way.rsplit(" ", 1)[1]) < header:
            continue  # the header is not in the table; a wrong one is found only if it contradicts the others
        message = error_of("repair", root, "-q")
        assert SHARDS[1] in message or "ranks '1' are missing" in message, way
        assert not (root / "manifest.json").exists(), way


def test_a_missing_rank_is_named(root: Path) -> None:
    """Without all files there is no checkpoint."""
    (root / "manifest.json").unlink()
    (root / SHARDS[2]).unlink()
    message = error_of("repair", root, "-q")
    assert "of a save by 3 ranks, 2 files are there; those of ranks '2' are missing" in message


def test_files_of_another_save_are_not_mixed_in(root: Path, tmp_path: Path) -> None:
    """A shard of other tensors, and two whole saves side by side, are refused."""
    other = tmp_path / "other"
    write_checkpoint(str(other), {"model.x": np.arange(30.0)}, world_size=3)
    (root / "manifest.json").unlink()
    sound = (root / SHARDS[1]).read_bytes()
    shutil.copy(other / SHARDS[1], root / SHARDS[1])
    assert "holds 'model.x', which rank 0 does not know; it is of another save" in error_of("repair", root, "-q")
    (root / SHARDS[1]).write_bytes(sound)
    for shard in SHARDS:
        shutil.copy(other / shard, root / shard.replace(".safetensors", "-0badcafe.safetensors"))
    assert "has the files of 2 whole saves" in error_of("repair", root, "-q")


def test_foreign_files_among_the_shards_are_told(root: Path) -> None:
    """A safetensors file with a shard's name that does not say where it belongs."""
    (root / "manifest.json").unlink()
    (root / SHARDS[1].replace(".safetensors", "-0badcafe.safetensors")).write_bytes((root / TABLE).read_bytes())
    assert "does not say where it belongs" in error_of("repair", root, "-q")


def test_nothing_to_repair_from_is_told(tmp_path: Path) -> None:
    """A path that is not there."""
    assert "there are no shard files" in error_of("repair", tmp_path / "void")
