"""Every command that writes, killed at each of its write steps in turn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.shardckpt.cli.invocation import run, run_json, tree
from tests.shardckpt.cli.sources import OF_HF, OF_OURS, Verb, write_hf, write_ours

WRITERS = [verb for verb in (*OF_OURS, *OF_HF) if verb.name in ("reshard", "consolidate", "export", "import")]
WRITERS.append(Verb("cp", lambda source, out: (source, out / "new")))


@pytest.mark.parametrize("verb", WRITERS, ids=str)
def test_killed_anywhere_the_source_is_whole_and_the_same_command_finishes(tmp_path: Path, verb: Verb) -> None:
    """The destination is whole, and the command finds it taken; or the same command makes it whole."""
    source = write_hf(tmp_path / "source") if verb in OF_HF else write_ours(tmp_path / "source")
    before = tree(source)
    out = tmp_path / "out-{}"
    program = (sys.executable, "-m", "tests.shardckpt.cli.kill_points", verb.name)
    done = subprocess.run(
        [*program, *map(str, verb.arguments(source, out))], capture_output=True, text=True, check=True, timeout=300
    )
    assert tree(source) == before
    num_runs = int(done.stdout)
    assert num_runs > 5
    names = set(tree(Path(str(out).format(num_runs - 1))))
    for number in range(num_runs):
        left = Path(str(out).format(number))
        arguments = verb.arguments(source, left)
        is_whole = names <= set(tree(left))
        result = run(verb.name, *arguments, exit_code=1 if is_whole else 0)
        assert ("choose another destination" in result.stderr) == is_whole
        assert names <= set(tree(left)), number
        assert run_json("diff", arguments[1], source, "--only", "*weight")["is_same"] is True, number
