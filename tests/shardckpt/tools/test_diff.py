"""Comparing: equal across layouts and formats, and what differs is told with place and size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from shardckpt.errors import CorruptError, MismatchError
from shardckpt.formats.origin import find_origin
from shardckpt.storage import open_store
from shardckpt.tools.diff import Difference, compare_values, plan_diff
from shardckpt.tools.selection import Choice
from shardckpt.transfer import TransferOptions
from tests.shardckpt.checkpoints import write_checkpoint

Arrays = dict[str, NDArray[np.generic]]
EVERYTHING = Choice()
SECTIONS = {"model": "module", "optimizer": "optimizer"}


def _state() -> Arrays:
    return {
        "model.a": np.arange(4000, dtype=np.float32).reshape(50, 80),
        "model.b": np.arange(7),
        "model.c": np.array(1.5, np.float16),
        "model.empty": np.zeros((0, 2), np.float32),
        "optimizer.state.a.exp_avg": np.arange(4000, dtype=np.float32).reshape(50, 80) / 7,
    }


def _diff(a: Path, b: Path, choice: Choice = EVERYTHING, budget: int = 1 << 12) -> list[Difference]:
    job = plan_diff(find_origin(str(a), open_store), find_origin(str(b), open_store), choice)
    return [*job.differences, *compare_values(job, options=TransferOptions(budget_bytes=budget))]


def _write(root: Path, arrays: Arrays, world_size: int = 2, lr: float = 0.1, step: int = 7) -> Path:
    objects = {"model": {}, "optimizer": {"param_groups": [{"lr": lr, "params": ["a"]}], "state": {}}}
    sections = dict(SECTIONS)
    write_checkpoint(str(root), arrays, world_size=world_size, sections=sections, objects=objects, step=step)
    return root


def test_layouts_make_no_difference(tmp_path: Path) -> None:
    """The same state on 2 and on 5 ranks is the same, read in windows much smaller than its tensors."""
    a, b = _write(tmp_path / "a", _state()), _write(tmp_path / "b", _state(), world_size=5)
    assert _diff(a, b) == []


def test_weights_in_other_files_go_by_the_names_in_the_module(tmp_path: Path) -> None:
    """A single file of weights is compared with the weights alone; with full names, with everything."""
    a = _write(tmp_path / "a", _state())
    weights = {name.removeprefix("model."): array for name, array in _state().items() if name.startswith("model.")}
    save_file(weights, tmp_path / "w.safetensors")
    save_file(_state(), tmp_path / "all.safetensors")
    assert _diff(a, tmp_path / "w.safetensors") == []
    assert _diff(tmp_path / "w.safetensors", a) == []
    assert _diff(a, tmp_path / "all.safetensors") == []
    assert [d.kind for d in _diff(tmp_path / "w.safetensors", tmp_path / "all.safetensors")] == ["only in A"] * 4 + [
        "only in B"
    ] * 5


def test_what_differs_is_told_with_place_and_size(tmp_path: Path) -> None:
    """Number of elements, first index, the two values there, and the largest distance."""
    changed = _state()
    changed["model.a"] = changed["model.a"].copy()
    changed["model.a"][3, 5] += 0.5  # type: ignore[call-overload]  # floats
    changed["model.a"][40, 79] -= 2  # type: ignore[call-overload]
    changed["model.c"] = np.array(np.nan, np.float16)
    a, b = _write(tmp_path / "a", _state()), _write(tmp_path / "b", changed, world_size=3)
    assert _diff(a, b) == [
        Difference("model.a", "values", "245.0", "245.5", 2, 2.0, (3, 5)),
        Difference("model.c", "values", "1.5", "nan", 1, None, ()),
    ]


def test_bits_count_not_numbers(tmp_path: Path) -> None:
    """-0.0 and 0.0 are equal numbers and different bits; a NaN equals the same NaN."""
    one, other = np.array([0.0, np.nan, 1.0]), np.array([-0.0, np.nan, 1.0])
    a, b = _write(tmp_path / "a", {"model.x": one}), _write(tmp_path / "b", {"model.x": other})
    assert _diff(a, b) == [Difference("model.x", "values", "0.0", "-0.0", 1, 0.0, (0,))]


def test_names_shapes_and_dtypes_are_told(tmp_path: Path) -> None:
    """A tensor that is missing, one of another shape and one of another dtype."""
    changed = _state()
    changed["model.new"] = changed.pop("model.b")
    changed["model.a"] = changed["model.a"].reshape(80, 50)
    changed["model.c"] = changed["model.c"].astype(np.float32)
    found = {
        (d.name, d.kind): (d.a, d.b) for d in _diff(_write(tmp_path / "a", _state()), _write(tmp_path / "b", changed))
    }
    assert found == {
        ("model.a", "shape"): ("F32 [50, 80]", "F32 [80, 50]"),
        ("model.c", "dtype"): ("F16 []", "F32 []"),
        ("model.b", "only in A"): ("I64 [7]", ""),
        ("model.new", "only in B"): ("", "I64 [7]"),
    }


def test_state_that_is_no_tensor_is_compared_by_place(tmp_path: Path) -> None:
    """A learning rate and a step that differ are told; under patterns only tensors count."""
    a, b = _write(tmp_path / "a", _state()), _write(tmp_path / "b", _state(), lr=0.2, step=8)
    assert [(d.name, d.kind, d.a, d.b) for d in _diff(a, b)] == [
        ("step", "state", "7", "8"),
        ("optimizer.param_groups[0].lr", "state", "0.1", "0.2"),
    ]
    assert _diff(a, b, Choice(only=("model.*",))) == []


def test_tied_names_match_whichever_is_kept(tmp_path: Path) -> None:
    """A tensor with two names equals one with either, and two separate ones."""
    x = np.arange(6.0)
    write_checkpoint(str(tmp_path / "tied"), {"model.a": x}, aliases={"model.a": ("model.b",)})
    write_checkpoint(str(tmp_path / "both"), {"model.a": x, "model.b": x})
    write_checkpoint(str(tmp_path / "other"), {"model.b": x})
    assert _diff(tmp_path / "tied", tmp_path / "both") == []
    assert _diff(tmp_path / "tied", tmp_path / "other") == []
    write_checkpoint(str(tmp_path / "apart"), {"model.a": x, "model.b": x + 1})
    assert [d.name for d in _diff(tmp_path / "tied", tmp_path / "apart")] == ["model.b"]


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    """Patterns that leave nothing on either side do not pass for equality."""
    a = _write(tmp_path / "a", _state())
    with pytest.raises(MismatchError, match="check --only and --skip"):
        _diff(a, a, Choice(only=("nothing*",)))


def test_damage_is_an_error(tmp_path: Path) -> None:
    """A chunk that is not what was saved is no basis for a comparison."""
    a, b = _write(tmp_path / "a", _state()), _write(tmp_path / "b", _state())
    path = b / "shard-00000-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="damaged"):
        _diff(a, b, budget=1 << 24)
