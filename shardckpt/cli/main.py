"""The command `shardckpt`: knows which file holds which command, and loads only the one that runs."""

from __future__ import annotations

import importlib

import click
from click.shell_completion import CompletionItem

COMMANDS = {
    "import": "Turn a Hugging Face folder or a safetensors file into a checkpoint.",
    "reshard": "Rewrite a checkpoint for another number of ranks.",
    "consolidate": "Put the weights of a checkpoint into one safetensors file.",
    "export": "Write the weights of a checkpoint as a Hugging Face folder.",
    "inspect": "Show what a checkpoint holds, without reading its tensors.",
    "verify": "Check that a checkpoint or model is whole and undamaged.",
    "diff": "Compare the tensors of two checkpoints or Hugging Face folders.",
    "cp": "Copy a checkpoint, between any two stores, verified.",
    "plan": "Say what another command would do: files, bytes, memory, room.",
    "map": "Draw who holds what: bytes by rank, and the ranges of each tensor.",
    "prune": "Remove old checkpoints of a run, and the remains of unfinished saves.",
    "repair": "Rebuild a lost or damaged manifest from the shard files.",
}
"""Command -> its one sentence; `cli/<command>.py` holds it, as `command`."""


class Group(click.Group):
    """A group whose commands are loaded on demand, so that `--help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Give the names of all commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one command."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"shardckpt.cli.{_MODULES.get(cmd_name, cmd_name)}").command
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands, without loading them, or the options."""
        fitting = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return fitting if not incomplete.startswith("-") else click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


_MODULES = {"import": "import_"}  # a module of that name could not be imported by others


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: shardckpt inspect step-000100",
)
@click.version_option(package_name="shardckpt")
def main() -> None:
    """Look at, check and rewrite checkpoints of sharded training; paths are local or any fsspec URL."""
