"""Saving on one rank: what is stored, what is refused, and that nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardckpt
from shardckpt.errors import CheckpointExistsError, MismatchError, UnsupportedError
from tests.shardckpt.models import adamw, tied, train


def test_the_shard_file_is_plain_safetensors_with_fqns(tmp_path: Path) -> None:
    """Any reader of safetensors finds the weights under their names, tied ones once, non-persistent buffers not."""
    model = tied(0)
    shardckpt.save(tmp_path / "a", {"model": model})
    stored = load_file(tmp_path / "a" / "shard-00000-of-00001.safetensors")
    expected = {f"model.{name}": value for name, value in model.state_dict().items() if value.numel()}
    del expected["model.third.weight"]
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(stored[name], value)
        assert stored[name].shape == value.shape


def test_both_names_of_a_tied_weight_open(tmp_path: Path) -> None:
    """A tied weight is stored once and found under each of its names."""
    model = tied(0)
    shardckpt.save(tmp_path / "a", {"model": model})
    with shardckpt.open(tmp_path / "a") as checkpoint:
        assert "model.third.weight" not in checkpoint.names
        assert torch.equal(checkpoint["model.third.weight"][...], model.second.weight)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    """Model, gradients and optimizer are as before, and training goes on as if no save had been."""
    model, other = tied(0), tied(0)
    optimizer, other_optimizer = adamw(model), adamw(other)
    train(model, optimizer, range(3))
    train(other, other_optimizer, range(3))
    shardckpt.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    assert str(optimizer.state_dict()) == str(other_optimizer.state_dict())
    assert train(model, optimizer, range(3, 6)) == train(other, other_optimizer, range(3, 6))


def test_saving_works_before_the_first_optimizer_step(tmp_path: Path) -> None:
    """An optimizer without state is saved with its groups, and loads."""
    model = tied(0)
    state = {"model": model, "optimizer": adamw(model)}
    shardckpt.save(tmp_path / "a", state)
    shardckpt.load(tmp_path / "a", state)
    assert state["optimizer"].state_dict()["state"] == {}  # type: ignore[attr-defined]


def test_an_existing_checkpoint_is_refused_unless_asked(tmp_path: Path) -> None:
    """Without `overwrite` the old checkpoint stays; with it, no file of the old one is left."""
    shardckpt.save(tmp_path / "a", {"x": torch.zeros(3)})
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(CheckpointExistsError, match="choose another destination, or ask to overwrite"):
        shardckpt.save(tmp_path / "a", {"x": torch.ones(3)})
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    shardckpt.save(tmp_path / "a", {"x": torch.ones(4)}, overwrite=True)
    with shardckpt.open(tmp_path / "a") as checkpoint:
        assert torch.equal(checkpoint["x"][...], torch.ones(4))
    assert len(list((tmp_path / "a").iterdir())) == 3


def test_leftovers_of_a_killed_save_are_removed_and_reported(tmp_path: Path) -> None:
    """A folder with shard files but no manifest is no checkpoint; the next save cleans it up and says so."""
    shardckpt.save(tmp_path / "a", {"x": torch.zeros(3)})
    (tmp_path / "a" / "manifest.json").unlink()
    report = shardckpt.save(tmp_path / "a", {"x": torch.ones(3)})
    assert sorted(report.leftovers) == ["chunks.safetensors", "shard-00000-of-00001.safetensors"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"deep": [1, object()]}, r"state\['notes'\]\['deep'\]\[1\].*object.*leave it out"),
        (torch.zeros(2, dtype=torch.complex128), "complex128.*Convert"),
        (torch.zeros(2, device="meta"), "meta tensor.*materialise"),
        (torch.eye(2).to_sparse(), "sparse.*convert it first"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_a_byte_is_written(tmp_path: Path, value: object, text: str) -> None:
    """The error names the place and what to do; the destination is not created."""
    with pytest.raises(UnsupportedError, match=text):
        shardckpt.save(tmp_path / "a", {"fine": torch.zeros(2), "notes": value})
    assert not (tmp_path / "a").exists()


def test_an_optimizer_without_its_module_is_refused(tmp_path: Path) -> None:
    """Parameters without a name cannot be found again; the error says what to add."""
    model = tied(0)
    with pytest.raises(MismatchError, match="Put the module that the optimizer was made from into the same state"):
        shardckpt.save(tmp_path / "a", {"optimizer": adamw(model)})


def test_the_manifest_reads_as_json(tmp_path: Path) -> None:
    """People and programs can read the manifest: step, sections, names."""
    model = tied(0)
    shardckpt.save(tmp_path / "a", {"model": model, "epoch": 3, "lr": 0.5}, step=17)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert (manifest["step"], manifest["world_size"], manifest["version"]) == (17, 1, 1)
    assert manifest["sections"] == {"model": "module", "epoch": "value", "lr": "value"}
    assert manifest["objects"] == {"model": {}, "epoch": 3, "lr": 0.5}


def test_non_contiguous_tensors_are_stored_by_value(tmp_path: Path) -> None:
    """Transposed, expanded and strided tensors, and a row of a large storage, are packed with equal values."""
    big = torch.arange(10_000.0).reshape(100, 100)
    tensors = {"t": big[:3, :4].T, "e": torch.ones(3, 1).expand(3, 5), "s": big[::7, ::9], "row": big[5]}
    report = shardckpt.save(tmp_path / "a", tensors)
    assert report.nbytes < 10_000
    with shardckpt.open(tmp_path / "a") as checkpoint:
        for name, value in tensors.items():
            assert torch.equal(checkpoint[name][...], value)


def test_views_of_one_buffer_are_not_taken_for_ties(tmp_path: Path) -> None:
    """Only tensors of equal memory, shape and strides are one; others that overlap are stored apart."""
    flat = torch.arange(12.0)
    state = {"values": {"a": flat[:6], "b": flat[6:], "whole": flat, "again": flat, "shaped": flat.view(3, 4)}}
    shardckpt.save(tmp_path / "a", state)
    with shardckpt.open(tmp_path / "a") as checkpoint:
        assert checkpoint.names == ("values.a", "values.b", "values.whole", "values.shaped")
        assert torch.equal(checkpoint["values.again"][...], flat)
        assert torch.equal(checkpoint["values.shaped"][1], flat.view(3, 4)[1])


@pytest.mark.parametrize(
    ("state", "step", "text"),
    [
        ([1], None, "the state is a list; give a dict"),
        ({1: torch.ones(1)}, None, "the section 1 of the state is no text"),
        ({"x": 1}, "a", "step is 'a'; give an integer"),
        ({"x": 1}, -1, "step is -1; give an integer that is not negative"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, state: object, step: object, text: str) -> None:
    """A state that is no dict of sections, and a step that is no count, are named."""
    with pytest.raises(UnsupportedError, match=text):
        shardckpt.save(tmp_path / "a", state, step=step)  # type: ignore[arg-type]


def test_values_nested_too_deep_or_in_themselves_are_refused(tmp_path: Path) -> None:
    """A cycle ends in an error that says so, not in a recursion error."""
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(UnsupportedError, match=r"state\['x'\]\[0\]\[0\]: it is nested more than 200 levels deep"):
        shardckpt.save(tmp_path / "a", {"x": cycle})
