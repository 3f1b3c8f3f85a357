"""The recipes of docs/recipes.md run with the real libraries; stopped and started again, they end as if not."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

RECIPES = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()


def _recipe(heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}$.*?^```python\n(.*?)^```$", RECIPES, re.DOTALL | re.MULTILINE)
    assert found, heading
    return found[1]


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _batch_of(step: int) -> torch.Tensor:
    return torch.arange(10.0).reshape(2, 5) / 10 - step / 3


def _net() -> _Net:
    torch.manual_seed(3)
    return _Net()


def _weights(run: str) -> tuple[list[int], list[list[float]]]:
    """Give the steps under a root, and the weights of the newest."""
    import shardckpt

    manager = shardckpt.Manager(run)
    newest = manager.latest()
    assert newest is not None
    stored = shardckpt.open(manager.path(newest))
    weights = [name for name in stored.names if name.startswith("model.")]
    assert weights
    return manager.steps(), [stored[name][...].double().flatten().tolist() for name in weights]


def _fsdp2(run: str, num_steps: int) -> None:
    from torch.distributed.fsdp import fully_shard

    import shardckpt

    names = {"model": _net(), "fully_shard": fully_shard, "torch": torch, "shardckpt": shardckpt, "batch_of": _batch_of}
    exec(_recipe("A plain loop with FSDP2"), names | {"run": run, "save_every": 2, "num_steps": num_steps})


def test_fsdp2(tmp_path: Path) -> None:
    """Stopped after step 4 of 6 on 2 ranks and gone on with on 3, the weights are those of one run."""
    run_ranks(2, _fsdp2, str(tmp_path / "whole"), 6)
    run_ranks(2, _fsdp2, str(tmp_path / "stopped"), 5)
    run_ranks(3, _fsdp2, str(tmp_path / "stopped"), 6)
    _same(tmp_path)


def _same(folder: Path) -> None:
    steps, whole = _weights(str(folder / "whole"))
    assert steps == [2, 4, 6]
    other_steps, stopped = _weights(str(folder / "stopped"))
    assert other_steps == steps
    for one, other in zip(whole, stopped, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows that are all alike, so that their order does not count."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(6), "labels": torch.arange(6)}


def _trainer(run: str, folder: Path, max_steps: int, stop_at: int | None = None) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the library warns of
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

        import shardckpt

        sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
        torch.manual_seed(3)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False))
        arguments = TrainingArguments(
            str(folder),
            max_steps=max_steps,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            per_device_train_batch_size=2,
            lr_scheduler_type="linear",
        )

        class Dataset(_Rows):
            def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
                if stop_at is not None and names["trainer"].state.global_step >= stop_at:
                    raise KeyboardInterrupt
                return super().__getitem__(index)

        names: dict[str, Any] = {
            "model": model,
            "arguments": arguments,
            "dataset": Dataset(),
            "run": run,
            "save_every": 2,
        }
        names |= {"Trainer": Trainer, "TrainerCallback": TrainerCallback, "shardckpt": shardckpt}
        exec(_recipe("`transformers.Trainer`"), names)
        return int(names["trainer"].state.global_step)


def test_transformers_trainer(tmp_path: Path) -> None:
    """Interrupted after step 5 of 6 and started again, the Trainer ends as if it had never stopped."""
    assert _trainer(str(tmp_path / "whole"), tmp_path / "a", 6) == 6
    with pytest.raises(KeyboardInterrupt):
        _trainer(str(tmp_path / "stopped"), tmp_path / "b", 6, stop_at=5)
    assert _trainer(str(tmp_path / "stopped"), tmp_path / "b", 6) == 6
    _same(tmp_path)
    assert _trainer(str(tmp_path / "stopped"), tmp_path / "b", 6) == 0  # it is done


def _fabric(run: str, num_steps: int, strategy: str, devices: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the library warns of
        from lightning_fabric import Fabric

        import shardckpt

        names = {"model": _net(), "torch": torch, "Fabric": Fabric, "shardckpt": shardckpt, "batch_of": _batch_of}
        names |= {"run": run, "save_every": 2, "num_steps": num_steps, "strategy": strategy, "devices": devices}
        exec(_recipe("Lightning Fabric"), names)


def _fabric_ranks(run: str, num_steps: int) -> None:
    import torch.distributed as dist

    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    of_torchrun |= {"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test"}
    before = dict(os.environ)
    os.environ.update(of_torchrun)
    try:
        _fabric(run, num_steps, "ddp", dist.get_world_size())
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_lightning_fabric(tmp_path: Path) -> None:
    """On 2 ranks of its data parallel strategy until after step 5, then on one process to the end, as on one alone."""
    _fabric(str(tmp_path / "whole"), 6, "auto", 1)
    run_ranks(2, _fabric_ranks, str(tmp_path / "stopped"), 5)
    _fabric(str(tmp_path / "stopped"), 6, "auto", 1)
    _same(tmp_path)
