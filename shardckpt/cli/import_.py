"""`shardckpt import`."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from shardckpt.cli import options
from shardckpt.cli.output import Output, Row
from shardckpt.cli.verb import TeamVerb
from shardckpt.cli.writing import plan_result, write_result
from shardckpt.committed import survey_destination
from shardckpt.errors import listing
from shardckpt.storage import Store, split_url
from shardckpt.tools.import_weights import plan_import
from shardckpt.tools.rewrite import rewrite


@click.command("import", cls=TeamVerb, epilog="Example: shardckpt import llama-hf step-000000 --ranks 8")
@options.source
@options.destination
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="Number of ranks to write for.")
@options.writing
@options.storage
@click.pass_obj
def command(
    output: Output,
    source: str,
    destination: str,
    ranks: int,
    writing: options.Writing,
    open_at: Callable[[str], Store],
) -> None:
    """Turn a Hugging Face folder or a safetensors file into a checkpoint.

    SRC is a folder with model.safetensors, or with numbered files and their index, or one file. The tensors become the
    section "model", each named as in SRC.
    """
    target = open_at(destination)
    started = time.monotonic()
    is_file = source.endswith(".safetensors")
    folder, file = split_url(source) if is_file else (source, None)
    job = plan_import(open_at(folder), num_ranks=ranks, file=file)
    if job.unused:
        output.note(f"left alone, as they are not part of the model: {listing(job.unused)}")
    facts: Row = {
        "source": source,
        "destination": destination,
        "to_ranks": ranks,
        "num_tensors": len(job.rewrite.draft.tensors),
    }
    files = job.rewrite.files
    if writing.is_dry_run:
        found = survey_destination(target, overwrite=writing.is_overwriting)
        plan_result(output, facts, files, target, writing, found.leftovers)
        return
    with output.progress("import", files.nbytes) as on_progress:
        done = rewrite(
            job.rewrite,
            target,
            overwrite=writing.is_overwriting,
            options=writing.transfer_options(on_progress),
            team=output.team,
        )
    write_result(output, facts, files, started, done.leftovers)
