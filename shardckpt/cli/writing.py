"""How the commands that write tell what they would do, and what they did."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardckpt.cli.options import Writing
from shardckpt.cli.output import Output, Row
from shardckpt.committed import check_space
from shardckpt.container import FileSet
from shardckpt.storage import Store


def plan_result(
    output: Output, facts: Row, files: FileSet, target: Store, writing: Writing, leftovers: Sequence[str] = ()
) -> None:
    """Print what a command would write: files, bytes, memory and the room that there is.

    Raises `NoSpaceError` where the room is too small: what a run would refuse, a dry run refuses.
    """
    check_space(target, files.nbytes)
    if leftovers:
        output.note(f"would start clean: remove {len(leftovers)} files that an unfinished run has left")
    planned: Row = {
        **facts,
        "is_dry_run": True,
        "num_files": len(files.headers),
        "nbytes": files.nbytes,
        "budget_bytes": writing.budget_bytes,
        "free_bytes": target.free_bytes(),
    }
    rows: list[Row] = [{"path": file.path, "nbytes": file.nbytes} for file in files.catalogue.files]
    output.result(planned, {"files": rows})


def write_result(output: Output, facts: Row, files: FileSet, started: float, leftovers: Sequence[str] = ()) -> None:
    """Print what a command wrote since `started`, a `time.monotonic()`."""
    if leftovers:
        output.note(f"started clean: removed {len(leftovers)} files that an unfinished run had left")
    seconds = time.monotonic() - started
    done: Row = {
        **facts,
        "is_dry_run": False,
        "num_files": len(files.headers),
        "nbytes": files.nbytes,
        "seconds": round(seconds, 3),
    }
    output.result(done)
