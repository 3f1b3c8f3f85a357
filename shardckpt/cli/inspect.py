"""`shardckpt inspect`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from shardckpt.cli import options
from shardckpt.cli.output import Output, Row
from shardckpt.cli.verb import Verb
from shardckpt.committed import read_committed
from shardckpt.storage import Store
from shardckpt.tools import inspect


@click.command("inspect", cls=Verb, epilog="Example: shardckpt inspect step-000100 --tensors")
@options.source
@click.option("--tensors", "shows_tensors", is_flag=True, help="List the tensors.")
@click.option("--tensor", metavar="NAME", help="List the chunks of one tensor.")
@click.option("--ranks", "shows_ranks", is_flag=True, help="List what each rank wrote.")
@click.option("--objects", "shows_objects", is_flag=True, help="List the state that is no tensor.")
@options.storage
@click.pass_obj
def command(
    output: Output,
    source: str,
    shows_tensors: bool,
    tensor: str | None,
    shows_ranks: bool,
    shows_objects: bool,
    open_at: Callable[[str], Store],
) -> None:
    """Show what a checkpoint holds, without reading its tensors."""
    found = read_committed(open_at(source))
    tables: dict[str, Sequence[Row]] = {}
    if shows_tensors:
        tables["tensors"] = inspect.tensor_rows(found.catalogue)
    if tensor is not None:
        tables["chunks"] = inspect.chunk_rows(found.catalogue, tensor)
    if shows_ranks:
        tables["ranks"] = inspect.rank_rows(found.catalogue)
    if shows_objects:
        tables["objects"] = inspect.object_rows(found.objects)
    if tables:
        output.result({}, tables)
    else:
        output.result({"source": source, **inspect.summary(found)}, {"sections": inspect.section_rows(found)})
