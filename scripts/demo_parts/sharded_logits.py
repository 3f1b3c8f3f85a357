"""Load a checkpoint into the sharded model, on all ranks of torchrun, and keep its logits for a batch of the corpus."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import LlamaConfig

import shardckpt
from examples.train_bytes import batch_of, build_model, read_corpus


@torch.no_grad()
def main(checkpoint: str, config: str, out: str) -> None:
    """Run the model on batch 0, whole on each rank; rank 0 writes batch and logits to `out`."""
    dist.init_process_group("gloo")
    model = build_model(LlamaConfig.from_pretrained(config)).eval()
    shardckpt.load(Path(checkpoint), {"model": model})
    batch = batch_of(read_corpus(), step=0, rank=0, world_size=1)
    logits = model(input_ids=batch).logits
    if dist.get_rank() == 0:
        save_file({"batch": batch, "logits": logits}, out)
    dist.barrier()  # gloo's threads may still hold the last tensors, and would block the next line for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
