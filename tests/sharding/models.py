"""Models and training loops that the runtime's tests compare with and without sharding."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block, with a buffer, of uneven parameters; optionally checkpointed, of either kind."""

    def __init__(self, width: int, recompute: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 3)
        self.down = nn.Linear(width + 3, width, bias=False)
        self.register_buffer("offset", torch.full((width,), 0.5))
        self.recompute = recompute

    def body(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block."""
        return x + self.down(torch.tanh(self.up(self.norm(x) + self.offset)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block, now or again in backward."""
        if self.recompute:
            out: torch.Tensor = checkpoint(self.body, x, use_reentrant=self.recompute == "reentrant")
            return out
        return self.body(x)


class Net(nn.Module):
    """An embedding tied to the head across units, blocks, one used twice, and tiny and scalar parameters."""

    def __init__(self, recompute: str = "", twice: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([Block(7, recompute) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.full((1,), 0.1))
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.twice = twice

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give logits."""
        x = self.embed(tokens) * self.scale + self.one
        for block in self.blocks:
            x = block(x)
        if self.twice:
            x = self.blocks[1](x)
        logits: torch.Tensor = self.head(x)
        return logits


def net(**options: bool | str) -> Net:
    """Give a net of fixed weights."""
    torch.manual_seed(3)
    return Net(**options)  # type: ignore[arg-type]  # as the caller says


GLOBAL_BATCH = 12


def global_batch(step: int) -> torch.Tensor:
    """Give the tokens of all ranks for a step. # [GLOBAL_BATCH, 5]"""
    return torch.randint(0, 11, (GLOBAL_BATCH, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Give the mean loss of predicting each token from itself."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    *,
    is_distributed: bool,
    clip: Callable[[], torch.Tensor] | None = None,
) -> list[float]:
    """Train, each rank on its part of the global batch; give the global losses (and the norms, with `clip`)."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
    part = GLOBAL_BATCH // world_size
    record = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, global_batch(step)[rank * part : (rank + 1) * part])
        loss.backward()
        if clip is not None:
            record.append(float(clip()))
        optimizer.step()
        total = loss.detach() / world_size
        if is_distributed:
            dist.all_reduce(total)
        record.append(float(total))
    return record
