"""`shardckpt reshard`."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from shardckpt.cli import options
from shardckpt.cli.output import Output, Row
from shardckpt.cli.verb import TeamVerb
from shardckpt.cli.writing import plan_result, write_result
from shardckpt.committed import survey_destination
from shardckpt.errors import UnsupportedError
from shardckpt.storage import Store
from shardckpt.tools.relayout import Kind, parse_kind
from shardckpt.tools.reshard import plan_reshard
from shardckpt.tools.rewrite import rewrite


class LayoutKind(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A layout, as `parse_kind` reads it."""

    name = "layout"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Kind:
        try:
            return parse_kind(str(value))
        except UnsupportedError as error:
            self.fail(str(error), param, ctx)


@click.command(
    "reshard",
    cls=TeamVerb,
    short_help="Rewrite a checkpoint for another number of ranks.",
    epilog="Example: shardckpt reshard step-000100 step-000100-on-16 --from 8 --to 16",
)
@options.source
@options.destination
@click.option("--from", "from_ranks", type=click.IntRange(min=1), help="Number of ranks that wrote SRC; checked.")
@click.option("--to", "to_ranks", type=click.IntRange(min=1), required=True, help="Number of ranks to write for.")
@click.option(
    "--layout",
    type=LayoutKind(),
    help="Cut tensors by another rule: flat, dim0, or a mesh of axes such as dp=4,tp=2. [default: as SRC]",
)
@options.writing
@options.storage
@click.pass_obj
def command(
    output: Output,
    source: str,
    destination: str,
    from_ranks: int | None,
    to_ranks: int,
    layout: Kind | None,
    writing: options.Writing,
    open_at: Callable[[str], Store],
) -> None:
    """Rewrite a checkpoint for another number of ranks.

    Writes the files that a save on that many ranks would have written: weights, optimizer and all other state. Loading
    them then needs no resharding. --layout writes those of another way of sharding; "dp=4,tp=2" is a mesh of 4 x 2
    ranks, in which tp cuts dim 1 and any other axis dim 0, unless the axis says which: "dp=4:1", "dp=4:-" for none.
    """
    target = open_at(destination)
    started = time.monotonic()
    job = plan_reshard(open_at(source), to_ranks=to_ranks, from_ranks=from_ranks, kind=layout)
    facts: Row = {"source": source, "destination": destination, "to_ranks": to_ranks}
    if writing.is_dry_run:
        found = survey_destination(target, overwrite=writing.is_overwriting)
        plan_result(output, facts, job.files, target, writing, found.leftovers)
        return
    with output.progress("reshard", job.files.nbytes) as on_progress:
        done = rewrite(
            job,
            target,
            overwrite=writing.is_overwriting,
            options=writing.transfer_options(on_progress),
            team=output.team,
        )
    write_result(output, facts, job.files, started, done.leftovers)
