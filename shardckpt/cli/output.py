"""What a command says: results on stdout, progress and notes on stderr.

Knows terminals, text and JSON; refuses to know what the results mean. A result is a mapping with stable keys, printed
as it is with `--json`, and as a table for people otherwise: a key that ends in `bytes` holds bytes, one that ends in
`seconds` holds seconds.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import click

from shardckpt.cli.stopping import Stopper
from shardckpt.team import Team

Value = None | bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"]
Row = Mapping[str, Value]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_WORDS = {"nbytes": "bytes", "seconds": "time"}


class Output:
    """Where one command's results and remarks go.

    Attributes:
        is_json: Print results as JSON.
        verbosity: -1 for results and errors only, 0, or 1 for details too.
        stopper: Takes the signals that ask the command to stop.
        team: The processes that run the command together; only the first of them prints.
    """

    def __init__(self, *, is_json: bool = False, verbosity: int = 0, team: Team | None = None) -> None:
        self.is_json = is_json
        self.team = team or Team()
        self.verbosity = verbosity if self.team.rank == 0 else -1
        self.stopper = Stopper()

    def result(self, facts: Row, tables: Mapping[str, Sequence[Row]] | None = None) -> None:
        """Print the result: single facts, then tables by name. `--json` gives one object with all of them."""
        if self.team.rank > 0:
            return
        tables = tables or {}
        if self.is_json:
            click.echo(json.dumps({**facts, **tables}, indent=1))
            return
        width = max((len(_label(key)) for key in facts), default=0)
        for key, value in facts.items():
            click.echo(f"{_label(key):{width}}  {text_of(key, value)}")
        for number, rows in enumerate(tables.values()):
            if facts or number:
                click.echo()
            _print_table(rows)

    def note(self, text: str) -> None:
        """Tell something that is worth knowing; on stderr, unless quiet."""
        if self.verbosity >= 0:
            click.echo(printable(text), err=True)

    def detail(self, text: str) -> None:
        """Tell something for those who asked for more with `-v`."""
        if self.verbosity > 0:
            click.echo(printable(text), err=True)

    @contextlib.contextmanager
    def progress(self, what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
        """Show a bar with rate and time left while the block runs, if stderr is a terminal; stop where it is safe.

        Args:
            what: What is being done, for the bar.
            nbytes: Bytes to do in all.

        Yields:
            What to call with the bytes done since the last call.
        """
        with self.stopper.deferring(), self._bar(what, nbytes) as advance:

            def report(done: int) -> None:
                self.stopper.check()
                advance(done)

            yield report

    @contextlib.contextmanager
    def _bar(self, what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
        if self.verbosity < 0 or not sys.stderr.isatty():
            yield lambda done: None
            return
        from rich.console import Console  # on demand: it takes longer to load than most commands run
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=nbytes)
            yield lambda done: bar.advance(task, done)


def bytes_text(nbytes: int | float) -> str:
    """Give a number of bytes as people read it: `1.23 GB`."""
    size = float(nbytes)
    for unit in _UNITS:
        if abs(size) < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{nbytes} B" if unit == "B" else f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"


def text_of(key: str, value: Value) -> str:
    """Give one value as text; what it counts follows from its key."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) and key.endswith("bytes"):
        return bytes_text(value)
    if isinstance(value, (int, float)) and key.endswith("seconds"):
        return f"{value:.2f} s"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(name)}: {text_of('', item)}" for name, item in value.items())
    if isinstance(value, Sequence):
        return "[" + ", ".join(text_of("", item) for item in value) + "]"
    return str(value)


def printable(text: str) -> str:
    """Give text that cannot move a terminal's cursor: control characters escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode() for c in text)


def _label(key: str) -> str:
    return _WORDS.get(key, key.removeprefix("num_").removeprefix("is_").replace("_", " "))


def _print_table(rows: Sequence[Row]) -> None:
    """Print rows of equal keys: by rich on a terminal, as aligned columns elsewhere."""
    if not rows:
        click.echo("(none)")
        return
    keys = list(rows[0])
    cells = [[text_of(key, row[key]) for key in keys] for row in rows]
    numeric = [all(isinstance(row[key], (int, float, type(None))) for row in rows) for key in keys]
    if sys.stdout.isatty():
        _print_rich([_label(key) for key in keys], cells, numeric)
        return
    lines = [[_label(key) for key in keys], *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(keys))]
    for line in lines:
        padded = (
            f"{cell:>{width}}" if is_number else f"{cell:{width}}"
            for cell, width, is_number in zip(line, widths, numeric, strict=True)
        )
        click.echo("  ".join(padded).rstrip())


def _print_rich(labels: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool]) -> None:
    from rich.console import Console  # on demand, as above
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for label, is_number in zip(labels, numeric, strict=True):
        table.add_column(label, justify="right" if is_number else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
