"""What was asked for when a module was made a unit: one record, checked where it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from sharding.errors import UnsupportedError, WrapError
from sharding.mesh import Groups
from sharding.policy import BackwardPrefetch, MixedPrecision, ShardingStrategy


@dataclass(frozen=True, slots=True)
class Settings:
    """What a call of `fully_shard` or the constructor asked for.

    Attributes:
        strategy: When parameters are whole.
        precision: In which dtypes it computes and reduces.
        groups: The ranks that share and that replicate shards.
        backward_prefetch: When the next gather is issued in backward; None for not before it is needed.
        forward_prefetch: Whether the next gather is issued early in forward.
        device: Where shards lie; None for where the parameters are.
    """

    strategy: ShardingStrategy
    precision: MixedPrecision
    groups: Groups
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    device: torch.device | None = None

    def override(self, arguments: Mapping[str, object]) -> Settings:
        """Give these settings with some replaced, under the constructor's names, as a `CustomPolicy` asks for.

        Raises:
            UnsupportedError: If a unit cannot have its own value of an argument.
            WrapError: If a value is of a wrong type.
        """
        settings = self
        for name, value in arguments.items():
            match name, value:
                case "sharding_strategy", ShardingStrategy():
                    settings = settings._with_strategy(value)
                case "mixed_precision", MixedPrecision() | None:
                    settings = replace(settings, precision=value or MixedPrecision())
                case "backward_prefetch", BackwardPrefetch() | None:
                    settings = replace(settings, backward_prefetch=value)
                case "forward_prefetch", bool():
                    settings = replace(settings, forward_prefetch=value)
                case (("sharding_strategy" | "mixed_precision" | "backward_prefetch" | "forward_prefetch"), _):
                    raise WrapError(f"a CustomPolicy gave {name}={value!r}, a {type(value).__name__}; give its enum")
                case _:
                    raise UnsupportedError(f"a CustomPolicy cannot override {name!r} for one unit; leave it out")
        return settings

    def _with_strategy(self, strategy: ShardingStrategy) -> Settings:
        groups, no_shard = self.groups, ShardingStrategy.NO_SHARD
        if strategy.is_hybrid != self.strategy.is_hybrid and strategy is not no_shard:
            raise UnsupportedError(
                f"a CustomPolicy cannot make a unit {strategy.name} inside {self.strategy.name}: that takes other "
                "groups of ranks; wrap that module by itself first"
            )
        if (strategy is no_shard) != (self.strategy is no_shard) and not self.strategy.is_hybrid:
            groups = Groups(shards=groups.replicas, replicas=groups.shards)
        elif strategy is no_shard and self.strategy.is_hybrid:
            raise UnsupportedError("a CustomPolicy cannot make a unit NO_SHARD inside a hybrid strategy; ignore it")
        return replace(self, strategy=strategy, groups=groups)
