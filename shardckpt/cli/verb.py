"""What all commands have in common: the options for output, and how errors become exit codes.

0 done, 1 failed, 2 wrong usage, 3 it ran and the answer is no, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import click

from shardckpt.cli.output import Output, printable
from shardckpt.errors import CheckpointError

ANSWER_IS_NO = 3
INTERRUPTED = 130
TERMINATED = 143


class Verb(click.Command):
    """A command whose function gets an `Output` first, and whose errors are one line."""

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
        ctx.obj = Output(is_json=bool(ctx.params.pop("as_json")), verbosity=verbosity)
        try:
            with _terminable():
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


class Terminated(BaseException):
    """A signal asked this process to end; what was begun is taken away first."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Raise `Terminated` where the signal would just end the process."""

    def stop(*_: object) -> None:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: signals go elsewhere
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _common_options() -> list[click.Parameter]:
    return [
        click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON."),
        click.Option(["-v", "--verbose"], is_flag=True, help="Tell more on stderr."),
        click.Option(["-q", "--quiet"], is_flag=True, help="Tell nothing but results and errors."),
        click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."),
    ]
