"""`shardckpt export --like config.json`: names and shapes are those that transformers itself has for the config."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shardckpt
from tests.shardckpt.cli.invocation import error_of, run
from tests.shardckpt.cli.test_transformers import CONFIGS


def made(kind: str, folder: Path) -> Any:
    """Make a model, and put its config there."""
    config, name = CONFIGS[kind]
    torch.manual_seed(3)
    model = getattr(transformers, name)(config)
    model.config.architectures = [name]
    model.config.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_that_do_not_fit_the_config_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    """Missing, unexpected and of another shape; nothing is written."""
    model = made(kind, tmp_path)
    state = model.state_dict()
    shared = {t.data_ptr() for t in state.values() if sum(o.data_ptr() == t.data_ptr() for o in state.values()) > 1}
    alone = [name for name, tensor in state.items() if tensor.data_ptr() not in shared and tensor.dim() == 2]
    missing, reshaped = alone[0], alone[1]
    shape = tuple(state[reshaped].shape)
    del state[missing]
    shardckpt.save(tmp_path / "a", {"model": {**state, reshaped: torch.ones(2, 5), "extra": torch.ones(3)}})
    arguments = ("export", tmp_path / "a", tmp_path / "out", "--like", tmp_path / "config.json", "--only", "model.*")
    text = error_of(*arguments)
    assert f"missing '{missing}'" in text
    assert "unexpected 'extra'" in text
    assert f"of another shape '{reshaped} (2, 5) instead of {shape}'" in text
    assert "Give the config of this training" in text
    assert not (tmp_path / "out").exists()


def test_older_names_of_the_same_model_fit_too(tmp_path: Path) -> None:
    """Weights that transformers wrote itself, in which each expert is apart, come in and go out as they were."""
    model = made("mixture of experts", tmp_path)
    model.save_pretrained(tmp_path / "hf")
    run("import", tmp_path / "hf", tmp_path / "a", "--ranks", 2)
    shown = run("export", tmp_path / "a", tmp_path / "out", "--like", tmp_path / "config.json")
    assert "not checked" not in shown.stderr
    assert "block_sparse_moe.experts.1.w2.weight" in " ".join(load_file(tmp_path / "out" / "model.safetensors"))


def test_a_tied_tensor_is_written_under_each_name_that_the_model_has(tmp_path: Path) -> None:
    """Where the config does not tie them, both are there, or loading would make one anew."""
    model = made("decoder", tmp_path)
    model.lm_head.weight = model.model.embed_tokens.weight
    shardckpt.save(tmp_path / "a", {"model": model})
    run("export", tmp_path / "a", tmp_path / "out", "--like", tmp_path / "config.json")
    loaded, found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values()), found
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_what_cannot_be_checked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that transformers does not have, or that has code of its own, and without transformers: and why."""
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(2, 3)}, tmp_path / "hf" / "model.safetensors")
    run("import", tmp_path / "hf", tmp_path / "a", "--ranks", 1)

    def said(**config: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        arguments = (tmp_path / "a", tmp_path / "out", "--like", tmp_path / "config.json", "--overwrite")
        return run("export", *arguments).stderr

    assert "not checked: transformers cannot tell (AttributeError: " in said(architectures=["TinyModel"])
    assert "not checked: transformers cannot tell" in said(architectures=["LlamaModel"], hidden_size="many")
    assert "names no architecture, or one that takes code of its own" in said(architectures=["LlamaModel"], auto_map={})
    assert "names no architecture" in said(architectures=5)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "install shardckpt[hf]" in said(architectures=["LlamaModel"])
