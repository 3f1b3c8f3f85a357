"""How to shard: strategies, precision and offload, as plain data. Refuses to know modules and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch.nn.modules.batchnorm import _BatchNorm


class ShardingStrategy(Enum):
    """What is split over the ranks, and when parameters are whole.

    | strategy | parameters at rest | after forward | gradients | optimizer state |
    |---|---|---|---|---|
    | FULL_SHARD | shard | shard | reduce-scatter | shard |
    | SHARD_GRAD_OP | shard | whole until backward ends | reduce-scatter | shard |
    | NO_SHARD | whole | whole | all-reduce | whole |
    | OPTIM | whole | whole | reduce-scatter | shard |
    | HYBRID_SHARD | inner shard | inner shard | reduce-scatter inner, all-reduce outer | inner shard |
    | _HYBRID_SHARD_ZERO2 | inner shard | whole until backward ends | as above | inner shard |

    OPTIM is ZeRO-1: whole parameters stay in memory, and are gathered again when an optimizer has changed the shards.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()
    OPTIM = auto()

    @property
    def is_hybrid(self) -> bool:
        """True if parameters are sharded in groups and replicated between them."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        """True if whole parameters are freed between forward and backward."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)

    @property
    def keeps_whole(self) -> bool:
        """True if whole parameters stay in memory beside the shard, or around it."""
        return self is ShardingStrategy.OPTIM


class BackwardPrefetch(Enum):
    """When the next unit's gather is issued in backward."""

    BACKWARD_PRE = auto()
    """Before the current unit's gradients are computed: most overlap, one more unit whole."""
    BACKWARD_POST = auto()
    """After them: less overlap, less memory."""


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of computation and communication; parameters are kept and updated in the dtype they were built in.

    Attributes:
        param_dtype: Of whole parameters in forward and backward; None keeps the parameters' own.
        reduce_dtype: Of gradient reduction; None for `param_dtype`.
        buffer_dtype: Of floating buffers; None leaves them.
        keep_low_precision_grads: Leave `.grad` in the dtype of computation, under NO_SHARD in that of reduction; the
            optimizer must take such gradients.
        cast_forward_inputs: Cast floating inputs of each unit to `param_dtype`.
        cast_root_forward_inputs: Cast floating inputs of the root to `param_dtype`.
        _module_classes_to_ignore: With an auto_wrap_policy, modules of these classes become units that compute and
            reduce in full precision, whatever the policy says of them.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[torch.nn.Module]] = (_BatchNorm,)

    @property
    def exceptions(self) -> tuple[type[torch.nn.Module], ...]:
        """Classes whose modules run in full precision, as far as there is another."""
        is_mixed = any(dtype is not None for dtype in (self.param_dtype, self.reduce_dtype, self.buffer_dtype))
        return tuple(self._module_classes_to_ignore) if is_mixed else ()


@dataclass(frozen=True)
class CPUOffload:
    """Where shards rest."""

    offload_params: bool = False
