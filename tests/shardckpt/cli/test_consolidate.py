"""`shardckpt consolidate`: the weights as one file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import error_of, run, run_json, tree
from tests.shardckpt.formats.hf_folders import arrays, assert_same

Arrays = dict[str, NDArray[np.generic]]


@pytest.fixture
def state() -> Arrays:
    """A model and its optimizer."""
    model = {f"model.{name}": array for name, array in arrays().items()}
    return model | {"optim.state.embed.weight.exp_avg": np.ones((17, 6), np.float32), "optim.step": np.array(3)}


@pytest.fixture
def root(tmp_path: Path, state: Arrays) -> Path:
    """Their checkpoint by three ranks; the embedding is tied to a head."""
    write_checkpoint(
        str(tmp_path / "a"),
        state,
        world_size=3,
        replicated=("optim.step", "model.scale"),
        aliases={"model.embed.weight": ("model.head.weight",)},
        sections={"model": "module", "optim": "optimizer"},
        objects={"model": {}, "optim": {}},
    )
    return tmp_path / "a"


def test_the_weights_come_out_as_they_were_saved(root: Path, tmp_path: Path) -> None:
    """Under the names of the module, tied ones once with the further name noted; the source stays untouched."""
    before = tree(root)
    found = run_json("consolidate", root, tmp_path / "out.safetensors")
    assert (found["num_tensors"], found["num_files"]) == (len(arrays()), 1)
    assert found["nbytes"] == (tmp_path / "out.safetensors").stat().st_size
    assert_same(load_file(tmp_path / "out.safetensors"), arrays())
    with safe_open(tmp_path / "out.safetensors", "numpy") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert tree(root) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out.safetensors"]


def test_tied_weights_can_be_stored_under_each_name(root: Path, tmp_path: Path) -> None:
    """For readers that know nothing of ties."""
    run("consolidate", root, tmp_path / "out.safetensors", "--tied", "both")
    assert_same(load_file(tmp_path / "out.safetensors"), arrays() | {"head.weight": arrays()["embed.weight"]})


def test_all_tensors_can_be_had_under_full_names(root: Path, tmp_path: Path, state: Arrays) -> None:
    """Weights and optimizer state together."""
    run("consolidate", root, tmp_path / "out.safetensors", "--optimizer")
    assert_same(load_file(tmp_path / "out.safetensors"), state)


def test_patterns_choose_tensors(root: Path, tmp_path: Path) -> None:
    """By full names; a pattern on the further name of a tied tensor takes it under that."""
    out = tmp_path / "out.safetensors"
    run("consolidate", root, out, "--only", "model.layers.*", "--skip", "*.mask")
    assert set(load_file(out)) == {"layers.0.weight", "layers.10.weight"}
    run("consolidate", root, out, "--only", "model.head.weight", "--overwrite")
    assert_same(load_file(out), {"head.weight": arrays()["embed.weight"]})
    text = error_of("consolidate", root, tmp_path / "no.safetensors", "--only", "layers.*")
    assert "no tensor fits the pattern 'layers.*'" in text
    assert "inspect --tensors" in text
    text = error_of("consolidate", root, tmp_path / "no.safetensors", "--skip", "*")
    assert "no tensor is left to write" in text
    assert not (tmp_path / "no.safetensors").exists()


def test_an_existing_file_is_kept_unless_told(root: Path, tmp_path: Path) -> None:
    """Refused by name; replaced with --overwrite."""
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    assert "has 'out.safetensors' already; choose another" in error_of("consolidate", root, out)
    assert out.read_bytes() == b"mine"
    run("consolidate", root, out, "--overwrite")
    assert_same(load_file(out), arrays())


def test_a_dry_run_writes_nothing(root: Path, tmp_path: Path) -> None:
    """It prints the file and its size to the byte."""
    planned = run_json("consolidate", root, tmp_path / "out.safetensors", "--dry-run")
    assert not (tmp_path / "out.safetensors").exists()
    run("consolidate", root, tmp_path / "out.safetensors")
    assert planned["files"] == [{"path": "out.safetensors", "nbytes": (tmp_path / "out.safetensors").stat().st_size}]


def test_several_models_keep_their_names_apart(tmp_path: Path) -> None:
    """Equal names in two modules do not collide; one of them alone loses its prefix."""
    both: Arrays = {"model.w": np.ones(5), "ema.w": np.zeros(5), "ema.b.c": np.arange(3)}
    write_checkpoint(str(tmp_path / "a"), both, sections={"model": "module", "ema": "module"})
    run("consolidate", tmp_path / "a", tmp_path / "out.safetensors")
    assert_same(load_file(tmp_path / "out.safetensors"), both)
    run("consolidate", tmp_path / "a", tmp_path / "ema.safetensors", "--only", "ema.*")
    assert_same(load_file(tmp_path / "ema.safetensors"), {"w": both["ema.w"], "b.c": both["ema.b.c"]})


def test_a_saved_state_dict_counts_as_weights(tmp_path: Path) -> None:
    """Where no section was a module, the one that holds tensors is taken; of several, one must be chosen."""
    one: Arrays = {"net.w": np.ones(5)}
    write_checkpoint(str(tmp_path / "a"), one, sections={"net": "value", "step": "value"})
    run("consolidate", tmp_path / "a", tmp_path / "out.safetensors")
    assert_same(load_file(tmp_path / "out.safetensors"), {"w": one["net.w"]})
    write_checkpoint(str(tmp_path / "b"), one | {"rng.w": np.ones(2)}, sections={"net": "value", "rng": "value"})
    assert "'net', 'rng' hold tensors. Say which with --only" in error_of(
        "consolidate", tmp_path / "b", tmp_path / "no.safetensors"
    )
    run("consolidate", tmp_path / "b", tmp_path / "rng.safetensors", "--only", "rng.*")
    assert_same(load_file(tmp_path / "rng.safetensors"), {"w": np.ones(2)})
