"""What a shell offers for the places on a command line: checkpoints and safetensors files of local folders.

Knows them by their names alone, as a key press waits for the answer; everything else is left to the shell's own paths.
"""

from __future__ import annotations

import os

import click
from click.shell_completion import CompletionItem

from shardckpt.manifest import MANIFEST_PATH

_MAX_ITEMS = 1000


def places(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the checkpoints and safetensors files that begin so; paths of any kind where there are none."""
    folder, name = os.path.split(incomplete)
    try:
        with os.scandir(folder or ".") as entries:
            fitting = [entry.path for entry in entries if entry.name.startswith(name)]
    except OSError:
        fitting = []
    found = sorted(path.removeprefix("./") for path in fitting if _is_place(path))
    return [CompletionItem(path) for path in found[:_MAX_ITEMS]] or paths(_, __, incomplete)


def paths(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave it to the shell, which knows how to walk through folders."""
    return [CompletionItem(incomplete, type="file")]


def _is_place(path: str) -> bool:
    return path.endswith(".safetensors") or os.path.exists(os.path.join(path, MANIFEST_PATH))
