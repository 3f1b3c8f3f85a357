"""Exports of saved models load in transformers: nothing missing, nothing left over, every tensor to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardckpt
from tests.shardckpt.cli.invocation import run

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
CONFIGS: dict[str, tuple[Any, str]] = {
    "decoder": (transformers.LlamaConfig(**SMALL, num_key_value_heads=1), "LlamaForCausalLM"),
    "decoder, tied": (
        transformers.LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=True),
        "LlamaForCausalLM",
    ),
    "encoder, tied": (transformers.BertConfig(**SMALL), "BertForMaskedLM"),
    "mixture of experts": (
        transformers.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=3),
        "MixtralForCausalLM",
    ),
    "encoder-decoder, tied": (
        transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=40),
        "T5ForConditionalGeneration",
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("size", ["1GB", "4kB"])
def test_from_pretrained_gives_back_the_saved_model(tmp_path: Path, kind: str, size: str) -> None:
    """As one file and as several, from a config alone."""
    config, name = CONFIGS[kind]
    torch.manual_seed(3)
    architecture: Any = getattr(transformers, name)
    model = architecture(config)
    config.save_pretrained(tmp_path / "config")
    shardckpt.save(tmp_path / "a", {"model": model})
    run("export", tmp_path / "a", tmp_path / "out", "--like", tmp_path / "config", "--max-shard-size", size)
    loaded, info = architecture.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    expected = model.state_dict()
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for fqn, tensor in expected.items():
        assert found[fqn].dtype == tensor.dtype, fqn
        assert torch.equal(found[fqn], tensor), fqn
