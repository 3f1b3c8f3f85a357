"""Rewrite a checkpoint for another number of ranks."""

from __future__ import annotations

from dataclasses import replace

from shardckpt.committed import draft_of, read_committed
from shardckpt.errors import MismatchError, UnsupportedError
from shardckpt.layout import regions
from shardckpt.storage import Store
from shardckpt.tools.rewrite import Rewrite, plan_rewrite


def plan_reshard(source: Store, *, to_ranks: int, from_ranks: int | None = None) -> Rewrite:
    """Work out the files that the checkpoint's writer would have written at `to_ranks`.

    Args:
        source: Root of the checkpoint.
        to_ranks: The new world size.
        from_ranks: The world size that the caller believes it was written at; None to believe the manifest.

    Raises:
        MismatchError: If `from_ranks` is not the manifest's world size.
        UnsupportedError: If the checkpoint has no layout rule, or its rule cannot have so many ranks.
    """
    found = read_committed(source)
    manifest = found.manifest
    if from_ranks is not None and from_ranks != manifest.world_size:
        raise MismatchError(
            f"{source.url!r} was written by {manifest.world_size} ranks, not {from_ranks}; "
            f"use --from {manifest.world_size}, or leave --from out"
        )
    if manifest.layout is None:
        raise UnsupportedError(
            f"{source.url!r} does not record the rule of its layout; consolidate it and import the result"
        )
    draft = replace(draft_of(found), world_size=to_ranks)
    return plan_rewrite(found.catalogue, source, draft, regions(manifest.layout, draft.tensors, to_ranks))
