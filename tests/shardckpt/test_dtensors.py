"""DTensors of every layout, FSDP2 and tensor parallelism: saved by one, loaded by any other, on real ranks."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardckpt
from shardckpt.errors import UnsupportedError
from tests.ranks import run_ranks

SHAPES = {"tall": (7, 5), "wide": (4, 6), "row": (1, 3), "large": (17, 8), "deep": (3, 4, 5)}
MESHES: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "hybrid": ((2, 2), [Replicate(), Shard(1)]),
    "one dim twice": ((2, 2), [Shard(1), Shard(1)]),
    "replicated": ((4,), [Replicate()]),
}


def _tagged() -> dict[str, torch.Tensor]:
    """Give tensors whose every element is unlike all others."""
    counts = [torch.Size(shape).numel() for shape in SHAPES.values()]
    return {
        name: torch.arange(count, dtype=torch.float64).reshape(shape) + 1000 * number
        for number, ((name, shape), count) in enumerate(zip(SHAPES.items(), counts, strict=True))
    }


def _distributed(values: dict[str, torch.Tensor], mesh_name: str) -> dict[str, object]:
    axes, placements = MESHES[mesh_name]
    mesh = init_device_mesh("cpu", axes)
    return {name: distribute_tensor(value.clone(), mesh, placements) for name, value in values.items()}


def _every_layout_loads_every_other(folder: str) -> dict[tuple[str, str], bool]:
    """Save in each layout, load in each, on 4 ranks; give whether all bytes came back."""
    found = {}
    for saved in MESHES:
        path = f"{folder}/{saved}"
        shardckpt.save(path, {"w": _distributed(_tagged(), saved)})
        for loaded in MESHES:
            state = _distributed({name: torch.zeros_like(value) for name, value in _tagged().items()}, loaded)
            shardckpt.load(path, {"w": state})
            wanted = _distributed(_tagged(), loaded)
            found[saved, loaded] = all(
                torch.equal(tensor.to_local(), wanted[name].to_local())  # type: ignore[attr-defined]
                for name, tensor in state.items()
            )
    return found


def test_every_layout_loads_every_other(tmp_path: Path) -> None:
    """A matrix of six layouts on four ranks; uneven and empty shards among them; then read whole on one rank."""
    for found in run_ranks(4, _every_layout_loads_every_other, str(tmp_path)):
        assert found == dict.fromkeys(found, True)
        assert len(found) == len(MESHES) ** 2
    for name in MESHES:
        with shardckpt.open(tmp_path / name) as checkpoint:
            for fqn, value in _tagged().items():
                assert torch.equal(checkpoint[f"w.{fqn}"][...], value)


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def _parallel(net: nn.Sequential) -> nn.Sequential:
    """Apply tensor parallelism and, over it, FSDP2 on a 2 x 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh["dp"])
    return net


def _fsdp2_over_tensor_parallelism(folder: str) -> None:
    warnings.simplefilter("ignore")  # FSDP2 warns of views; the suite's other ranks keep warnings as errors
    torch.manual_seed(0)
    net = _parallel(_net())
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    shardckpt.save(folder, {"model": net, "optimizer": optimizer}, step=1)

    plain = _net()
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    shardckpt.load(folder, {"model": plain, "optimizer": plain_optimizer})
    plain_parameters = dict(plain.named_parameters())
    for name, parameter in net.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), plain_parameters[name])
        for key in ("exp_avg", "exp_avg_sq"):
            moment = plain_optimizer.state[plain_parameters[name]][key]
            assert torch.equal(optimizer.state[parameter][key].full_tensor(), moment)
            assert moment.abs().sum() > 0

    shardckpt.save(f"{folder}-plain", {"model": plain, "optimizer": plain_optimizer})
    fresh = _parallel(_net())
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    shardckpt.load(f"{folder}-plain", {"model": fresh, "optimizer": fresh_optimizer})
    for (name, one), other in zip(net.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local()), name
        for key, value in optimizer.state[one].items():
            found = fresh_optimizer.state[other][key]
            assert type(found) is type(value)
            assert torch.equal(found.to_local(), value.to_local()) if isinstance(value, DTensor) else found == value
    warnings.simplefilter("error")


def test_fsdp2_over_tensor_parallelism_goes_to_a_plain_module_and_back(tmp_path: Path) -> None:
    """Weights and Adam moments, with strided shards on one dim, are exact both ways."""
    run_ranks(4, _fsdp2_over_tensor_parallelism, str(tmp_path / "a"))


def _fsdp2_loads(folder: str) -> None:
    net = _net()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    shardckpt.load(folder, {"model": net})
    with shardckpt.open(folder) as checkpoint:
        for name, parameter in net.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), checkpoint[f"model.{name}"][...])


def test_fsdp2_loads_at_another_world_size(tmp_path: Path) -> None:
    """What one plain process saved, FSDP2 loads on three ranks, uneven shards included."""
    shardckpt.save(tmp_path / "a", {"model": _net()})
    run_ranks(3, _fsdp2_loads, str(tmp_path / "a"))


def _stages(folder: str) -> tuple[list[str], list[str]]:
    """Save a model of which each rank has one stage of its own, and a part in common; load it; try what must fail."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 4)})
    torch.manual_seed(7)
    stage["common"] = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(stage.parameters())
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shardckpt.save(folder, {"model": stage, "optimizer": optimizer, "epoch": 4})
    other = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 4), "common": nn.Linear(2, 2)})
    other_optimizer = torch.optim.AdamW(other.parameters())
    shardckpt.load(folder, {"model": other, "optimizer": other_optimizer, "epoch": 0})
    assert str(other_optimizer.state_dict()) == str(optimizer.state_dict())
    for one, two in zip(stage.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    only = {"only": torch.zeros(1)} if rank == 1 else {}
    refused = []
    for state in (
        {"expert": torch.tensor([rank])},
        {"expert": torch.tensor([rank]), **only},
        {"expert": torch.zeros(1 + rank), **only},
        {"epoch": rank},
    ):
        try:
            shardckpt.save(f"{folder}-refused", state)
        except shardckpt.CheckpointError as error:
            refused.append(str(error))
    return sorted(shardckpt.open(folder).names), refused


def test_ranks_that_hold_different_stages_are_saved_together(tmp_path: Path) -> None:
    """The union of disjoint names is stored and loads; one name with different bytes, shapes or values is refused."""
    results = run_ranks(3, _stages, str(tmp_path / "a"))
    assert results[0] == results[1] == results[2]
    names, refused = results[0]
    modules = ("common", "stage0", "stage1", "stage2")
    weights = [f"model.{module}.{leaf}" for module in modules for leaf in ("bias", "weight")]
    assert [name for name in names if name.startswith("model.")] == weights
    assert len(refused) == 4
    assert "'expert' should be the same on ranks 0 and 1, but its bytes differ" in refused[0]
    assert "'expert' has the same name on ranks 0 and 1, but different bytes" in refused[1]
    assert "Give what differs a name of its own on each rank" in refused[1]
    assert "'expert' has dtype F32 and global shape (1,) on rank 0, F32 and (2,) on rank 1" in refused[2]
    assert "state['epoch'] is 0 on rank 0, 1 on rank 1" in refused[3]
    assert not (tmp_path / "a-refused").exists()


def _partial_sums() -> str:
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    try:
        shardckpt.save("memory://partial", {"x": partial})
    except UnsupportedError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def test_partial_sums_are_refused() -> None:
    """A tensor that still has to be reduced has no value to store; the error says what to do."""
    for message in run_ranks(2, _partial_sums):
        assert "holds partial sums on a mesh axis; redistribute it before saving" in message
