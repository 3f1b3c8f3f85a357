"""The numbers behind the picture, against counting element by element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardckpt.committed import read_committed
from shardckpt.storage import open_store
from shardckpt.tools.holdings import Strip, holdings, moved
from shardckpt.tools.reshard import plan_reshard
from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.tools.meshes import write_on_mesh


def _owners(root: Path, name: str) -> NDArray[np.int64]:
    """Give the rank of every element of a tensor, flattened."""
    catalogue = read_committed(open_store(root)).catalogue
    tensor = catalogue.by_name[name]
    owners = np.full(catalogue.tensors[tensor].numel, -1)
    for row in np.flatnonzero(catalogue.spans.tensor == tensor).tolist():
        owners[catalogue.spans.start[row] : catalogue.spans.stop[row]] = catalogue.spans.file[row]
    return owners


def _drawn(strip: Strip, numel: int) -> NDArray[np.int64]:
    owners = np.full(numel, -1)
    for cell in strip.cells:
        owners[round(cell.x * numel) : round((cell.x + cell.width) * numel)] = cell.rank
    return owners


def test_bytes_are_counted_by_rank_and_kind(tmp_path: Path) -> None:
    """Weights by section, optimizer state by its key; together they are what the files hold."""
    arrays = {
        "model.a": np.zeros((30, 4)),
        "optimizer.state.a.exp_avg": np.zeros((30, 4)),
        "optimizer.state.a.step": np.zeros(()),
    }
    sections = {"model": "module", "optimizer": "optimizer"}
    write_checkpoint(str(tmp_path), arrays, world_size=4, sections=sections, replicated=("optimizer.state.a.step",))
    found = read_committed(open_store(tmp_path))
    held = holdings(found)
    assert held.kinds == ("model", "optimizer: exp_avg", "optimizer: step")
    assert held.nbytes.sum(axis=0).tolist() == [960, 960, 8]
    sizes = [file.nbytes - file.header_nbytes for file in found.catalogue.files]
    assert held.by_rank.tolist() == sizes
    assert held.imbalance == max(sizes) / (sum(sizes) / 4)


def test_every_element_is_drawn_with_its_rank(tmp_path: Path) -> None:
    """Tensors in one, two and all files, an empty one left out."""
    shapes = {"model.a": (30, 4), "model.b": (3,), "model.c": (101,), "model.e": (0, 2)}
    write_checkpoint(str(tmp_path), {name: np.zeros(shape) for name, shape in shapes.items()}, world_size=5)
    held = holdings(read_committed(open_store(tmp_path)))
    assert [strip.name for strip in held.strips] == ["model.a", "model.b", "model.c"]
    for strip in held.strips:
        owners = _owners(tmp_path, strip.name)
        np.testing.assert_array_equal(_drawn(strip, len(owners)), owners)
        assert strip.num_ranks == len(set(owners.tolist()))
        assert strip.num_replicas == 1


def test_more_chunks_than_pixels_are_thinned(tmp_path: Path) -> None:
    """The picture does not grow with the number of ranks, and is right at the middle of each pixel."""
    write_checkpoint(str(tmp_path), {"model.a": np.zeros(6000)}, world_size=101)
    (strip,) = holdings(read_committed(open_store(tmp_path)), num_pixels=20).strips
    assert len(strip.cells) <= 20
    owners = _owners(tmp_path, "model.a")
    centres = ((np.arange(20) + 0.5) * 300).astype(int)
    np.testing.assert_array_equal(_drawn(strip, 6000)[centres], owners[centres])


def test_tensors_that_are_alike_are_drawn_once(tmp_path: Path) -> None:
    """Of one shape and cut the same: columns of one bucket, such as moments; the others are named."""
    arrays = {f"model.{i}": np.zeros((8, 3)) for i in range(3)}
    write_on_mesh(tmp_path, arrays, [2, 2], [(0, 0), (1, 1)])
    (strip,) = holdings(read_committed(open_store(tmp_path))).strips
    assert (strip.name, strip.others) == ("model.0", ("model.1", "model.2"))
    assert sorted((cell.rank, cell.x, cell.y) for cell in strip.cells) == [
        (0, 0.0, 0.0),
        (1, 2 / 3, 0.0),
        (2, 0.0, 0.5),
        (3, 2 / 3, 0.5),
    ]


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    """The largest are shown."""
    write_checkpoint(str(tmp_path), {f"model.{i}": np.zeros(10 + i) for i in range(9)})
    held = holdings(read_committed(open_store(tmp_path)), max_tensors=2)
    assert [strip.name for strip in held.strips] == ["model.7", "model.8"]
    assert held.num_left_out == 7


def test_moves_add_up_and_are_those_of_the_owners(tmp_path: Path) -> None:
    """Rows are what old ranks give, columns what new ones get; each element goes from its old to its new owner."""
    write_checkpoint(str(tmp_path / "a"), {"model.a": np.zeros(700), "model.b": np.zeros(33)}, world_size=4)
    write_checkpoint(str(tmp_path / "b"), {"model.a": np.zeros(700), "model.b": np.zeros(33)}, world_size=6)
    store = open_store(tmp_path / "a")
    matrix = moved(read_committed(store).catalogue, plan_reshard(store, to_ranks=6).files.catalogue)
    expected = np.zeros((4, 6), np.int64)
    for name in ("model.a", "model.b"):
        np.add.at(expected, (_owners(tmp_path / "a", name), _owners(tmp_path / "b", name)), 8)
    np.testing.assert_array_equal(matrix, expected)
