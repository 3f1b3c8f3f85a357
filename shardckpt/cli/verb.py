"""What all commands have in common: the options for output, and how errors become exit codes.

0 done, 1 failed, 2 wrong usage, 3 it ran and the answer is no, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os

import click

from shardckpt.cli.output import Output, printable
from shardckpt.cli.stopping import Terminated
from shardckpt.errors import CheckpointError
from shardckpt.team import Team

ANSWER_IS_NO = 3
INTERRUPTED = 130
TERMINATED = 143


class Verb(click.Command):
    """A command whose function gets an `Output` first, and whose errors are one line.

    Attributes:
        is_teamwork: Started on several processes (see `team`), each does its part; otherwise the first does all.
    """

    is_teamwork = False

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Give its own parameters and those of every command."""
        *own, help_option = super().get_params(ctx)
        return [*own, *_common_options(), help_option]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the example in one line, to be copied."""
        formatter.write(f"\n{self.epilog or ''}\n")

    def invoke(self, ctx: click.Context) -> object:
        """Run the function; known errors end as `Error: ...` unless `--debug` asks for the traceback."""
        is_debug = bool(ctx.params.pop("debug"))
        verbosity = -1 if ctx.params.pop("quiet") else int(ctx.params.pop("verbose"))
        ctx.params.pop("verbose", None)
        is_json = bool(ctx.params.pop("as_json"))
        try:
            ctx.obj = Output(is_json=is_json, verbosity=verbosity, team=Team.of_environment(os.environ))
            if ctx.obj.team.rank > 0 and not self.is_teamwork:
                return None
            with ctx.obj.stopper.listening():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click ends quietly
        except (CheckpointError, OSError, MemoryError, RecursionError) as error:
            if is_debug:
                raise
            raise Failure(str(error) or type(error).__name__) from error
        except (KeyboardInterrupt, Terminated) as error:
            if is_debug:
                raise
            raise (Termination() if isinstance(error, Terminated) else Interruption()) from error


class TeamVerb(Verb):
    """A command whose work several processes divide."""

    is_teamwork = True


class Failure(click.ClickException):
    """An error that is shown as one message."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Interruption(Failure):
    """The user stopped it."""

    exit_code = INTERRUPTED

    def __init__(self) -> None:
        super().__init__("interrupted; run the same command again to start over")


class Termination(Failure):
    """The system stopped it."""

    exit_code = TERMINATED

    def __init__(self) -> None:
        super().__init__("terminated; run the same command again to start over")


def _common_options() -> list[click.Parameter]:
    return [
        click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON."),
        click.Option(["-v", "--verbose"], is_flag=True, help="Tell more on stderr."),
        click.Option(["-q", "--quiet"], is_flag=True, help="Tell nothing but results and errors."),
        click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."),
    ]
