"""`shardckpt prune`."""

from __future__ import annotations

from collections.abc import Callable

import click

from shardckpt.cli import options
from shardckpt.cli.completion import paths
from shardckpt.cli.output import Output, Row
from shardckpt.cli.verb import Verb
from shardckpt.storage import Store
from shardckpt.tools.prune import Keeping, plan_prune, prune


@click.command("prune", cls=Verb, epilog="Example: shardckpt prune runs/a --keep 3 --keep-every 1000 --dry-run")
@click.argument("root", metavar="ROOT", shell_complete=paths)
@click.option("--keep", type=click.IntRange(min=1), help="Keep this many of the newest. [default: all]")
@click.option("--keep-every", type=click.IntRange(min=1), help="Also keep those whose step is a multiple of this.")
@click.option("--unfinished", is_flag=True, help="Remove what unfinished saves left; none may be under way.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@options.storage
@click.pass_obj
def command(
    output: Output,
    root: str,
    keep: int | None,
    keep_every: int | None,
    unfinished: bool,
    dry_run: bool,
    open_at: Callable[[str], Store],
) -> None:
    """Remove old checkpoints of a run, and the remains of unfinished saves.

    ROOT holds the checkpoints as folders. The newest is always kept, and so is every file that no save wrote.
    """
    if keep is None and not unfinished:
        raise click.UsageError("Say what to remove: --keep N for all but the newest N, --unfinished for remains.")
    job = plan_prune(open_at(root), Keeping(keep, keep_every, not unfinished))
    if not dry_run:
        prune(job)
    facts: Row = {
        "root": root,
        "is_dry_run": dry_run,
        "num_removed": sum(folder.verdict == "remove" for folder in job.folders),
        "freed_bytes": job.nbytes,
    }
    rows: list[Row] = [
        {"folder": f.name, "step": f.step, "verdict": f.verdict, "reason": f.reason, "nbytes": f.nbytes}
        for f in job.folders
    ]
    output.result(facts, {"folders": rows})
