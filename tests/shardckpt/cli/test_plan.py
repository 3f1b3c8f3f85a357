"""`shardckpt plan`: any writer's dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.shardckpt.cli.invocation import error_of, run, run_json
from tests.shardckpt.cli.sources import write_ours


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of three ranks."""
    return write_ours(tmp_path / "a")


WRITERS = (
    ("reshard", "{}", "{}-b", "--to", "2"),
    ("consolidate", "{}", "{}.safetensors"),
    ("export", "{}", "{}-hf"),
    ("cp", "{}", "{}-c"),
)


@pytest.mark.parametrize("words", WRITERS, ids=lambda words: words[0])
def test_it_is_the_dry_run_of_the_command(root: Path, words: tuple[str, ...]) -> None:
    """The same but for the room left, and nothing is written; options may stand on either side."""
    arguments = [word.format(root) for word in words]
    expected = run_json(*arguments, "--dry-run") | {"free_bytes": 0}
    assert run_json("plan", *arguments) | {"free_bytes": 0} == expected
    assert json.loads(run("plan", "--json", *arguments).stdout) | {"free_bytes": 0} == expected
    assert "dry run" in run("plan", *arguments).stdout
    assert [path.name for path in root.parent.iterdir()] == ["a"]


def test_what_the_command_would_refuse_is_refused(root: Path) -> None:
    """With the same message and exit code."""
    message = error_of("reshard", root, root, "--to", 2, "--dry-run")
    assert error_of("plan", "reshard", root, root, "--to", 2) == message
    assert "no command that writes" in run("plan", "inspect", root, exit_code=2).stderr
    assert "no command that writes" in run("plan", "unheard", root, exit_code=2).stderr
    assert "Missing option" in run("plan", "reshard", root, root, exit_code=2).stderr
