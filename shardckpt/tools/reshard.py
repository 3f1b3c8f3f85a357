"""Rewrite a checkpoint for another number of ranks."""

from __future__ import annotations

from dataclasses import replace

from shardckpt.committed import draft_of, read_committed
from shardckpt.errors import MismatchError, UnsupportedError
from shardckpt.layout import regions
from shardckpt.storage import Store
from shardckpt.tools.relayout import Kind, layout_of_kind
from shardckpt.tools.rewrite import Rewrite, plan_rewrite


def plan_reshard(source: Store, *, to_ranks: int, from_ranks: int | None = None, kind: Kind | None = None) -> Rewrite:
    """Work out the files that the checkpoint's writer, or one with another layout, would have written at `to_ranks`.

    Args:
        source: Root of the checkpoint.
        to_ranks: The new world size.
        from_ranks: The world size that the caller believes it was written at; None to believe the manifest.
        kind: The layout to write; None to keep the one that it has.

    Raises:
        MismatchError: If `from_ranks` is not the manifest's world size, or as `layout_of_kind`.
        UnsupportedError: If the checkpoint has no layout rule, or its rule cannot have so many ranks.
    """
    found = read_committed(source)
    manifest = found.manifest
    if from_ranks is not None and from_ranks != manifest.world_size:
        raise MismatchError(
            f"{source.url!r} was written by {manifest.world_size} ranks, not {from_ranks}; "
            f"use --from {manifest.world_size}, or leave --from out"
        )
    draft = replace(draft_of(found), world_size=to_ranks)
    if kind is not None:
        layout = layout_of_kind(kind, draft.tensors, draft.sections, draft.layout, num_ranks=to_ranks)
        draft = replace(draft, layout=layout)
    if draft.layout is None:
        raise UnsupportedError(
            f"{source.url!r} does not record the rule of its layout; choose one, as in --layout flat"
        )
    return plan_rewrite(found.catalogue, source, draft, regions(draft.layout, draft.tensors, to_ranks))
