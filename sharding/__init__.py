"""Fully sharded data parallel training. The public names, loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding.activation import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
        offload_wrapper,
    )
    from sharding.disk_optimizer import DiskOptimizer
    from sharding.errors import LoadError, ShardingError, StateError, UnsupportedError, WrapError
    from sharding.fsdp import FullyShardedDataParallel
    from sharding.functional import fully_shard, reset
    from sharding.optimizer_state import full_optimizer_state_dict, load_full_optimizer_state_dict
    from sharding.policy import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
    from sharding.sharded_grad_scaler import ShardedGradScaler
    from sharding.state_dict import (
        LocalTensor,
        bucket_layouts,
        full_state_dict,
        is_sharded,
        load_full_state_dict,
        local_state_dict,
    )
    from sharding.state_options import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        OptimStateDictConfig,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )
    from sharding.wrap import (
        CustomPolicy,
        ModuleWrapPolicy,
        always_wrap_policy,
        lambda_auto_wrap_policy,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )

_HOME = {
    "activation": ("CheckpointImpl", "apply_activation_checkpointing", "checkpoint_wrapper", "offload_wrapper"),
    "disk_optimizer": ("DiskOptimizer",),
    "errors": (
        "LoadError",
        "ShardingError",
        "StateError",
        "UnsupportedError",
        "WrapError",
    ),
    "fsdp": ("FullyShardedDataParallel",),
    "functional": ("fully_shard", "reset"),
    "optimizer_state": ("full_optimizer_state_dict", "load_full_optimizer_state_dict"),
    "policy": (
        "BackwardPrefetch",
        "CPUOffload",
        "MixedPrecision",
        "ShardingStrategy",
    ),
    "sharded_grad_scaler": ("ShardedGradScaler",),
    "state_dict": (
        "LocalTensor",
        "bucket_layouts",
        "full_state_dict",
        "is_sharded",
        "load_full_state_dict",
        "local_state_dict",
    ),
    "state_options": (
        "FullOptimStateDictConfig",
        "FullStateDictConfig",
        "LocalOptimStateDictConfig",
        "LocalStateDictConfig",
        "OptimStateDictConfig",
        "OptimStateKeyType",
        "ShardedOptimStateDictConfig",
        "ShardedStateDictConfig",
        "StateDictConfig",
        "StateDictSettings",
        "StateDictType",
    ),
    "wrap": (
        "CustomPolicy",
        "ModuleWrapPolicy",
        "always_wrap_policy",
        "lambda_auto_wrap_policy",
        "size_based_auto_wrap_policy",
        "transformer_auto_wrap_policy",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CheckpointImpl",
    "CustomPolicy",
    "DiskOptimizer",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LoadError",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "LocalTensor",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingError",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StateError",
    "UnsupportedError",
    "WrapError",
    "always_wrap_policy",
    "apply_activation_checkpointing",
    "bucket_layouts",
    "checkpoint_wrapper",
    "full_optimizer_state_dict",
    "full_state_dict",
    "fully_shard",
    "is_sharded",
    "lambda_auto_wrap_policy",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "local_state_dict",
    "offload_wrapper",
    "reset",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sharding' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sharding.{_MODULE_OF[name]}"), name)
