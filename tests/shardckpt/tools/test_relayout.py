"""Resharding to another layout: nothing changes but where the bytes lie, and they lie as a save would have put them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

import shardckpt
from shardckpt.catalogue import Tensor
from shardckpt.committed import read_committed
from shardckpt.errors import MismatchError, UnsupportedError
from shardckpt.layout import Bucket, Layout, Mesh
from shardckpt.storage import open_store
from shardckpt.tools.relayout import Axis, layout_of_kind, parse_kind
from shardckpt.tools.reshard import plan_reshard
from shardckpt.tools.rewrite import rewrite
from shardckpt.transfer import TransferOptions
from tests.ranks import run_ranks
from tests.shardckpt.checkpoints import Arrays, read_checkpoint, write_checkpoint
from tests.shardckpt.cli.invocation import run, tree

SECTIONS = {"model": "module", "optim": "optimizer", "more": "value"}


def arrays() -> Arrays:
    """A model, its moments in another dtype, scalars, and odd shapes."""
    random = np.random.default_rng(0)
    shapes = {"a.w": (13, 7), "a.b": (7,), "c": (1, 5, 3), "d": (0, 4), "e": ()}
    model = {f"model.{name}": random.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}
    moments = {
        f"optim.state.{name}.{key}": random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return model | moments | {"optim.state.a.w.step": np.array(3.0, np.float32), "more.x": np.arange(11)}


def write(root: Path) -> None:
    replicated = ("optim.state.a.w.step", "model.e", "optim.state.e.exp_avg", "optim.state.e.exp_avg_sq")
    write_checkpoint(str(root), arrays(), world_size=3, replicated=replicated, sections=dict(SECTIONS))


@pytest.mark.parametrize("text", ["flat", "dim0", "dp=2,tp=3", "tp=6", "dp=3:-,tp=2:0", "a=1,b=6:2"])
def test_every_layout_holds_the_same(tmp_path: Path, text: str) -> None:
    """Tensors, objects and step; and the way back to flat buckets is open."""
    write(tmp_path / "a")
    run("reshard", tmp_path / "a", tmp_path / "b", "--to", 6, "--layout", text)
    run("reshard", tmp_path / "b", tmp_path / "c", "--to", 5, "--layout", "flat")
    for name in "bc":
        run("verify", tmp_path / name)
        found = read_checkpoint(str(tmp_path / name))
        assert all(found[key].tobytes() == array.tobytes() for key, array in arrays().items())
    first, last = (read_committed(open_store(tmp_path / name)) for name in "ac")
    assert (first.objects, first.manifest.step) == (last.objects, last.manifest.step)


def test_moments_are_cut_like_their_parameters(tmp_path: Path) -> None:
    """In flat buckets that are made anew, so that each rank finds both in its file."""
    write(tmp_path / "a")
    run("reshard", tmp_path / "a", tmp_path / "b", "--to", 4, "--layout", "dim0")
    run("reshard", tmp_path / "b", tmp_path / "c", "--to", 4, "--layout", "flat")
    catalogue = read_committed(open_store(tmp_path / "c")).catalogue
    spans = {
        tensor.name: {
            (file, start, stop)
            for index, file, start, stop in zip(
                *(
                    c.tolist()
                    for c in (catalogue.spans.tensor, catalogue.spans.file, catalogue.spans.start, catalogue.spans.stop)
                ),
                strict=True,
            )
            if index == number
        }
        for number, tensor in enumerate(catalogue.tensors)
    }
    for name in ("a.w", "a.b", "c"):
        assert spans[f"model.{name}"] == spans[f"optim.state.{name}.exp_avg"] == spans[f"optim.state.{name}.exp_avg_sq"]


PLACEMENTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "dim0": ((4,), [Shard(0)]),
    "dp=2,tp=2": ((2, 2), [Shard(0), Shard(1)]),
    "tp=4": ((4,), [Shard(1)]),
}


def _weights() -> dict[str, torch.Tensor]:
    return {name: torch.arange(n * m).reshape(n, m).double() for name, (n, m) in {"x": (7, 5), "y": (2, 9)}.items()}


def _save_dtensors(folder: str) -> None:
    for text, (axes, placements) in PLACEMENTS.items():
        mesh = init_device_mesh("cpu", axes)
        placed = {name: distribute_tensor(value, mesh, placements) for name, value in _weights().items()}
        shardckpt.save(f"{folder}/{text}", {"w": placed, "n": 3}, step=5)


def test_the_files_are_those_that_dtensors_would_have_saved(tmp_path: Path) -> None:
    """Byte by byte: from a checkpoint of one rank to row shards, column shards and both, as four ranks write them."""
    run_ranks(4, _save_dtensors, str(tmp_path / "real"))
    shardckpt.save(tmp_path / "one", {"w": _weights(), "n": 3}, step=5)
    for text in PLACEMENTS:
        run("reshard", tmp_path / "one", tmp_path / "made" / text, "--to", 4, "--layout", text)
        found, expected = tree(tmp_path / "made" / text), tree(tmp_path / "real" / text)
        shards = [path for path in expected if path.startswith("shard")]
        assert len(shards) == 4
        assert {path: found[path] for path in shards} == {path: expected[path] for path in shards}, text


def test_what_is_shared_or_of_one_rank_stays_so() -> None:
    """Only tensors that are split are split another way."""
    tensors = [Tensor(f"model.{name}", "F32", (4, 2)) for name in "abcd"]
    current = Layout([Bucket(1, [8], [1], [[0]])], [1], [Mesh([2], [(0, 1)], [2])], [(3, 1)])
    found = layout_of_kind("dim0", tensors, {"model": "module"}, current, num_ranks=2)
    assert found == Layout([], [1], [Mesh([2], [(0, 0)], [0, 2])], [(3, 1)])
    found = layout_of_kind("flat", tensors, {"model": "module"}, current, num_ranks=2)
    assert found == Layout([*current.buckets, Bucket(4, [8], [1], [[2]])], [1], [], [(3, 1)])


def test_layouts_are_read_as_people_write_them() -> None:
    """The outermost axis first; tp cuts dim 1, others dim 0."""
    assert parse_kind("flat") == "flat"
    assert parse_kind("dp=8,tp=2") == (Axis("dp", 8, 0), Axis("tp", 2, 1))
    assert parse_kind("rep=2:-,x=3:4") == (Axis("rep", 2, None), Axis("x", 3, 4))
    for text in ("", "tp", "tp=0", "tp=2,", "tp=x", "dp=2;tp=2", "flat,dim0"):
        with pytest.raises(UnsupportedError, match="is no layout; write flat, dim0, or the axes of a mesh"):
            parse_kind(text)


def test_a_mesh_of_another_size_is_refused(tmp_path: Path) -> None:
    """Both numbers are told; a text that is no layout is wrong usage."""
    write(tmp_path / "a")
    with pytest.raises(MismatchError, match="a mesh of dp=2 x tp=2 has 4 ranks, not 8"):
        plan_reshard(open_store(tmp_path / "a"), to_ranks=8, kind=parse_kind("dp=2,tp=2"))
    assert "is no layout" in run("reshard", "a", "b", "--to", 8, "--layout", "x", exit_code=2).stderr


def test_a_checkpoint_without_a_rule_can_be_given_one(tmp_path: Path) -> None:
    """All but scalars is split."""
    write(tmp_path / "a")
    job = plan_reshard(open_store(tmp_path / "a"), to_ranks=3, kind="flat")
    tensors = job.draft.tensors
    found = layout_of_kind("flat", tensors, SECTIONS, None, num_ranks=3)
    assert {tensors[i].shape for i in found.replicated} == {()}
    found.check(len(tensors), "x")
    rewrite(job, open_store(tmp_path / "b"), overwrite=False, options=TransferOptions())
