"""Small models, optimizers and training steps for tests of saving and loading."""

from __future__ import annotations

import torch
from torch import nn


class Tied(nn.Module):
    """Uneven, tiny, scalar, empty and frozen parameters, a tied pair that is not first, buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 7, bias=False)
        self.third = nn.Linear(7, 7)
        self.third.weight = self.second.weight
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.zeros(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every trainable parameter."""
        hidden = self.third(self.second(self.norm(self.first(x))))
        return hidden * self.scale + self.one + self.empty.sum() + self.frozen.sum()


def tied(seed: int) -> Tied:
    """Give a model of random weights."""
    torch.manual_seed(seed)
    return Tied()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Give an optimizer of three groups, one of them empty."""
    first = [p for name, p in model.named_parameters() if "first" in name]
    rest = [p for name, p in model.named_parameters() if "first" not in name]
    return torch.optim.AdamW([{"params": first, "lr": 1e-2}, {"params": []}, {"params": rest, "weight_decay": 0.1}])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on a fixed sequence of batches, and give the losses."""
    losses = []
    for step in steps:
        batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
