"""What results look like, for people and for programs."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from shardckpt.cli.output import Output, bytes_text, printable, text_of

FACTS = {"source": "a", "num_files": 2, "nbytes": 1234, "is_good": True, "step": None, "seconds": 0.5, "lr": 1.0}
ROWS = [{"path": "x", "nbytes": 5}, {"path": "a\x1b[2Jlong", "nbytes": 5_000_000}]


def test_people_get_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes in units, numbers to the right, nothing that moves the cursor."""
    Output().result(FACTS, {"files": ROWS})
    assert capsys.readouterr().out.splitlines() == [
        "source  a",
        "files   2",
        "bytes   1.23 kB",
        "good    yes",
        "step    -",
        "time    0.50 s",
        "lr      1.0",
        "",
        "path          bytes",
        r"x               5 B",
        r"a\x1b[2Jlong   5 MB",
    ]


def test_programs_get_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """The same facts under the same keys, nothing rounded."""
    Output(is_json=True).result(FACTS, {"files": ROWS})
    assert json.loads(capsys.readouterr().out) == {**FACTS, "files": ROWS}


def test_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """No line would be taken for a failure."""
    Output().result({}, {"files": []})
    assert capsys.readouterr().out == "(none)\n"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_999, "1000 kB"),
        (1_234_567, "1.23 MB"),
        (25 * 10**17, "2500 PB"),
    ],
)
def test_bytes_are_given_in_three_digits(nbytes: int, text: str) -> None:
    """In powers of ten, as disks are sold."""
    assert bytes_text(nbytes) == text


def test_values_of_all_kinds_have_a_text() -> None:
    """Lists and mappings too."""
    assert text_of("shape", [2, 3]) == "[2, 3]"
    assert text_of("value", {"a": None, "b": [True]}) == "a: -, b: [yes]"
    assert printable("a\nb\u202e\ud800") == "a\nb\\u202e\\ud800"


def test_progress_is_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Piped, nothing is printed."""
    with Output().progress("copy", 10) as on_progress:
        on_progress(5)
    assert capsys.readouterr().err == ""


def test_a_terminal_sees_progress_and_tables(tmp_path: Path) -> None:
    """Bytes, rate and time left on stderr; a table on stdout; names are never taken for markup."""
    program = tmp_path / "program.py"
    program.write_text(
        "from shardckpt.cli.output import Output\n"
        "with Output().progress('copying', 4_000_000) as on_progress:\n"
        "    on_progress(1_000_000)\n"
        "Output().result({}, {'rows': [{'path': '[red]x', 'nbytes': 5}]})\n"
    )
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    child = subprocess.Popen([sys.executable, program], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = _read_all(ours)
    assert child.wait(timeout=60) == 0
    assert "copying" in shown
    assert "1.0/4.0 MB" in shown
    assert "[red]x" in shown


def _read_all(descriptor: int) -> str:
    parts = []
    while select.select([descriptor], [], [], 60)[0]:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(descriptor)
    return b"".join(parts).decode()
