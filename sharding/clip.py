"""The norm of gradients that are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from sharding.unit import Unit


def clip_grad_norm(root: nn.Module, units: Sequence[Unit], max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale the gradients of all parameters of `root`; see `FullyShardedDataParallel.clip_grad_norm_`."""
    sharded = [
        p.grad
        for u in units
        if u.shards.size > 1
        for b in u.buckets
        for m in b.members
        if (p := m.shard).grad is not None
    ]
    known = {id(gradient) for gradient in sharded}
    whole = [p.grad for p in root.parameters() if p.grad is not None and id(p.grad) not in known]
    device = next((gradient.device for gradient in [*sharded, *whole]), torch.device("cpu"))
    total = _power_sum(sharded, norm_type, device)
    group = next((u.shards for u in units if u.shards.size > 1), None)
    if group is not None:
        group.all_reduce(total, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM).wait()
    rest = _power_sum(whole, norm_type, device)
    total = torch.maximum(total, rest) if math.isinf(norm_type) else (total + rest) ** (1 / norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in [*sharded, *whole]:
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return total


def _power_sum(gradients: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Give the sum of |x|^p over all elements in fp32, or the largest |x|. # []"""
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.zeros((), device=device)
    norms = torch.stack([torch.linalg.vector_norm(g, norm_type, dtype=torch.float32).to(device) for g in filled])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
