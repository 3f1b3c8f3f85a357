"""What the benchmarks of training train: a Llama-like model under our strategies and those of others, in gloo ranks.

Knows the contenders and how ranks are started; refuses to know what is measured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import sharding


@dataclass(frozen=True)
class Size:
    """A model and its batch on each rank."""

    width: int
    num_blocks: int
    vocabulary: int
    batch: int
    length: int


SIZES = {
    "compute": Size(width=256, num_blocks=6, vocabulary=2048, batch=4, length=64),
    "communication": Size(width=1024, num_blocks=8, vocabulary=1024, batch=1, length=16),
}


class Block(nn.Module):
    """Attention and a gated MLP, as in Llama, without positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = width // 64
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        inner = 64 * round(width * 8 / 3 / 64)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block. # [batch, length, width]"""
        q, k, v = (t.unflatten(-1, (self.num_heads, 64)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def model(size: Size) -> nn.Sequential:
    """Give a model of fixed weights."""
    torch.manual_seed(0)
    blocks = [Block(size.width) for _ in range(size.num_blocks)]
    head = nn.Linear(size.width, size.vocabulary, bias=False)
    return nn.Sequential(nn.Embedding(size.vocabulary, size.width), *blocks, nn.RMSNorm(size.width), head)


class Trainer(Protocol):
    """A model in training on this rank's batches."""

    def step(self) -> float:
        """Take one step, and give its loss on this rank."""


class Batches:
    """The batches of one rank."""

    def __init__(self, size: Size) -> None:
        self._size, self._generator = size, torch.Generator().manual_seed(dist.get_rank())

    def loss(self, module: nn.Module) -> torch.Tensor:
        """Give the loss of the next batch."""
        shape = (self._size.batch, self._size.length)
        tokens = torch.randint(0, self._size.vocabulary, shape, generator=self._generator)
        return nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Give the optimizer of all contenders."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


class Loop:
    """The loop that people write in PyTorch."""

    def __init__(self, module: nn.Module, size: Size) -> None:
        self.module, self.optimizer, self._batches = module, adamw(module.parameters()), Batches(size)

    def forward_backward(self) -> float:
        """Compute gradients, and give the loss."""
        loss = self._batches.loss(self.module)
        loss.backward()
        return loss.item()

    def step(self) -> float:
        """Take one step, and give its loss on this rank."""
        loss = self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Alone:
    """What a rank computes and nothing else: a whole model's gradients, and the update of this rank's part of it."""

    def __init__(self, strategy: str, size: Size) -> None:
        self.module, self._batches = model(size), Batches(size)
        ranks = 1 if strategy == "NO_SHARD" else dist.get_world_size()
        self._parts = [nn.Parameter(torch.zeros(p.numel() // ranks)) for p in self.module.parameters()]
        for part in self._parts:
            part.grad = torch.zeros_like(part)
        self._optimizer = adamw(self._parts)

    def step(self) -> float:
        """Compute one step."""
        loss = self._batches.loss(self.module)
        loss.backward()
        self._optimizer.step()
        self.module.zero_grad()
        return loss.item()


class DeepSpeed:
    """DeepSpeed's engine. It sums by a kernel of its own in shared memory, where ranks share a machine."""

    def __init__(self, strategy: str, size: Size) -> None:
        os.environ.update(LOCAL_RANK=str(dist.get_rank()), LOCAL_SIZE=str(dist.get_world_size()), DS_ACCELERATOR="cpu")
        logging.disable(logging.WARNING)
        module, self._batches = model(size), Batches(size)
        config = {
            "train_micro_batch_size_per_gpu": size.batch,
            "zero_optimization": {"stage": STAGES[strategy]},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        with contextlib.redirect_stdout(sys.stderr):
            import deepspeed

            self._engine, *_ = deepspeed.initialize(
                model=module, optimizer=adamw(module.parameters()), config=config, dist_init_required=False
            )

    def step(self) -> float:
        """Take one step, and give its loss on this rank."""
        loss = self._batches.loss(self._engine)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.item())


def ours(strategy: str, size: Size) -> Loop:
    """Train by `sharding`."""
    policy = sharding.ModuleWrapPolicy({Block})
    module = sharding.FullyShardedDataParallel(
        model(size), sharding_strategy=sharding.ShardingStrategy[strategy], auto_wrap_policy=policy
    )
    return Loop(module, size)


def fsdp1(strategy: str, size: Size) -> Loop:
    """Shard by torch's first FSDP."""
    policy = ModuleWrapPolicy({Block})
    module = fsdp.FullyShardedDataParallel(
        model(size),
        sharding_strategy=fsdp.ShardingStrategy[strategy],
        auto_wrap_policy=policy,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return Loop(module, size)


def fsdp2(strategy: str, size: Size) -> Loop:
    """Shard by torch's second FSDP."""
    module, is_resharded = model(size), strategy == "FULL_SHARD"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module:
        if isinstance(block, Block):
            fsdp.fully_shard(block, mesh=mesh, reshard_after_forward=is_resharded)
    fsdp.fully_shard(module, mesh=mesh, reshard_after_forward=False)  # the root is needed first in backward
    return Loop(module, size)


def ddp(strategy: str, size: Size) -> Loop:
    """Replicate by DistributedDataParallel."""
    return Loop(DistributedDataParallel(model(size)), size)


Make = Callable[[str, Size], Trainer]
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "OPTIM", "NO_SHARD")
STAGES = {"OPTIM": 1, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3}
"""DeepSpeed's name for a strategy."""
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def contenders(strategy: str) -> dict[str, Make]:
    """Give ours, and what others have that shards as much."""
    match strategy:
        case "FULL_SHARD" | "SHARD_GRAD_OP":
            peers: dict[str, Make] = {"FSDP2": fsdp2, "FSDP1": fsdp1}
        case "NO_SHARD":
            peers = {"DDP": ddp}
        case _:
            peers = {}
    if HAS_DEEPSPEED and strategy in STAGES:
        peers["DeepSpeed"] = DeepSpeed
    return {"ours": ours, **peers}


def in_ranks(num_ranks: int, function: Callable[..., object], *args: object) -> object:
    """Run a function as every rank of a gloo group, and give what it returns on the first."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        theirs, answers = context.Pipe(duplex=False)
        processes = [
            context.Process(target=_rank, args=(rank, num_ranks, folder, answers, function, args))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        answers.close()
        try:
            answer = theirs.recv()
        except EOFError:
            raise SystemExit("a rank failed; see above") from None
        for process in processes:
            process.join()
    return answer


def _rank(
    rank: int, num_ranks: int, folder: str, answers: object, function: Callable[..., object], args: tuple[object, ...]
) -> None:
    warnings.simplefilter("ignore")  # torch deprecates its own
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    answer = function(*args)
    dist.barrier()
    if rank == 0:
        answers.send(answer)  # type: ignore[attr-defined]
    dist.destroy_process_group()
