"""Completion, as the scripts ask for it that the command gives to shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from shardckpt.cli.main import main
from tests.shardckpt.checkpoints import write_checkpoint


def offered(line: str) -> list[str]:
    """Give what is offered for the last word of a line: (type, value) as bash gets it."""
    words = line.split(" ")
    env = {"_SHARDCKPT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return CliRunner().invoke(main, env=env, prog_name="shardckpt").output.splitlines()


def test_commands_options_and_values_are_offered() -> None:
    """All that begin so; those of the command that stands there."""
    assert offered("shardckpt re") == ["plain,reshard", "plain,repair"]
    assert offered("shardckpt consolidate --ti") == ["plain,--tied"]
    assert offered("shardckpt consolidate --tied ") == ["plain,once", "plain,both"]
    assert offered("shardckpt --ver") == ["plain,--version"]


def test_checkpoints_and_weights_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the folder so far; where there are none, the shell goes on with its own paths."""
    write_checkpoint(str(tmp_path / "runs" / "step-1"), {"model.x": np.arange(3)})
    write_checkpoint(str(tmp_path / "runs" / "step-2"), {"model.x": np.arange(3)})
    (tmp_path / "runs" / "step-notes").mkdir()
    (tmp_path / "runs" / "last.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert offered("shardckpt inspect runs/step") == ["plain,runs/step-1", "plain,runs/step-2"]
    assert offered("shardckpt diff runs/step-1 runs/l") == ["plain,runs/last.safetensors"]
    assert offered("shardckpt verify r") == ["file,r"]
    assert offered("shardckpt verify s3://bucket/st") == ["file,s3://bucket/st"]
    assert offered("shardckpt reshard runs/step-1 ru") == ["file,ru"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_takes_the_script() -> None:
    """What the command prints for a `.bashrc` is sound, and registers a function for `shardckpt`."""
    code = "from shardckpt.cli.main import main; main(prog_name='shardckpt')"
    env = os.environ | {"_SHARDCKPT_COMPLETE": "bash_source"}
    script = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, text=True).stdout
    found = subprocess.run(
        ["bash", "-c", script + "\ncomplete -p shardckpt"], capture_output=True, check=True, text=True
    )
    assert "-F _shardckpt_completion shardckpt" in found.stdout
