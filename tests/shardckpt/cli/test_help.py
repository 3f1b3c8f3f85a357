"""Help and documentation: complete, true and quick to load; the examples run as they stand."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest

from shardckpt.cli.main import COMMANDS, main
from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import run
from tests.shardckpt.cli.sources import WORLD_SIZE, write_hf, write_ours

ROOT = Path(__file__).parents[3]

NO_TORCH = """
import sys
from shardckpt.cli.main import main
for arguments in {lines!r}:
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0, (arguments, end.code)
    heavy = sorted({{"torch", "transformers", "sharding.functional"}} & set(sys.modules))
    assert not heavy, (arguments, heavy)
"""


def _command(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_begins_with_one_sentence_and_ends_with_an_example(name: str) -> None:
    """The sentence is the one in the list of commands; every option says what it does."""
    command = _command(name)
    lines = run(name, "--help").stdout.strip().splitlines()
    assert lines[2].strip() == COMMANDS[name]
    assert COMMANDS[name].count(".") == 1
    assert lines[-1].startswith(f"Example: shardckpt {name} ")
    assert run(name, "-h").stdout.strip().splitlines() == lines
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    assert all(option.help and option.help[0].isupper() for option in options)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_example_of_each_command_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with what it names, and nothing else."""
    monkeypatch.chdir(tmp_path)
    example = str(_command(name).epilog).removeprefix("Example: ")
    _prepare(tmp_path, example)
    words = shlex.split(example)
    assert words[:2] == ["shardckpt", name]
    run(*words[1:])


def _prepare(folder: Path, example: str) -> None:
    """Make what an example reads: a checkpoint of 8 ranks, a model of the same weights, a config."""
    arrays = {"model.embed.weight": np.arange(60.0).reshape(10, 6), "model.head.weight": np.arange(24.0).reshape(4, 6)}
    write_checkpoint(str(folder / "step-000100"), arrays, world_size=8)
    write_checkpoint(str(folder / "runs" / "a" / "step-000100"), arrays, world_size=2)
    run("export", folder / "step-000100", folder / "llama-hf")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    if example.startswith("shardckpt export"):
        for path in (folder / "llama-hf").iterdir():
            path.unlink()


def test_the_page_is_up_to_date() -> None:
    """`docs/cli.md` is what `scripts/cli-docs` makes of the commands."""
    command = [sys.executable, ROOT / "scripts" / "cli-docs", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_list_of_commands_is_complete() -> None:
    """`shardckpt --help` shows every command with its sentence, and every file of a command is in the list."""
    text = run("--help").stdout
    for name, sentence in COMMANDS.items():
        assert name in text
        assert sentence.split()[0] in text
    folder = ROOT / "shardckpt" / "cli"
    others = {"__init__", "completion", "main", "options", "output", "stopping", "verb", "writing"}
    assert {path.stem.rstrip("_") for path in folder.glob("*.py")} - {"init", "__init"} - others == set(COMMANDS)


def test_nothing_imports_torch(tmp_path: Path) -> None:
    """Neither help nor any command, on real input, loads torch, transformers or the runtime."""
    ours, hf = str(write_ours(tmp_path / "ours")), str(write_hf(tmp_path / "hf"))
    out = str(tmp_path / "out")
    lines = [
        ["--help"],
        ["--version"],
        ["import", hf, f"{out}/imported", "--ranks", "2"],
        ["reshard", ours, f"{out}/resharded", "--from", str(WORLD_SIZE), "--to", "2"],
        ["consolidate", ours, f"{out}/one.safetensors"],
        ["export", f"{out}/imported", f"{out}/exported", "--like", hf],
        ["inspect", ours, "--tensors"],
        ["verify", ours],
        ["diff", hf, f"{out}/exported"],
        ["cp", ours, f"{out}/copy", "--read-back"],
        ["repair", ours],
    ]
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH.format(lines=lines)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
