"""The command line as tests call it: in this process, with its output and exit code kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

from click.testing import CliRunner, Result

from shardckpt.cli.main import main


def run(*arguments: object, exit_code: int = 0) -> Result:
    """Run `shardckpt` with these arguments, and check its exit code and that no traceback is shown."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    shown = f"shardckpt {' '.join(map(str, arguments))}\n{result.stdout}\n{result.stderr}"
    assert result.exit_code == exit_code, f"exit code {result.exit_code}, expected {exit_code}: {shown}"
    assert "Traceback" not in result.output, shown
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result


def run_json(*arguments: object, exit_code: int = 0) -> dict[str, object]:
    """Run with `--json` and give what was printed."""
    found = json.loads(run(*arguments, "--json", exit_code=exit_code).stdout)
    assert isinstance(found, dict)
    return found


def error_of(*arguments: object, exit_code: int = 1) -> str:
    """Run what must fail, and give its message, which is all that it says."""
    result = run(*arguments, exit_code=exit_code)
    assert result.stdout == "", result.stdout
    assert result.stderr.startswith("Error: "), result.stderr
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def tree(folder: Path) -> dict[str, bytes]:
    """Give every file below a folder with its bytes."""
    return {
        str(Path(root, name).relative_to(folder)): Path(root, name).read_bytes()
        for root, _, names in os.walk(folder)
        for name in names
    }
