"""`shardckpt cp`."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from shardckpt.cli import options
from shardckpt.cli.output import Output, Row
from shardckpt.cli.verb import ANSWER_IS_NO, Verb
from shardckpt.storage import Store
from shardckpt.tools.cp import cp, plan_cp
from shardckpt.tools.soundness import read_through
from shardckpt.tools.verify import survey


@click.command("cp", cls=Verb, epilog="Example: shardckpt cp step-000100 step-000100-copy --read-back")
@options.source
@options.destination
@click.option("--read-back", is_flag=True, help="Read the copy again and compare it; exit code 3 if it is not good.")
@options.writing
@options.storage
@click.pass_context
def command(
    ctx: click.Context,
    source: str,
    destination: str,
    read_back: bool,
    writing: options.Writing,
    open_at: Callable[[str], Store],
) -> None:
    """Copy a checkpoint, between any two stores, verified.

    Every byte is compared with its recorded checksum on the way, and the copy appears when all of it is there. Nothing
    is kept on local disk between two remote stores.
    """
    output = ctx.find_object(Output)
    assert output is not None
    started = time.monotonic()
    job = plan_cp(open_at(source), open_at(destination), overwrite=writing.is_overwriting)
    facts: Row = {
        "source": source,
        "destination": destination,
        "is_dry_run": writing.is_dry_run,
        "num_files": len(job.files),
        "nbytes": job.nbytes,
    }
    if writing.is_dry_run:
        rows: list[Row] = [{"path": file.path, "nbytes": file.nbytes} for file in job.files]
        more: Row = {"budget_bytes": writing.budget_bytes, "free_bytes": job.target.free_bytes()}
        output.result({**facts, **more}, {"files": rows})
        return
    with output.progress("cp", job.nbytes) as on_progress:
        leftovers = cp(job, overwrite=writing.is_overwriting, options=writing.transfer_options(on_progress))
    if leftovers:
        output.note(f"started clean: removed {len(leftovers)} files that an unfinished run had left")
    problems = []
    if read_back:
        surveyed = survey(open_at(destination))
        with output.progress("read back", surveyed.nbytes) as on_progress:
            problems = [*surveyed.problems, *read_through(surveyed, options=writing.transfer_options(on_progress))]
    for problem in problems:
        output.note(f"{problem.kind}: {problem.path}: {problem.text}")
    done: Row = {"is_read_back": read_back, "is_good": not problems, "seconds": round(time.monotonic() - started, 3)}
    output.result({**facts, **done})
    if problems:
        ctx.exit(ANSWER_IS_NO)
