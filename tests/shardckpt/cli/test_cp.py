"""`shardckpt cp`: byte-identical copies between stores, and nothing of a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardckpt.storage import open_store
from tests.shardckpt.cli.invocation import error_of, run, run_json, tree
from tests.shardckpt.cli.sources import SHARDS, spoilt, write_ours


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of three ranks."""
    return write_ours(tmp_path / "a")


def test_the_copy_is_the_original_to_the_byte(source: Path, tmp_path: Path) -> None:
    """All files, manifest and chunk table too; it is verified on the way and, on request, read back."""
    found = run_json("cp", source, tmp_path / "b", "--read-back")
    assert tree(tmp_path / "b") == tree(source)
    nbytes = sum((source / shard).stat().st_size for shard in SHARDS)
    assert {**found, "seconds": 0} == {
        "source": str(source),
        "destination": str(tmp_path / "b"),
        "is_dry_run": False,
        "num_files": 3,
        "nbytes": nbytes,
        "is_read_back": True,
        "is_good": True,
        "seconds": 0,
    }


def test_between_stores_of_any_kind(source: Path, tmp_path: Path) -> None:
    """To a store that is written front to back, and from there back to disk."""
    run("cp", source, "memory://cp/a")
    run("cp", "memory://cp/a", tmp_path / "b", "--budget", "1MiB", "--workers", 3)
    assert tree(tmp_path / "b") == tree(source)
    for path in open_store("memory://cp").list():
        open_store("memory://cp").delete(path)


def test_over_an_older_checkpoint_the_copy_takes_new_names(source: Path, tmp_path: Path) -> None:
    """Refused at first; with --overwrite the state is the source's and nothing of the old one stays."""
    old = write_ours(tmp_path / "b")
    before = tree(old)
    assert "holds a checkpoint already; choose another destination" in error_of("cp", source, old)
    assert tree(old) == before
    run("cp", source, old, "--overwrite", "--read-back")
    after = tree(old)
    assert len(after) == len(before)
    assert not set(SHARDS) & set(after)
    assert sorted(data for path, data in after.items() if path.startswith("shard")) == sorted(
        data for path, data in before.items() if path.startswith("shard")
    )
    assert run_json("diff", source, old)["is_same"] is True


def test_a_dry_run_copies_nothing(source: Path, tmp_path: Path) -> None:
    """It lists the files and their bytes."""
    planned = run_json("cp", source, tmp_path / "b", "--dry-run")
    assert not (tmp_path / "b").exists()
    assert planned["files"] == [{"path": shard, "nbytes": (source / shard).stat().st_size} for shard in SHARDS]


@pytest.mark.parametrize("file", ["manifest.json", "chunks.safetensors", SHARDS[0], SHARDS[1]])
def test_no_damage_is_copied(source: Path, tmp_path: Path, file: str) -> None:
    """Whatever was changed, anywhere, headers included: an error that names the file, and an empty destination."""
    for way in spoilt(source / file):
        if way.startswith("replaced") and file.startswith("shard"):
            continue  # of another size, as those that are truncated
        message = error_of("cp", source, tmp_path / "b")
        assert file in message or (file == "manifest.json" and "unfinished save" in message), way
        assert not (tmp_path / "b").exists() or tree(tmp_path / "b") == {}, way


def test_an_unfinished_copy_is_no_checkpoint_and_is_done_again(source: Path, tmp_path: Path) -> None:
    """Files without a manifest, as a kill leaves them, are removed, and that is told."""
    run("cp", source, tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    result = run("cp", source, tmp_path / "b")
    assert "started clean: removed 4 files" in result.stderr
    assert tree(tmp_path / "b") == tree(source)
