"""How errors become messages and exit codes."""

from __future__ import annotations

import errno

import click
import pytest
from click.testing import CliRunner, Result

from shardckpt.cli.output import Output
from shardckpt.cli.verb import Verb
from shardckpt.errors import FormatError, StorageError


def invoke(error: BaseException | None, *arguments: str) -> Result:
    """Run a command that raises `error`."""

    @click.command("test", cls=Verb)
    @click.pass_obj
    def command(output: Output) -> None:
        if error is not None:
            raise error
        output.note("a note")
        output.detail("a detail")
        output.result({"verbosity": output.verbosity})

    return CliRunner().invoke(command, arguments)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FormatError("'x' is damaged; restore it"), "'x' is damaged; restore it"),
        (StorageError.wrap("write", "a", OSError(errno.ENOSPC, "full")), "Free some room"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "Permission denied: '/x'"),
        (MemoryError(), "MemoryError"),
        (FormatError("moves the cursor \x1b[2J and rings \x07"), r"moves the cursor \x1b[2J and rings \x07"),
    ],
)
def test_known_errors_are_one_message(error: BaseException, message: str) -> None:
    """Exit code 1, no traceback, nothing on stdout, control characters escaped."""
    result = invoke(error)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr


def test_debug_lets_the_error_through() -> None:
    """With its traceback, for whoever is to mend it."""
    assert isinstance(invoke(FormatError("x"), "--debug").exception, FormatError)


def test_errors_of_the_program_itself_are_not_hidden() -> None:
    """What nobody foresaw keeps its traceback."""
    assert isinstance(invoke(ZeroDivisionError("x")).exception, ZeroDivisionError)


def test_an_interrupt_says_what_to_do() -> None:
    """Exit code 130, as of a shell."""
    result = invoke(KeyboardInterrupt())
    assert result.exit_code == 130
    assert result.stderr == "Error: interrupted; run the same command again to start over\n"


@pytest.mark.parametrize(("argument", "shown"), [("-q", ""), ("-v", "a note\na detail\n"), ("--json", "a note\n")])
def test_verbosity_is_about_stderr_alone(argument: str, shown: str) -> None:
    """Results are always printed."""
    result = invoke(None, argument)
    assert (result.exit_code, result.stderr) == (0, shown)
    assert "verbosity" in result.stdout
