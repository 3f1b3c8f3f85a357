"""The command as a whole: its help, its commands, and what it loads."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest

from shardckpt.cli.main import COMMANDS, main
from tests.shardckpt.checkpoints import write_checkpoint
from tests.shardckpt.cli.invocation import run
from tests.shardckpt.formats.hf_folders import arrays, write_single


def command_of(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does_and_gives_an_example(name: str) -> None:
    """The table of the group, the help's first sentence and its last line agree."""
    command = command_of(name)
    assert command.name == name
    assert (command.help or "").split("\n")[0] == COMMANDS[name]
    assert (command.epilog or "").startswith(f"Example: shardckpt {name} ")
    shown = run(name, "--help").stdout
    assert shown.splitlines()[-1] == command.epilog, "the example must stand in one line, to be copied"
    assert all(getattr(option, "help", "") for option in command.params if isinstance(option, click.Option))


def test_the_help_lists_all_commands() -> None:
    """With one sentence each; it ends with an example."""
    shown = " ".join(run("--help").stdout.split())
    assert all(f"{name} {sentence}" in shown for name, sentence in COMMANDS.items())
    assert shown.endswith("Example: shardckpt inspect step-000100")
    assert "version" in run("--version").stdout


def test_wrong_usage_has_exit_code_2() -> None:
    """As with all programs: an unknown command, a missing argument, a malformed option."""
    assert "No such command 'no'" in run("no", exit_code=2).stderr
    assert "Missing argument 'DST'" in run("reshard", "a", exit_code=2).stderr
    assert "is not in the range x>=1" in run("reshard", "a", "b", "--to", 0, exit_code=2).stderr


def test_no_command_loads_torch(tmp_path: Path) -> None:
    """The offline tools run where no training framework is, and start quickly: help loads no file system either."""
    write_checkpoint(str(tmp_path / "a"), {"model.a": np.arange(6.0)})
    write_single(tmp_path / "hf", arrays())
    runs = [
        ["--help"],
        ["import", str(tmp_path / "hf"), str(tmp_path / "b"), "--ranks", "2"],
        ["reshard", str(tmp_path / "a"), str(tmp_path / "c"), "--to", "3"],
        ["consolidate", str(tmp_path / "a"), str(tmp_path / "d.safetensors")],
        ["export", str(tmp_path / "a"), str(tmp_path / "e")],
        ["inspect", str(tmp_path / "a")],
        ["verify", str(tmp_path / "a")],
    ]
    program = f"""
import json, sys
from shardckpt.cli.main import main
for number, arguments in enumerate({json.dumps(runs)}):
    try:
        main(arguments)
    except SystemExit as error:
        assert error.code == 0, arguments
    heavy = {{"torch", "transformers", "pandas"}} | (set() if number else {{"rich", "fsspec", "numpy", "botocore"}})
    assert not heavy & set(sys.modules), (arguments, heavy & set(sys.modules))
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, timeout=120)


def test_every_file_of_the_command_line_is_a_command_or_listed() -> None:
    """No command is left out of the table."""
    folder = Path(importlib.import_module("shardckpt.cli").__path__[0])
    shared = {"__init__", "completion", "main", "verb", "options", "output", "stopping", "writing"}
    assert {path.stem for path in folder.glob("*.py")} - shared == {"import_" if c == "import" else c for c in COMMANDS}


def test_a_reader_that_goes_away_ends_a_command_quietly(tmp_path: Path) -> None:
    """As in `shardckpt inspect ... | head -1`."""
    write_checkpoint(str(tmp_path / "a"), {f"model.{i}": np.arange(2.0) for i in range(3000)})
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from shardckpt.cli.main import main; main()",
            "inspect",
            str(tmp_path / "a"),
            "--tensors",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline().startswith(b"name")
    child.stdout.close()
    assert child.stderr is not None
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(timeout=60) == 1
