"""`shardckpt repair`."""

from __future__ import annotations

from collections.abc import Callable

import click

from shardckpt.cli import options
from shardckpt.cli.output import Output, Row
from shardckpt.cli.verb import Verb
from shardckpt.storage import Store
from shardckpt.tools.repair import plan_repair, repair
from shardckpt.transfer import TransferOptions


@click.command("repair", cls=Verb, epilog="Example: shardckpt repair step-000100")
@options.source
@click.option("--dry-run", is_flag=True, help="Say what would be done, and write nothing.")
@options.budget
@options.storage
@click.pass_obj
def command(
    output: Output,
    source: str,
    dry_run: bool,
    budget: int,
    workers: int | None,
    open_at: Callable[[str], Store],
) -> None:
    """Rebuild a lost or damaged manifest from the shard files.

    All shard files must be there and sound. Their bytes are compared with the chunk table, if that is left; without it
    they are taken as they are, and that is told.
    """
    job = plan_repair(open_at(source))
    facts: Row = {"source": source, "is_dry_run": dry_run, "is_needed": job is not None}
    if job is None:
        output.result({**facts, "is_verified": True, "num_files": 0, "nbytes": 0})
        return
    output.note(f"to be repaired: {job.fault}")
    if job.table is None:
        output.note("the chunk table is lost too: the shard files are taken as they are, damaged or not")
    if not dry_run:
        with output.progress("repair", job.nbytes) as on_progress:
            how = TransferOptions(budget_bytes=budget, num_workers=workers, is_verified=False, on_progress=on_progress)
            repair(job, options=how)
    is_verified = job.table is not None
    output.result({**facts, "is_verified": is_verified, "num_files": len(job.catalogue.files), "nbytes": job.nbytes})
