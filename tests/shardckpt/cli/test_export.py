"""`shardckpt export`: Hugging Face folders, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import error_of, run, run_json, tree
from tests.shardckpt.formats.hf_folders import arrays, assert_same, read_weights, write_sharded, write_single

Arrays = dict[str, NDArray[np.generic]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of a model and a bit of optimizer state."""
    state = {f"model.{name}": array for name, array in arrays().items()} | {"optim.step": np.array(3)}
    write_checkpoint(
        str(tmp_path / "a"),
        state,
        world_size=3,
        sections={"model": "module", "optim": "optimizer"},
        objects={"model": {}, "optim": {}},
    )
    return tmp_path / "a"


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """A folder of the same model with other weights, and all that lies about in such folders."""
    folder = write_single(tmp_path / "like", arrays(seed=1))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"mean": true}')
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock.json").write_text("{}")
    return folder


def test_an_export_of_an_import_is_identical(tmp_path: Path) -> None:
    """Every tensor to the bit, under its name; the files beside the weights to the byte."""
    source = write_single(tmp_path / "hf", arrays())
    run("import", source, tmp_path / "a", "--ranks", 5)
    run("reshard", tmp_path / "a", tmp_path / "b", "--to", 7)
    run("export", tmp_path / "b", tmp_path / "out", "--to", "hf", "--like", source)
    assert_same(read_weights(tmp_path / "out"), arrays())
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_the_folder_holds_weights_and_companions_alone(root: Path, like: Path, tmp_path: Path) -> None:
    """Config, tokenizer and subfolders go along; other weights and hidden files do not; nothing else is touched."""
    before = tree(root), tree(like)
    found = run_json("export", root, tmp_path / "out", "--like", like)
    assert set(tree(tmp_path / "out")) == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "1_Pooling/config.json",
    }
    assert found["companions"] == ["1_Pooling/config.json", "config.json", "tokenizer.json"]
    assert_same(read_weights(tmp_path / "out"), arrays())
    assert (tree(root), tree(like)) == before


def test_large_models_are_split_with_an_index(root: Path, tmp_path: Path) -> None:
    """By bytes; the index names each tensor's file and the size of all."""
    run("export", root, tmp_path / "out", "--max-shard-size", "300")
    found = tree(tmp_path / "out")
    index = json.loads(found.pop("model.safetensors.index.json"))
    assert set(index["weight_map"].values()) == set(found)
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in arrays().values())}
    assert_same(read_weights(tmp_path / "out"), arrays())
    run("import", tmp_path / "out", tmp_path / "again", "--ranks", 2)


def test_a_config_alone_can_go_along(root: Path, tmp_path: Path) -> None:
    """Under its standard name, whatever it is called."""
    (tmp_path / "tiny.json").write_text('{"model_type": "tiny"}')
    run("export", root, tmp_path / "out", "--like", tmp_path / "tiny.json")
    assert set(tree(tmp_path / "out")) == {"model.safetensors", "config.json"}
    assert "there is no file" in error_of("export", root, tmp_path / "no", "--like", tmp_path / "none.json")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("stated", "expected"),
    [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16"), (None, None)],
)
def test_the_config_says_a_dtype_that_the_weights_have(
    root: Path, tmp_path: Path, stated: str | None, expected: str | None
) -> None:
    """Otherwise loading would cast the weights; what is right or unsaid stays as it is."""
    config = json.dumps({"torch_dtype": stated, "dtype": stated} if stated else {"a": 1})
    (tmp_path / "config.json").write_text(config)
    run("export", root, tmp_path / "out", "--like", tmp_path / "config.json")
    text = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(text).get("dtype") == json.loads(text).get("torch_dtype") == expected
    if stated == expected:
        assert text == config


def test_other_models_are_refused_by_name(root: Path, like: Path, tmp_path: Path) -> None:
    """Missing, unexpected and reshaped tensors are all told."""
    tensors: Arrays = arrays() | {"extra": np.ones(2), "scale": np.ones(3, np.float32)}
    del tensors["layers.10.weight"]
    write_single(like, tensors)
    text = error_of("export", root, tmp_path / "out", "--like", like)
    assert "missing 'extra'" in text
    assert "unexpected 'layers.10.weight'" in text
    assert "of another shape 'scale () instead of (3,)'" in text
    assert "only its config.json" in text
    assert not (tmp_path / "out").exists()


def test_a_part_of_a_model_is_refused(root: Path, like: Path, tmp_path: Path) -> None:
    """An export that lacks tensors of the model would load with fresh ones in their place."""
    text = error_of("export", root, tmp_path / "out", "--like", like, "--skip", "model.scale")
    assert "missing 'scale'" in text


@pytest.mark.parametrize("kept", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")])
def test_tied_tensors_get_the_names_that_the_model_has(tmp_path: Path, kept: tuple[str, ...]) -> None:
    """Once or twice, under whichever name the other folder has."""
    tensor = np.ones((4, 2), np.float32)
    write_checkpoint(
        str(tmp_path / "a"), {"model.embed.weight": tensor}, aliases={"model.embed.weight": ("model.head.weight",)}
    )
    like = write_single(tmp_path / "like", dict.fromkeys(kept, tensor))
    run("export", tmp_path / "a", tmp_path / "out", "--like", like)
    assert_same(read_weights(tmp_path / "out"), dict.fromkeys(kept, tensor))


def test_a_folder_whose_weights_are_not_there_still_gives_its_files(root: Path, like: Path, tmp_path: Path) -> None:
    """As after a clone without large files: names are not checked, and -v says why."""
    (like / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    shown = run("export", root, tmp_path / "out", "--like", like, "-v")
    assert "names and shapes are not checked" in shown.stderr
    assert "tokenizer.json" in tree(tmp_path / "out")


def test_a_taken_destination_is_refused(root: Path, like: Path, tmp_path: Path) -> None:
    """Other files and other weights stay as they are; files that would be written just so do not count."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "is not empty: it has 'notes.txt'; choose another destination" in error_of("export", root, out)
    (out / "notes.txt").unlink()
    (out / "pytorch_model.bin").write_bytes(b"PK")
    for more in ((), ("--overwrite",)):
        text = error_of("export", root, out, *more)
        assert "has other weights: 'pytorch_model.bin'" in text
        assert "or remove them" in text
    assert tree(out) == {"pytorch_model.bin": b"PK"}
    (out / "pytorch_model.bin").unlink()
    (out / "tokenizer.json").write_bytes((like / "tokenizer.json").read_bytes())
    run("export", root, out, "--like", like)


def test_overwriting_leaves_no_file_of_the_old_export(root: Path, tmp_path: Path) -> None:
    """From one file to several, to fewer, and back; the folder is a model each time."""
    out = tmp_path / "out"
    for size in ("1GB", "300", "600", "1GB"):
        run("export", root, out, "--max-shard-size", size, "--overwrite")
        found = tree(out)
        index = json.loads(found.pop("model.safetensors.index.json", "null"))
        assert set(found) == (set(index["weight_map"].values()) if index else {"model.safetensors"})
        assert_same(read_weights(out), arrays())


def test_a_failed_export_leaves_nothing(root: Path, like: Path, tmp_path: Path) -> None:
    """A damaged shard is found on the way; no file appears, and an old export stays whole."""
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    run("export", root, out, "--like", like)
    before = tree(out)
    shard = root / "shard-00001-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for target in (out, fresh):
        assert "damaged" in error_of("export", root, target, "--like", like, "--overwrite", "--max-shard-size", "300")
    assert tree(out) == before
    assert tree(fresh) == {}


def test_leftovers_of_a_killed_run_are_removed(root: Path, tmp_path: Path) -> None:
    """The same command starts clean, and says so."""
    out = tmp_path / "out"
    out.mkdir()
    (out / ".model.safetensors.0123456789abcdef.tmp").write_bytes(b"half")
    assert "started clean: removed 1 files" in run("export", root, out).stderr
    assert set(tree(out)) == {"model.safetensors"}


def test_a_dry_run_writes_nothing(root: Path, like: Path, tmp_path: Path) -> None:
    """It checks names all the same."""
    planned = run_json("export", root, tmp_path / "out", "--like", like, "--dry-run")
    assert not (tmp_path / "out").exists()
    run("export", root, tmp_path / "out", "--like", like)
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert planned["files"] == [{"path": "model.safetensors", "nbytes": size}]
    write_sharded(tmp_path / "like2", {"other": np.ones(3)})
    assert "does not fit" in error_of("export", root, tmp_path / "no", "--like", tmp_path / "like2", "--dry-run")
