"""`shardckpt map`."""

from __future__ import annotations

from collections.abc import Callable

import click

from shardckpt.cli import options
from shardckpt.cli.output import Output, Row, bytes_text, printable
from shardckpt.cli.verb import Verb
from shardckpt.committed import read_committed
from shardckpt.errors import CheckpointExistsError
from shardckpt.storage import Store, split_url
from shardckpt.tools.holdings import Holdings, Strip, holdings, moved
from shardckpt.tools.picture import draw_html, draw_svg
from shardckpt.tools.reshard import plan_reshard

_COLUMNS = 64
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MAX_ROWS = 64


@click.command("map", cls=Verb, epilog="Example: shardckpt map step-000100 -o step-000100.html --to 16")
@options.source
@click.option("-o", "--output", "path", metavar="FILE", help="Write the picture to FILE.svg or FILE.html.")
@click.option("--to", "to_ranks", type=click.IntRange(min=1), help="Also show what a reshard to that many ranks moves.")
@click.option("--overwrite", is_flag=True, help="Replace FILE.")
@options.storage
@click.pass_obj
def command(
    output: Output,
    source: str,
    path: str | None,
    to_ranks: int | None,
    overwrite: bool,
    open_at: Callable[[str], Store],
) -> None:
    """Draw who holds what: bytes by rank, and the ranges of each tensor.

    Without -o it is drawn in the terminal, roughly. No tensor is read.
    """
    if path is not None and not path.endswith((".svg", ".html")):
        raise click.UsageError(f"-o takes a file whose name ends in .svg or .html, not {path!r}.")
    store = open_at(source)
    found = read_committed(store)
    held = holdings(found, num_pixels=_COLUMNS if path is None else 540)
    matrix = None
    if to_ranks is not None:
        matrix = moved(found.catalogue, plan_reshard(store, to_ranks=to_ranks).files.catalogue)
    facts: Row = {
        "source": source,
        "num_ranks": len(found.catalogue.files),
        "tensor_bytes": found.catalogue.nbytes,
        "imbalance": round(held.imbalance, 4),
        "moved_bytes": None if matrix is None else int(matrix.sum() - matrix.trace()),
        "picture": path,
    }
    if path is None:
        rows: list[Row] = [
            {"rank": rank, "nbytes": sum(row), "by_kind": dict(zip(held.kinds, row, strict=True))}
            for rank, row in enumerate(held.nbytes.tolist())
        ]
        output.result(facts, {"ranks": rows} if output.is_json else {})
        if not output.is_json:
            _print_map(held)
        return
    folder, name = split_url(path)
    target = open_at(folder)
    if target.exists(name) and not overwrite:
        raise CheckpointExistsError(f"{path!r} exists; choose another file, or pass --overwrite")
    title = f"{split_url(source)[1]}: {len(found.catalogue.files)} ranks, {bytes_text(found.catalogue.nbytes)}"
    subtitle = f"step {found.manifest.step}, {len(found.catalogue.tensors)} tensors, saved {found.manifest.created}"
    picture = draw_svg(title, subtitle, held, matrix)
    target.put(name, (draw_html(title, picture) if name.endswith(".html") else picture).encode())
    output.result(facts)


def _print_map(held: Holdings) -> None:
    """Print bars of the ranks, and tensors with a character for the rank that holds each part."""
    largest = max(int(held.by_rank.max()), 1)
    click.echo()
    for rank, nbytes in enumerate(held.by_rank[:_MAX_ROWS].tolist()):
        bar = "█" * round(nbytes / largest * _COLUMNS)
        click.echo(f"rank {rank:<5}{_DIGITS[rank % len(_DIGITS)]}  {bar:{_COLUMNS}}  {bytes_text(nbytes)}")
    if len(held.by_rank) > _MAX_ROWS:
        click.echo(f"... and {len(held.by_rank) - _MAX_ROWS} more ranks")
    click.echo()
    width = min(max((len(printable(strip.name)) for strip in held.strips), default=0), 48)
    for strip in held.strips:
        name = printable(strip.name)
        shown = name if len(name) <= width else f"…{name[1 - width :]}"
        count = f"  and {len(strip.others)} alike" if strip.others else ""
        click.echo(f"{shown:{width}}  {_line(strip)}  {strip.form}{count}")
    if held.num_left_out:
        click.echo(f"... and {held.num_left_out} smaller tensors")


def _line(strip: Strip) -> str:
    """Give a tensor as characters; of a grid, the first row."""
    line = [" "] * _COLUMNS
    for cell in strip.cells:
        if cell.y == 0:
            begin, end = round(cell.x * _COLUMNS), round((cell.x + cell.width) * _COLUMNS)
            for column in range(begin, max(end, min(begin + 1, _COLUMNS))):
                line[column] = _DIGITS[cell.rank % len(_DIGITS)]
    return "".join(line)
