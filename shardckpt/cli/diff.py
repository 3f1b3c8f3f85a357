"""`shardckpt diff`."""

from __future__ import annotations

from collections.abc import Callable

import click

from shardckpt.cli import options
from shardckpt.cli.completion import places
from shardckpt.cli.output import Output, Row
from shardckpt.cli.verb import ANSWER_IS_NO, Verb
from shardckpt.formats.origin import find_origin
from shardckpt.storage import Store
from shardckpt.tools.diff import Difference, compare_values, plan_diff
from shardckpt.tools.selection import Choice
from shardckpt.transfer import TransferOptions


@click.command("diff", cls=Verb, epilog="Example: shardckpt diff step-000100 llama-hf")
@click.argument("a", metavar="A", shell_complete=places)
@click.argument("b", metavar="B", shell_complete=places)
@click.option("--quick", is_flag=True, help="Compare names, dtypes and shapes only; read no data.")
@options.choosing
@options.budget
@options.storage
@click.pass_context
def command(
    ctx: click.Context,
    a: str,
    b: str,
    quick: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    budget: int,
    workers: int | None,
    open_at: Callable[[str], Store],
) -> None:
    """Compare the tensors of two checkpoints or Hugging Face folders.

    A and B may differ in format and number of ranks; tensors are compared bit by bit. For those that differ it gives
    how many elements do, the largest difference and the first place. The exit code is 3 if anything differs.
    """
    output = ctx.find_object(Output)
    assert output is not None
    job = plan_diff(find_origin(a, open_at), find_origin(b, open_at), Choice(only, skip))
    differences = list(job.differences)
    if not quick:
        with output.progress("diff", job.nbytes) as on_progress:
            how = TransferOptions(budget_bytes=budget, num_workers=workers, on_progress=on_progress)
            differences += compare_values(job, options=how)
    facts: Row = {
        "a": a,
        "b": b,
        "is_same": not differences,
        "is_quick": quick,
        "num_compared": len(job.pairs),
        "nbytes": 0 if quick else job.nbytes,
        "num_differences": len(differences),
    }
    rows = [_row(difference) for difference in differences]
    output.result(facts, {"differences": rows} if rows or output.is_json else {})
    if differences:
        ctx.exit(ANSWER_IS_NO)


def _row(found: Difference) -> Row:
    return {
        "name": found.name,
        "kind": found.kind,
        "a": found.a,
        "b": found.b,
        "num_differing": found.num_differing,
        "max_abs": found.max_abs,
        "first_index": list(found.first_index),
    }
