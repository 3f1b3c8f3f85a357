"""`shardckpt consolidate`."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from shardckpt.cli import options
from shardckpt.cli.completion import paths
from shardckpt.cli.output import Output, Row
from shardckpt.cli.verb import Verb
from shardckpt.cli.writing import plan_result, write_result
from shardckpt.storage import Store, split_url
from shardckpt.tools.consolidate import Tied, consolidate, plan_consolidate, refuse_taken
from shardckpt.tools.recast import NewDtype
from shardckpt.tools.selection import Choice


@click.command("consolidate", cls=Verb, epilog="Example: shardckpt consolidate step-000100 model.safetensors")
@options.source
@click.argument("destination", metavar="OUT", shell_complete=paths)
@options.choosing
@options.dtype
@click.option("--optimizer", is_flag=True, help="Take all tensors, under their full names, not the weights alone.")
@click.option(
    "--tied",
    type=click.Choice([tied.value for tied in Tied]),
    default=Tied.ONCE.value,
    show_default=True,
    help="Store a tensor with several names under the first, or under each.",
)
@options.writing
@options.storage
@click.pass_obj
def command(
    output: Output,
    source: str,
    destination: str,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    dtype: NewDtype | None,
    optimizer: bool,
    tied: str,
    writing: options.Writing,
    open_at: Callable[[str], Store],
) -> None:
    """Put the weights of a checkpoint into one safetensors file.

    The tensors are named as in the module that was saved; "once" notes further names of tied ones in the metadata.
    """
    if not destination.endswith(".safetensors"):
        raise click.UsageError(f"OUT is to be a file whose name ends in .safetensors, not {destination!r}.")
    folder, name = split_url(destination)
    target = open_at(folder)
    started = time.monotonic()
    job = plan_consolidate(open_at(source), name, choice=Choice(only, skip, optimizer), tied=Tied(tied), dtype=dtype)
    num_tensors = len(job.files.catalogue.tensors)
    facts: Row = {"source": source, "destination": destination, "num_tensors": num_tensors}
    if writing.is_dry_run:
        refuse_taken(target, [name], overwrite=writing.is_overwriting)
        plan_result(output, facts, job.files, target, writing)
        return
    with output.progress("consolidate", job.files.nbytes) as on_progress:
        how = writing.transfer_options(on_progress)
        leftovers = consolidate(job, target, overwrite=writing.is_overwriting, options=how)
    write_result(output, facts, job.files, started, leftovers, job.derivation.conversions)
