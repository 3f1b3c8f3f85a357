"""What the demo says: a narrated step, a claim that holds or does not, and the table at the end.

Knows nothing of checkpoints. Imports no torch: no command that this process starts can show a smaller peak of memory
than this process itself has.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Done:
    """What a finished command took.

    Attributes:
        output: What it printed, if that was asked for.
        seconds: Wall clock, its start included.
        peak_bytes: The most memory that one of its processes ever had resident.
    """

    output: str
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Row:
    """A line of the table; `is_identical` is None where nothing was compared."""

    what: str
    nbytes: int
    done: Done
    is_identical: bool | None


@dataclass
class Report:
    """Everything said so far."""

    console: Console = field(default_factory=lambda: Console(file=sys.stdout, highlight=False, soft_wrap=True))
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def title(self, text: str) -> None:
        """Begin a part."""
        self.console.print(f"\n[bold]{text}[/bold]")

    def say(self, text: str) -> None:
        """Narrate."""
        self.console.print(text, markup=False)

    def row(self, what: str, done: Done, made: Path, *, is_identical: bool | None = None) -> None:
        """Add a line to the table, for a command and the file or folder that it made."""
        files = [made] if made.is_file() else [file for file in made.rglob("*") if file.is_file()]
        self.rows.append(Row(what, sum(file.stat().st_size for file in files), done, is_identical))

    def claim(self, text: str, holds: bool) -> bool:
        """State a fact that was just computed; one that does not hold fails the demo in the end."""
        self.console.print(("[green]  yes: [/green]" if holds else "[red]   NO: [/red]") + text.replace("[", r"\["))
        if not holds:
            self.failed.append(text)
        return holds

    def finish(self) -> int:
        """Print the table and the verdict, and give the exit code."""
        self.title("What was done")
        self.console.print(self._table())
        self.say(
            "seconds and GB/s: of the whole command, from the start of its process; peak memory: of its largest process"
        )
        compared = [row for row in self.rows if row.is_identical is not None]
        is_identical = bool(compared) and all(row.is_identical for row in compared)
        self.say(f"bit-identical: {'yes' if is_identical else 'NO'}")
        for text in self.failed:
            self.say(f"does not hold: {text}")
        return 0 if is_identical and not self.failed else 1

    def _table(self) -> Table:
        table = Table("what", box=None, pad_edge=False)
        for heading in ("bytes", "seconds", "GB/s", "peak memory", "bit-identical"):
            table.add_column(heading, justify="right")
        for row in self.rows:
            identical = {None: "", True: "yes", False: "NO"}[row.is_identical]
            table.add_row(
                row.what,
                f"{row.nbytes / 1e6:,.1f} MB",
                f"{row.done.seconds:.2f}",
                f"{row.nbytes / row.done.seconds / 1e9:.2f}",
                f"{row.done.peak_bytes / 2**20:,.0f} MiB",
                identical,
            )
        return table
