"""What `state_dict` and optimizer states are to be: kinds and options, under torch's names, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto


class StateDictType(Enum):
    """What a wrapped module's `state_dict` gives for each parameter."""

    FULL_STATE_DICT = auto()
    """The whole tensor, as the module without sharding would."""
    LOCAL_STATE_DICT = auto()
    """This rank's span of the flattened tensor."""
    SHARDED_STATE_DICT = auto()
    """A `ShardedTensor` of all ranks' spans, as `torch.distributed.checkpoint` takes it."""


class OptimStateKeyType(Enum):
    """How an optimizer state names parameters."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass(frozen=True)
class StateDictConfig:
    """Options for the state of modules; use the class of the kind."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """Options for whole tensors; with `rank0_only`, the other ranks get an empty dict."""

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """Options for spans."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """Options for sharded tensors."""

    _use_dtensor: bool = False


@dataclass(frozen=True)
class OptimStateDictConfig:
    """Options for the state of optimizers; use the class of the kind."""

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options for whole tensors; with `rank0_only`, the other ranks get an empty dict."""

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options for spans."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options for sharded tensors."""

    _use_dtensor: bool = False


@dataclass(frozen=True)
class StateDictSettings:
    """A kind, and its options for modules and optimizers."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)
