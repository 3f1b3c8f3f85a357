"""Makes the golden checkpoint of the current format version: `python -m tests.shardckpt.golden.make FOLDER`.

For a new version only: a golden checkpoint that is there is never made anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardckpt
from shardckpt import PerRank
from shardckpt.tensors import TORCH_DTYPES
from sharding import FullyShardedDataParallel, local_state_dict
from tests.ranks import run_ranks
from tests.shardckpt.golden.content import COLUMNS, MODULE, MOMENTS, NAMES, OBJECTS, TRAINED, own_name, raw


def tensor(name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Give a tensor with the bytes that the rule says."""
    found = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    bytes_of(found).copy_(torch.from_numpy(raw(name, dtype, shape)))
    return found


def bytes_of(found: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as bytes. # [nbytes]"""
    real = torch.view_as_real(found) if found.is_complex() else found
    return real.reshape(-1).view(torch.uint8) if found.numel() else torch.empty(0, dtype=torch.uint8)


class Model(nn.Module):
    """A module with parameters and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.block = nn.Linear(7, 5)
        for fqn, (dtype, shape) in MODULE.items():
            if fqn.startswith("buffer_") or fqn in ("empty", "count"):
                self.register_buffer(fqn, tensor(f"model.{fqn}", dtype, shape))
            elif "." not in fqn:
                is_trained = fqn != "frozen"
                setattr(
                    self, fqn, nn.Parameter(torch.empty(shape, dtype=TORCH_DTYPES[dtype]), requires_grad=is_trained)
                )


class Scheduler:
    """An object with a state dict."""

    def state_dict(self) -> dict[str, object]:
        """Give the state."""
        return {"last_epoch": 3, "factors": (0.5, [1.0])}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Take nothing."""


def state() -> dict[str, object]:
    """Give the state that every rank saves."""
    model = FullyShardedDataParallel(Model())
    local = local_state_dict(model)
    trained = {fqn: local[fqn].tensor for fqn in TRAINED}
    groups = [
        {"params": [trained[fqn] for fqn in TRAINED[:2]], "lr": 0.001, "weight_decay": 0.0},
        {"params": [trained[fqn] for fqn in TRAINED[2:]], "betas": (0.8, 0.95)},
    ]
    optimizer = torch.optim.AdamW(groups)
    for parameter in trained.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for fqn, held in local.items():
        if fqn in MODULE and not held.is_replicated:
            _fill(held.tensor, f"model.{fqn}", fqn, held.start)
    for fqn, parameter in trained.items():
        found = optimizer.state[parameter]
        found["step"].copy_(tensor(f"optimizer.state.{fqn}.step", "F32", ()))
        for moment in MOMENTS:
            _fill(found[moment], f"optimizer.state.{fqn}.{moment}", fqn, local[fqn].start)
    mesh = init_device_mesh("cpu", (2,))
    cut = {key: _cut(tensor(f"mesh.{key}", *spec), mesh, int(key == "columns")) for key, spec in COLUMNS.items()}
    odd = {key: tensor(f"odd.{key.replace('%', '%25') or '%e'}", "U8", (4,)) for key in NAMES}
    own = {"epoch": dist.get_rank(), "order": tensor(own_name(dist.get_rank()), "U8", (4,))}
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": Scheduler(),
        "mesh": cut,
        "odd": odd,
        "loader": PerRank(own, "same"),
        **OBJECTS,
    }


def _cut(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    local = whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(local, mesh, [Shard(dim)], shape=whole.shape, stride=whole.stride())


def _fill(local: torch.Tensor, name: str, fqn: str, start: int) -> None:
    dtype, shape = MODULE[fqn]
    view, begin = bytes_of(local.detach()), start * local.element_size()
    view.copy_(torch.from_numpy(raw(name, dtype, shape)[begin : begin + view.numel()].copy()))


def save(folder: str) -> None:
    """Save from one rank of the group."""
    shardckpt.save(folder, state(), step=12345)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    assert not target.exists(), f"{target} is there: a golden checkpoint is never made anew"
    run_ranks(2, save, str(target))
