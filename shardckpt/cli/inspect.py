"""`shardckpt inspect`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from shardckpt.cli import options
from shardckpt.cli.output import Output, Row
from shardckpt.cli.verb import Verb
from shardckpt.errors import listing
from shardckpt.formats.origin import find_origin
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
    """Show what a checkpoint holds, without reading its tensors.

    SRC may also be a Hugging Face folder or a safetensors file; of these it lists the files in place of ranks.
    """
    found = find_origin(source, open_at)
    tables: dict[str, Sequence[Row]] = {}
    if shows_tensors:
        tables["tensors"] = inspect.tensor_rows(found.catalogue)
    if tensor is not None:
        tables["chunks"] = inspect.chunk_rows(found.catalogue, tensor)
    if shows_ranks:
        tables["ranks"] = inspect.rank_rows(found)
    if shows_objects:
        tables["objects"] = inspect.object_rows(found.stored.objects if found.stored else {})
    if found.unused:
        output.note(f"not part of the weights: {listing(found.unused)}")
    if tables:
        output.result({}, tables)
        return
    rows = inspect.section_rows(found.stored) if found.stored else inspect.rank_rows(found)
    output.result({"source": source, **inspect.summary(found)}, {"sections" if found.stored else "files": rows})
