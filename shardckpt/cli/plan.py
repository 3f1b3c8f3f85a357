"""`shardckpt plan`."""

from __future__ import annotations

import click

from shardckpt.cli.output import Output
from shardckpt.cli.verb import Verb


@click.command(
    "plan",
    cls=Verb,
    context_settings={"ignore_unknown_options": True},
    epilog="Example: shardckpt plan reshard step-000100 step-000100-on-16 --to 16",
)
@click.argument("verb", metavar="COMMAND")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, verb: str, arguments: tuple[str, ...]) -> None:
    """Say what another command would do: files, bytes, memory, room.

    The same as that command with --dry-run: it refuses what the command would refuse, and writes nothing.
    """
    group, output = ctx.find_root().command, ctx.find_object(Output)
    assert isinstance(group, click.Group)
    assert output is not None
    found = group.get_command(ctx.find_root(), verb)
    options = [option for parameter in found.params for option in parameter.opts] if found else []
    if found is None or "--dry-run" not in options:
        raise click.UsageError(f"{verb!r} is no command that writes.")
    own = ["--json"] if output.is_json else []
    own += {-1: ["-q"], 1: ["-v"]}.get(output.verbosity, [])
    with found.make_context(verb, ["--dry-run", *own, *arguments], parent=ctx.find_root()) as inner:
        found.invoke(inner)
