"""Train a byte-level Llama on Python's standard library, sharded over all ranks; resume at any number of ranks.

    torchrun --nproc-per-node 4 examples/train_bytes.py --out runs/a
    torchrun --nproc-per-node 3 examples/train_bytes.py --out runs/b --resume runs/a/step-000016

Batch number n is the same whatever the number of ranks, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import functools
import json
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardckpt
from sharding import FullyShardedDataParallel, ShardingStrategy, transformer_auto_wrap_policy

BATCH_SIZE = 12
CONTEXT = 128


def main() -> None:
    """Train, log and save, as the command line says."""
    args = parse_arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH_SIZE % world_size:
        raise SystemExit(f"{world_size} ranks cannot share a batch of {BATCH_SIZE} evenly; use a divisor of it")
    log = Log(args.out, is_silent=rank != 0)

    config = model_config(num_layers=args.layers)
    model = build_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if rank == 0:
        config.save_pretrained(args.out / "config")
    if args.resume:
        loaded = shardckpt.load(args.resume, state)
        log(f"resumed at step {state['step']} on {world_size} ranks", resumed=state["step"], nbytes=loaded.nbytes)

    corpus = read_corpus()
    for step in range(int(str(state["step"])), args.steps):
        started = time.perf_counter()
        batch = batch_of(corpus, step, rank, world_size)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report(log, step + 1, loss.detach(), float(scheduler.get_last_lr()[0]), time.perf_counter() - started)

        if (step + 1) % args.save_every == 0:
            state["step"] = step + 1
            saved = shardckpt.save(args.out / f"step-{step + 1:06}", state, step=step + 1)
            log(
                f"saved {saved.path}: {saved.nbytes / 1e6:.1f} MB in {saved.seconds:.2f} s",
                saved=saved.path,
                nbytes=saved.nbytes,
                seconds=saved.seconds,
            )
    dist.barrier()  # gloo's threads may still hold the last tensors, and would block the next line for ever
    dist.destroy_process_group()


def model_config(*, num_layers: int) -> LlamaConfig:
    """Give the architecture: one token a byte."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def build_model(config: LlamaConfig) -> FullyShardedDataParallel:
    """Build the model, the same on all ranks, and shard it: a unit a block."""
    torch.manual_seed(0)
    blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    return FullyShardedDataParallel(
        LlamaForCausalLM(config), auto_wrap_policy=blocks, sharding_strategy=ShardingStrategy.FULL_SHARD
    )


def read_corpus() -> torch.Tensor:
    """Give the text of the standard library's top-level modules, as bytes."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in modules)), dtype=torch.uint8)


def batch_of(corpus: torch.Tensor, step: int, rank: int, world_size: int) -> torch.Tensor:
    """Give this rank's rows of batch number `step`; the batch itself depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(corpus) - CONTEXT, (BATCH_SIZE,), generator=generator)[rank::world_size]
    return torch.stack([corpus[start : start + CONTEXT] for start in starts]).long()


def report(log: Log, step: int, loss: torch.Tensor, learning_rate: float, seconds: float) -> None:
    """Log a finished step, with the mean loss of all ranks."""
    dist.all_reduce(loss)
    mean, speed = float(loss) / dist.get_world_size(), BATCH_SIZE * CONTEXT / seconds
    text = f"step {step:3}  loss {mean:.4f}  learning rate {learning_rate:.2e}  {speed:,.0f} tokens/s"
    log(text, step=step, loss=mean, learning_rate=learning_rate, tokens_per_s=speed)


class Log:
    """Prints what rank 0 says, and keeps it as JSON lines beside the checkpoints."""

    def __init__(self, folder: Path, *, is_silent: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = None if is_silent else (folder / "log.jsonl").open("w")

    def __call__(self, text: str, **fields: object) -> None:
        """Print a line; its facts go to the file."""
        if self._file is not None:
            print(text, flush=True)
            print(json.dumps(fields), file=self._file, flush=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for checkpoints, the log and the model's config"
    )
    parser.add_argument("--resume", type=Path, help="a checkpoint, written at any number of ranks")
    parser.add_argument("--steps", type=int, default=48, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=16, help="save each time that many steps are done")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    return parser.parse_args()


if __name__ == "__main__":
    main()
