"""Checkpoints of sharded training that any tool can read. The public names, loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardckpt.checkpoint import Checkpoint, StoredTensor
    from shardckpt.checkpoint import open_checkpoint as open  # noqa: A004  # reads as shardckpt.open
    from shardckpt.coordinate import Deadlines
    from shardckpt.errors import CheckpointError, PreemptedError
    from shardckpt.loading import LoadReport, load
    from shardckpt.manager import Manager, Restored
    from shardckpt.per_rank import PerRank
    from shardckpt.preemption import Preemption
    from shardckpt.retention import Best
    from shardckpt.save_async import AsyncSaver, PendingSave
    from shardckpt.save_phases import SaveReport
    from shardckpt.saving import save

__all__ = [
    "AsyncSaver",
    "Best",
    "Checkpoint",
    "CheckpointError",
    "Deadlines",
    "LoadReport",
    "Manager",
    "PendingSave",
    "PerRank",
    "PreemptedError",
    "Preemption",
    "Restored",
    "SaveReport",
    "StoredTensor",
    "load",
    "open",
    "save",
]

_HOME = {
    "Checkpoint": ("checkpoint", "Checkpoint"),
    "StoredTensor": ("checkpoint", "StoredTensor"),
    "open": ("checkpoint", "open_checkpoint"),
    "CheckpointError": ("errors", "CheckpointError"),
    "Deadlines": ("coordinate", "Deadlines"),
    "LoadReport": ("loading", "LoadReport"),
    "load": ("loading", "load"),
    "AsyncSaver": ("save_async", "AsyncSaver"),
    "Manager": ("manager", "Manager"),
    "Restored": ("manager", "Restored"),
    "PreemptedError": ("errors", "PreemptedError"),
    "Preemption": ("preemption", "Preemption"),
    "Best": ("retention", "Best"),
    "PerRank": ("per_rank", "PerRank"),
    "PendingSave": ("save_async", "PendingSave"),
    "SaveReport": ("save_phases", "SaveReport"),
    "save": ("saving", "save"),
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'shardckpt' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(f"shardckpt.{module}"), attribute)
