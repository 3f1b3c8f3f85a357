"""`shardckpt import`: folders and files in, checkpoints out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardckpt.committed import read_committed
from shardckpt.storage import open_store
from tests.shardckpt.checkpoints import read_checkpoint
from tests.shardckpt.cli.invocation import error_of, run, run_json, tree
from tests.shardckpt.formats.hf_folders import arrays, assert_same, write_sharded, write_single


@pytest.mark.parametrize("ranks", [1, 3, 101])
def test_every_tensor_comes_in_as_it_was(tmp_path: Path, ranks: int) -> None:
    """Names, dtypes, shapes and bits, as the section "model" of that many ranks; the source stays untouched."""
    tensors = arrays()
    source = write_single(tmp_path / "hf", tensors)
    before = tree(source)
    found = run_json("import", source, tmp_path / "out", "--ranks", ranks)
    assert (found["num_tensors"], found["num_files"], found["to_ranks"]) == (len(tensors), ranks, ranks)
    assert_same(read_checkpoint(str(tmp_path / "out")), {f"model.{name}": array for name, array in tensors.items()})
    manifest = read_committed(open_store(tmp_path / "out")).manifest
    assert (manifest.world_size, manifest.sections) == (ranks, {"model": "module"})
    assert tree(source) == before
    assert run("verify", tmp_path / "out")


def test_numbered_files_and_single_files_give_equal_checkpoints(tmp_path: Path) -> None:
    """Where the tensors lie in the source leaves no trace but their order; a file may be named by itself."""
    tensors = {name: array for name, array in arrays().items() if array.dtype == np.float32}
    names = sorted(tensors)
    write_single(tmp_path / "one", tensors)
    write_sharded(tmp_path / "many", {n: tensors[n] for n in names[:2]}, {n: tensors[n] for n in names[2:]})
    run("import", tmp_path / "one", tmp_path / "a", "--ranks", 4)
    run("import", tmp_path / "many", tmp_path / "b", "--ranks", 4)
    run("import", tmp_path / "one" / "model.safetensors", tmp_path / "c", "--ranks", 4)
    found = [read_checkpoint(str(tmp_path / name)) for name in "abc"]
    assert_same(found[0], found[1])
    shards = [{p: b for p, b in tree(tmp_path / name).items() if p.startswith("shard")} for name in "ac"]
    assert shards[0] == shards[1]


def test_odd_names_come_in(tmp_path: Path) -> None:
    """Names are data: with slashes, dots, percent signs, none at all, and of other scripts."""
    names = ["", "..", "a/b", "100%", "%2E", "重み", "x" * 300, "format", "a..b"]
    tensors = {name: np.full(3, number) for number, name in enumerate(names)}
    source = write_single(tmp_path / "hf", tensors)
    run("import", source, tmp_path / "out", "--ranks", 2)
    run("consolidate", tmp_path / "out", tmp_path / "back" / "model.safetensors")
    run("import", tmp_path / "back", tmp_path / "again", "--ranks", 2)
    assert_same(read_checkpoint(str(tmp_path / "out")), read_checkpoint(str(tmp_path / "again")))


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    """It prints the files, their bytes and the room."""
    source = write_single(tmp_path / "hf", arrays())
    found = run_json("import", source, tmp_path / "out", "--ranks", 2, "--dry-run")
    assert found["is_dry_run"] is True
    assert [row["path"] for row in found["files"]] == [f"shard-0000{rank}-of-00002.safetensors" for rank in range(2)]  # type: ignore[attr-defined]  # parsed JSON
    assert not (tmp_path / "out").exists()


def test_a_file_of_no_tensors_is_refused(tmp_path: Path) -> None:
    """There is nothing to make a checkpoint of."""
    source = write_single(tmp_path / "hf", {})
    assert "holds no tensors; check the path" in error_of("import", source, tmp_path / "out", "--ranks", 2)
    assert not (tmp_path / "out").exists()


def test_files_beside_the_model_are_told(tmp_path: Path) -> None:
    """They are left alone, and that is said on stderr."""
    source = write_single(tmp_path / "hf", arrays())
    (source / "optimizer.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    shown = run("import", source, tmp_path / "out", "--ranks", 2)
    assert "left alone, as they are not part of the model: 'optimizer.safetensors'" in shown.stderr
    assert "left alone" not in run("import", source, tmp_path / "out", "--ranks", 2, "--overwrite", "--quiet").stderr
