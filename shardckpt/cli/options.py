"""Every option that more than one command has, once.

Knows how options are spelt and parsed; refuses to know what commands do with them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import click

from shardckpt.cli.completion import paths, places
from shardckpt.storage import Store, open_store
from shardckpt.tools.recast import DTYPES, NewDtype
from shardckpt.transfer import DEFAULT_BUDGET_BYTES, NUM_LOCAL_WORKERS, NUM_REMOTE_WORKERS, TransferOptions

Function = Callable[..., object]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", re.IGNORECASE)


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A number of bytes: `5GB`, `128MiB`, `1000`."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        nbytes = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
        if nbytes < 1:
            self.fail(f"{value!r} is no size; write it like 5GB, 128MiB or 1000.", param, ctx)
        return nbytes


class KeyValue(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """An option of a file system: `KEY=VALUE`; a value that is JSON is taken as such."""

    name = "key=value"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, object]:
        key, equals, text = str(value).partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is not of the form KEY=VALUE.", param, ctx)
        try:
            return key, json.loads(text)
        except ValueError:
            return key, text


@dataclass(frozen=True, slots=True)
class Writing:
    """How a command writes.

    Attributes:
        is_dry_run: Only say what would be done.
        is_overwriting: Replace what is at the destination.
        budget_bytes: Ceiling of the buffers.
        num_workers: Threads; None to choose.
    """

    is_dry_run: bool
    is_overwriting: bool
    budget_bytes: int
    num_workers: int | None

    def transfer_options(self, on_progress: Callable[[int], None] | None) -> TransferOptions:
        """Give the options of the transfer."""
        return TransferOptions(budget_bytes=self.budget_bytes, num_workers=self.num_workers, on_progress=on_progress)


def source(function: Function) -> Function:
    """Add the argument SRC."""
    return click.argument("source", metavar="SRC", shell_complete=places)(function)


def destination(function: Function) -> Function:
    """Add the argument DST."""
    return click.argument("destination", metavar="DST", shell_complete=paths)(function)


def budget(function: Function) -> Function:
    """Add `--budget` and `--workers`."""
    function = click.option(
        "--workers",
        type=click.IntRange(min=1),
        help=f"Threads that move bytes. [default: one a core, at most {NUM_LOCAL_WORKERS}; {NUM_REMOTE_WORKERS} where "
        "an end is remote; fewer if the budget is small]",
    )(function)
    return click.option(
        "--budget",
        type=ByteSize(),
        default=f"{DEFAULT_BUDGET_BYTES >> 20}MiB",
        show_default=True,
        help="Memory for buffers, whatever the size of the checkpoint.",
    )(function)


def writing(function: Function) -> Function:
    """Add the options of all commands that write; the function gets them together, as `writing`."""

    @functools.wraps(function)
    def together(
        *arguments: object, dry_run: bool, overwrite: bool, budget: int, workers: int | None, **others: object
    ) -> object:  # click passes options by name
        return function(*arguments, writing=Writing(dry_run, overwrite, budget, workers), **others)

    wrapped = budget(together)
    wrapped = click.option("--overwrite", is_flag=True, help="Replace what is at the destination.")(wrapped)
    return click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")(wrapped)


def choosing(function: Function) -> Function:
    """Add `--only` and `--skip`."""
    function = click.option(
        "--skip", metavar="GLOB", multiple=True, help="Leave out the tensors that fit; repeatable."
    )(function)
    return click.option(
        "--only", metavar="GLOB", multiple=True, help="Take only tensors whose full name fits; repeatable."
    )(function)


def dtype(function: Function) -> Function:
    """Add `--dtype` and `--keep`; the function gets them together, as `dtype`."""

    @functools.wraps(function)
    def together(*arguments: object, dtype: str | None, keep: tuple[str, ...], **others: object) -> object:
        if keep and dtype is None:
            raise click.UsageError("--keep is for use with --dtype.")
        return function(*arguments, dtype=NewDtype(DTYPES[dtype], keep) if dtype else None, **others)

    wrapped = click.option(
        "--keep", metavar="GLOB", multiple=True, help="Do not convert tensors whose full name fits; repeatable."
    )(together)
    return click.option(
        "--dtype", type=click.Choice(list(DTYPES)), help="Convert floating-point tensors; tells what was rounded."
    )(wrapped)


def storage(function: Function) -> Function:
    """Add `--storage-option`; the function gets a function that opens stores, as `open_at`."""

    @functools.wraps(function)
    def with_stores(*arguments: object, storage_option: tuple[tuple[str, object], ...], **others: object) -> object:
        def open_at(url: str) -> Store:
            return open_store(url, dict(storage_option))

        return function(*arguments, open_at=open_at, **others)

    return click.option(
        "--storage-option",
        type=KeyValue(),
        multiple=True,
        help="Passed to the file system of remote URLs; may be given several times.",
    )(with_stores)
