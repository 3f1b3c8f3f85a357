"""`--dtype`: floating-point tensors converted on the way out, to the bits that torch gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import error_of, run, run_json

Arrays = dict[str, NDArray[np.generic]]


@pytest.fixture
def state() -> Arrays:
    """Tensors of several dtypes; values that float16 rounds, holds and cannot reach; a NaN and infinities."""
    random = np.random.default_rng(0)
    odd = np.array([1.0, 1 + 2**-12, 1e6, -1e6, np.nan, np.inf, -np.inf, 1e-30, -0.0], np.float32)
    return {
        "model.a": random.normal(size=(301, 7)).astype(np.float32),
        "model.norm": odd,
        "model.wide": random.normal(size=1001),
        "model.half": random.normal(size=33).astype(np.float16),
        "model.ids": np.arange(5),
        "model.mask": np.array([True, False, True]),
        "model.none": np.zeros((0, 3), np.float32),
    }


@pytest.fixture
def root(tmp_path: Path, state: Arrays) -> Path:
    """Their checkpoint by three ranks."""
    write_checkpoint(str(tmp_path / "a"), state, world_size=3)
    return tmp_path / "a"


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("more", [(), ("--budget", "1000", "--workers", "1")])
def test_bits_are_those_that_torch_gives(
    root: Path, state: Arrays, tmp_path: Path, dtype: str, more: tuple[str, ...]
) -> None:
    """Whatever the buffers; integers and booleans stay as they are."""
    run("consolidate", root, tmp_path / "out.safetensors", "--dtype", dtype, *more)
    found = load_file(tmp_path / "out.safetensors")
    assert {f"model.{name}" for name in found} == set(state)
    for name, tensor in found.items():
        before = torch.from_numpy(state[f"model.{name}"])
        expected = before.to(getattr(torch, dtype)) if before.is_floating_point() else before
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
        same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
        is_nan = torch.isnan(expected.double())
        assert torch.equal(is_nan, torch.isnan(tensor.double())), name
        assert torch.equal(tensor[~is_nan].view(same_width), expected[~is_nan].view(same_width)), name


def test_what_was_rounded_is_told(root: Path, tmp_path: Path) -> None:
    """By tensor: how many numbers changed, how many became infinite; the latter on stderr too."""
    found = run_json("consolidate", root, tmp_path / "out.safetensors", "--dtype", "float16")
    rows = {row["name"]: row for row in found["conversions"]}  # type: ignore[attr-defined]  # parsed JSON
    assert set(rows) == {"a", "norm", "wide"}
    assert rows["norm"] == {
        "name": "norm",
        "dtype": "F32",
        "to_dtype": "F16",
        "numel": 9,
        "num_rounded": 4,
        "num_overflowed": 2,
    }
    assert rows["wide"]["numel"] == 1001
    assert found["num_elements_overflowed"] == 2
    shown = run("consolidate", root, tmp_path / "out.safetensors", "--dtype", "float16", "--overwrite")
    assert "became infinite in part, as the dtype does not reach so far: 'norm'" in shown.stderr
    assert "elements overflowed  2" in shown.stdout


def test_tensors_can_be_kept_as_they_are(root: Path, state: Arrays, tmp_path: Path) -> None:
    """By patterns of full names; one that fits nothing is an error, and so is --keep alone."""
    out = tmp_path / "out.safetensors"
    run("consolidate", root, out, "--dtype", "bfloat16", "--keep", "*norm", "--keep", "model.wide")
    found = load_file(out)
    assert [str(found[name].dtype) for name in ("a", "norm", "wide")] == [
        "torch.bfloat16",
        "torch.float32",
        "torch.float64",
    ]
    assert np.array_equal(found["norm"].numpy(), state["model.norm"], equal_nan=True)
    assert "no tensor fits the pattern 'norm'" in error_of(
        "consolidate", root, out, "--dtype", "float16", "--keep", "norm"
    )
    assert "for use with --dtype" in run("consolidate", root, out, "--keep", "*", exit_code=2).stderr


def test_an_export_has_its_dtype_in_the_config(root: Path, tmp_path: Path) -> None:
    """So that what loads it does not cast back."""
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    like = tmp_path / "config.json"
    run("export", root, tmp_path / "out", "--like", like, "--dtype", "bfloat16", "--max-shard-size", "1kB")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "bfloat16"}
    shards = [load_file(path) for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(shards) > 1
    assert {str(tensor.dtype) for shard in shards for tensor in shard.values() if tensor.is_floating_point()} == {
        "torch.bfloat16"
    }


def test_a_tied_tensor_is_counted_once(tmp_path: Path) -> None:
    """Stored under one name, with the other noted."""
    tied = {"model.a": ("model.b",)}
    write_checkpoint(str(tmp_path / "a"), {"model.a": np.ones(4, np.float32)}, aliases=tied)
    found = run_json("consolidate", tmp_path / "a", tmp_path / "out.safetensors", "--dtype", "bfloat16")
    assert (found["num_converted"], found["num_elements_rounded"]) == (1, 0)
