"""How options are parsed."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner

from shardckpt.cli import options
from shardckpt.storage import Store


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("1000B", 1000), ("5GB", 5 * 10**9), ("128MiB", 1 << 27), ("1.5 kb", 1500), ("2T", 2 * 10**12)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    """Powers of ten, and of two where it says so."""
    assert options.ByteSize().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "5 XB", "1e9", "0.1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """With how to write one."""
    with pytest.raises(click.BadParameter, match="is no size; write it like 5GB, 128MiB or 1000"):
        options.ByteSize().convert(text, None, None)


def test_writing_options_come_together() -> None:
    """The command gets one object of them, and the transfer what it needs of it."""
    found: list[options.Writing] = []

    @click.command()
    @options.writing
    def command(writing: options.Writing) -> None:
        found.append(writing)

    CliRunner().invoke(command, [])
    CliRunner().invoke(command, ["--dry-run", "--overwrite", "--budget", "1MiB", "--workers", "3"])
    assert found == [options.Writing(False, False, 128 << 20, None), options.Writing(True, True, 1 << 20, 3)]
    assert found[1].transfer_options(None).budget_bytes == 1 << 20


def test_storage_options_reach_the_store() -> None:
    """Values that are JSON are taken as such; what is not KEY=VALUE is wrong usage."""
    urls: list[str] = []

    @click.command()
    @options.storage
    def command(open_at: Callable[[str], Store]) -> None:
        urls.extend(open_at(url).url for url in ("memory://x", "/tmp"))

    assert CliRunner().invoke(command, ["--storage-option", "skip_instance_cache=true"]).exit_code == 0
    assert urls == ["memory://x", "/tmp"]
    result = CliRunner().invoke(command, ["--storage-option", "x"])
    assert result.exit_code == 2
    assert "is not of the form KEY=VALUE" in result.stderr
