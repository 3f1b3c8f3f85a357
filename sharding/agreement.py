"""Ranks agree on what they are about to shard, or all raise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from sharding.bucket import Member
from sharding.collectives import Group
from sharding.errors import WrapError
from sharding.mesh import Groups


def describe(units: Iterable[Sequence[Member]]) -> list[str]:
    """Give a line for each parameter of each unit: what ranks must have alike."""
    return [
        f"unit {number}: {member.places[0].fqn!r}, {member.original.dtype}, shape {tuple(member.original.shape)}, "
        f"requires_grad={member.original.requires_grad}"
        for number, members in enumerate(units)
        for member in members
        if member.original is not None
    ]


def agree(groups: Groups, lines: Sequence[str], problem: str = "") -> None:
    """Raise on every rank if some rank has other lines, or a problem; only digests travel while all agree.

    Args:
        groups: All of their ranks call.
        lines: What this rank says.
        problem: What this rank cannot go on with.

    Raises:
        WrapError: Naming the ranks, and the first line in which they differ.

    Collective:
        All ranks of the groups; blocks.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    for group in (groups.shards, groups.replicas):
        said = group.gather_objects((digest, problem))
        problem = next((str(other[1]) for other in said if isinstance(other, tuple) and other[1]), "")
        if not problem and said.count(said[0]) < len(said):
            problem = _difference(group, lines, next(rank for rank, other in enumerate(said) if other != said[0]))
    if problem:
        raise WrapError(problem)


def _difference(group: Group, lines: Sequence[str], rank: int) -> str:
    """Say where the lines of a rank and of rank 0 part."""
    said = group.gather_objects(list(lines) if group.rank in (0, rank) else [])
    held = [value for value in (said[0], said[rank]) if isinstance(value, list)]
    at = next(i for i in range(max(map(len, held)) + 1) if held[0][i : i + 1] != held[1][i : i + 1])
    first, other = (value[at] if at < len(value) else "there are no more parameters" for value in held)
    return (
        f"ranks shard different modules. On rank 0: {first}. On rank {rank} of the group: {other}. "
        "Build the same module, with the same policy, on every rank"
    )
