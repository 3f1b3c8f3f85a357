"""Gradient scaling for float16, where each rank sees only its shards of the gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from sharding.collectives import Group


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` whose ranks skip a step together when any of them found an infinity or NaN."""

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Take torch's arguments.

        Args:
            device: Kind of device of the gradients; None for the accelerator, or the CPU where there is none.
            init_scale: Scale at first.
            backoff_factor: Factor after a step with infinities.
            growth_factor: Factor after `growth_interval` steps without.
            growth_interval: See there.
            enabled: False to do nothing.
            process_group: The ranks that share the shards; None for all.
        """
        if device is None:
            device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"  # type: ignore[union-attr]
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or nested losses, by the scale; each keeps its dtype, so that backward computes in it."""
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(one) for one in outputs)
        scaled = super().scale(outputs)
        return scaled.to(outputs.dtype) if isinstance(outputs, torch.Tensor) else scaled

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Divide gradients by the scale, as torch does, float16 ones too, and agree on what was found.

        Collective:
            All ranks of the group; blocks.
        """
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        found = found or {found_inf.device: found_inf}  # a rank may hold no part of any gradient
        group = Group(self.process_group if self.process_group is not None else dist.group.WORLD)
        for flag in found.values():
            group.all_reduce(flag, dist.ReduceOp.MAX).wait()
        return found
