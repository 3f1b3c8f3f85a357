"""The scripts that people run first: they explain themselves, refuse what they do not know, and work from anywhere."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("venv", "check", "test", "demo")


def _run(*argv: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_what_happens_and_does_nothing(name: str, tmp_path: Path) -> None:
    """`--help` works from any folder, before anything is installed, and names the script's usage first."""
    done = _run(ROOT / "scripts" / name, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: scripts/{name}")
    assert len(done.stdout) > 200
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["venv", "check"])
def test_unknown_arguments_are_refused(name: str, tmp_path: Path) -> None:
    """A mistyped option is an error that points to `--help`, and nothing is run."""
    done = _run(ROOT / "scripts" / name, "--fxi", cwd=tmp_path)
    assert done.returncode != 0
    assert "unknown argument '--fxi'" in done.stderr
    assert "--help" in done.stderr


def test_the_demo_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    """The demo writes over nobody's files."""
    (tmp_path / "mine").write_text("precious")
    done = _run(ROOT / "scripts" / "demo", "--out", tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert "is not empty; name another folder" in done.stderr
    assert (tmp_path / "mine").read_text() == "precious"


def test_an_environment_that_is_up_to_date_is_left_alone(tmp_path: Path) -> None:
    """The second run of the bootstrap installs nothing."""
    assert _run(ROOT / "scripts" / "venv", cwd=tmp_path).returncode == 0
    done = _run(ROOT / "scripts" / "venv", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_machine_without_python_is_told_what_to_install(tmp_path: Path) -> None:
    """Without python3 on PATH the bootstrap says so, in one line."""
    (tmp_path / "scripts").mkdir()
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "cat", "cmp", "env"):
        (tools / tool).symlink_to(_which(tool))
    for file in ("scripts/venv", "pyproject.toml", "constraints.txt"):
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    done = subprocess.run(
        [tools / "bash", tmp_path / "scripts" / "venv"],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "scripts/venv: no python3 of version 3.10 or newer on PATH; install one\n"


def _which(tool: str) -> str:
    return subprocess.run(
        ["bash", "-c", f"command -v {tool}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_no_package_index_and_no_place_of_one_machine_is_named() -> None:
    """What the scripts install comes from where pip is configured to look, on any machine."""
    listed = _run("git", "ls-files", "scripts", ".ci", "constraints.txt", "pyproject.toml", cwd=ROOT).stdout.split()
    files = [ROOT / name for name in listed] or [ROOT / "constraints.txt"]
    pattern = re.compile(r"--(extra-)?index-url|--find-links|https?://(?!127\.0\.0\.1)|/home/|/r[o]ot/|/opt/")
    found = [f"{file}: {line}" for file in files for line in file.read_text().splitlines() if pattern.search(line)]
    assert found == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_can_be_executed(name: str) -> None:
    """A clone gives files that run as they are."""
    assert os.access(ROOT / "scripts" / name, os.X_OK)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
