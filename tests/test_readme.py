"""The README does what it says: its example trains, its commands run, its links lead somewhere."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _block(language: str, containing: str) -> str:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return next(text for written_in, text in blocks if written_in == language and containing in text)


@contextlib.contextmanager
def _inside(folder: str | Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    yield
    os.chdir(before)


def _train(folder: str, run: str, num_batches: int) -> list[int]:
    """Run the example of the README as one rank, with a tiny model; give the steps of its checkpoints."""
    with warnings.catch_warnings(), _inside(folder):
        warnings.simplefilter("ignore")  # what other libraries warn of while they are imported
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        import shardckpt
        import sharding

        sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
        config.save_pretrained("config")
        names = {
            "FullyShardedDataParallel": sharding.FullyShardedDataParallel,
            "LlamaDecoderLayer": LlamaDecoderLayer,
            "LlamaForCausalLM": LlamaForCausalLM,
            "batches": [torch.arange(24).reshape(2, 12)] * num_batches,
            "config": config,
            "functools": functools,
            "run": run,
            "save_every": 2,
            "shardckpt": shardckpt,
            "torch": torch,
            "transformer_auto_wrap_policy": sharding.transformer_auto_wrap_policy,
        }
        exec(_block("python", "manager.save_if_due"), names)
        return shardckpt.Manager(run).steps()


def _run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{program}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_example_trains_and_the_commands_run(tmp_path: Path) -> None:
    """Saved on 4 ranks by the README's code, sent through all its commands, and resumed on 2 ranks by the same code."""
    assert run_ranks(4, _train, str(tmp_path), "run", 3) == [[2]] * 4
    commands = _block("", "shardckpt inspect").splitlines()
    assert len(commands) == 6
    for line in commands:
        done = _run(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert run_ranks(2, _train, str(tmp_path), "two", 2) == [[2, 4]] * 2
    names = _run("find . -name manifest.json -o -name '*.json' -path './model-hf/*' | sort", tmp_path).stdout.split()
    expected = ["imported", "model-hf/config.json", "run/step-00000002", "two/step-00000002", "two/step-00000004"]
    assert [name.removeprefix("./").removesuffix("/manifest.json") for name in names] == expected


def test_open_reads_the_rows_that_the_readme_reads(tmp_path: Path) -> None:
    """The expression in the README gives 8 rows of a tensor."""
    import torch

    import shardckpt

    (expression,) = re.findall(r"`(shardckpt\.open\([^`]*)`", README)
    embedding = torch.arange(32.0).reshape(16, 2)
    with _inside(tmp_path):
        shardckpt.save("run/step-00000002", {"model": {"model": {"embed_tokens": {"weight": embedding}}}})
        found = eval(expression, {"shardckpt": shardckpt})
    assert torch.equal(found, embedding[:8])


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    """Each file that the README names is there."""
    assert (ROOT / link).exists()


def test_it_fits_one_screen() -> None:
    """The README stays short: no line is wide, and there are few of them."""
    lines = README.splitlines()
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 130
