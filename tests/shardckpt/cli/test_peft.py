"""`shardckpt export` of LoRA adapters: folders that PEFT loads, with what it would have written itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import shardckpt
from tests.shardckpt.cli.invocation import error_of, run, tree

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

CONFIG = transformers.LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=40,
)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "with a whole module": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "of embeddings": {"target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["norm"]},
    "with magnitudes": {"target_modules": r".*\.(up|down)_proj", "use_dora": True},
    "of several ranks": {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}},
}


def base(seed: int = 0) -> Any:
    """Make the same base model each time."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(CONFIG)


def adapted(**change: Any) -> Any:
    """Give a model with adapters that are no longer as they were made."""
    model = peft.get_peft_model(base(), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **change))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    return model.eval()


def written_by_peft(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Let PEFT write its folder, and give the tensors in it."""
    model.save_pretrained(folder, save_embedding_layers=False)
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_what_peft_writes_and_loads(tmp_path: Path, kind: str) -> None:
    """From the whole model, and from adapters alone: the same names and bits, and a model of the same outputs."""
    model = adapted(**KINDS[kind])
    expected = written_by_peft(model, tmp_path / "by-peft")
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    shardckpt.save(tmp_path / "whole", {"model": model})
    shardckpt.save(tmp_path / "alone", {"model": trained})
    like = tmp_path / "by-peft"
    run("export", tmp_path / "whole", tmp_path / "a", "--to", "peft", "--like", like / "adapter_config.json")
    run("export", tmp_path / "alone", tmp_path / "b", "--like", like, "--only", "model.*")
    for folder in (tmp_path / "a", tmp_path / "b"):
        found = load_file(folder / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        loaded = peft.PeftModel.from_pretrained(base(), folder).eval()
        tokens = torch.arange(12).reshape(2, 6)
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert set(tree(tmp_path / "a")) == {"adapter_model.safetensors", "adapter_config.json"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_of_an_import_is_identical(tmp_path: Path, kind: str) -> None:
    """A folder of PEFT comes in and goes out again, to the bit, its config with it; a reshard in between keeps it."""
    expected = written_by_peft(adapted(**KINDS[kind]), tmp_path / "in")
    run("import", tmp_path / "in", tmp_path / "a", "--ranks", 3)
    run("reshard", tmp_path / "a", tmp_path / "b", "--to", 2)
    run("export", tmp_path / "b", tmp_path / "out")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    config = "adapter_config.json"
    assert (tmp_path / "out" / config).read_bytes() == (tmp_path / "in" / config).read_bytes()
    run("diff", tmp_path / "in", tmp_path / "out")
    run("verify", tmp_path / "out")


def test_the_config_of_an_import_gives_way_to_one_that_is_named(tmp_path: Path) -> None:
    """`--like` is asked for; a config that is no JSON does not come in, and one that is none of adapters not out."""
    written_by_peft(adapted(**KINDS["plain"]), tmp_path / "in")
    run("import", tmp_path / "in", tmp_path / "a", "--ranks", 1)
    path = tmp_path / "in" / "adapter_config.json"
    changed = json.dumps(json.loads(path.read_text()) | {"lora_alpha": 99})
    path.write_text(changed)
    run("export", tmp_path / "a", tmp_path / "out", "--like", path)
    assert (tmp_path / "out" / "adapter_config.json").read_text() == changed
    path.write_text("no")
    assert "'adapter_config.json' is damaged" in error_of("import", tmp_path / "in", tmp_path / "b", "--ranks", 1)
    path.write_text("[]")
    run("import", tmp_path / "in", tmp_path / "b", "--ranks", 1)
    assert "'adapter_config.json' is damaged" in error_of("export", tmp_path / "b", tmp_path / "out-b")


def test_adapters_in_a_bare_model_are_taken_too(tmp_path: Path) -> None:
    """Without PEFT's own model around it, as transformers puts them in, its name is put before those of the tensors."""
    model = adapted(**KINDS["with a whole module"])
    expected = written_by_peft(model, tmp_path / "by-peft")
    shardckpt.save(tmp_path / "a", {"model": model.get_base_model()})
    run("export", tmp_path / "a", tmp_path / "out", "--to", "peft", "--like", tmp_path / "by-peft")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_adapters_that_peft_would_misread_are_refused(tmp_path: Path) -> None:
    """Each message says what is wrong and what to do; nothing is written."""
    model = adapted(**KINDS["plain"])
    written_by_peft(model, tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    shardckpt.save(tmp_path / "a", {"model": model})
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    shardckpt.save(tmp_path / "two", {"model": model})
    shardckpt.save(tmp_path / "base", {"model": base()})

    def refused(source: str, *more: object, **change: object) -> str:
        (tmp_path / "c.json").write_text(json.dumps(config | change))
        return error_of("export", tmp_path / source, tmp_path / "out", "--like", tmp_path / "c.json", *more)

    peft_only = ("--to", "peft")
    assert "name it, or the folder that has it, with --like" in error_of("export", tmp_path / "a", tmp_path / "out")
    assert "Write the adapters alone with --to peft" in refused("a")
    assert "there are no LoRA tensors" in refused("base", *peft_only)
    assert "choose one, as in --only '*.default.*'" in refused("two", *peft_only)
    assert "only LORA is supported" in refused("a", *peft_only, peft_type="IA3")
    assert "Save the adapters with PEFT itself" in refused("a", *peft_only, bias="all")
    assert "says rank 3. Take the config of this training" in refused("a", *peft_only, r=3)
    assert "PEFT would leave out their adapters" in refused("a", *peft_only, target_modules=["q_proj"])
    assert "is no pattern" in refused("a", *peft_only, target_modules="(")
    assert "is damaged" in refused("a", *peft_only, r="four")
    assert "the adapter is incomplete" in refused("a", *peft_only, "--skip", "*0.self_attn.q_proj.lora_B*")
    assert "PEFT reads adapters from one file" in refused("a", *peft_only, "--max-shard-size", "1kB")
    assert not (tmp_path / "out").exists()
    run("export", tmp_path / "two", tmp_path / "out", *peft_only, "--like", tmp_path / "peft", "--only", "*.default.*")
