"""`shardckpt verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from shardckpt.cli import options
from shardckpt.cli.output import Output, Row, printable
from shardckpt.cli.verb import ANSWER_IS_NO, Verb
from shardckpt.errors import listing
from shardckpt.formats.origin import find_place
from shardckpt.storage import Store
from shardckpt.tools.soundness import Problem, read_through
from shardckpt.tools.verify import survey, survey_weights
from shardckpt.transfer import TransferOptions


@click.command(
    "verify",
    cls=Verb,
    short_help="Check that a checkpoint or model is whole and undamaged.",
    epilog="Example: shardckpt verify step-000100",
)
@options.source
@click.option("--quick", is_flag=True, help="Check sizes and coverage only; read no data.")
@options.budget
@options.storage
@click.pass_context
def command(
    ctx: click.Context,
    source: str,
    quick: bool,
    budget: int,
    workers: int | None,
    open_at: Callable[[str], Store],
) -> None:
    """Check that a checkpoint or model is whole and undamaged.

    Compares every checksum and size with what was recorded when it was saved, proves that the chunks of each tensor
    fill it, and names all files and tensors that are damaged. The exit code is 3 if there are any.

    Hugging Face folders and single safetensors files record no checksums: index, headers, sizes and tied tensors are
    checked and all bytes read, and "unverified" says how many of them were compared with nothing.
    """
    output = ctx.find_object(Output)
    assert output is not None
    place = find_place(source, open_at)
    surveyed = survey(place.store) if place.format == "shardckpt" else survey_weights(place)
    problems = list(surveyed.problems)
    if not quick:
        with output.progress("verify", surveyed.nbytes) as on_progress:
            how = TransferOptions(budget_bytes=budget, num_workers=workers, is_verified=False, on_progress=on_progress)
            problems += read_through(surveyed, options=how)
    unverified = surveyed.nbytes if quick else surveyed.unverified_bytes
    if surveyed.unverified_bytes:
        output.note("unverified: no checksums are recorded there, so that changed values are not found")
    if surveyed.extra:
        output.note(f"not part of the checkpoint: {listing(surveyed.extra)}")
    facts: Row = {
        "source": source,
        "format": place.format,
        "is_good": not problems,
        "is_quick": quick,
        "num_files": len(surveyed.catalogue.files),
        "num_tensors": len(surveyed.catalogue.tensors),
        "nbytes": 0 if quick else surveyed.nbytes,
        "unverified_bytes": unverified,
        "num_problems": len(problems),
    }
    _show(output, facts, problems)
    if problems:
        ctx.exit(ANSWER_IS_NO)


def _show(output: Output, facts: Row, problems: Sequence[Problem]) -> None:
    if output.is_json:
        rows: list[Row] = [
            {"path": p.path, "kind": p.kind, "text": p.text, "tensors": list(p.tensors)} for p in problems
        ]
        output.result(facts, {"problems": rows})
        return
    output.result(facts)
    for problem in problems:
        place = f"{problem.path}: " if problem.path else ""
        click.echo(printable(f"\n{problem.kind}: {place}{problem.text}"))
        for name in problem.tensors:
            click.echo(printable(f"  {name}"))
