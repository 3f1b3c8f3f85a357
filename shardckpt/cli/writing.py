"""How the commands that write tell what they would do, and what they did."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from shardckpt.cli.options import Writing
from shardckpt.cli.output import Output, Row, Value
from shardckpt.committed import check_space
from shardckpt.container import FileSet
from shardckpt.conversion import Conversion
from shardckpt.errors import listing
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


def write_result(
    output: Output,
    facts: Row,
    files: FileSet,
    started: float,
    leftovers: Sequence[str] = (),
    conversions: Sequence[Conversion] = (),
) -> None:
    """Print what a command wrote since `started`, a `time.monotonic()`, and what it converted."""
    if leftovers:
        output.note(f"started clean: removed {len(leftovers)} files that an unfinished run had left")
    seconds = time.monotonic() - started
    done: dict[str, Value] = {
        **facts,
        "is_dry_run": False,
        "num_files": len(files.headers),
        "nbytes": files.nbytes,
        "seconds": round(seconds, 3),
    }
    if not conversions:
        output.result(done)
        return
    overflowed = [one.name for one in conversions if one.num_overflowed]
    if overflowed:
        output.note(f"became infinite in part, as the dtype does not reach so far: {listing(overflowed)}")
    done |= {
        "num_converted": len(conversions),
        "num_elements_rounded": sum(one.num_rounded for one in conversions),
        "num_elements_overflowed": sum(one.num_overflowed for one in conversions),
    }
    rows: list[Row] = [asdict(one) for one in conversions]
    output.result(done, {"conversions": rows} if output.is_json or output.verbosity > 0 else None)
