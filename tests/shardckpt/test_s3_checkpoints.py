"""Tests of the whole way on a real S3 server: training state, the offline commands, many checkpoints of a run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import shardckpt
from shardckpt.storage import open_store
from tests.s3_server import S3Root, S3Server
from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import run, tree
from tests.shardckpt.models import adamw, tied, train

_RANDOM = np.random.default_rng(6)
WEIGHTS = {
    "embed.weight": _RANDOM.standard_normal((3000, 900)).astype(np.float32),
    "layer.weight": _RANDOM.standard_normal((17, 5)).astype(np.float16),
    "layer.bias": np.arange(3, dtype=np.int64),
    "scale": np.array(2.5, np.float64),
}


@pytest.fixture
def _nothing_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Hold after the test that nothing was put in the working folder or among temporary files."""
    for name in ("cwd", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def options_of(root: S3Root) -> list[str]:
    """Give the options of a place as arguments."""
    return [f"--storage-option={name}={value}" for name, value in root.options.items()]


def content(root: S3Root, path: str) -> dict[str, bytes]:
    """Give every object below a path."""
    store = open_store(f"{root.url}/{path}", root.options)
    return {name: store.get(name, max_nbytes=1 << 30) for name in store.list()}


def without_time(files: dict[str, bytes]) -> dict[str, object]:
    """Give files with the manifest's time, and so its checksum, left out."""
    manifest = json.loads(files["manifest.json"])
    return {**files, "manifest.json": {k: v for k, v in manifest.items() if k not in ("created", "crc32c")}}


@pytest.mark.usefixtures("_nothing_local")
def test_the_commands_write_the_same_bytes_as_locally(
    s3_root: S3Root, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Import, reshard, verify, inspect, consolidate and export: from S3 to S3, without a local copy."""
    local, options = tmp_path_factory.mktemp("local"), options_of(s3_root)
    folder = local / "hf"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    for path in folder.iterdir():
        open_store(f"{s3_root.url}/hf", s3_root.options).put(path.name, path.read_bytes())
    for root, extra in ((str(local), []), (s3_root.url, options)):
        run("import", f"{root}/hf", f"{root}/four", "--ranks", 4, *extra)
        run("reshard", f"{root}/four", f"{root}/three", "--from", 4, "--to", 3, *extra)
        assert "world size    3" in run("inspect", f"{root}/three", *extra).stdout
        run("verify", f"{root}/three", *extra)
        run("consolidate", f"{root}/three", f"{root}/all/model.safetensors", *extra)
        run("export", f"{root}/three", f"{root}/hf-again", "--like", f"{root}/hf", "--max-shard-size", "9MB", *extra)
    for path in ("four", "three"):
        assert without_time(content(s3_root, path)) == without_time(tree(local / path))
    for path in ("all", "hf-again"):
        assert content(s3_root, path) == tree(local / path)
    assert s3_server.uploads(s3_root.prefix) == []


@pytest.mark.usefixtures("_nothing_local")
def test_damage_on_s3_is_named_by_verify(s3_root: S3Root) -> None:
    """A flipped bit in an object is found, and the answer is no."""
    store = open_store(s3_root.url, s3_root.options)
    write_checkpoint(store, {"model.x": np.arange(1000.0), "model.y": np.arange(5)})
    path = "shard-00001-of-00002.safetensors"
    data = bytearray(store.get(path, max_nbytes=1 << 20))
    data[-3] ^= 16
    store.put(path, bytes(data))
    assert path in run("verify", s3_root.url, *options_of(s3_root), exit_code=3).output


@pytest.mark.usefixtures("_nothing_local")
def test_training_state_comes_back_from_s3(s3_root: S3Root) -> None:
    """Model, optimizer and counters, of a run that keeps its two newest checkpoints; a background save too."""
    model = tied(1)
    optimizer = adamw(model)
    manager = shardckpt.Manager(s3_root.url, keep=2, storage_options=s3_root.options)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        manager.save(step, {"model": model, "optimizer": optimizer, "step": step})
    train(model, optimizer, range(3, 4))
    manager.save_async(3, {"model": model, "optimizer": optimizer, "step": 3})
    manager.wait()
    assert manager.steps() == [2, 3]
    other = tied(2)
    state = {"model": other, "optimizer": adamw(other), "step": 0}
    restored = shardckpt.Manager(s3_root.url, storage_options=s3_root.options).restore(state)
    assert restored is not None
    assert (restored.step, state["step"]) == (3, 3)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in model.state_dict().items())
    assert train(other, state["optimizer"], range(4, 6)) == train(model, optimizer, range(4, 6))
