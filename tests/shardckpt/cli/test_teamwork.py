"""One command on several processes, as torchrun and srun start it: divided by files, committed once, failed as one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import run, tree
from tests.shardckpt.formats.hf_folders import arrays, write_single

LAUNCHERS = {"torchrun": ("RANK", "WORLD_SIZE"), "srun": ("SLURM_PROCID", "SLURM_NTASKS")}


def run_team(size: int, *arguments: object, launcher: str = "torchrun", exit_code: int = 0) -> list[tuple[str, str]]:
    """Run the command on so many processes; give what each printed on stdout and stderr."""
    rank_name, size_name = LAUNCHERS[launcher]
    children = []
    for rank in range(size):
        environment: Mapping[str, str] = os.environ | {rank_name: str(rank), size_name: str(size)}
        command = [sys.executable, "-m", "shardckpt", *map(str, arguments)]
        children.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    shown = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [exit_code] * size, shown
    assert not any("Traceback" in err for _, err in shown), shown
    return shown


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of three ranks."""
    state = {f"model.{name}": array for name, array in arrays().items()}
    write_checkpoint(str(tmp_path / "a"), state, world_size=3)
    return tmp_path / "a"


def shards(folder: Path) -> dict[str, bytes]:
    """Give all files but the manifest, which tells the time."""
    return {path: data for path, data in tree(folder).items() if path != "manifest.json"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_result_is_that_of_one_process(root: Path, tmp_path: Path, launcher: str) -> None:
    """Byte by byte, also where a process has no file to write; the first alone prints, and nothing is left over."""
    run("reshard", root, tmp_path / "one", "--to", 5)
    shown = run_team(3, "reshard", root, tmp_path / "team", "--to", 5, launcher=launcher)
    assert shards(tmp_path / "team") == shards(tmp_path / "one")
    assert "files        5" in shown[0][0]
    assert [out for out, _ in shown[1:]] == ["", ""]
    assert [err for _, err in shown] == ["", "", ""]
    run_team(3, "reshard", root, tmp_path / "team", "--to", 2, "--overwrite", launcher=launcher)
    run("verify", tmp_path / "team")
    assert len([path for path in shards(tmp_path / "team") if path.startswith("shard")]) == 2


def test_an_export_and_an_import_are_divided_too(root: Path, tmp_path: Path) -> None:
    """With conversions counted over all processes, and the index last."""
    like = write_single(tmp_path / "like", arrays())
    options = ("--max-shard-size", "300", "--like", like, "--dtype", "float16")
    run("export", root, tmp_path / "one", *options)
    shown = run_team(2, "export", root, tmp_path / "team", *options)
    assert tree(tmp_path / "team") == tree(tmp_path / "one")
    assert "converted            2" in shown[0][0]
    run("import", tmp_path / "one", tmp_path / "b", "--ranks", 4)
    run_team(2, "import", tmp_path / "team", tmp_path / "c", "--ranks", 4)
    assert shards(tmp_path / "b") == shards(tmp_path / "c")


def test_what_cannot_be_divided_is_done_by_the_first(root: Path, tmp_path: Path) -> None:
    """The others leave at once."""
    shown = run_team(2, "consolidate", root, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").exists()
    assert shown[1] == ("", "")
    assert run_team(2, "verify", root)[1] == ("", "")


def test_a_failure_of_one_is_that_of_all(root: Path, tmp_path: Path) -> None:
    """No file appears, and nothing of the meeting is left."""
    shard = root / "shard-00002-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    shown = run_team(3, "reshard", root, tmp_path / "out", "--to", 3, exit_code=1)
    assert all("damaged" in err for _, err in shown), shown
    assert tree(tmp_path / "out") == {}
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_text("mine")
    shown = run_team(2, "reshard", root, tmp_path / "taken", "--to", 3, exit_code=1)
    assert all("is not empty: it has 'x'" in err for _, err in shown), shown
    assert tree(tmp_path / "taken") == {"x": b"mine"}


def test_a_nonsense_environment_is_one_message(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to unset."""
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK is 5, which is not below WORLD_SIZE, 2; unset both" in run("inspect", root, exit_code=1).stderr
