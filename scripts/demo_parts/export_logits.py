"""Load an export with transformers, compare its logits with stored ones, generate, and print as JSON how it went."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

NEW_BYTES = 48


@torch.no_grad()
def main(folder: str, stored: str, prompt: str) -> None:
    """Compare on the batch that is stored with the logits; go on after `prompt`, a byte at a time."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, loading = loaded
    model.eval()
    expected = load_file(stored)
    logits = model(input_ids=expected["batch"]).logits
    start = torch.tensor([list(prompt.encode())])
    torch.manual_seed(0)
    generated = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=NEW_BYTES, do_sample=True)
    found = {
        "numel": logits.numel(),
        "same": torch.equal(logits, expected["logits"]),
        "is_complete": not any(loading.values()),
        "generated": bytes(generated[0, start.shape[1] :].tolist()).decode(errors="replace"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
