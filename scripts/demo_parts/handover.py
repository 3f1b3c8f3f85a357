"""Part 3, out: the trained model as a Hugging Face folder, the same model to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.demo_parts.commands import Commands
from scripts.demo_parts.report import Report
from scripts.demo_parts.weights import claim_identical

PROMPT = "def __init__(self"


def run(report: Report, commands: Commands, checkpoint: Path, *, ranks: int) -> None:
    """Consolidate and export a training checkpoint; compare the export's logits with those of the sharded model."""
    report.title("Part 3. Out: the trained model for other programs")
    out = commands.folder
    single, exported, logits = out / "llama.safetensors", out / "llama-hf", out / "logits.safetensors"
    config = checkpoint.parent / "config"

    report.say("The weights as one safetensors file, and as a Hugging Face folder with the config of the training run.")
    report.row("consolidate", commands.shardckpt("consolidate", checkpoint, single), single)
    done = commands.shardckpt("export", checkpoint, exported, "--to", "hf", "--like", config)
    report.row("export", done, exported, is_identical=claim_identical(report, single, exported))

    report.say(
        f"\nAsk the sharded model for logits, on {ranks} ranks; then the export, by transformers.AutoModelForCausalLM."
    )
    commands.torchrun(ranks, "-m", f"{__package__}.sharded_logits", checkpoint, config, logits)
    found = json.loads(commands.module("export_logits", exported, logits, PROMPT))
    report.claim(f"all {found['numel']} logits are equal, bit for bit", found["same"])
    report.claim("nothing was missing or left over when transformers loaded it", found["is_complete"])
    report.say(f"  it goes on after {PROMPT!r}: {found['generated']!r}")
